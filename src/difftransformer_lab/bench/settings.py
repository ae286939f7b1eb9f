"""What `bench` measures and for how long: sizes that suit a few CPU cores, and sizes that fill a GPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from difftransformer.errors import ConfigError
from difftransformer.ops import backend_names

from ..results import BenchRow, Dtype, Mode
from .timing import MIN_ROUNDS

# On a GPU every call has this many tokens, and its heads together are this wide, as in FlashAttention's benchmarks
# (arXiv:2307.08691 section 4.1: 16k tokens, hidden dimension 2048), so that batch x heads fills the device at every length.
GPU_CALL_TOKENS = 16_384
GPU_HIDDEN_SIZE = 2048
GPU_DECODE_BATCH = 8


class Size(NamedTuple):
    """Batch rows, differential heads, and the width of one map."""

    batch: int
    heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What is measured on a device."""

    kernel: str  # the backend that holds this project's own kernels
    baselines: tuple[str, ...]  # implementations of PyTorch's own attention; ratios refer to the first
    dtypes: tuple[Dtype, ...]
    modes: tuple[Mode, ...]
    lengths_tokens: tuple[int, ...]
    decode_lengths_tokens: tuple[int, ...]  # keys of a decoding step
    head_dims: tuple[int, ...]  # widths of one map
    size: Callable[[int, int], Size]  # from length and width
    decode_sizes: Callable[[Sequence[int]], list[Size]]  # from the widths
    longest_tokens: Mapping[str, int] = field(default_factory=dict)  # above it a backend is too slow unless it is named
    memory_dtype: Dtype
    memory_size: Size
    memory_lengths_tokens: tuple[int, ...]
    long_memory_lengths_tokens: tuple[int, ...]  # what --long_memory adds, for our kernel alone
    models: tuple[str, ...]  # names in `models.SIZES`


def _gpu_heads(head_dim: int) -> int:
    return max(1, GPU_HIDDEN_SIZE // (2 * head_dim))


DEFAULTS: dict[str, Defaults] = {
    "cpu": Defaults(
        kernel="cpu",
        baselines=("torch sdpa",),
        dtypes=("fp32", "bf16"),
        modes=("forward", "forward+backward", "decode"),
        lengths_tokens=(512, 2048, 8192),
        decode_lengths_tokens=(16_384,),
        head_dims=(32, 64, 128),
        # Fewer heads at longer lengths, so that no call takes minutes.
        size=lambda length, width: Size(1, 8 if length <= 1024 else 4 if length <= 4096 else 2, width),
        decode_sizes=lambda _: [Size(1, 2, 64), Size(1, 8, 64)],
        memory_dtype="fp32",
        memory_size=Size(1, 4, 64),
        memory_lengths_tokens=(2048, 8192),
        long_memory_lengths_tokens=(32_768, 65_536),
        models=("0.5M", "5M", "20M"),  # 135M takes 12 GB: there are six models, each with its moments
    ),
    "cuda": Defaults(
        kernel="triton",
        baselines=("torch sdpa", "torch cudnn"),
        dtypes=("bf16",),
        modes=("forward", "forward+backward", "decode"),
        lengths_tokens=(2048, 4096, 8192, 16_384, 32_768, 65_536),
        decode_lengths_tokens=(4096, 16_384, 65_536, 131_072),
        head_dims=(64, 128),
        size=lambda length, width: Size(max(1, GPU_CALL_TOKENS // length), _gpu_heads(width), width),
        decode_sizes=lambda widths: [Size(GPU_DECODE_BATCH, _gpu_heads(width), width) for width in widths],
        longest_tokens={"chunked": 16_384},
        memory_dtype="bf16",
        memory_size=Size(1, _gpu_heads(64), 64),
        memory_lengths_tokens=(8192, 32_768, 65_536),
        long_memory_lengths_tokens=(131_072,),
        models=("125M", "350M"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure and for how long.

    Attributes:
        device: cpu or cuda.
        dtypes: Data types, such as [fp32,bf16], the default on the CPU; fp16 is possible too; the default on cuda is [bf16].
        modes: Passes of attention, such as [forward,decode].
        lengths: Sequence lengths of attention in tokens, such as [512,2048]; by default 512 to 8,192, on cuda 2,048 to
            65,536, and longer in decoding.
        head_dims: Widths of one map, such as [64]; by default 32, 64, 128, on cuda 64, 128.
        backends: Backends of differential attention, such as [chunked]; by default all, but those with n x n maps only up
            to 1,024 tokens.
        peers: Whether to time transformers' DiffLlama too.
        repeats: Largest number of timed rounds of a shape, at least 3.
        seconds: Time for a shape; after it no round begins, but at least 3 are timed.
        threads: CPU threads; all by default.
        long_memory: Measure memory up to 65,536 tokens too, on cuda up to 131,072.
        works: Works of "models", such as ["training step"]; all by default.
        sizes: Sizes of "models", such as [135M], which needs 12 GB; by default 0.5M, 5M and 20M, on cuda 125M and 350M.
    """

    device: str = "cpu"
    dtypes: list[Dtype] | None = None
    modes: list[Mode] | None = None
    lengths: list[int] | None = None
    head_dims: list[int] | None = None
    backends: list[str] | None = None
    peers: bool = True
    works: list[str] | None = None
    repeats: int = 30
    seconds: float = 8.0
    threads: int | None = None
    long_memory: bool = False
    sizes: list[str] | None = None

    def __post_init__(self) -> None:
        if self.repeats < MIN_ROUNDS:
            raise ConfigError(f"--repeats {self.repeats}: give at least {MIN_ROUNDS}")
        for flag, numbers in (("--lengths", self.lengths), ("--head-dims", self.head_dims)):
            if numbers is not None and min(numbers, default=0) < 1:
                raise ConfigError(f"{flag} {list(numbers)}: give whole numbers of at least 1")
        if unknown := [name for name in self.backends or () if name not in backend_names()]:
            raise ConfigError(f"--backends: {unknown[0]!r} is unknown; choose from {', '.join(backend_names())}")

    @property
    def defaults(self) -> Defaults:
        return DEFAULTS[self.device]


@dataclass(frozen=True)
class Step:
    """One measurement: its label, and the function that makes its rows."""

    label: str
    measure: Callable[[], list[BenchRow]]
