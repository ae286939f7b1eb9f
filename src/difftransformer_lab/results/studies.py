"""Results of studies: runs with their evaluations, comparisons, upcycling."""

from dataclasses import dataclass
from typing import Any, Literal

from .base import Environment
from .tasks import TaskResult


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric over training steps."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One trained model with its training curves and its evaluations, by their names in the recipe."""

    model: str
    seed: int
    run: str
    train_loss_nats: Curve
    validation_loss_nats: Curve
    lambda_steps: list[int]
    lambda_values: list[list[float]]
    train_tokens: int
    train_seconds: float
    evaluations: dict[str, TaskResult]


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """A model's size and its cost by formula. `label` is the name that a report prints."""

    model: str
    label: str
    attention_type: str
    parameters: int
    train_flops_per_token: int
    kv_bytes_per_token: int


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """A model's cost. Measured figures are None where nothing was measured (a size known by formula only)."""

    model: str
    label: str
    parameters: int
    train_step_seconds: float | None
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    peak_training_bytes: int | None
    weights_and_kv_bytes_4k: int
    weights_and_kv_bytes_64k: int


@dataclass(frozen=True, kw_only=True)
class BaselineNll:
    """A byte n-gram model fitted to the same training text and scored on the same validation text."""

    name: str
    bits_per_byte: float


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """A mean over seeds. `standard_error` is None with one seed."""

    mean: float
    standard_error: float | None
    seeds: int


IntervalMethod = Literal[
    "student-t over seeds",
    "sign flip over seeds",
    "welch over seeds",
    "studentised over items",
    "mid-p over items",
    "bootstrap over evaluation documents",
    "none",
]


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """A minus B on the same seeds or items, with an interval of `confidence`; `interval_method` says how it was made.

    `p_value` is that of no difference, and `p_holm` is corrected for the number of `comparisons` on the page; None where
    there is no interval, and in files of earlier releases, which also have "bootstrap over evaluation documents".
    """

    mean: float
    low: float | None
    high: float | None
    confidence: float
    interval_method: IntervalMethod
    p_value: float | None = None
    p_holm: float | None = None
    comparisons: int | None = None


@dataclass(frozen=True, kw_only=True)
class MetricComparison:
    """One row of a study's table of metrics.

    Attributes:
        task: Name of the evaluation in the recipe.
        metric: Name for tables and sentences.
        unit: Unit of the values.
        better: The direction that is an improvement.
        models: Each model's mean over seeds.
        differences: Each model minus the study's last one.
    """

    task: str
    metric: str
    unit: str
    better: Literal["lower", "higher"]
    models: dict[str, Statistic]
    differences: dict[str, PairedDifference]


@dataclass(frozen=True, kw_only=True)
class Study:
    """Models trained on the same batches for each seed, and evaluated alike. The last model is the reference."""

    name: str
    command: str
    created: str
    environment: Environment
    recipe: dict[str, Any]
    seeds: list[int]
    models: list[ModelSummary]
    runs: list[RunResult]
    metrics: list[MetricComparison]


@dataclass(frozen=True, kw_only=True)
class Comparison(Study):
    """The result of `compare`: a model against its same-size twin."""

    baselines: list[BaselineNll]
    costs: list[CostRow]


@dataclass(frozen=True, kw_only=True)
class Drift:
    """The distance of a converted model from its source, both in fp32 and with the attention written out.

    Attributes:
        tokens: Positions compared.
        largest_logit_difference: The largest over all positions and the whole vocabulary.
        largest_logit: The largest absolute logit of the source, for scale.
        mean_kl_nats: Kullback-Leibler divergence of the next token's distribution, source to result, averaged over tokens.
        greedy_tokens: Length of the greedy continuations compared, with each model's own kernels.
        greedy_same_tokens: Number of them, from the first, that are the same.
        of: Fingerprint of both models and of the positions; empty if unknown.
    """

    tokens: int
    largest_logit_difference: float
    largest_logit: float
    mean_kl_nats: float
    greedy_tokens: int
    greedy_same_tokens: int
    of: str = ""


@dataclass(frozen=True, kw_only=True)
class Upcycling(Study):
    """The result of `upcycle --train`: one pretrained model, trained on in each differential form and unconverted.

    Attributes:
        source: Name of the pretrained model.
        added_parameters: Parameters that a form has beyond the unconverted model.
        drift: Distance of each form from the source before the training.
        before: Evaluations of the unconverted model before the training.
    """

    source: str
    added_parameters: dict[str, int]
    drift: dict[str, Drift]
    before: dict[str, TaskResult]
