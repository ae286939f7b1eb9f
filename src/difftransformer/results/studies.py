"""Results of training and of studies: one model's evaluations, runs, comparisons, upcycling."""

from dataclasses import dataclass
from typing import Any, Literal

from .base import Cities, Environment, Form, Segment


@dataclass(frozen=True, kw_only=True)
class DocumentNll:
    """Summed loss of one evaluation window: the unit of the bootstrap."""

    nll_nats: float
    tokens: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class PositionBucket:
    """Mean loss of the targets at positions start_tokens <= t < end_tokens of a window."""

    start_tokens: int
    end_tokens: int
    nll_nats_per_token: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class NllResult:
    """Validation loss of one model."""

    nll_nats_per_token: float
    bits_per_byte: float
    tokens: int
    bytes: int
    context_tokens: int
    by_position: list[PositionBucket]
    documents: list[DocumentNll]


@dataclass(frozen=True, kw_only=True)
class NeedleCell:
    """Exact answers in one cell of the needle grid. `depth` is the answer's place, 0 (start) to 1 (end)."""

    length_tokens: int
    depth: float
    needles: int
    asked: int
    cities: Cities
    correct: int
    trials: int


@dataclass(frozen=True, kw_only=True)
class NeedleResult:
    """Multi-needle retrieval: every needle asked for is one trial, right when all its digits are."""

    digits: int
    chance: float
    cells: list[NeedleCell]


@dataclass(frozen=True, kw_only=True)
class AllocationShare:
    """Mean share of attention that the last prompt token gives to a segment, over heads, layers and documents."""

    depth: float
    form: Form
    segment: Segment
    share: float
    standard_error: float


@dataclass(frozen=True, kw_only=True)
class AllocationResult:
    """Attention allocation (arXiv:2410.05258, Figure 1 and Table 3), in three forms of a signed map."""

    length_tokens: int
    needles: int
    documents: int
    shares: list[AllocationShare]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric over training steps."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One trained model with its training curves and evaluations."""

    model: str
    seed: int
    run: str
    train_loss_nats: Curve
    validation_loss_nats: Curve
    lambda_steps: list[int]
    lambda_values: list[list[float]]
    train_tokens: int
    train_seconds: float
    nll: NllResult
    needle: NeedleResult | None
    allocation: AllocationResult | None


@dataclass(frozen=True, kw_only=True)
class ModelSummary:
    """What a model is and what it costs by formula. `label` is the name that a report prints."""

    model: str
    label: str
    attention_type: str
    parameters: int
    train_flops_per_token: int
    kv_bytes_per_token: int


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """What a model costs. Measured figures are None where nothing was measured (a size known by formula only)."""

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


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """A minus B on the same seeds, with an interval of `confidence`; `interval_method` says how it was made."""

    mean: float
    low: float | None
    high: float | None
    confidence: float
    interval_method: Literal["student-t over seeds", "bootstrap over evaluation documents", "none"]


@dataclass(frozen=True, kw_only=True)
class MetricComparison:
    """One row of the comparison table. `better` says which direction is an improvement."""

    metric: str
    unit: str
    better: Literal["lower", "higher"]
    models: dict[str, Statistic]
    difference: PairedDifference


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What `compare` measured: `models[0]` against `models[1]`, on the same batches for each seed."""

    name: str
    command: str
    created: str
    environment: Environment
    recipe: dict[str, Any]
    seeds: list[int]
    models: list[ModelSummary]
    baselines: list[BaselineNll]
    runs: list[RunResult]
    costs: list[CostRow]
    metrics: list[MetricComparison]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `eval` measured on one checkpoint."""

    checkpoint: str
    command: str
    created: str
    environment: Environment
    nll: NllResult | None
    needle: NeedleResult | None
    allocation: AllocationResult | None


@dataclass(frozen=True, kw_only=True)
class Drift:
    """How far a converted model is from its source, both in fp32 and with the attention written out.

    Attributes:
        tokens: Positions compared.
        largest_logit_difference: Over all positions and the whole vocabulary.
        largest_logit: The largest absolute logit of the source, for scale.
        mean_kl_nats: Kullback-Leibler divergence of the next token's distribution, source to result, a token.
        greedy_tokens: Length of the greedy continuations compared, with each model's own kernels.
        greedy_same_tokens: How many of them, from the first, are the same.
    """

    tokens: int
    largest_logit_difference: float
    largest_logit: float
    mean_kl_nats: float
    greedy_tokens: int
    greedy_same_tokens: int


@dataclass(frozen=True, kw_only=True)
class Upcycling:
    """What `upcycle --train` measured: one pretrained model, trained on as it was and in each differential form.

    `models[-1]` is the unconverted one, `before` its evaluation before the training, and `differences` compares every other
    model's end with its end.
    """

    name: str
    command: str
    created: str
    environment: Environment
    recipe: dict[str, Any]
    source: str
    models: list[ModelSummary]
    added_parameters: dict[str, int]
    drift: dict[str, Drift]
    before: Evaluation
    runs: list[RunResult]
    differences: dict[str, list[MetricComparison]]
