"""Steps that would harm the weights: a loss or gradient that is not finite, a norm far above those before, or no target.

Without a target the gradient is zero, and the optimizer's moments alone would move the weights.
"""

import math
import warnings
from collections import deque
from typing import Any, Literal

import numpy as np

from ..errors import Diverged
from .checkpoint import CheckpointState, checkpoints
from .metrics import FaultMetrics
from .trainer import ON_DIVERGING, Callback, Trainer, Update

Fault = Literal["nonfinite", "outlier", "no target"]

OUTLIER_STEPS = 128  # as OLMo-core's SkipStepOptimizer
MOST_NONFINITE = 10  # steps since the last checkpoint, after which training stops under every policy


class Faults(Callback):
    """Keeps faulty steps from the weights. All processes judge the same loss and gradient norm, and so decide alike.

    Args:
        policy: What follows a loss or gradient that is not finite, see `TrainingConfig.nonfinite`.
        sigmas: Number of standard deviations above the mean of the last `OUTLIER_STEPS` gradient norms from which one is an
            outlier, whose step is skipped; None finds none.

    Attributes:
        norms: Those of the last steps. Outliers are among them, so that a new level is accepted after some steps.
        nonfinite: Number of steps that were not finite since the last checkpoint.
    """

    def __init__(self, policy: Literal["stop", "skip", "rollback"], sigmas: float | None) -> None:
        self._policy, self._sigmas, self.nonfinite = policy, sigmas, 0
        self._last: Fault | None = None
        self.norms = deque[float](maxlen=OUTLIER_STEPS)

    def on_restore(self, trainer: Trainer, state: CheckpointState | None) -> None:
        """Go back to the norms of a checkpoint."""
        self.norms = deque(state.norms if state else (), maxlen=OUTLIER_STEPS)

    def on_save(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Keep the norms. A checkpoint is progress unless its step was not finite."""
        state["norms"] = list(self.norms)
        if self._last != "nonfinite":
            self.nonfinite = 0

    def on_gradients(self, trainer: Trainer, update: Update) -> None:
        """Skip a faulty step, go back, or end training."""
        if update.targets and self._judges_late(trainer):
            return
        loss, norm, at_step = update.loss_nats, update.gradient_norm, trainer.step + 1
        fault = self.fault(loss, norm, update.targets)
        if fault is None:
            return
        update.action = "skip"
        if fault == "nonfinite":
            self._stop_if_hopeless(trainer, at_step, loss, norm)
            if self._policy == "rollback":
                update.action = "rollback"
                trainer.roll_back()
        if trainer.processes.is_first:
            follows = "it is skipped" if update.action == "skip" else f"training goes back to step {trainer.step}"
            met = f"loss {loss:.4g} and gradient norm {norm:.4g}" if update.targets else "no target to learn"
            warnings.warn(f"step {at_step} has {met}; {follows}", stacklevel=2)
        trainer.report(
            FaultMetrics(
                step=trainer.step + 1,
                fault=fault,
                action=update.action,
                at_step=at_step,
                faulty_loss_nats=loss if math.isfinite(loss) else None,
                faulty_gradient_norm=norm if math.isfinite(norm) else None,
            )
        )

    def on_step(self, trainer: Trainer, figures: dict[str, Any]) -> None:
        """End training after a step that was not finite, where it is judged late."""
        loss, norm = figures["loss_nats"], figures["gradient_norm"]
        if self._judges_late(trainer) and self.fault(loss, norm):
            self._stop_if_hopeless(trainer, trainer.step, loss, norm)

    def _judges_late(self, trainer: Trainer) -> bool:
        """Whether a step is judged when its figures are read, which need not keep it from weights that training ends with."""
        return trainer.reads_late and self._policy == "stop" and self._sigmas is None

    def fault(self, loss: float, norm: float, targets: int = 1) -> Fault | None:
        """Say what is wrong with a step."""
        self._last = self._judged(loss, norm) if targets else "no target"
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

    def _stop_if_hopeless(self, trainer: Trainer, at_step: int, loss: float, norm: float) -> None:
        run, often = trainer.folder, self.nonfinite > MOST_NONFINITE
        if self._policy == "rollback":
            trainer.finish_saving()  # the first checkpoint may be being written
        nowhere = self._policy == "rollback" and not trainer.processes.broadcast(lambda: checkpoints(run))
        if self._policy == "stop" or often or nowhere:
            count = f", the {self.nonfinite}th such step since the last checkpoint" if often else ""
            trainer.processes.fail(
                Diverged(f"{run}: step {at_step} has loss {loss} and gradient norm {norm}{count}; {ON_DIVERGING}")
            )
