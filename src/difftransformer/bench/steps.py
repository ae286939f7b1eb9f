"""What `bench` measures, as a list of steps with a guess of their time, so that the time left can be told."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from ..errors import ConfigError
from ..ops import backend_names, explain
from ..results import (
    AttentionShape,
    AttentionSkip,
    AttentionTiming,
    DiffLlamaTiming,
    Dtype,
    GenerationTiming,
    MemoryPoint,
    Mode,
    ModelTiming,
    TrainingSkip,
    TrainingTiming,
)
from .accelerate import WORKS, time_diffllama
from .attention import NO_BACKEND, geometric_means, problem_of, time_attention
from .defaults import DEFAULTS, PEAKED_SIZE, PEAKED_TOKENS, Defaults, Size
from .generation import time_generation
from .memory import peak_attention_bytes
from .models import SIZES, time_models
from .models import WORKS as MODEL_WORKS
from .timing import MIN_ROUNDS
from .training import IMPLEMENTATIONS, time_training
from .trial import Failure, attempt

Part = Literal[
    "attention", "peaked", "decode", "memory", "training", "train", "diffllama", "generation", "models", "all"
]
MODEL_SIZES = ("0.5M", "5M", "20M")  # 135M, with its moments five times over, takes 12 GB
OTHER_NAMES: dict[Part, Part] = {"train": "training"}
Row = (
    AttentionTiming
    | AttentionSkip
    | MemoryPoint
    | TrainingTiming
    | TrainingSkip
    | DiffLlamaTiming
    | GenerationTiming
    | ModelTiming
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure and for how long.

    Attributes:
        device: "cpu" or "cuda".
        dtypes: Of attention and of the training step; None means the device's, as with the next two.
        lengths_tokens: Of attention.
        head_dims: Widths of one map.
        backends: Of differential attention; None means all.
        peers: Whether transformers' DiffLlama takes part.
        rounds: Timed rounds of a shape at most.
        budget_seconds: Time for a shape, after which no round begins but the first MIN_ROUNDS.
        threads: CPU threads of the processes that measure memory.
        long_memory: Whether memory is measured at the device's long lengths too.
        sizes: Of whole models, names in `models.SIZES`; None means those of `MODEL_SIZES`.
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
        for flag, values in (("--lengths", self.lengths_tokens), ("--head_dims", self.head_dims)):
            if min(values, default=0) < 1:
                raise ConfigError(f"{flag} {list(values)}: give whole numbers of at least 1")
        unknown = [name for name in self.backends or () if name not in backend_names()]
        if unknown:
            raise ConfigError(
                f"--backends: no backend is named {unknown[0]!r}; choose from {', '.join(backend_names())}"
            )

        unknown = [size for size in self.sizes or () if size not in SIZES]
        if unknown:
            raise ConfigError(f"--sizes: {unknown[0]!r} is none of {', '.join(SIZES)}")

    @property
    def defaults(self) -> Defaults:
        """What suits the device."""
        return DEFAULTS[self.device]


@dataclass(frozen=True)
class Step:
    """One measurement: what to say of it, a guess of its time, and the function that makes it."""

    label: str
    expected_seconds: float
    measure: Callable[[], Sequence[Row]]


def plan(part: Part, settings: Settings) -> list[Step]:
    """The steps of a part, in the order in which they are made."""
    parts: dict[str, Callable[[Settings], list[Step]]] = {
        "attention": _attention,
        "peaked": _peaked,
        "decode": _decode,
        "memory": _memory,
        "training": _training,
    }
    part = OTHER_NAMES.get(part, part)
    # By name alone: they time another package's models.
    apart = {"diffllama": _diffllama, "generation": _generation, "models": _models}
    if part in apart:
        return apart[part](settings)
    return [step for name, steps in parts.items() if part in (name, "all") for step in steps(settings)]


def sort_rows(rows: Iterable[Row], by_width: bool = False) -> dict[str, Any]:
    """The rows of all steps as fields of `Bench`, with the geometric means over shapes, of all or of each width."""
    rows = list(rows)
    timings = [row for row in rows if isinstance(row, AttentionTiming)]
    attention = [timing for timing in timings if not timing.is_peaked]
    return {
        "attention": attention,
        "skipped": [row for row in rows if isinstance(row, AttentionSkip)],
        "peaked": [timing for timing in timings if timing.is_peaked],
        "means": geometric_means(attention, by_width),
        "memory": [row for row in rows if isinstance(row, MemoryPoint)],
        "training": [row for row in rows if isinstance(row, TrainingTiming)],
        "training_skipped": [row for row in rows if isinstance(row, TrainingSkip)],
        "diffllama": [row for row in rows if isinstance(row, DiffLlamaTiming)],
        "generation": [row for row in rows if isinstance(row, GenerationTiming)],
        "models": [row for row in rows if isinstance(row, ModelTiming)],
    }


def _attention(settings: Settings) -> list[Step]:
    return [
        _attention_step(settings, _shape(dtype, mode, length, settings.defaults.size(length, width)))
        for dtype in settings.dtypes
        for mode in settings.defaults.modes
        for length in settings.lengths_tokens
        for width in settings.head_dims
    ]


def _peaked(settings: Settings) -> list[Step]:
    """Our own kernels and PyTorch's, on scores of several spreads."""
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
    measure = partial(
        time_attention,
        shape,
        device=settings.device,
        backends=settings.backends,
        peers=settings.peers,
        rounds=settings.rounds,
        budget_seconds=settings.budget_seconds,
    )
    expected = _expected(settings, defaults.round_units * _seconds(shape, defaults))
    return Step(_words(shape), defaults.first_call_seconds + expected, measure)


def _seconds(shape: AttentionShape, defaults: Defaults) -> float:
    """A guess of the time of PyTorch's kernel."""
    units = shape.batch * shape.heads * shape.queries_tokens * shape.length_tokens * shape.head_dim
    return defaults.seconds_per_unit[shape.mode] * units


def _memory(settings: Settings) -> list[Step]:
    defaults = settings.defaults
    wanted = [(length, name) for length in defaults.memory_lengths_tokens for name in defaults.memory_implementations]
    if settings.long_memory:
        wanted += [
            (length, name)
            for length in defaults.long_memory_lengths_tokens
            for name in defaults.long_memory_implementations
        ]
    steps = []
    for length, name in wanted:
        shape = _shape(defaults.memory_dtype, "forward+backward", length, defaults.memory_size)
        expected = defaults.memory_seconds + 2 * _seconds(shape, defaults)
        steps.append(Step(f"memory of {name}, {_words(shape)}", expected, partial(_weigh, name, shape, settings)))
    return steps


def _weigh(implementation: str, shape: AttentionShape, settings: Settings) -> list[MemoryPoint | AttentionSkip]:
    fields = dataclasses.asdict(shape) | {"implementation": implementation}
    family, _, backend = implementation.partition(" ")
    if family == "diff":
        reason = explain(problem_of(shape, "differential", settings.device)).get(backend, NO_BACKEND)
        if reason is not None:
            return [AttentionSkip(**fields, reason=f"memory: {reason}")]
    weigh = partial(peak_attention_bytes, implementation, shape, threads=settings.threads, device=settings.device)
    peak = weigh() if settings.device == "cpu" else attempt(weigh)
    if isinstance(peak, Failure):
        return [AttentionSkip(**fields, reason=f"memory: {peak.reason}")]
    return [MemoryPoint(**fields, peak_bytes=peak)]


def _training(settings: Settings) -> list[Step]:
    defaults = settings.defaults
    steps = []
    for model, fields in defaults.models.items():
        weights = 12 * fields["num_hidden_layers"] * fields["hidden_size"] ** 2  # 12 M^2 a layer
        expected = defaults.first_call_seconds + _expected(
            settings,
            len(IMPLEMENTATIONS) * defaults.training_seconds_per_flop * 6 * weights * defaults.training_tokens,
        )
        for dtype in settings.dtypes:
            for context in defaults.training_contexts_tokens:
                measure = partial(
                    time_training,
                    model,
                    dtype,
                    device=settings.device,
                    context_tokens=context,
                    rounds=settings.rounds,
                    budget_seconds=settings.budget_seconds,
                )
                length = f" n={context}" if len(defaults.training_contexts_tokens) > 1 else ""
                steps.append(Step(f"training step of {model}, {dtype}{length}", expected, measure))
    return steps


def _diffllama(settings: Settings) -> list[Step]:
    return [
        Step(
            f"DiffLlama, {work}, {dtype}",
            2 * settings.budget_seconds,
            partial(
                time_diffllama,
                work,
                dtype,
                device=settings.device,
                rounds=settings.rounds,
                budget_seconds=settings.budget_seconds,
            ),
        )
        for dtype in settings.dtypes
        for work in WORKS
    ]


def _generation(settings: Settings) -> list[Step]:
    return [
        Step(
            f"decoding by whole models, {dtype}",
            settings.budget_seconds,
            partial(
                time_generation,
                dtype,
                device=settings.device,
                rounds=settings.rounds,
                budget_seconds=settings.budget_seconds,
            ),
        )
        for dtype in settings.dtypes
    ]


def _models(settings: Settings) -> list[Step]:
    return [
        Step(
            f"{work} of {size}, {dtype}",
            settings.budget_seconds,
            partial(
                time_models,
                size,
                dtype,
                work,
                device=settings.device,
                rounds=settings.rounds,
                budget_seconds=settings.budget_seconds,
            ),
        )
        for work in MODEL_WORKS
        for size in settings.sizes or MODEL_SIZES
        for dtype in settings.dtypes
    ]


def _expected(settings: Settings, round_seconds: float) -> float:
    """With a warm-up round: as long as the rounds take, but not above the budget once MIN_ROUNDS are done."""
    least, most = (1 + MIN_ROUNDS) * round_seconds, (1 + settings.rounds) * round_seconds
    return max(least, min(most, settings.budget_seconds))


def _words(shape: AttentionShape) -> str:
    batch = f"b={shape.batch} " if shape.batch > 1 else ""
    factor = f" factor {shape.score_factor:g}" if shape.score_factor else ""
    return f"{shape.dtype} {shape.mode} {batch}n={shape.length_tokens} h={shape.heads} d={shape.head_dim}{factor}"
