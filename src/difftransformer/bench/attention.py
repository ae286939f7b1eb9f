"""Attention of every implementation on one shape: who takes part, who is left out and why, and the ratios."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from ..ops.backends import BACKENDS, QUADRATIC_MEMORY_MAX_LENGTH, backend_names, explain
from ..ops.problem import Problem
from ..results import AttentionShape, AttentionSkip, AttentionTiming, Dtype, GeometricMean, Mode
from .peers import ATTN_IMPLEMENTATIONS
from .timing import time_interleaved
from .work import DTYPES, attention_work

TORCH_SDPA = "torch sdpa"
SOFTMAX_KERNEL = "cpu"  # the backend whose plain attention is the second thing that ratios are to
SOFTMAX = f"softmax {SOFTMAX_KERNEL}"
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
    work = {name: attention_work(name, shape, device) for name, reason in reasons.items() if reason is None}
    timings = time_interleaved(work, rounds=rounds, budget_seconds=budget_seconds)
    fields = dataclasses.asdict(shape)
    base, softmax = timings[TORCH_SDPA].median_seconds, timings.get(SOFTMAX)
    rows: list[AttentionTiming | AttentionSkip] = []
    for name, reason in reasons.items():
        if reason is not None:
            rows.append(AttentionSkip(**fields, implementation=name, reason=reason))
            continue
        median = timings[name].median_seconds
        rows.append(
            AttentionTiming(
                **fields,
                **dataclasses.asdict(timings[name]),
                implementation=name,
                ratio_to_torch_sdpa=median / base,
                ratio_to_softmax_kernel=median / softmax.median_seconds if softmax else None,
            )
        )
    return rows


def geometric_means(timings: Iterable[AttentionTiming]) -> list[GeometricMean]:
    """Means of the ratios to PyTorch's kernel and to our softmax kernel over shapes, for each dtype and mode."""
    groups: dict[tuple[Dtype, Mode, str, str], list[float]] = {}
    for timing in timings:
        key = (timing.dtype, timing.mode, timing.implementation)
        groups.setdefault((*key, TORCH_SDPA), []).append(timing.ratio_to_torch_sdpa)
        if timing.ratio_to_softmax_kernel is not None:
            groups.setdefault((*key, SOFTMAX), []).append(timing.ratio_to_softmax_kernel)
    return [
        GeometricMean(
            dtype=dtype,
            mode=mode,
            implementation=implementation,
            against=against,
            shapes=len(ratios),
            ratio=statistics.geometric_mean(ratios),
        )
        for (dtype, mode, implementation, against), ratios in groups.items()
    ]


def problem_of(shape: AttentionShape, op: str, device: str) -> Problem:
    """The shape as the choice of a backend sees it; op is "differential" or "softmax"."""
    maps = 2 if op == "differential" else 1
    heads = 2 * shape.heads // maps
    return Problem(
        op,
        device,
        DTYPES[shape.dtype],
        batch=1,
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
    """Implementation -> why it is not timed on this shape, or None where it is."""
    differential = problem_of(shape, "differential", device)
    can = explain(differential)
    found = {TORCH_SDPA: None, SOFTMAX: explain(problem_of(shape, "softmax", device)).get(SOFTMAX_KERNEL, NO_BACKEND)}
    for name in backends or backend_names():
        reason = can[name]
        if reason is None and BACKENDS[name].has_quadratic_memory(differential):
            reason = _too_long(shape) if backends is None else _too_large(shape)
        found[f"diff {name}"] = reason
    if peers and shape.mode != "decode":
        # DiffLlama's attention has the headwise norm: this is its like.
        found[f"normed {SOFTMAX_KERNEL}"] = can.get(SOFTMAX_KERNEL, NO_BACKEND)
        for name, makes_maps in ATTN_IMPLEMENTATIONS.items():
            found[f"DiffLlama {name}"] = _too_large(shape) if makes_maps else None
    return found


def _too_long(shape: AttentionShape) -> str | None:
    if shape.queries_tokens * shape.length_tokens <= QUADRATIC_MEMORY_MAX_LENGTH**2:
        return None
    return f"takes O(n^2) memory: above {QUADRATIC_MEMORY_MAX_LENGTH:,} tokens only where --backends names it"


def _too_large(shape: AttentionShape) -> str | None:
    needed = MAP_COPIES * 2 * shape.heads * shape.queries_tokens * shape.length_tokens * 4
    if needed <= MAPS_BUDGET_BYTES:
        return None
    return (
        f"{MAP_COPIES} copies of its n x n maps in fp32 take {needed / 2**30:.1f} GiB, "
        f"more than the budget of {MAPS_BUDGET_BYTES / 2**30:g} GiB"
    )
