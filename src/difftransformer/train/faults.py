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
    """

    def __init__(self, sigmas: float | None, norms: Iterable[float] = ()) -> None:
        self._sigmas = sigmas
        self.norms = deque(norms, maxlen=OUTLIER_STEPS)

    def fault(self, loss: float, norm: float) -> Fault | None:
        """Return what is wrong with a step."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return "nonfinite"
        if self._sigmas is None:
            return None
        is_full, before = len(self.norms) == OUTLIER_STEPS, np.array(self.norms)
        self.norms.append(norm)
        return "outlier" if is_full and norm > before.mean() + self._sigmas * before.std() else None
