"""Interleaved timing: every candidate once, then again, so that a busy moment of the machine hits all of them."""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping

from ..results import Timing

MIN_ROUNDS = 3


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 1, budget_seconds: float = math.inf
) -> dict[str, Timing]:
    """Wall time of each candidate: median and quartiles over rounds of all of them.

    Args:
        candidates: Name -> what to call.
        rounds: Timed rounds at most.
        warmup: Rounds before them.
        budget_seconds: Once so long has passed, the warm-up counted, no further round begins after the first MIN_ROUNDS.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    begun = time.perf_counter()
    for index in range(-warmup, rounds):
        if index >= MIN_ROUNDS and time.perf_counter() - begun > budget_seconds:
            break
        for name, call in candidates.items():
            started = time.perf_counter()
            call()
            if index >= 0:
                seconds[name].append(time.perf_counter() - started)
    return {name: _timing(measured) for name, measured in seconds.items()}


def foreign_cpu_seconds() -> float | None:
    """CPU time, of all cores, that went to other processes and other machines since this one started; None if not Linux."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except OSError:
        return None
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])  # this process and the finished ones that it started


def _timing(seconds: list[float]) -> Timing:
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return Timing(median_seconds=median, low_seconds=low, high_seconds=high, rounds=len(seconds))
