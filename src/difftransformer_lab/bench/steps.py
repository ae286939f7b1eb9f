"""What `bench` measures, as a list of steps with an estimate of their time, so that the time left can be shown."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from difftransformer.errors import ConfigError
from difftransformer.ops import backend_names, explain

from ..results import (
    AttentionShape,
    AttentionSkip,
    AttentionTiming,
    DiffLlamaTiming,
    Dtype,
    GenerationTiming,
    LossTiming,
    MemoryPoint,
    Mode,
    ModelTiming,
    Overhead,
    TrainingSkip,
    TrainingTiming,
    VariantTiming,
)
from .accelerate import WORKS, time_diffllama
from .attempt import Failure, attempt
from .attention import NO_BACKEND, geometric_means, problem_of, time_attention
from .defaults import DEFAULTS, PEAKED_SIZE, PEAKED_TOKENS, Defaults, Size
from .generation import time_generation
from .loss import loss_shapes, time_loss
from .memory import peak_attention_bytes
from .models import SIZES, time_models, time_variants
from .models import WORKS as MODEL_WORKS
from .overhead import time_overhead
from .roofline import attention_flops
from .timing import MIN_ROUNDS
from .training import IMPLEMENTATIONS, time_training

Part = Literal[
    "attention",
    "peaked",
    "decode",
    "memory",
    "training",
    "train",
    "diffllama",
    "generation",
    "models",
    "variants",
    "loss",
    "overhead",
    "all",
]
MODEL_SIZES = ("0.5M", "5M", "20M")  # 135M takes 12 GB: there are five models, each with its moments


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure and for how long.

    Attributes:
        device: "cpu" or "cuda".
        dtypes: Data types of attention and of the training step; None means the device's defaults.
        lengths_tokens: Sequence lengths of attention; None means the device's defaults.
        head_dims: Widths of one map; None means the device's defaults.
        backends: Backends of differential attention; None means all.
        peers: Whether to time transformers' DiffLlama too.
        rounds: Largest number of timed rounds of a shape.
        budget_seconds: Time for a shape; after it no round begins, but at least MIN_ROUNDS are timed.
        threads: CPU threads of the processes that measure memory.
        long_memory: Whether to measure memory at the device's long lengths too.
        sizes: Sizes of whole models, names in `models.SIZES`; None means `MODEL_SIZES`.
    """

    device: str = "cpu"
    dtypes: Sequence[Dtype] = None  # type: ignore[assignment]  # filled in below, like the next two
    lengths_tokens: Sequence[int] = None  # type: ignore[assignment]
    head_dims: Sequence[int] = None  # type: ignore[assignment]
    backends: Sequence[str] | None = None
    peers: bool = True
    rounds: int = 30
    budget_seconds: float = 8.0
    threads: int = 1
    long_memory: bool = False
    sizes: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for name in ("dtypes", "lengths_tokens", "head_dims"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.defaults, name))
        if self.rounds < MIN_ROUNDS:
            raise ConfigError(f"--repeats {self.rounds}: give at least {MIN_ROUNDS}")
        for flag, numbers in (("--lengths", self.lengths_tokens), ("--head_dims", self.head_dims)):
            if min(numbers, default=0) < 1:
                raise ConfigError(f"{flag} {list(numbers)}: give whole numbers of at least 1")
        for flag, names, known in (("--backends", self.backends, backend_names()), ("--sizes", self.sizes, SIZES)):
            if unknown := [name for name in names or () if name not in known]:
                raise ConfigError(f"{flag}: {unknown[0]!r} is unknown; choose from {', '.join(known)}")

    @property
    def defaults(self) -> Defaults:
        """The defaults of the device."""
        return DEFAULTS[self.device]


@dataclass(frozen=True)
class Step:
    """One measurement: its label, an estimate of its time, and the function that makes it."""

    label: str
    expected_seconds: float
    measure: Callable[[], Sequence[object]]


def steps_of(part: Part, settings: Settings) -> list[Step]:
    """List the steps of a part in the order in which they run."""
    if part == "all":
        return [step for make in _PARTS_OF_ALL.values() for step in make(settings)]
    return (_PARTS_OF_ALL | _OTHER_PARTS)["training" if part == "train" else part](settings)


def sort_rows(rows: Iterable[object], by_width: bool = False) -> dict[str, Any]:
    """Return the rows of all steps as fields of `Bench`, with the geometric means over shapes (or over those of a width)."""
    rows = list(rows)

    def of(kind: type) -> list[Any]:
        return [row for row in rows if isinstance(row, kind)]

    attention = [timing for timing in of(AttentionTiming) if not timing.is_peaked]
    return {
        "attention": attention,
        "skipped": of(AttentionSkip),
        "peaked": [timing for timing in of(AttentionTiming) if timing.is_peaked],
        "means": geometric_means(attention, by_width),
        "memory": of(MemoryPoint),
        "training": of(TrainingTiming),
        "training_skipped": of(TrainingSkip),
        "diffllama": of(DiffLlamaTiming),
        "generation": of(GenerationTiming),
        "models": of(ModelTiming),
        "variants": [row for row in of(VariantTiming) if not isinstance(row, ModelTiming)],
        "loss": of(LossTiming),
        "overhead": of(Overhead),
    }


def _step(
    settings: Settings,
    label: str,
    seconds: float,
    time: Callable[..., Sequence[object]],
    *arguments: Any,
    **options: Any,
) -> Step:
    """Make a step of a function that takes the settings' device, rounds and budget."""
    budget = {"rounds": settings.rounds, "budget_seconds": settings.budget_seconds}
    return Step(label, seconds, partial(time, *arguments, device=settings.device, **budget, **options))


def _attention(settings: Settings) -> list[Step]:
    return [
        _attention_step(settings, _shape(dtype, mode, length, settings.defaults.size(length, width)))
        for dtype in settings.dtypes
        for mode in settings.defaults.modes
        for length in settings.lengths_tokens
        for width in settings.head_dims
    ]


def _peaked(settings: Settings) -> list[Step]:
    """Time our own kernels and PyTorch's on scores of several spreads."""
    defaults = settings.defaults
    ours = dataclasses.replace(settings, backends=[defaults.kernel], peers=False)
    return [
        _attention_step(ours, dataclasses.replace(shape, score_factor=factor))
        for dtype in settings.dtypes
        for mode in defaults.modes
        for shape in [_shape(dtype, mode, PEAKED_TOKENS, PEAKED_SIZE)]
        for factor in defaults.score_factors
    ]


def _decode(settings: Settings) -> list[Step]:
    return [
        _attention_step(settings, _shape(dtype, "decode", length, size))
        for dtype in settings.dtypes
        for length in settings.defaults.decode_lengths_tokens
        for size in settings.defaults.decode_sizes(settings.head_dims)
    ]


def _shape(dtype: Dtype, mode: Mode, length_tokens: int, size: Size) -> AttentionShape:
    return AttentionShape(dtype=dtype, mode=mode, length_tokens=length_tokens, **size._asdict())


def _attention_step(settings: Settings, shape: AttentionShape) -> Step:
    defaults = settings.defaults
    call_seconds = attention_flops(shape) / defaults.flops_per_second  # of PyTorch's kernel
    seconds = defaults.first_call_seconds + _expected(settings, defaults.round_units * call_seconds)
    options = {"backends": settings.backends, "peers": settings.peers}
    return _step(settings, _label(shape), seconds, time_attention, shape, **options)


def _memory(settings: Settings) -> list[Step]:
    defaults = settings.defaults
    wanted = [*itertools.product(*defaults.memory)]
    if settings.long_memory:
        wanted += itertools.product(*defaults.long_memory)
    steps = []
    for length, name in wanted:
        shape = _shape(defaults.memory_dtype, "forward+backward", length, defaults.memory_size)
        expected = defaults.memory_seconds + 2 * attention_flops(shape) / defaults.flops_per_second
        steps.append(Step(f"memory of {name}, {_label(shape)}", expected, partial(_weigh, name, shape, settings)))
    return steps


def _weigh(implementation: str, shape: AttentionShape, settings: Settings) -> list[MemoryPoint | AttentionSkip]:
    family, _, backend = implementation.partition(" ")
    reason = None
    if family == "diff":
        reason = explain(problem_of(shape, "differential", settings.device)).get(backend, NO_BACKEND)
    if reason is None:
        weigh = partial(peak_attention_bytes, implementation, shape, threads=settings.threads, device=settings.device)
        peak = weigh() if settings.device == "cpu" else attempt(weigh)
        if not isinstance(peak, Failure):
            return [MemoryPoint(**vars(shape), implementation=implementation, peak_bytes=peak)]
        reason = peak.reason
    return [AttentionSkip(**vars(shape), implementation=implementation, reason=f"memory: {reason}")]


def _training(settings: Settings) -> list[Step]:
    defaults = settings.defaults
    steps = []
    for model, fields in defaults.models.items():
        weights = 12 * fields["num_hidden_layers"] * fields["hidden_size"] ** 2  # 12 M^2 a layer
        flops = len(IMPLEMENTATIONS) * 6 * weights * defaults.training_tokens
        seconds = defaults.first_call_seconds + _expected(settings, flops / defaults.flops_per_second)
        for dtype in settings.dtypes:
            for context in defaults.training_contexts_tokens:
                length = f" n={context}" if len(defaults.training_contexts_tokens) > 1 else ""
                label = f"training step of {model}, {dtype}{length}"
                steps.append(_step(settings, label, seconds, time_training, model, dtype, context_tokens=context))
    return steps


def _diffllama(settings: Settings) -> list[Step]:
    seconds = 2 * settings.budget_seconds
    return [
        _step(settings, f"DiffLlama, {work}, {dtype}", seconds, time_diffllama, work, dtype)
        for dtype in settings.dtypes
        for work in WORKS
    ]


def _generation(settings: Settings) -> list[Step]:
    seconds = settings.budget_seconds
    return [
        _step(settings, f"decoding by whole models, {dtype}", seconds, time_generation, dtype)
        for dtype in settings.dtypes
    ]


def _models(settings: Settings) -> list[Step]:
    return _works(settings, "", time_models)


def _variants(settings: Settings) -> list[Step]:
    return _works(settings, "every attention type, ", time_variants)


def _works(settings: Settings, of_what: str, measure: Callable[..., Sequence[object]]) -> list[Step]:
    seconds = settings.budget_seconds
    return [
        _step(settings, f"{of_what}{work} of {size}, {dtype}", seconds, measure, size, dtype, work)
        for work in MODEL_WORKS
        for size in settings.sizes or MODEL_SIZES
        for dtype in settings.dtypes
    ]


def _loss(settings: Settings) -> list[Step]:
    return [
        _step(
            settings,
            f"loss over {shape.vocab_size:,} logits of {shape.tokens:,} x {shape.hidden_size}, {shape.dtype}",
            2 * settings.budget_seconds,
            time_loss,
            shape,
            threads=settings.threads,
        )
        for shape in loss_shapes(tuple(settings.dtypes))
    ]


def _overhead(settings: Settings) -> list[Step]:
    return [
        _step(
            settings,
            f"training loop of {size}, {dtype}",
            settings.budget_seconds,
            time_overhead,
            size,
            dtype,
        )
        for size in settings.sizes or ("5M",)
        for dtype in settings.dtypes
    ]


_PARTS_OF_ALL: dict[str, Callable[[Settings], list[Step]]] = {
    "attention": _attention,
    "peaked": _peaked,
    "decode": _decode,
    "memory": _memory,
    "training": _training,
}
# These run by name only.
_OTHER_PARTS: dict[str, Callable[[Settings], list[Step]]] = {
    "diffllama": _diffllama,
    "generation": _generation,
    "models": _models,
    "variants": _variants,
    "loss": _loss,
    "overhead": _overhead,
}


def _expected(settings: Settings, round_seconds: float) -> float:
    """Estimate the time of all rounds and a warm-up, which ends with the budget once MIN_ROUNDS are done."""
    least, most = (1 + MIN_ROUNDS) * round_seconds, (1 + settings.rounds) * round_seconds
    return max(least, min(most, settings.budget_seconds))


def _label(shape: AttentionShape) -> str:
    batch = f"b={shape.batch} " if shape.batch > 1 else ""
    factor = f" factor {shape.score_factor:g}" if shape.score_factor else ""
    return f"{shape.dtype} {shape.mode} {batch}n={shape.length_tokens} h={shape.heads} d={shape.head_dim}{factor}"
