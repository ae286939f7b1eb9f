"""A training curve and its figures: spikes, the step at which a value is reached, and the mean over training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

SPIKE_WINDOW, SPIKE_RATIO = 100, 3.0


@dataclass(frozen=True, kw_only=True)
class Curve:
    steps: list[int]
    values: list[float]


def spikes(values: Sequence[float]) -> list[int]:
    """Return the places of the values that exceed 3 times the median of the 100 values before them.

    The median follows a level that changes during training and ignores earlier spikes. The first 100 values have too few
    before them and never count.

    Args:
        values: One value for each step, such as gradient norms before clipping.
    """
    medians = ((at, median(values[at - SPIKE_WINDOW : at])) for at in range(SPIKE_WINDOW, len(values)))
    return [at for at, before in medians if values[at] > SPIKE_RATIO * before]


def steps_to(curve: Curve, threshold: float, *, rising: bool) -> float | None:
    """Return the first step at which a curve reaches a threshold, between its points by a straight line.

    Args:
        curve: Values over steps.
        threshold: The value to reach.
        rising: Whether to reach it from below, as a share of right answers does; a loss reaches it from above.

    Returns:
        The step; the first point's if it is there already, and None if the curve never reaches the threshold.
    """
    sign = 1 if rising else -1
    ahead = [sign * (value - threshold) for value in curve.values]
    if ahead and ahead[0] >= 0:
        return float(curve.steps[0])
    for (start, low), (end, high) in pairwise(zip(curve.steps, ahead, strict=True)):
        if high >= 0:
            return start + (end - start) * low / (low - high)
    return None


def mean_over_steps(curve: Curve) -> float:
    """Return the mean of a curve from its first to its last point by the trapezoidal rule: its area over its length."""
    points = list(zip(curve.steps, curve.values, strict=True))
    if len(points) == 1:
        return curve.values[0]
    area = math.fsum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in pairwise(points))
    return area / (curve.steps[-1] - curve.steps[0])
