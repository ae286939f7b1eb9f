"""Figures of a training curve: spikes, the step at which a value is reached, and the mean over training."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from difftransformer.errors import ResultsError

from .studies import Curve

SPIKE_WINDOW, SPIKE_RATIO = 100, 3.0


def spikes(values: Sequence[float], *, window: int = SPIKE_WINDOW, ratio: float = SPIKE_RATIO) -> list[int]:
    """Return the places of the values that exceed `ratio` times the median of the `window` values before them.

    The median follows a level that changes during training and ignores earlier spikes. The first `window` values have too
    few before them and never count.

    Args:
        values: One value for each step, such as gradient norms before clipping.
        window: Number of earlier values.
        ratio: How many times the median a spike is above.

    Raises:
        ResultsError: window is below 1, or ratio is not above 1.
    """
    if window < 1 or not ratio > 1:
        raise ResultsError(f"window={window}, ratio={ratio}: give a window of at least 1 and a ratio above 1")
    return [at for at in range(window, len(values)) if values[at] > ratio * median(values[at - window : at])]


def steps_to(curve: Curve, threshold: float, *, rising: bool) -> float | None:
    """Return the first step at which a curve reaches a threshold, between its points by a straight line.

    Args:
        curve: Values over steps.
        threshold: The value to reach.
        rising: Whether to reach it from below, as a share of right answers does; a loss reaches it from above.

    Returns:
        The step; that of the first point if it is there already, and None if the curve never reaches the threshold.
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
    """Return the mean of a curve from its first to its last step, by the trapezoidal rule: its area over its length.

    Raises:
        ResultsError: the curve has fewer than two steps.
    """
    if len(curve.steps) < 2 or curve.steps[0] == curve.steps[-1]:
        raise ResultsError(f"a curve over steps {curve.steps} has no area; it needs at least two steps")
    points = pairwise(zip(curve.steps, curve.values, strict=True))
    area = sum((end - start) * (first + second) / 2 for (start, first), (end, second) in points)
    return area / (curve.steps[-1] - curve.steps[0])
