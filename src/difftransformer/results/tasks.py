"""Results of single tasks on any saved model."""

from dataclasses import dataclass

from .base import Environment


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
