"""Metrics of a run, one JSON object with a checksum per line in metrics.jsonl."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..files import naming
from ..results import write_text_atomically
from ..results.checksums import DamagedLine, line_of, rows
from ..typed import build

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Metrics of an optimiser step.

    Attributes:
        step: Number of finished steps, including this one.
        loss_nats: Mean loss over the batch's tokens.
        gradient_norm: Gradient norm before clipping.
        learning_rate: Learning rate of this step.
        tokens: Number of tokens trained on so far.
        seconds: Time spent in training steps so far, including earlier processes of the run.
        tokens_per_second: Speed of this step.
        lambdas: Lambda of each layer after the step; empty for attention without lambda.
    """

    step: int
    loss_nats: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    tokens_per_second: float
    lambdas: list[float]


@dataclass(frozen=True, kw_only=True)
class ValidationMetrics:
    """Loss on fixed validation windows after `step` steps, and the share of right answers where the data ask for answers."""

    step: int
    validation_loss_nats: float
    validation_accuracy: float | None = None


Metrics = StepMetrics | ValidationMetrics


class MetricsLog:
    """Writer of metrics.jsonl.

    Args:
        path: Path of the file.
        step: Step at which the run continues. Lines of later steps are dropped, because they will be written again.

    Attributes:
        validated_step: Step of the last validation in the file when it was opened; 0 if there is none.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        kept = [line for line in read_lines(path) if line["step"] <= step] if path.exists() else []
        self.validated_step = max((line["step"] for line in kept if "validation_loss_nats" in line), default=0)
        write_text_atomically(path, b"".join(map(line_of, kept)).decode())
        self._path, self._file = path, path.open("ab")

    def write(self, metrics: Metrics) -> None:
        """Append a line."""
        with naming(self._path):
            self._file.write(line_of(dataclasses.asdict(metrics)))
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with naming(self._path):
            self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a metrics file, without a truncated last line.

    Raises:
        CheckpointError: The file cannot be read, or a line is damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the run's metrics ({error.strerror})") from None
    try:
        for number, (row, _) in enumerate(rows(content), start=1):
            if not isinstance(row.get("step"), int):
                raise DamagedLine(number)
            yield row
    except DamagedLine as damage:
        raise CheckpointError(f"{path}: line {damage.line} is damaged; delete the line to continue") from None


def read_metrics(path: Path) -> tuple[list[StepMetrics], list[ValidationMetrics]]:
    """Read the training steps and the validations of a metrics file.

    Raises:
        CheckpointError: The file cannot be read, or a line is damaged.
    """
    steps, validations = [], []
    for line in read_lines(path):
        if "validation_loss_nats" in line:
            validations.append(build(ValidationMetrics, line, source=str(path), error=CheckpointError))
        else:
            steps.append(build(StepMetrics, line, source=str(path), error=CheckpointError))
    return steps, validations
