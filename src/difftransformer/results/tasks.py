"""Results of single tasks on any saved model."""

from dataclasses import dataclass
from typing import Any, Literal

from .base import Environment


@dataclass(frozen=True, kw_only=True)
class ModelIdentity:
    """Which model was asked. `sha256` is of its configuration, weights and tokenizer files, in the order of their names."""

    name: str
    architecture: str
    attention: str
    parameters: int
    dtype: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class DataIdentity:
    """On what. `sha256` is of the requests, which hold all that the model was shown."""

    name: str
    sha256: str
    requests: int


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One figure. `at` says where it was taken, such as {"length_tokens": 1024, "depth": 0.5}.

    `standard_error` is over the `n` items, never over training; None where there is none. `better` is None where no
    direction is an improvement.
    """

    name: str
    unit: str
    value: float
    standard_error: float | None
    n: int
    better: Literal["lower", "higher"] | None = None
    at: dict[str, Any]


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


@dataclass(frozen=True, kw_only=True)
class HarnessMetric:
    """One figure of a task of lm-eval. `filter` is what was made of the model's answers; None is what lm-eval does not say."""

    task: str
    version: str
    metric: str
    filter: str
    value: float
    standard_error: float | None
    higher_is_better: bool | None
    shots: int | None
    documents: int | None


@dataclass(frozen=True, kw_only=True)
class HarnessResult:
    """What `eval harness` measured on one model. The seed is that of Python, numpy, torch and the examples."""

    checkpoint: str
    command: str
    created: str
    environment: Environment
    lm_eval: str
    seed: int
    limit_documents: int | None
    batch_size: int
    dtype: str
    metrics: list[HarnessMetric]
