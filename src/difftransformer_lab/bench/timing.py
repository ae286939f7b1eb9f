"""Interleaved timing: candidates take turns, so that a busy moment of the machine slows all of them."""

import math
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from difftransformer.errors import BackendUnavailable

from ..results import BenchRow, Timing
from .settings import MIN_ROUNDS, Settings

Call = Callable[[], object]
# Bytes written on a GPU before each timed call. The write empties the L2 cache, and while it runs (half a millisecond at
# 4 TB/s) the host launches the call, so that the time between the two events is the device's own.
GPU_FILL_BYTES = 2**31


def time_rows(
    builders: Mapping[str, Callable[[], Call]], settings: Settings, row: Callable[..., BenchRow]
) -> list[BenchRow]:
    """Build and time implementations in turns. One that its backend refuses, or that fails on a GPU, is left out.

    Args:
        builders: Functions that build the call of each implementation.
        row: `BenchRow` with the fields that all rows share.
    """
    calls, reasons = dict[str, Call](), dict[str, str]()
    errors = BackendUnavailable if settings.device == "cpu" else RuntimeError
    for name, build in builders.items():
        try:
            call = build()
            call()
        except errors as error:
            reasons[name] = str(error).partition("\n")[0]
        else:
            calls[name] = call
    timings = time_interleaved(
        calls, rounds=settings.repeats, budget_seconds=settings.seconds, device=settings.device, warmup=0
    )
    return [row(implementation=name, timing=timings.get(name), left_out=reasons.get(name)) for name in builders]


def time_interleaved(
    candidates: Mapping[str, Call],
    *,
    rounds: int,
    warmup: int = 1,
    budget_seconds: float = math.inf,
    device: str = "cpu",
) -> dict[str, Timing]:
    """Time all candidates in turn and return the median and quartiles of each over the rounds.

    Args:
        budget_seconds: After this time, warm-up included, no further round begins, but at least MIN_ROUNDS are timed.
        device: "cpu" for wall time; "cuda" for the time between two events on the device, from cold caches.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    clock = _host_clock if device == "cpu" else _device_clock(device)
    begun = time.perf_counter()
    for index in range(-warmup, rounds):
        if index >= MIN_ROUNDS and time.perf_counter() - begun > budget_seconds:
            break
        for name, call in candidates.items():
            taken = clock(call)
            if index >= 0:
                seconds[name].append(taken)
    quartiles = {name: statistics.quantiles(measured, n=4, method="inclusive") for name, measured in seconds.items()}
    return {
        name: Timing(median_seconds=median, low_seconds=low, high_seconds=high, rounds=len(seconds[name]))
        for name, (low, median, high) in quartiles.items()
    }


def _host_clock(call: Call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _device_clock(device: str) -> Callable[[Call], float]:
    fill = torch.empty(GPU_FILL_BYTES, dtype=torch.uint8, device=device)

    def seconds(call: Call) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        fill.zero_()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3  # elapsed_time counts milliseconds

    return seconds
