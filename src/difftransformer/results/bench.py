"""Results of `bench`: times, memory, and what was not timed."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from .base import Dtype, Environment, Mode


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Time of one call over interleaved rounds, median and quartiles: wall time, on a GPU time on the device."""

    median_seconds: float
    low_seconds: float
    high_seconds: float
    rounds: int


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One piece of attention work: causal, `heads` differential heads or twice as many ordinary ones.

    `length_tokens` counts the keys; there are as many queries, in mode "decode" one. `head_dim` is the width of one map.
    Mode "backward" is the backward pass alone. `score_factor` multiplies queries of variance 1, whose scores have a standard
    deviation of 1 nat: at 20 and 60 nearly all exponentials are far below their row's largest. None where that is not the
    question.
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
        """Whether scores of a given spread are what the shape is about."""
        return self.score_factor is not None

    @property
    def queries_tokens(self) -> int:
        """T."""
        return 1 if self.mode == "decode" else self.length_tokens

    @property
    def has_backward(self) -> bool:
        """Whether gradients of all inputs are part of the work."""
        return self.mode in ("backward", "forward+backward")


@dataclass(frozen=True, kw_only=True)
class AttentionTiming(Timing, AttentionShape):
    """Time of one implementation, and its ratio of medians to PyTorch's kernel and to our own kernel for plain attention.

    On a GPU also rates, in which every implementation counts as having done the FLOPs and moved the bytes of plain attention
    of the same shape, so that they compare as tokens per second do; and the time and the work over the least that they could
    be (`bench/floor.py`), where the device's peak and the implementation's scheme are known.
    """

    implementation: str
    ratio_to_torch_sdpa: float
    ratio_to_softmax_kernel: float | None
    teraflops_per_second: float | None = None
    terabytes_per_second: float | None = None
    time_over_floor: float | None = None
    work_over_floor: float | None = None


@dataclass(frozen=True, kw_only=True)
class AttentionSkip(AttentionShape):
    """An implementation that was not timed, and why."""

    implementation: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class GeometricMean:
    """Geometric mean of an implementation's ratios to `against` over the shapes where both were timed.

    Over those with maps of width `head_dim`, or over all where that is None.
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
    """Peak memory above the inputs of one call: on the CPU of a fresh process, on a GPU by PyTorch's count."""

    implementation: str
    peak_bytes: int


@dataclass(frozen=True, kw_only=True)
class TrainingTiming(Timing):
    """Time of a training step, and its ratio of medians to the twin's on PyTorch's attention.

    `batch` rows of `context_tokens` tokens. `peak_bytes` is the most memory that the step held, weights, gradients and
    moments included; None where it was not measured.
    """

    model: str
    parameters: int
    dtype: Dtype
    implementation: str
    ratio_to_twin: float
    batch: int | None = None
    context_tokens: int | None = None
    peak_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingSkip:
    """A training step that was not timed, and why."""

    model: str
    dtype: Dtype
    batch: int
    context_tokens: int
    implementation: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class DiffLlamaTiming(Timing):
    """Time of transformers' DiffLlama at some work, as it is or accelerated, and its ratio of medians to DiffLlama as it is.

    `tokens` are those of the row, or in decoding those in the cache.
    """

    work: str
    dtype: Dtype
    tokens: int
    parameters: int
    implementation: str
    ratio_to_diffllama: float


@dataclass(frozen=True, kw_only=True)
class GenerationTiming(Timing):
    """Time of a whole model's decoding step, one row behind `cached_tokens` tokens.

    Ratios are of token rates, to those with a static cache: of the faster DiffLlama, and of the same-size Transformer.
    `median_cpu_seconds` is CPU time of all threads, which waiting for a core does not lengthen; None on a GPU.
    """

    dtype: Dtype
    cached_tokens: int
    parameters: int
    implementation: str
    cache: Literal["static", "dynamic"]
    tokens_per_second: float
    rate_over_diffllama: float
    rate_over_twin: float
    median_cpu_seconds: float | None = None


ModelWork = Literal["training step", "prefill", "decoding"]


@dataclass(frozen=True, kw_only=True)
class ModelTiming(Timing):
    """Time of a whole model at some work, and its ratios of medians to others of the same shape at the same.

    These are the twin, transformers' Llama on PyTorch's attention, and the faster of transformers' DiffLlamas.
    `context_tokens` are those of a row of `batch`, or in decoding those in the cache.
    """

    model: str
    parameters: int
    dtype: Dtype
    work: ModelWork
    batch: int
    context_tokens: int
    implementation: str
    ratio_to_twin: float
    ratio_to_llama: float
    ratio_to_diffllama: float


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What `bench` measured in one run.

    `foreign_cpu_share` is the share of the machine's CPU time that other processes took meanwhile; None where that is not
    known. Spinning threads suffer from it out of proportion: above a few per cent the times say little.
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
