"""The roofline of attention: the least FLOPs and bytes of a shape by formula, and the least time a device needs for them.

A unit is the work of one product of an n x n by an n x d matrix: 2 n n d FLOPs, and half of that in a causal call, as is
usual to count. Units are counted for each differential head, which stands for two heads of ordinary attention.

`python benchmarks/roofline.py reports/bench/attention.json DEVICE` prints the rates of attention in a result, and its times
over the roofline of a device in `PEAKS`.
"""

import sys
from typing import NamedTuple

from tables import bench_tables

from difftransformer_lab.bench.attention import AttentionShape
from difftransformer_lab.cli.console import show_table
from difftransformer_lab.results import Bench, BenchRow, read_result

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class Units(NamedTuple):
    """Units of the forward and of the backward pass, which computes the maps again."""

    forward: int
    backward: int


# The summands forward are the products for S and O; backward those for S, dP, dV, dQ and dK.
PLAIN = Units(2 + 2, 2 + 2 + 2 + 2 + 2)
# Both maps in one kernel: O1 and O2 are 2 d wide, and backward dP and dV are shared.
FUSED = Units(2 + 4, 2 + 2 + 2 + 2 + 2)


class Peak(NamedTuple):
    """Peak rates of a device: dense bf16 or fp16 matrix products, and memory traffic."""

    flops_per_second: float
    bytes_per_second: float


# Keyed by CUDA's device name; from NVIDIA's data sheets of H100, H200 and A100 (their rates with sparsity, halved).
PEAKS = {
    "NVIDIA H200": Peak(989e12, 4.8e12),
    "NVIDIA H100 80GB HBM3": Peak(989e12, 3.35e12),
    "NVIDIA H100 PCIe": Peak(756e12, 2.0e12),
    "NVIDIA A100-SXM4-80GB": Peak(312e12, 2.039e12),
    "NVIDIA A100 80GB PCIe": Peak(312e12, 1.935e12),
    "NVIDIA A100-SXM4-40GB": Peak(312e12, 1.555e12),
    "NVIDIA A100-PCIE-40GB": Peak(312e12, 1.555e12),
}


def attention_flops(shape: AttentionShape, units: Units = PLAIN) -> float:
    """Return the FLOPs of one call in its mode."""
    unit = 2.0 * shape.batch * shape.heads * shape.queries_tokens * shape.length_tokens * shape.head_dim
    if shape.mode != "decode":
        unit /= 2
    return unit * (units.forward + shape.has_backward * units.backward)


def attention_bytes(shape: AttentionShape) -> float:
    """Return the bytes that must move if each pass reads its inputs and writes its results once.

    The forward pass moves Q, K, V and O; the backward pass these, dO and the three gradients. The sums of the softmax and
    lambda are left out; they are below one percent.
    """
    row = 2 * shape.head_dim * shape.heads * shape.batch * BYTES[shape.dtype]
    tokens = 2.0 * (shape.queries_tokens + shape.length_tokens)
    return row * tokens * {"forward": 1, "decode": 1, "forward+backward": 3}[shape.mode]


def rates(shape: AttentionShape, implementation: str, seconds: float, peak: Peak | None) -> dict[str, float]:
    """Return the rates of a call that took so long, and its time over the roofline where the device's peak is known.

    The rates count FLOPs and bytes of ordinary attention for every implementation, so that they compare as tokens per second
    do. The roofline is the larger of FLOPs over rate and bytes over bandwidth, for the FLOPs of ordinary attention, or of
    differential attention with both maps in one kernel.
    """
    found = {
        "teraflops_per_second": attention_flops(shape) / seconds / 1e12,
        "terabytes_per_second": attention_bytes(shape) / seconds / 1e12,
    }
    if peak:
        units = PLAIN if implementation.startswith(("torch ", "softmax ")) else FUSED
        flops_seconds = attention_flops(shape, units) / peak.flops_per_second
        found["time_over_roofline"] = seconds / max(flops_seconds, attention_bytes(shape) / peak.bytes_per_second)
    return found


def rated(row: BenchRow, peak: Peak | None) -> BenchRow:
    """Return a row of attention with its rates."""
    if row.timing is None:
        return row
    shape = AttentionShape(dtype=row.dtype, mode=row.work, **{"batch": 1} | row.shape)
    known = None if row.dtype == "fp32" else peak
    figures = rates(shape, row.implementation, row.timing.median_seconds, known)
    return BenchRow(**vars(row) | {"timing": None, "figures": figures})


def main(path: str, device: str = "") -> None:
    """Print the rates."""
    bench = read_result(path, Bench)
    rows = [rated(row, PEAKS.get(device)) for row in bench.rows if row.part == "attention" and not row.left_out]
    result = Bench(**vars(bench) | {"rows": rows})
    for table in bench_tables(result):
        show_table(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
