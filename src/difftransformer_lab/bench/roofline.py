"""The roofline of attention: the least FLOPs and bytes of a shape by formula, and the least time a device needs for them.

A unit is the work of one product of an n x n by an n x d matrix: 2 n n d FLOPs, and half of that in a causal call, as is
usual to count. Units are counted for each differential head, which stands for two heads of ordinary attention. A backward
pass computes the maps again.
"""

from typing import NamedTuple

from ..results import AttentionShape, Dtype, Mode

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
PLAIN, FUSED, SPLIT, WIDE_SPLIT = "plain", "fused", "fused, split", "fused, split, dV apart"
TWO_CALLS, FOUR_CALLS = "two calls", "four calls"


class Scheme(NamedTuple):
    """The cost of a method: units forward and backward, and how often decoding reads the keys and values.

    Copies are not counted.
    """

    forward: int
    backward: int
    reads: float


# The summands forward are the products for S and O; backward those for S, dP, dV, dQ and dK.
SCHEMES = {
    PLAIN: Scheme(2 + 2, 2 + 2 + 2 + 2 + 2, 1),
    # Both maps in one kernel: O1 and O2 are 2 d wide, and backward dP and dV are shared.
    FUSED: Scheme(2 + 4, 2 + 2 + 2 + 2 + 2, 1),
    # The same, but dQ has its own pass, so that sums always run in the same order: S and dP are computed twice.
    SPLIT: Scheme(2 + 4, (2 + 2 + 2 + 2) + (2 + 2 + 2), 1),
    # dV has its own pass too, as with wide heads: S is computed three times, dP twice.
    WIDE_SPLIT: Scheme(2 + 4, (2 + 2) + (2 + 2 + 2) + (2 + 2 + 2), 1),
    # Ordinary attention for each map with a value of 2 d: the value is read twice, and nothing is shared.
    TWO_CALLS: Scheme(2 + 4, 2 + 4 + 4 + 2 + 2, 1.5),
    # A call for each map and each half of the value. Q and K padded to 2 d cost the same.
    FOUR_CALLS: Scheme(4 + 4, 4 + 4 + 4 + 4 + 4, 2),
}
# The implementations whose scheme is known. The others choose by what is installed. Our own kernels choose the faster of
# two backward passes at run time, unless deterministic algorithms are requested.
SCHEME_OF = {
    "torch sdpa": PLAIN,
    "torch cudnn": PLAIN,
    "softmax triton": PLAIN,
    "diff triton": FUSED,
    "diff triton deterministic": SPLIT,
    "normed triton": FUSED,
    "diff flex": TWO_CALLS,
    "diff sdpa": FOUR_CALLS,
    "DiffLlama sdpa": FOUR_CALLS,
}
WIDEST_TOGETHER = 64  # widest map whose backward computes dV in the pass of dK (`ops/triton_kernels/configs.py`)
CHOOSE_BACKWARD = ("softmax triton", "diff triton", "normed triton")


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


def peak_of(device_name: str, dtype: Dtype) -> Peak | None:
    """Return the peak of a device, or None if it is unknown: for other devices, and in fp32."""
    return None if dtype == "fp32" else PEAKS.get(device_name)


def attention_flops(shape: AttentionShape, scheme: str = PLAIN) -> float:
    """Return the FLOPs of one call in its mode."""
    unit = 2.0 * shape.batch * shape.heads * shape.queries_tokens * shape.length_tokens * shape.head_dim
    if shape.mode != "decode":
        unit /= 2
    return unit * _units(shape.mode, SCHEMES[scheme])


def attention_bytes(shape: AttentionShape) -> float:
    """Return the bytes that must move if each pass reads its inputs and writes its results once.

    The forward pass moves Q, K, V and O; the backward pass these, dO and the three gradients. The sums of the softmax and
    lambda are left out; they are below one percent.
    """
    row = 2 * shape.head_dim * shape.heads * shape.batch * BYTES[shape.dtype]
    tokens = 2.0 * (shape.queries_tokens + shape.length_tokens)
    return row * tokens * {"forward": 1, "decode": 1, "backward": 2, "forward+backward": 3}[shape.mode]


def roofline_seconds(shape: AttentionShape, implementation: str, peak: Peak) -> float:
    """Return the least time that the peak allows: the larger of FLOPs over rate and bytes over bandwidth.

    The FLOPs are those of ordinary attention, or for differential attention those of both maps in one kernel.
    """
    scheme = FUSED if _is_differential(implementation) else PLAIN
    return max(
        attention_flops(shape, scheme) / peak.flops_per_second,
        attention_bytes(shape) / peak.bytes_per_second,
    )


def work_over_least(shape: AttentionShape, implementation: str) -> float | None:
    """Return the FLOPs (in decoding, bytes) of an implementation's scheme over the least, or None if it is unknown."""
    name = SCHEME_OF.get(implementation)
    if name == SPLIT and shape.head_dim > WIDEST_TOGETHER:
        name = WIDE_SPLIT
    if name is None or (shape.has_backward and implementation in CHOOSE_BACKWARD):
        return None
    scheme, least = SCHEMES[name], SCHEMES[FUSED if _is_differential(implementation) else PLAIN]
    if shape.mode == "decode":
        return scheme.reads / least.reads
    return _units(shape.mode, scheme) / _units(shape.mode, least)


def _is_differential(implementation: str) -> bool:
    return implementation.partition(" ")[0] not in ("torch", "softmax")


def _units(mode: Mode, scheme: Scheme) -> int:
    forward, backward = mode != "backward", mode in ("backward", "forward+backward")
    return forward * scheme.forward + backward * scheme.backward
