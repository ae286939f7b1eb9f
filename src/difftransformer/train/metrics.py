"""Metrics of a run, one JSON object per line in metrics.jsonl."""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import CheckpointError
from ..jsonl import DamagedLine, RowWriter, read_rows
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
        lambdas: Lambda of each layer after the step, None where it is not finite; empty for attention without lambda.
        mfu: Model FLOPs a second as a share of the peak of all devices; None if one of the two is not known. Recomputed
            activations do not count.
        peak_bytes: Most memory of the first process so far: of tensors on a GPU, of all of the process on a CPU.
        gradient_norms: Gradient norm of each part of the model before clipping: "embedding", "attention", "lambdas", "mlp",
            "norms", "head", and "other" for what has another name.
    """

    step: int
    loss_nats: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    tokens_per_second: float
    lambdas: list[float | None]
    mfu: float | None = None
    peak_bytes: int | None = None
    gradient_norms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ValidationMetrics:
    """Loss on fixed validation windows after `step` steps.

    Where the data ask for answers, the share of right ones, and the mean negative log-likelihood of the right answer (see
    `accuracy.held_out_answers`).
    """

    step: int
    validation_loss_nats: float
    validation_accuracy: float | None = None
    validation_answer_nll_nats: float | None = None


@dataclass(frozen=True, kw_only=True)
class FaultMetrics:
    """A step that has not changed the weights.

    Attributes:
        step: The step, or under "rollback" the step that follows the checkpoint.
        fault: What is wrong with it.
        action: What follows.
        at_step: The step.
        faulty_loss_nats: Its loss; None if that is not finite.
        faulty_gradient_norm: Its gradient norm; None if that is not finite.
    """

    step: int
    fault: Literal["nonfinite", "outlier", "no target"]
    action: Literal["skip", "rollback"]
    at_step: int
    faulty_loss_nats: float | None
    faulty_gradient_norm: float | None


@dataclass(frozen=True, kw_only=True)
class InsideMetrics:
    """What a model does inside on one fixed row of the validation text, by layer, after `step` steps. None is not finite.

    Attributes:
        step: Number of finished steps.
        attention_entropy_nats: Entropy of the attention maps, averaged over maps, heads and queries.
        largest_logits: Largest absolute attention logit.
        largest_hidden_states: Largest absolute value of the layer's output.
    """

    step: int
    attention_entropy_nats: list[float | None]
    largest_logits: list[float | None]
    largest_hidden_states: list[float | None]


@dataclass(frozen=True, kw_only=True)
class EvaluationMetrics:
    """Figures of tasks that the checkpoint of `step` was asked, by name."""

    step: int
    evaluation: dict[str, float]


Metrics = StepMetrics | ValidationMetrics | FaultMetrics | InsideMetrics | EvaluationMetrics


def finite(values: Iterable[float]) -> list[float | None]:
    """Return numbers as JSON holds them: None where one is not finite."""
    return [value if math.isfinite(value) else None for value in values]


class MetricsLog:
    """Writer of metrics.jsonl.

    Args:
        path: Path of the file.
        step: Step at which the run continues. Lines of later steps are dropped, because they will be written again.

    Attributes:
        validated_step: Step of the last validation in the file when it was opened; 0 if there is none.
        evaluated_step: The same of evaluations.

    Raises:
        CheckpointError: A line before those is damaged.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        keep_bytes = self.validated_step = self.evaluated_step = 0
        for row, end in _rows(path) if path.exists() else ():
            if row["step"] > step:
                break
            keep_bytes = end
            if "validation_loss_nats" in row:
                self.validated_step = row["step"]
            if "evaluation" in row:
                self.evaluated_step = row["step"]
        self._rows = RowWriter(path, keep_bytes=keep_bytes)

    def write(self, metrics: Metrics) -> None:
        """Append a line."""
        self._rows.write(dataclasses.asdict(metrics))

    def close(self) -> None:
        """Close the file."""
        self._rows.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a metrics file, without a truncated last line.

    Raises:
        CheckpointError: The file cannot be read, or a line is damaged.
    """
    return (row for row, _ in _rows(path))


def _rows(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    try:
        for number, (row, end) in enumerate(read_rows(path), start=1):
            if not isinstance(row.get("step"), int):
                raise DamagedLine(number)
            yield row, end
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read the run's metrics ({error.strerror})") from None
    except DamagedLine as damage:
        raise CheckpointError(f"{path}: line {damage.line} is damaged; delete the line to continue") from None


def read_metrics(path: Path) -> tuple[list[StepMetrics], list[ValidationMetrics]]:
    """Read the training steps and the validations of a metrics file. Other lines are left out.

    Raises:
        CheckpointError: The file cannot be read, or a line is damaged.
    """
    steps, validations = [], []
    for line in read_lines(path):
        if "validation_loss_nats" in line:
            validations.append(build(ValidationMetrics, line, source=str(path), error=CheckpointError))
        elif "loss_nats" in line:
            steps.append(build(StepMetrics, line, source=str(path), error=CheckpointError))
    return steps, validations
