"""Attention of every implementation on one shape: who takes part, who is left out and why, and the ratios."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..model.dtypes import DTYPES
from ..ops.backends import BACKENDS, QUADRATIC_MEMORY_MAX_LENGTH, backend_names, explain
from ..ops.problem import Problem
from ..results import AttentionShape, AttentionSkip, AttentionTiming, Dtype, GeometricMean, Mode
from .defaults import DEFAULTS
from .floor import Peak, attention_bytes, attention_flops, least_seconds, peak_of, work_over_floor
from .peers import ATTN_IMPLEMENTATIONS
from .timing import time_interleaved, wait_for
from .trial import Failure, attempt
from .work import DETERMINISTIC, Data, Work, attention_work, draw

TORCH_SDPA = "torch sdpa"
# An implementation that makes n x n maps holds about so many copies of all of them in fp32 (DiffLlama's eager one, forward
# and backward); it is left out where they would take more than the budget.
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
    """Time one shape, every implementation in one interleaved run.

    Args:
        shape: What is computed.
        device: "cpu" or "cuda".
        backends: Of differential attention; None means all that suit the length.
        peers: Whether transformers' DiffLlama takes part.
        rounds: Timed rounds at most.
        budget_seconds: As in `time_interleaved`.
    """
    reasons = _implementations(shape, device, backends, peers)
    work = _work(shape, device, reasons)
    if TORCH_SDPA not in work:
        lost = f"{TORCH_SDPA}, which ratios are to, did not run ({reasons[TORCH_SDPA]})"
        return [_skip(shape, name, reason or lost) for name, reason in reasons.items()]
    timings = time_interleaved(work, rounds=rounds, budget_seconds=budget_seconds, device=device)
    peak = None if device == "cpu" else peak_of(torch.cuda.get_device_name(device), shape.dtype)
    base, softmax = timings[TORCH_SDPA].median_seconds, timings.get(_softmax(device))
    rows: list[AttentionTiming | AttentionSkip] = []
    for name, reason in reasons.items():
        if reason is not None:
            rows.append(_skip(shape, name, reason))
            continue
        median = timings[name].median_seconds
        rows.append(
            AttentionTiming(
                **dataclasses.asdict(shape),
                **dataclasses.asdict(timings[name]),
                implementation=name,
                ratio_to_torch_sdpa=median / base,
                ratio_to_softmax_kernel=median / softmax.median_seconds if softmax else None,
                **({} if device == "cpu" else rates(shape, name, median, peak)),
            )
        )
    return rows


def rates(shape: AttentionShape, implementation: str, seconds: float, peak: Peak | None) -> dict[str, Any]:
    """The fields of `AttentionTiming` that follow from a time by formula."""
    return {
        "teraflops_per_second": attention_flops(shape) / seconds / 1e12,
        "terabytes_per_second": attention_bytes(shape) / seconds / 1e12,
        "time_over_floor": seconds / least_seconds(shape, implementation, peak) if peak else None,
        "work_over_floor": work_over_floor(shape, implementation),
    }


def geometric_means(timings: Iterable[AttentionTiming], by_width: bool = False) -> list[GeometricMean]:
    """Means of the ratios to PyTorch's kernel and to our softmax kernel over shapes, for each dtype and mode.

    Args:
        timings: Of several shapes.
        by_width: Whether those of each width have a mean of their own.
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
    """The shape as the choice of a backend sees it; op is "differential" or "softmax"."""
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


def _softmax(device: str) -> str:
    """Our own kernel for plain attention, the second thing that ratios are to."""
    return f"softmax {DEFAULTS[device].kernel}"


def _implementations(
    shape: AttentionShape, device: str, backends: Sequence[str] | None, peers: bool
) -> dict[str, str | None]:
    """Implementation -> why it is not timed on this shape, or None where it is."""
    kernel = DEFAULTS[device].kernel
    can = explain(problem_of(shape, "differential", device))
    found: dict[str, str | None] = dict.fromkeys(DEFAULTS[device].baselines)
    found[_softmax(device)] = explain(problem_of(shape, "softmax", device)).get(kernel, NO_BACKEND)
    for name in backends or backend_names():
        found[f"diff {name}"] = can[name] or _unsuited(name, shape, device, is_named=backends is not None)
        if name == kernel and device != "cpu" and shape.has_backward:
            # On a GPU a sum over blocks is faster in any order; on the CPU the order is always the same.
            found[f"diff {name}{DETERMINISTIC}"] = found[f"diff {name}"]
    if peers and shape.mode != "decode":
        # DiffLlama's attention has the headwise norm: this is its like.
        found[f"normed {kernel}"] = can.get(kernel, NO_BACKEND)
        for name, makes_maps in ATTN_IMPLEMENTATIONS.items():
            found[f"DiffLlama {name}"] = _too_large(shape) if makes_maps else None
    return found


def _work(shape: AttentionShape, device: str, reasons: dict[str, str | None]) -> dict[str, Work]:
    """The work of every implementation that takes part; on a GPU each is tried once, and `reasons` says what failed."""
    names = [name for name, reason in reasons.items() if reason is None]
    if device == "cpu":
        return {name: attention_work(name, shape, device) for name in names}
    work: dict[str, Work] = {}
    data = attempt(lambda: draw(shape, device))  # one for all: a decoder's keys and values take gigabytes
    for name in names:
        tried = data if isinstance(data, Failure) else attempt(_first_call(name, shape, device, data))
        if isinstance(tried, Failure):
            reasons[name] = tried.reason
        else:
            work[name] = tried
    return work


def _first_call(name: str, shape: AttentionShape, device: str, data: Data) -> Callable[[], Work]:
    def first_call() -> Work:
        work = attention_work(name, shape, device, data)
        work()
        wait_for(device)
        return work

    return first_call


def _skip(shape: AttentionShape, implementation: str, reason: str) -> AttentionSkip:
    return AttentionSkip(**dataclasses.asdict(shape), implementation=implementation, reason=reason)


def _unsuited(backend: str, shape: AttentionShape, device: str, is_named: bool) -> str | None:
    """Why a backend that could run the shape is left out of it."""
    if BACKENDS[backend].has_quadratic_memory(problem_of(shape, "differential", device)):
        return _too_large(shape) if is_named else _too_long(shape, QUADRATIC_MEMORY_MAX_LENGTH, "takes O(n^2) memory")
    longest = DEFAULTS[device].longest_tokens.get(backend)
    if longest is None or is_named:
        return None
    return _too_long(shape, longest, "takes many times the others' time")


def _too_long(shape: AttentionShape, longest_tokens: int, trouble: str) -> str | None:
    if shape.queries_tokens * shape.length_tokens <= longest_tokens**2:
        return None
    return f"{trouble}: above {longest_tokens:,} tokens only where --backends names it"


def _too_large(shape: AttentionShape) -> str | None:
    needed = MAP_COPIES * 2 * shape.batch * shape.heads * shape.queries_tokens * shape.length_tokens * 4
    if needed <= MAPS_BUDGET_BYTES:
        return None
    return (
        f"{MAP_COPIES} copies of its n x n maps in fp32 take {needed / 2**30:.1f} GiB, "
        f"more than the budget of {MAPS_BUDGET_BYTES / 2**30:g} GiB"
    )
