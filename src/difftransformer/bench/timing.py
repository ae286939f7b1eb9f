"""Interleaved timing: every candidate once, then again, so that a busy moment of the machine hits all of them."""

import statistics
import time
from collections.abc import Callable, Mapping

from ..results import Timing

MIN_REPEATS = 2


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]], *, against: str, repeats: int, warmup: int = 1
) -> list[Timing]:
    """Wall time of each candidate: median, quartiles, and the ratio of medians to one of them.

    Args:
        candidates: Name -> what to call.
        against: The candidate that the ratios are to.
        repeats: Timed rounds, at least `MIN_REPEATS`.
        warmup: Rounds before them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for round_index in range(warmup + repeats):
        for name, call in candidates.items():
            started = time.perf_counter()
            call()
            if round_index >= warmup:
                seconds[name].append(time.perf_counter() - started)
    base = statistics.median(seconds[against])
    timings = []
    for name, measured in seconds.items():
        low, median, high = statistics.quantiles(measured, n=4, method="inclusive")
        timings.append(
            Timing(
                name=name,
                against=against,
                median_seconds=median,
                low_seconds=low,
                high_seconds=high,
                repeats=repeats,
                ratio=median / base,
            )
        )
    return timings
