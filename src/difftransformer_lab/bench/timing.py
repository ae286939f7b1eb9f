"""Interleaved timing: all candidates take turns, so that a busy moment of the machine slows all of them."""

import contextlib
import math
import statistics
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch

from ..results import Timing

T = TypeVar("T")

MIN_ROUNDS = 3
LONGEST_REASON = 200  # characters
# Bytes written on a GPU before each timed call. The write empties the L2 cache, and while it runs (half a millisecond at
# 4 TB/s) the host launches the call, so that for a call of few kernels the time between the two events is the device's own.
GPU_FILL_BYTES = 2**31


def attempt_each(names: Iterable[str], build: Callable[[str], T], device: str) -> tuple[dict[str, T], dict[str, str]]:
    """Build what each implementation needs, its first call included.

    Args:
        device: "cpu", where errors are raised, or "cuda", where they become reasons.

    Returns:
        What was built, by name, and the reason in one line for each implementation that was left out. PyTorch often explains
        in a warning what the error itself does not say, so warnings are part of the reason.
    """
    if device == "cpu":
        return {name: build(name) for name in names}, {}
    built: dict[str, T] = {}
    reasons: dict[str, str] = {}
    for name in names:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                built[name] = build(name)
            except (
                Exception
            ) as error:  # any library may raise its own; each means that this implementation cannot run here
                messages = [f"{type(error).__name__}: {error}", *(str(warning.message) for warning in caught)]
                lines = dict.fromkeys(message.partition("\n")[0] for message in messages)
                reasons[name] = textwrap.shorten("; ".join(lines), LONGEST_REASON, placeholder="...")
    return built, reasons


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]],
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
        started = {name: clock(call) for name, call in candidates.items()}
        taken = {name: read() for name, read in started.items()}
        if index >= 0:
            for name, value in taken.items():
                seconds[name].append(value)
    quartiles = {name: statistics.quantiles(measured, n=4, method="inclusive") for name, measured in seconds.items()}
    return {
        name: Timing(median_seconds=median, low_seconds=low, high_seconds=high, rounds=len(seconds[name]))
        for name, (low, median, high) in quartiles.items()
    }


@contextlib.contextmanager
def deterministically(*, fill_memory: bool) -> Iterator[None]:
    """Request deterministic algorithms, and say whether new tensors are filled with NaN, which the same switch turns on."""
    mode, memory = torch.get_deterministic_debug_mode(), torch.utils.deterministic
    fills = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = fill_memory  # type: ignore[attr-defined]
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def _host_clock(call: Callable[[], object]) -> Callable[[], float]:
    started = time.perf_counter()
    call()
    seconds = time.perf_counter() - started
    return lambda: seconds


def _device_clock(device: str) -> Callable[[Callable[[], object]], Callable[[], float]]:
    """Return the clock of a GPU. It waits only when a time is read, so that the host runs ahead of the device."""
    fill = torch.empty(GPU_FILL_BYTES, dtype=torch.uint8, device=device)

    def clock(call: Callable[[], object]) -> Callable[[], float]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        fill.zero_()
        begin.record()
        call()
        end.record()

        def read() -> float:
            end.synchronize()
            return begin.elapsed_time(end) / 1e3  # elapsed_time counts milliseconds

        return read

    return clock
