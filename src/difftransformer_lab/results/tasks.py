"""Results of single tasks."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from .base import Environment


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """The model that was asked. `sha256` covers its configuration, weights and tokenizer files, in the order of their names.

    `kernels` is its attn_implementation: "difftransformer" where attention went through this package's op.
    """

    name: str
    architecture: str
    attention: str
    parameters: int
    dtype: str
    sha256: str
    kernels: str = ""

    @property
    def fingerprint(self) -> str:
        """Everything that its answers depend on: answers of models with equal fingerprints are interchangeable."""
        return f"{self.sha256} {self.dtype} {self.kernels}"


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """The data. `sha256` covers everything that the model was shown and that its answers were scored by."""

    name: str
    sha256: str
    requests: int


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One figure. `at` says where it was taken, such as {"length_tokens": 1024, "depth": 0.5}.

    `standard_error` is over the `n` items, never over training; None where there is none. Where several items share a
    document or the like, `units` is the number of these, and the standard error is over them. A share of right answers
    also has Wilson's interval of 95 %, `low` to `high`. `better` is None where no direction is an improvement.
    A `detail` is one of many that a picture shows; short tables leave it out.
    """

    name: str
    unit: str
    value: float
    standard_error: float | None
    n: int
    better: Literal["lower", "higher"] | None = None
    at: dict[str, Any]
    low: float | None = None
    high: float | None = None
    detail: bool = False
    units: int | None = None


@dataclass(frozen=True, kw_only=True)
class ItemScore:
    """The contribution of one item to the measurement `name`: the unit on which two models are paired.

    The measurement is the sum of scores over the sum of weights.
    """

    name: str
    item: str
    score: float
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Rows of numbers that a picture shows, too many to be figures in a table. `at` is a measurement's.

    Rows may differ in length. `labels` name rows and columns where they are the same things, such as the tokens of a prompt.
    """

    name: str
    at: dict[str, Any]
    values: list[list[float]]
    labels: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The result of a task on one model.

    `options` are the task's. `choices` say what the paper leaves open and how it was settled here. `gaps` name figures
    that are undefined, which the measurements lack.
    """

    task: str
    model: ModelIdentity
    data: DataIdentity
    options: dict[str, Any]
    choices: list[str]
    seed: int
    command: str
    created: str
    environment: Environment
    measurements: list[Measurement]
    items: list[ItemScore]
    grids: list[Grid] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)


def headlines(result: TaskResult) -> list[Measurement]:
    """Return the main figures of a result: the ones with a better direction, over as much of the data as possible."""
    rows = [row for row in result.measurements if row.better is not None and not row.detail]
    fewest = {name: min(len(row.at) for row in rows if row.name == name) for name in {row.name for row in rows}}
    return [row for row in rows if len(row.at) == fewest[row.name]]


def title_of(row: Measurement, result: TaskResult) -> str:
    """Return the name of a figure for tables and sentences, such as "validation loss" or "needle accuracy (seen cities)"."""
    if row.unit in ("nats/token", "bits/byte") and row.name in ("nll", "bits per byte"):
        return f"{result.data.name} loss"
    words = [
        f"{value} {place}" if isinstance(value, str) else f"{place.removesuffix('_tokens')} {value}"
        for place, value in row.at.items()
    ]
    name = f"{result.task} {row.name}" if row.name == "accuracy" else row.name
    return name + (f" ({', '.join(words)})" if words else "")


def summary_rows(result: TaskResult, *, errors: bool = False) -> list[tuple[str, str]]:
    """Return name and value of every figure that is no detail, for a terminal or a model card; errors are standard errors."""
    rows = []
    for row in result.measurements:
        if row.detail:
            continue
        unit = "" if row.unit == "share" else f", {row.unit}"
        right = row.value * row.n
        is_count = row.low is not None and math.isclose(right, round(right), abs_tol=1e-6)
        count = f" ({round(right)} of {row.n})" if is_count else ""
        error = f" ± {row.standard_error:.4f}" if errors and row.standard_error is not None else ""
        rows.append((title_of(row, result) + unit, f"{row.value:.4f}{error}{count}"))
    return rows
