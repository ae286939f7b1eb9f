"""Time and weigh every implementation of attention on one shape, and say which ones are left out and why."""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from difftransformer.model.weights import DTYPES
from difftransformer.ops.backends import BACKENDS, QUADRATIC_MEMORY_MAX_LENGTH, backend_names, explain
from difftransformer.ops.problem import Problem

from ..results import BenchRow, Dtype, Mode
from .attention_work import DETERMINISTIC, AttentionShape, attention_work, draw
from .diffllama import ATTN_IMPLEMENTATIONS
from .memory import peak_attention_bytes
from .settings import Settings, Size, Step
from .timing import attempt_each, time_interleaved

# An implementation that makes n x n maps holds about this many fp32 copies of all of them (measured on DiffLlama's eager
# attention, forward and backward). It is left out where they would exceed the budget.
MAP_COPIES = 5
MAPS_BUDGET_BYTES = 2 * 2**30
NO_BACKEND = "there is no such backend here"


def attention_steps(settings: Settings) -> list[Step]:
    return [
        Step(f"attention, {shape}", partial(time_attention, shape, settings))
        for dtype in settings.dtypes or settings.defaults.dtypes
        for mode in settings.modes or settings.defaults.modes
        for shape in _shapes(dtype, mode, settings)
    ]


def memory_steps(settings: Settings) -> list[Step]:
    """List the shapes of attention whose peak memory is measured; of long ones that of our own kernel alone."""
    defaults, steps = settings.defaults, []
    for length in defaults.memory_lengths_tokens + settings.long_memory * defaults.long_memory_lengths_tokens:
        shape = _shape(defaults.memory_dtype, "forward+backward", length, defaults.memory_size)
        is_long = length in defaults.long_memory_lengths_tokens
        names = {f"diff {defaults.kernel}": None} if is_long else implementations(shape, settings)
        able = [name for name, why in names.items() if why is None]
        steps += [Step(f"memory of {name}, {shape}", partial(weigh_attention, name, shape, settings)) for name in able]
    return steps


def time_attention(shape: AttentionShape, settings: Settings, part: str = "attention") -> list[BenchRow]:
    device = settings.device
    unsuited = implementations(shape, settings)
    shared = functools.cache(lambda: draw(shape, device))

    def first_call(name: str) -> Callable[[], Tensor]:
        work = attention_work(name, shape, device, shared())  # one copy: the keys and values of decoding take gigabytes
        if device != "cpu":
            work()
            torch.cuda.synchronize()
        return work

    works, reasons = attempt_each((name for name, why in unsuited.items() if why is None), first_call, device)
    timings = time_interleaved(works, rounds=settings.repeats, budget_seconds=settings.seconds, device=device)
    return [
        _row(part, shape, name, timing=timings.get(name), left_out=why or reasons.get(name))
        for name, why in unsuited.items()
    ]


def weigh_attention(name: str, shape: AttentionShape, settings: Settings) -> list[BenchRow]:
    """Measure the peak memory of an implementation on one shape above its inputs."""
    threads = settings.threads or torch.get_num_threads()
    weigh = partial(peak_attention_bytes, shape=shape, threads=threads, device=settings.device)
    peaks, reasons = attempt_each([name], weigh, settings.device)
    figures = {"peak_bytes": float(peaks[name])} if name in peaks else {}
    return [_row("memory", shape, name, figures=figures, left_out=reasons.get(name))]


def _row(part: str, shape: AttentionShape, name: str, **measured: Any) -> BenchRow:
    return BenchRow(part=part, work=shape.mode, dtype=shape.dtype, shape=shape.sizes, implementation=name, **measured)


def implementations(shape: AttentionShape, settings: Settings) -> dict[str, str | None]:
    """Map each implementation to the reason why it is not timed on this shape, or to None."""
    device, kernel = settings.device, settings.defaults.kernel
    can = explain(problem_of(shape, "differential", device))
    reasons: dict[str, str | None] = dict.fromkeys(settings.defaults.baselines)
    reasons[f"softmax {kernel}"] = explain(problem_of(shape, "softmax", device)).get(kernel, NO_BACKEND)
    for name in settings.backends or backend_names():
        reasons[f"diff {name}"] = can[name] or _unsuited(name, shape, settings)
        if name == kernel and device != "cpu" and shape.has_backward:
            # On a GPU, adding blocks up in any order is faster. On the CPU the order is always the same.
            reasons[f"diff {name}{DETERMINISTIC}"] = reasons[f"diff {name}"]
    if settings.peers and shape.mode != "decode":
        # DiffLlama's attention includes the headwise norm, so it is compared with our kernel with the norm fused.
        reasons[f"normed {kernel}"] = can.get(kernel, NO_BACKEND)
        for name, makes_maps in ATTN_IMPLEMENTATIONS.items():
            reasons[f"DiffLlama {name}"] = _too_large(shape) if makes_maps else None
    return reasons


def problem_of(shape: AttentionShape, op: str, device: str) -> Problem:
    """Return the shape as the choice of a backend sees it; op is "differential" or "softmax"."""
    maps = 2 if op == "differential" else 1
    heads = 2 * shape.heads // maps
    sizes: dict[str, Any] = {"batch": shape.batch, "queries": shape.queries_tokens, "keys": shape.length_tokens}
    sizes |= {"heads": heads, "groups": heads, "width": shape.head_dim, "value_width": maps * shape.head_dim}
    return Problem(op, device, DTYPES[shape.dtype], **sizes, is_causal=True, needs_grad=shape.has_backward)


def _shapes(dtype: Dtype, mode: Mode, settings: Settings) -> list[AttentionShape]:
    defaults = settings.defaults
    widths = settings.head_dims or defaults.head_dims
    if mode == "decode":
        lengths = settings.lengths or defaults.decode_lengths_tokens
        return [_shape(dtype, mode, length, size) for length in lengths for size in defaults.decode_sizes(widths)]
    lengths = settings.lengths or defaults.lengths_tokens
    return [_shape(dtype, mode, length, defaults.size(length, width)) for length in lengths for width in widths]


def _shape(dtype: Dtype, mode: Mode, length_tokens: int, size: Size) -> AttentionShape:
    return AttentionShape(dtype=dtype, mode=mode, length_tokens=length_tokens, **size._asdict())


def _unsuited(backend: str, shape: AttentionShape, settings: Settings) -> str | None:
    longest, why = settings.defaults.longest_tokens.get(backend), "takes many times as long as the others"
    if BACKENDS[backend].has_quadratic_memory(problem_of(shape, "differential", settings.device)):
        if settings.backends is not None:
            return _too_large(shape)
        longest, why = QUADRATIC_MEMORY_MAX_LENGTH, "takes O(n^2) memory"
    is_short = longest is None or shape.queries_tokens * shape.length_tokens <= longest**2
    if is_short or settings.backends is not None:
        return None
    return f"{why}: above {longest:,} tokens only where --backends names it"


def _too_large(shape: AttentionShape) -> str | None:
    needed = MAP_COPIES * 2 * shape.batch * shape.heads * shape.queries_tokens * shape.length_tokens * 4
    if needed <= MAPS_BUDGET_BYTES:
        return None
    size = f"{MAP_COPIES} copies of its n x n maps in fp32 take {needed / 2**30:.1f} GiB"
    return f"{size}, more than the budget of {MAPS_BUDGET_BYTES / 2**30:g} GiB"
