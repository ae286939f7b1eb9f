"""Results of `bench`: times, peak memory, and what was left out."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from .base import Dtype, Environment, Mode

# Keys of earlier results files.
RENAMED_KEYS = {"time_over_floor": "time_over_roofline", "work_over_floor": "work_over_least"}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Median and quartiles of the time of one call over interleaved rounds: wall time, or on a GPU time on the device."""

    median_seconds: float
    low_seconds: float
    high_seconds: float
    rounds: int


@dataclass(frozen=True, kw_only=True)
class _ModelTiming(Timing):
    """What the timings of models share."""

    dtype: Dtype
    parameters: int
    implementation: str


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """A causal attention call with `heads` differential heads or twice as many ordinary ones.

    `length_tokens` counts the keys. There are as many queries, or one in mode "decode". `head_dim` is the width of one map.
    Mode "backward" is the backward pass alone. `score_factor` multiplies queries whose scores have a standard deviation of
    1 nat; at 20 and 60 nearly all exponentials are far below their row's largest. None means that peaked scores are not
    tested.
    """

    dtype: Dtype
    mode: Mode
    length_tokens: int
    heads: int
    head_dim: int
    batch: int = 1
    score_factor: float | None = None

    @property
    def is_peaked(self) -> bool:
        """Whether the shape tests scores of a given spread."""
        return self.score_factor is not None

    @property
    def queries_tokens(self) -> int:
        """Number of queries, T."""
        return 1 if self.mode == "decode" else self.length_tokens

    @property
    def has_backward(self) -> bool:
        """Whether the call computes the gradients of all inputs."""
        return self.mode in ("backward", "forward+backward")


@dataclass(frozen=True, kw_only=True)
class AttentionTiming(Timing, AttentionShape):
    """Time of one implementation, and the ratios of its median to PyTorch's kernel and to our kernel for plain attention.

    On a GPU there are rates too. They count the FLOPs and bytes of plain attention of the same shape for every
    implementation, so that they compare as tokens per second do. Where the device's peak and the implementation's scheme are
    known (`bench/roofline.py`), there are the time over the roofline and the work over the least work.
    """

    implementation: str
    ratio_to_torch_sdpa: float
    ratio_to_softmax_kernel: float | None
    teraflops_per_second: float | None = None
    terabytes_per_second: float | None = None
    time_over_roofline: float | None = None
    work_over_least: float | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSkip(AttentionShape):
    """An implementation that was left out, and the reason."""

    implementation: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class GeometricMean:
    """Geometric mean of an implementation's ratios to `against` over the shapes where both were timed.

    If `head_dim` is given, only shapes with maps of that width count.
    """

    dtype: Dtype
    mode: Mode
    implementation: str
    against: str
    shapes: int
    ratio: float
    head_dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class MemoryPoint(AttentionShape):
    """Peak memory of one call above its inputs: on the CPU that of a fresh process, on a GPU by PyTorch's count."""

    implementation: str
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class TrainingTiming(_ModelTiming):
    """Time of a training step, and the ratio of its median to that of the twin on PyTorch's attention.

    A step has `batch` rows of `context_tokens` tokens. `peak_bytes` is its peak memory, weights, gradients and moments
    included, or None if it was not measured.
    """

    model: str
    ratio_to_twin: float
    batch: int | None = None
    context_tokens: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class LossShape:
    """A loss over `vocab_size` logits of each of `tokens` hidden states."""

    dtype: Dtype
    tokens: int
    hidden_size: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class LossTiming(Timing, LossShape):
    """Time of the loss with both gradients, its ratio to that with whole logits, and the peak memory above the inputs."""

    implementation: str
    ratio_to_whole: float
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class TrainingSkip:
    """A training step that was left out, and the reason."""

    model: str
    dtype: Dtype
    batch: int
    context_tokens: int
    implementation: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class DiffLlamaTiming(_ModelTiming):
    """Time of transformers' DiffLlama, as it is or accelerated, and the ratio of its median to DiffLlama as it is.

    `tokens` is the length of the row, or in decoding of the cache.
    """

    work: str
    tokens: int
    ratio_to_diffllama: float


@dataclass(frozen=True, kw_only=True)
class GenerationTiming(_ModelTiming):
    """Time of a whole model's decoding step, with one row behind `cached_tokens` tokens.

    The token rate is divided by two rates with a static cache: that of the faster DiffLlama and that of the same-size
    Transformer. `median_cpu_seconds` is the CPU time of all threads, which does not grow while a thread waits for a core;
    None on a GPU.
    """

    cached_tokens: int
    cache: Literal["static", "dynamic"]
    tokens_per_second: float
    rate_over_diffllama: float
    rate_over_twin: float
    median_cpu_seconds: float | None = None


ModelWork = Literal["training step", "prefill", "decoding"]


@dataclass(frozen=True, kw_only=True)
class VariantTiming(_ModelTiming):
    """Time of a whole model, and the ratio of its median to that of its twin, the model with softmax attention.

    `implementation` is the attention type. `context_tokens` is the length of a row, or in decoding of the cache.
    """

    model: str
    work: ModelWork
    batch: int
    context_tokens: int
    ratio_to_twin: float


@dataclass(frozen=True, kw_only=True)
class ModelTiming(VariantTiming):
    """Time of a whole model, and the ratios of its median to those of other models of the same shape.

    The others are the twin, transformers' Llama on PyTorch's attention, and the faster of transformers' DiffLlamas.
    """

    ratio_to_llama: float
    ratio_to_diffllama: float


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """What the training loop costs beside a bare PyTorch loop over the same model, in turns with it.

    Attributes:
        steps: Number of timed steps.
        step_seconds: Median time of a step of the loop: batch, step, metrics and their line.
        bare_seconds: Median time of a bare step.
        ratio_to_bare: Median over steps of the ratio to the bare step after it.
        loader_share: Time of reading a batch, as a share of a step.
        log_share: Time of metrics and their line, as a share of a step; gradient norms by part are in the step itself.
        inside_seconds: Time of a look inside the model, which `inside_share` spreads over `inside_every` steps.
        save_seconds: Time of a checkpoint, which `save_share` spreads over `save_every` steps.
    """

    model: str
    dtype: Dtype
    batch: int
    context_tokens: int
    steps: int
    step_seconds: float
    bare_seconds: float
    ratio_to_bare: float
    loader_share: float
    log_share: float
    inside_seconds: float
    inside_every: int
    save_seconds: float
    save_every: int

    @property
    def inside_share(self) -> float:
        """Looks inside the model, as a share of training."""
        return self.inside_seconds / self.inside_every / self.step_seconds

    @property
    def save_share(self) -> float:
        """Checkpoints, as a share of training."""
        return self.save_seconds / self.save_every / self.step_seconds

    @property
    def share(self) -> float:
        """All of them."""
        return self.loader_share + self.log_share + self.inside_share + self.save_share


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The result of one run of `bench`.

    `foreign_cpu_share` is the share of the machine's CPU time that other processes took meanwhile, or None if unknown.
    Threads that wait in a loop slow down by more than that share: above a few per cent the times mean little.
    """

    command: str
    created: str
    environment: Environment
    foreign_cpu_share: float | None
    attention: list[AttentionTiming]
    skipped: list[AttentionSkip]
    means: list[GeometricMean]
    memory: list[MemoryPoint]
    training: list[TrainingTiming]
    training_skipped: list[TrainingSkip] = dataclasses.field(default_factory=list)
    diffllama: list[DiffLlamaTiming] = dataclasses.field(default_factory=list)
    generation: list[GenerationTiming] = dataclasses.field(default_factory=list)
    peaked: list[AttentionTiming] = dataclasses.field(default_factory=list)
    models: list[ModelTiming] = dataclasses.field(default_factory=list)
    variants: list[VariantTiming] = dataclasses.field(default_factory=list)
    loss: list[LossTiming] = dataclasses.field(default_factory=list)
    overhead: list[Overhead] = dataclasses.field(default_factory=list)
