"""Send metrics to TensorBoard and Weights & Biases as well, where a recipe asks for it.

Their packages are imported when they are used. Weights & Biases reads its key from its own settings; nothing here touches it.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .checkpoint import CheckpointState
from .config import LogsConfig
from .metrics import Metrics
from .trainer import Callback, Trainer

TENSORBOARD_FOLDER = "tensorboard"


class Trackers(Callback):
    """The trackers of a run, which get the metrics that the run's own file gets, from the first process.

    Args:
        logs: Names them.
    """

    def __init__(self, logs: LogsConfig) -> None:
        self._logs, self._closing = logs, ExitStack()
        self._write: list[Callable[[dict[str, float], int], None]] = []

    def on_restore(self, trainer: Trainer, state: CheckpointState | None) -> None:
        """Open them, once.

        Raises:
            ConfigError: A package is missing.
        """
        if trainer.processes.is_first and not self._write:
            self.open(trainer.folder, step=trainer.step)

    def open(self, run: Path, *, step: int) -> None:
        """Open them in a run folder, at the step at which the run continues."""
        if self._logs.tensorboard:
            self._open_tensorboard(run, step)
        if self._logs.wandb is not None:
            self._open_wandb(self._logs.wandb, run)

    def on_metrics(self, trainer: Trainer, metrics: Metrics) -> None:
        """Send the numbers of a line."""
        if self._write:
            numbers = dict(scalars(metrics))
            for write in self._write:
                write(numbers, metrics.step)

    def close(self) -> None:
        """Close them all."""
        self._closing.close()

    def _open_tensorboard(self, run: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ConfigError(
                "logs.tensorboard: true needs another package; pip install 'difftransformer[tensorboard]', or set it to false"
            ) from None
        # A run that continues writes its later steps again.
        writer: Any = SummaryWriter(str(run / TENSORBOARD_FOLDER), purge_step=step + 1)  # type: ignore[no-untyped-call]
        self._closing.callback(writer.close)

        def write(numbers: dict[str, float], step: int) -> None:
            for name, number in numbers.items():
                writer.add_scalar(name, number, step)

        self._write.append(write)

    def _open_wandb(self, project: str, run: Path) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(
                f"logs.wandb: {project} needs another package; pip install 'difftransformer[wandb]', or set it to null"
            ) from None
        opened = wandb.init(project=project, name=run.name, dir=str(run), resume="allow")
        self._closing.callback(opened.finish)
        self._write.append(lambda numbers, step: opened.log(numbers, step=step))


def scalars(metrics: Metrics) -> Iterator[tuple[str, float]]:
    """Yield the names and numbers of a line. Of a list by layer and of parts, each has a name."""
    for name, value in dataclasses.asdict(metrics).items():
        if name == "step":
            continue
        if isinstance(value, list):
            yield from (
                (f"{name}/layer_{layer:02d}", number) for layer, number in enumerate(value) if number is not None
            )
        elif isinstance(value, dict):
            yield from ((f"{name}/{part}", number) for part, number in value.items())
        elif isinstance(value, (int, float)):
            yield name, value
