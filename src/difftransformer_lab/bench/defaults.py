"""What `bench` measures by default: sizes that suit a few CPU cores, and sizes that fill a GPU."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..results import Dtype, Mode

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


PEAKED_SIZE, PEAKED_TOKENS = Size(1, 4, 64), 1024


@dataclass(frozen=True, kw_only=True)
class Defaults:
    """What is measured on a device, and estimates of its speed that only the progress bar uses."""

    kernel: str  # the backend that holds this project's own kernels
    baselines: tuple[str, ...]  # implementations of PyTorch's own attention; ratios refer to the first
    dtypes: tuple[Dtype, ...]  # of attention and of the training step
    lengths_tokens: tuple[int, ...]
    head_dims: tuple[int, ...]  # widths of one map
    modes: tuple[Mode, ...]
    size: Callable[[int, int], Size]  # from length and width
    score_factors: tuple[
        float, ...
    ] = ()  # of PEAKED_SIZE and PEAKED_TOKENS; none on a GPU, where denormals cost nothing
    decode_lengths_tokens: tuple[int, ...]  # keys of a decoding step
    decode_sizes: Callable[[Sequence[int]], list[Size]]  # from the widths
    longest_tokens: Mapping[str, int] = field(default_factory=dict)  # above it a backend is too slow unless it is named
    means_by_width: bool = False  # whether geometric means are taken for each width
    memory_dtype: Dtype
    memory_size: Size
    memory: tuple[tuple[int, ...], tuple[str, ...]]  # lengths and implementations whose memory is measured
    long_memory: tuple[tuple[int, ...], tuple[str, ...]]  # what --long_memory adds
    models: Mapping[str, dict[str, Any]]  # arguments of `DiffTransformerConfig`
    training_tokens: int  # of one training step
    training_contexts_tokens: tuple[int, ...]  # of a row
    flops_per_second: float  # of PyTorch's attention and of a training step
    round_units: float  # time of a round of all implementations, in calls of PyTorch's kernel
    first_call_seconds: float  # before the rounds of a shape
    memory_seconds: float  # of one memory measurement


def _cpu_size(length_tokens: int, head_dim: int) -> Size:
    """Take fewer heads at longer lengths, so that no call takes minutes."""
    return Size(1, 8 if length_tokens <= 1024 else 4 if length_tokens <= 4096 else 2, head_dim)


def _gpu_heads(head_dim: int) -> int:
    return max(1, GPU_HIDDEN_SIZE // (2 * head_dim))


def _gpu_size(length_tokens: int, head_dim: int) -> Size:
    return Size(max(1, GPU_CALL_TOKENS // length_tokens), _gpu_heads(head_dim), head_dim)


_SMALL = {"vocab_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "max_position_embeddings": 512}
# GPT-3's two smallest shapes (arXiv:2005.14165 Table 2.1) with GPT-2's vocabulary, padded; inner widths are multiples of 16.
_LARGE = {"vocab_size": 50_304, "max_position_embeddings": 4096}

DEFAULTS: dict[str, Defaults] = {
    "cpu": Defaults(
        kernel="cpu",
        baselines=("torch sdpa",),
        dtypes=("fp32", "bf16"),
        lengths_tokens=(512, 2048, 8192),
        head_dims=(32, 64, 128),
        modes=("forward", "forward+backward"),
        score_factors=(1, 8, 20, 60),
        size=_cpu_size,
        decode_lengths_tokens=(16_384,),
        decode_sizes=lambda _: [Size(1, 2, 64), Size(1, 8, 64)],
        memory_dtype="fp32",
        memory_size=Size(1, 4, 64),
        memory=((2048, 8192), ("diff cpu", "diff chunked", "torch sdpa")),
        long_memory=((32_768, 65_536), ("diff cpu",)),  # the others would take minutes
        models={"5M": {"hidden_size": 256, **_SMALL}, "20M": {"hidden_size": 512, **_SMALL}},
        training_tokens=8 * 512,
        training_contexts_tokens=(512,),
        flops_per_second=1.2e11,  # measured on two cores
        round_units=10,
        first_call_seconds=0.0,
        memory_seconds=8.0,
    ),
    "cuda": Defaults(
        kernel="triton",
        baselines=("torch sdpa", "torch cudnn"),
        dtypes=("bf16",),
        lengths_tokens=(2048, 4096, 8192, 16_384, 32_768, 65_536),
        head_dims=(64, 128),
        modes=("forward", "backward", "forward+backward"),
        size=_gpu_size,
        decode_lengths_tokens=(4096, 16_384, 65_536, 131_072),
        decode_sizes=lambda widths: [Size(GPU_DECODE_BATCH, _gpu_heads(width), width) for width in widths],
        longest_tokens={"chunked": 16_384},
        means_by_width=True,
        memory_dtype="bf16",
        memory_size=Size(1, _gpu_heads(64), 64),
        memory=(
            (8192, 32_768, 65_536),
            ("diff triton", "diff flex", "diff flash", "diff sdpa", "diff chunked", "torch sdpa", "DiffLlama sdpa"),
        ),
        long_memory=((131_072,), ("diff triton", "torch sdpa")),
        models={
            "125M": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, **_LARGE},
            "350M": _LARGE
            | {"hidden_size": 1024, "intermediate_size": 2736, "num_hidden_layers": 24, "num_attention_heads": 16},
        },
        training_tokens=16_384,
        training_contexts_tokens=(2048, 4096),
        flops_per_second=3.5e14,  # measured on an H100
        round_units=25,
        first_call_seconds=8.0,
        memory_seconds=3.0,
    ),
}
