"""What `bench` measures, as a list of steps with a guess of their time, so that the time left can be told."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from ..errors import ConfigError
from ..ops import backend_names, explain
from ..results import AttentionShape, AttentionSkip, AttentionTiming, Dtype, MemoryPoint, Mode, TrainingTiming
from .attention import NO_BACKEND, TORCH_SDPA, geometric_means, problem_of, time_attention
from .memory import peak_attention_bytes
from .timing import MIN_ROUNDS
from .training import CONTEXT_TOKENS, IMPLEMENTATIONS, MODELS, ROWS, time_training

Part = Literal["attention", "decode", "memory", "training", "all"]
Row = AttentionTiming | AttentionSkip | MemoryPoint | TrainingTiming

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
LENGTHS_TOKENS = (512, 2048, 8192)
HEAD_DIMS = (32, 64, 128)
DECODE_LENGTH_TOKENS, DECODE_HEADS, DECODE_HEAD_DIM = 16_384, (2, 8), 64
MEMORY_LENGTHS_TOKENS, MEMORY_HEADS, MEMORY_HEAD_DIM = (2048, 8192), 4, 64
LONG_MEMORY_LENGTHS_TOKENS = (32_768, 65_536)
MEMORY_IMPLEMENTATIONS = ("diff cpu", "diff chunked", TORCH_SDPA)
LONG_MEMORY_IMPLEMENTATIONS = ("diff cpu",)  # the others take minutes there

ATTENTION_MODES: tuple[Mode, ...] = ("forward", "forward+backward")

# Guesses for two cores, in seconds, which only the progress bar uses.
SECONDS_PER_UNIT = {"forward": 3e-11, "forward+backward": 1e-10, "decode": 3e-10}  # of H T S D
ATTENTION_ROUND_UNITS = 10  # a round of all implementations, in calls of PyTorch's kernel
TRAINING_SECONDS_PER_FLOP = 1e-11
MEMORY_SECONDS = 8.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure and for how long.

    Attributes:
        device: "cpu" or "cuda".
        dtypes: Of attention and of the training step.
        lengths_tokens: Of attention; `heads_of` says with how many heads.
        head_dims: Widths of one map.
        backends: Of differential attention; None means all.
        peers: Whether transformers' DiffLlama takes part.
        rounds: Timed rounds of a shape at most.
        budget_seconds: Time for a shape, after which no round begins but the first MIN_ROUNDS.
        threads: CPU threads of the processes that measure memory.
        long_memory: Whether memory is measured at LONG_MEMORY_LENGTHS_TOKENS too.
    """

    device: str = "cpu"
    dtypes: Sequence[Dtype] = DTYPES
    lengths_tokens: Sequence[int] = LENGTHS_TOKENS
    head_dims: Sequence[int] = HEAD_DIMS
    backends: Sequence[str] | None = None
    peers: bool = True
    rounds: int = 30
    budget_seconds: float = 8.0
    threads: int = 1
    long_memory: bool = False

    def __post_init__(self) -> None:
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


@dataclass(frozen=True)
class Step:
    """One measurement: what to say of it, a guess of its time, and the function that makes it."""

    label: str
    expected_seconds: float
    measure: Callable[[], Sequence[Row]]


def heads_of(length_tokens: int) -> int:
    """Differential heads at a length, fewer at longer ones so that none takes minutes."""
    return 8 if length_tokens <= 1024 else 4 if length_tokens <= 4096 else 2


def plan(part: Part, settings: Settings) -> list[Step]:
    """The steps of a part, in the order in which they are made."""
    parts: dict[str, Callable[[Settings], list[Step]]] = {
        "attention": _attention,
        "decode": _decode,
        "memory": _memory,
        "training": _training,
    }
    return [step for name, steps in parts.items() if part in (name, "all") for step in steps(settings)]


def sort_rows(rows: Iterable[Row]) -> dict[str, Any]:
    """The rows of all steps as fields of `Bench`, with the geometric means over shapes."""
    rows = list(rows)
    attention = [row for row in rows if isinstance(row, AttentionTiming)]
    return {
        "attention": attention,
        "skipped": [row for row in rows if isinstance(row, AttentionSkip)],
        "means": geometric_means(attention),
        "memory": [row for row in rows if isinstance(row, MemoryPoint)],
        "training": [row for row in rows if isinstance(row, TrainingTiming)],
    }


def _attention(settings: Settings) -> list[Step]:
    return [
        _attention_step(
            settings,
            AttentionShape(dtype=dtype, mode=mode, length_tokens=length, heads=heads_of(length), head_dim=width),
        )
        for dtype in settings.dtypes
        for mode in ATTENTION_MODES
        for length in settings.lengths_tokens
        for width in settings.head_dims
    ]


def _decode(settings: Settings) -> list[Step]:
    return [
        _attention_step(
            settings,
            AttentionShape(
                dtype=dtype, mode="decode", length_tokens=DECODE_LENGTH_TOKENS, heads=heads, head_dim=DECODE_HEAD_DIM
            ),
        )
        for dtype in settings.dtypes
        for heads in DECODE_HEADS
    ]


def _attention_step(settings: Settings, shape: AttentionShape) -> Step:
    units = shape.heads * shape.queries_tokens * shape.length_tokens * shape.head_dim
    measure = partial(
        time_attention,
        shape,
        device=settings.device,
        backends=settings.backends,
        peers=settings.peers,
        rounds=settings.rounds,
        budget_seconds=settings.budget_seconds,
    )
    return Step(
        _words(shape), _expected(settings, ATTENTION_ROUND_UNITS * SECONDS_PER_UNIT[shape.mode] * units), measure
    )


def _memory(settings: Settings) -> list[Step]:
    wanted = [(length, name) for length in MEMORY_LENGTHS_TOKENS for name in MEMORY_IMPLEMENTATIONS]
    if settings.long_memory:
        wanted += [(length, name) for length in LONG_MEMORY_LENGTHS_TOKENS for name in LONG_MEMORY_IMPLEMENTATIONS]
    steps = []
    for length, name in wanted:
        shape = AttentionShape(
            dtype="fp32", mode="forward+backward", length_tokens=length, heads=MEMORY_HEADS, head_dim=MEMORY_HEAD_DIM
        )
        units = MEMORY_HEADS * length**2 * MEMORY_HEAD_DIM
        expected = MEMORY_SECONDS + 2 * SECONDS_PER_UNIT[shape.mode] * units
        steps.append(Step(f"memory of {name}, {_words(shape)}", expected, partial(_weigh, name, shape, settings)))
    return steps


def _weigh(implementation: str, shape: AttentionShape, settings: Settings) -> list[MemoryPoint | AttentionSkip]:
    fields = dataclasses.asdict(shape) | {"implementation": implementation}
    family, _, backend = implementation.partition(" ")
    if family == "diff":
        reason = explain(problem_of(shape, "differential", settings.device)).get(backend, NO_BACKEND)
        if reason is not None:
            return [AttentionSkip(**fields, reason=f"memory: {reason}")]
    peak = peak_attention_bytes(implementation, shape, threads=settings.threads, device=settings.device)
    return [MemoryPoint(**fields, peak_bytes=peak)]


def _training(settings: Settings) -> list[Step]:
    steps = []
    for model in MODELS:
        for dtype in settings.dtypes:
            flops = 6 * MODELS[model]["hidden_size"] ** 2 * 72 * ROWS * CONTEXT_TOKENS  # 6 layers of 12 M^2 weights
            expected = _expected(settings, len(IMPLEMENTATIONS) * TRAINING_SECONDS_PER_FLOP * flops)
            measure = partial(
                time_training,
                model,
                dtype,
                device=settings.device,
                rounds=settings.rounds,
                budget_seconds=settings.budget_seconds,
            )
            steps.append(Step(f"training step of {model}, {dtype}", expected, measure))
    return steps


def _expected(settings: Settings, round_seconds: float) -> float:
    """With a warm-up round: as long as the rounds take, but not above the budget once MIN_ROUNDS are done."""
    least, most = (1 + MIN_ROUNDS) * round_seconds, (1 + settings.rounds) * round_seconds
    return max(least, min(most, settings.budget_seconds))


def _words(shape: AttentionShape) -> str:
    return f"{shape.dtype} {shape.mode} n={shape.length_tokens} h={shape.heads} d={shape.head_dim}"
