"""Steps that would harm the weights: a loss or gradient that is not finite, or a gradient norm far above those before."""

import math
from collections import deque
from collections.abc import Iterable
from typing import Literal

import numpy as np

Fault = Literal["nonfinite", "outlier"]

OUTLIER_STEPS = 128  # as OLMo-core's SkipStepOptimizer
MOST_NONFINITE = 10  # steps since the last checkpoint, after which training stops under every policy


class GradientWatch:
    """Judges the loss and the gradient norm of all processes before the optimizer's step.

    Args:
        sigmas: Number of standard deviations above the mean of the last `OUTLIER_STEPS` gradient norms from which one is an
            outlier; None finds none.
        norms: Gradient norms of the steps before, oldest first.

    Attributes:
        norms: Those of the last steps. Outliers are among them, so that a new level is accepted after some steps.
        nonfinite: Number of steps that were not finite since the last checkpoint.
    """

    def __init__(self, sigmas: float | None, norms: Iterable[float] = ()) -> None:
        self._sigmas, self.nonfinite = sigmas, 0
        self._last: Fault | None = None
        self.restore(norms)

    def restore(self, norms: Iterable[float]) -> None:
        """Go back to the norms of a checkpoint."""
        self.norms = deque(norms, maxlen=OUTLIER_STEPS)

    def saved(self) -> None:
        """Note a checkpoint, which is progress unless its step was not finite."""
        if self._last != "nonfinite":
            self.nonfinite = 0

    def fault(self, loss: float, norm: float) -> Fault | None:
        """Return what is wrong with a step."""
        self._last = self._judged(loss, norm)
        self.nonfinite += self._last == "nonfinite"
        return self._last

    def _judged(self, loss: float, norm: float) -> Fault | None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return "nonfinite"
        if self._sigmas is None:
            return None
        is_full, before = len(self.norms) == OUTLIER_STEPS, np.array(self.norms)
        self.norms.append(norm)
        return "outlier" if is_full and norm > float(before.mean()) + self._sigmas * float(before.std()) else None
