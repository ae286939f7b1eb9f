"""Results of single tasks on any saved model."""

from dataclasses import dataclass, field
from typing import Any, Literal

from .base import Environment


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """Which model was asked. `sha256` is of its configuration, weights and tokenizer files, in the order of their names.

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
        """Of all that its answers depend on: those of one fingerprint stand for each other."""
        return f"{self.sha256} {self.dtype} {self.kernels}"


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """On what. `sha256` is of the requests, which hold all that the model was shown."""

    name: str
    sha256: str
    requests: int


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One figure. `at` says where it was taken, such as {"length_tokens": 1024, "depth": 0.5}.

    `standard_error` is over the `n` items, never over training; None where there is none. A share of independent items also
    has Wilson's interval of 95 %, `low` to `high`. `better` is None where no direction is an improvement.
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


@dataclass(frozen=True, kw_only=True)
class ItemScore:
    """What one item adds to the measurement `name`: the unit on which two models are paired.

    The measurement is the sum of scores over the sum of weights.
    """

    name: str
    item: str
    score: float
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Rows of numbers that a picture shows, too many to be figures in a table. `at` says where, as a measurement's does.

    Rows may differ in length. `labels` name rows and columns where they are the same things, such as the tokens of a prompt.
    """

    name: str
    at: dict[str, Any]
    values: list[list[float]]
    labels: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """What `eval TASK` measured on one model.

    `options` are those of the task, `choices` what the paper leaves open and how it was settled here.
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
