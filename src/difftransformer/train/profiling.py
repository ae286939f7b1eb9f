"""A trace of some training steps, for https://ui.perfetto.dev."""

from typing import Any

import torch
from torch.profiler import ProfilerActivity

from .checkpoint import CheckpointState
from .trainer import Callback, Trainer

FOLDER = "profile"
SKIPPED_STEPS = 2  # which compile, and take memory for the first time


class Profile(Callback):
    """Writes a trace of operators and kernels to RUN/profile, one file for each process.

    Args:
        steps: Number of steps to trace, after the first two.
    """

    def __init__(self, steps: int) -> None:
        self._steps, self._left = steps, SKIPPED_STEPS + steps
        self._profiler: Any = None
        self._write_to = ""

    def on_restore(self, trainer: Trainer, state: CheckpointState | None) -> None:
        """Choose the file."""
        (trainer.folder / FOLDER).mkdir(exist_ok=True)
        first = trainer.step + SKIPPED_STEPS + 1
        name = f"steps-{first}-{first + self._steps - 1}-process-{trainer.processes.rank}.json.gz"
        self._write_to = str(trainer.folder / FOLDER / name)

    def on_step(self, trainer: Trainer, figures: dict[str, Any]) -> None:
        """Begin or end the trace."""
        self._left -= 1
        if self._left == self._steps:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU, *gpu], record_shapes=True)
            self._profiler.start()
        elif self._left == 0:
            self.close()

    def close(self) -> None:
        """Write what has been traced."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler.export_chrome_trace(self._write_to)
            self._profiler = None
