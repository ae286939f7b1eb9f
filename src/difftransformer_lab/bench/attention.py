"""Time every implementation of attention on one shape, and say which ones are left out and why."""

import functools
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from difftransformer.model.weights import DTYPES
from difftransformer.ops.backends import BACKENDS, QUADRATIC_MEMORY_MAX_LENGTH, backend_names, explain
from difftransformer.ops.problem import Problem

from ..results import AttentionShape, AttentionSkip, AttentionTiming, Dtype, GeometricMean, Mode
from .attempt import attempt_each
from .defaults import DEFAULTS
from .diffllama import ATTN_IMPLEMENTATIONS
from .roofline import Peak, attention_bytes, attention_flops, peak_of, roofline_seconds, work_over_least
from .timing import time_interleaved, wait_for
from .work import DETERMINISTIC, Work, attention_work, draw

TORCH_SDPA = "torch sdpa"
# An implementation that makes n x n maps holds about this many fp32 copies of all of them (measured on DiffLlama's eager
# attention, forward and backward). It is left out where they would exceed the budget.
MAP_COPIES = 5
MAPS_BUDGET_BYTES = 2 * 2**30
NO_BACKEND = "there is no such backend here"


def time_attention(
    shape: AttentionShape,
    *,
    device: str = "cpu",
    backends: Sequence[str] | None = None,
    peers: bool = True,
    rounds: int,
    budget_seconds: float,
) -> list[AttentionTiming | AttentionSkip]:
    """Time all implementations on one shape in one interleaved run.

    Args:
        shape: The attention call to time.
        device: "cpu" or "cuda".
        backends: Backends of differential attention; None means all that suit the length.
        peers: Whether to time transformers' DiffLlama too.
        rounds: Largest number of timed rounds.
        budget_seconds: As in `time_interleaved`.
    """
    unsuited = _implementations(shape, device, backends, peers)
    shared = functools.cache(lambda: draw(shape, device))

    def first_call(name: str) -> Work:
        if device == "cpu":
            return attention_work(name, shape)
        work = attention_work(name, shape, device, shared())  # one copy: the keys and values of decoding take gigabytes
        work()
        wait_for(device)
        return work

    candidates = [name for name, reason in unsuited.items() if reason is None]
    work, reasons = attempt_each(candidates, first_call, base=TORCH_SDPA, device=device)
    timings = time_interleaved(work, rounds=rounds, budget_seconds=budget_seconds, device=device) if work else {}
    peak = None if device == "cpu" else peak_of(torch.cuda.get_device_name(device), shape.dtype)
    softmax = timings.get(f"softmax {DEFAULTS[device].kernel}")
    rows: list[AttentionTiming | AttentionSkip] = []
    for name, reason in unsuited.items():
        if name not in timings:
            reason = reason or reasons[name]
            rows.append(AttentionSkip(**vars(shape), implementation=name, reason=reason))
            continue
        median = timings[name].median_seconds
        rows.append(
            AttentionTiming(
                **vars(shape),
                **vars(timings[name]),
                implementation=name,
                ratio_to_torch_sdpa=median / timings[TORCH_SDPA].median_seconds,
                ratio_to_softmax_kernel=median / softmax.median_seconds if softmax else None,
                **({} if device == "cpu" else rates(shape, name, median, peak)),
            )
        )
    return rows


def rates(shape: AttentionShape, implementation: str, seconds: float, peak: Peak | None) -> dict[str, Any]:
    """Return the fields of `AttentionTiming` that follow from a time by formula."""
    return {
        "teraflops_per_second": attention_flops(shape) / seconds / 1e12,
        "terabytes_per_second": attention_bytes(shape) / seconds / 1e12,
        "time_over_roofline": seconds / roofline_seconds(shape, implementation, peak) if peak else None,
        "work_over_least": work_over_least(shape, implementation),
    }


def geometric_means(timings: Iterable[AttentionTiming], by_width: bool = False) -> list[GeometricMean]:
    """Average the ratios to PyTorch's kernel and to our softmax kernel over shapes, for each dtype and mode.

    Args:
        timings: Timings of several shapes.
        by_width: Whether to average each head width separately.
    """
    timings = list(timings)
    softmax = next((timing.implementation for timing in timings if timing.implementation.startswith("softmax ")), "")
    groups: dict[tuple[Dtype, Mode, int | None, str, str], list[float]] = {}
    for timing in timings:
        key = (timing.dtype, timing.mode, timing.head_dim if by_width else None, timing.implementation)
        groups.setdefault((*key, TORCH_SDPA), []).append(timing.ratio_to_torch_sdpa)
        if timing.ratio_to_softmax_kernel is not None:
            groups.setdefault((*key, softmax), []).append(timing.ratio_to_softmax_kernel)
    return [
        GeometricMean(
            dtype=dtype,
            mode=mode,
            implementation=implementation,
            against=against,
            shapes=len(ratios),
            ratio=statistics.geometric_mean(ratios),
            head_dim=head_dim,
        )
        for (dtype, mode, head_dim, implementation, against), ratios in groups.items()
    ]


def problem_of(shape: AttentionShape, op: str, device: str) -> Problem:
    """Return the shape as the choice of a backend sees it; op is "differential" or "softmax"."""
    maps = 2 if op == "differential" else 1
    heads = 2 * shape.heads // maps
    return Problem(
        op,
        device,
        DTYPES[shape.dtype],
        batch=shape.batch,
        heads=heads,
        groups=heads,
        queries=shape.queries_tokens,
        keys=shape.length_tokens,
        width=shape.head_dim,
        value_width=maps * shape.head_dim,
        is_causal=True,
        needs_grad=shape.has_backward,
    )


def _implementations(
    shape: AttentionShape, device: str, backends: Sequence[str] | None, peers: bool
) -> dict[str, str | None]:
    """Map each implementation to the reason why it is not timed on this shape, or to None."""
    kernel = DEFAULTS[device].kernel
    can = explain(problem_of(shape, "differential", device))
    found: dict[str, str | None] = dict.fromkeys(DEFAULTS[device].baselines)
    found[f"softmax {kernel}"] = explain(problem_of(shape, "softmax", device)).get(kernel, NO_BACKEND)
    for name in backends or backend_names():
        found[f"diff {name}"] = can[name] or _unsuited(name, shape, device, is_named=backends is not None)
        if name == kernel and device != "cpu" and shape.has_backward:
            # On a GPU, adding blocks up in any order is faster. On the CPU the order is always the same.
            found[f"diff {name}{DETERMINISTIC}"] = found[f"diff {name}"]
    if peers and shape.mode != "decode":
        # DiffLlama's attention includes the headwise norm, so it is compared with our kernel with the norm fused.
        found[f"normed {kernel}"] = can.get(kernel, NO_BACKEND)
        for name, makes_maps in ATTN_IMPLEMENTATIONS.items():
            found[f"DiffLlama {name}"] = _too_large(shape) if makes_maps else None
    return found


def _unsuited(backend: str, shape: AttentionShape, device: str, is_named: bool) -> str | None:
    """Return why a backend that could run the shape is left out, or None."""
    if BACKENDS[backend].has_quadratic_memory(problem_of(shape, "differential", device)):
        return _too_large(shape) if is_named else _too_long(shape, QUADRATIC_MEMORY_MAX_LENGTH, "takes O(n^2) memory")
    longest = DEFAULTS[device].longest_tokens.get(backend)
    if longest is None or is_named:
        return None
    return _too_long(shape, longest, "takes many times as long as the others")


def _too_long(shape: AttentionShape, longest_tokens: int, problem: str) -> str | None:
    if shape.queries_tokens * shape.length_tokens <= longest_tokens**2:
        return None
    return f"{problem}: above {longest_tokens:,} tokens only where --backends names it"


def _too_large(shape: AttentionShape) -> str | None:
    needed = MAP_COPIES * 2 * shape.batch * shape.heads * shape.queries_tokens * shape.length_tokens * 4
    if needed <= MAPS_BUDGET_BYTES:
        return None
    return (
        f"{MAP_COPIES} copies of its n x n maps in fp32 take {needed / 2**30:.1f} GiB, "
        f"more than the budget of {MAPS_BUDGET_BYTES / 2**30:g} GiB"
    )
