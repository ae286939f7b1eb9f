"""Attention of DIFF and of the same-size Transformer on one shape, by our backends and by PyTorch's own kernels."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from difftransformer.errors import ConfigError
from difftransformer.model.weights import DTYPES
from difftransformer.ops import backend_names, differential_attention, softmax_attention

from ..results import BenchRow, Dtype, Mode
from .settings import Settings
from .timing import Call, time_rows

LAMBDA = 0.8  # close to lambda in most layers, at the start and after training (arXiv:2410.05258)
KERNELS = {"cpu": "cpu", "cuda": "triton"}
"""The backend that holds this project's own kernels, by device."""
# Of PyTorch's attention on a GPU, in order of priority; the flash kernel lacks fp32.
TORCH_KERNELS = {
    "sdpa": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION],
    "cudnn": [SDPBackend.CUDNN_ATTENTION],
}
LENGTHS = {"cpu": [512, 2048, 8192], "cuda": [2048, 8192, 32_768]}
WIDTHS = {"cpu": [32, 64, 128], "cuda": [64, 128]}
# On a GPU every call has this many tokens, and its heads together are this wide, as in FlashAttention's benchmarks
# (arXiv:2307.08691 section 4.1: 16k tokens, hidden dimension 2048), so that batch x heads fills the device at every length.
GPU_CALL_TOKENS, GPU_HIDDEN_SIZE, GPU_DECODE_BATCH = 16_384, 2048, 8


class AttentionShape(NamedTuple):
    """A causal attention call with `heads` differential heads or twice as many ordinary ones.

    `length_tokens` counts the keys. There are as many queries, or one in mode "decode". `head_dim` is the width of one map.
    """

    dtype: Dtype
    mode: Mode
    batch: int
    length_tokens: int
    heads: int
    head_dim: int

    @property
    def queries_tokens(self) -> int:
        return 1 if self.mode == "decode" else self.length_tokens

    @property
    def has_backward(self) -> bool:
        return self.mode == "forward+backward"

    def __str__(self) -> str:
        return f"{self.dtype} {self.mode} {self.batch}x{self.length_tokens}/{self.heads}/{self.head_dim}"


def attention_steps(settings: Settings) -> dict[str, Callable[[], list[BenchRow]]]:
    """List the shapes of attention, with a label for each."""
    for name in settings.backends or ():
        if name not in backend_names():
            raise ConfigError(f"--backends: {name!r} is unknown; choose from {', '.join(backend_names())}")
    return {str(shape): partial(time_attention, shape, settings) for shape in attention_shapes(settings)}


def attention_shapes(settings: Settings) -> list[AttentionShape]:
    device = settings.device
    return [
        shape_of(dtype, mode, length, width, device)
        for dtype in settings.dtypes or ()
        for mode in settings.modes or get_args(Mode)
        for length in settings.lengths or LENGTHS[device]
        for width in settings.head_dims or WIDTHS[device]
    ]


def shape_of(dtype: Dtype, mode: Mode, length: int, width: int, device: str) -> AttentionShape:
    """Choose batch and heads so that a call fills a GPU, or takes no minutes on a CPU."""
    if device == "cpu":
        return AttentionShape(dtype, mode, 1, length, 8 if length <= 1024 else 4 if length <= 4096 else 2, width)
    batch = GPU_DECODE_BATCH if mode == "decode" else max(1, GPU_CALL_TOKENS // length)
    return AttentionShape(dtype, mode, batch, length, max(1, GPU_HIDDEN_SIZE // (2 * width)), width)


def time_attention(shape: AttentionShape, settings: Settings) -> list[BenchRow]:
    kernel = KERNELS[settings.device]
    ours = [f"softmax {kernel}", *(f"diff {backend}" for backend in settings.backends or (kernel, "chunked"))]
    data = draw(shape, settings.device)  # one copy: decoding reads gigabytes
    names = ["torch sdpa", *(["torch cudnn"] if settings.device != "cpu" else []), *ours]
    return attention_rows(
        "attention", shape, settings, {name: partial(attention_call, name, shape, data) for name in names}
    )


def attention_rows(
    part: str, shape: AttentionShape, settings: Settings, builders: Mapping[str, Callable[[], Call]], **sizes: float
) -> list[BenchRow]:
    """Time implementations on one shape, and describe it in the rows."""
    dtype, mode, *_ = shape
    known = {name: size for name, size in shape._asdict().items() if name not in ("dtype", "mode")}
    return time_rows(builders, settings, partial(BenchRow, part=part, work=mode, dtype=dtype, shape=known | sizes))


def draw(shape: AttentionShape, device: str) -> list[Tensor]:
    """Draw normal numbers for query, key and value; H heads of 2 D and 2 H heads of D have equally many."""
    numbers = 2 * shape.batch * shape.heads * shape.head_dim
    lengths = (shape.queries_tokens, shape.length_tokens, shape.length_tokens)
    return [torch.randn(numbers * n, device=device).to(DTYPES[shape.dtype]) for n in lengths]


def by_head(data: list[Tensor], shape: AttentionShape, maps: int) -> list[Tensor]:
    """Arrange query (B, heads, T, width), key and value (B, heads, S, width): H heads of 2 D for two maps, else 2 H of D."""
    return [x.detach().view(shape.batch, 2 * shape.heads // maps, -1, maps * shape.head_dim) for x in data]


def attention_call(implementation: str, shape: AttentionShape, data: list[Tensor]) -> Callable[[], Tensor]:
    """Build one causal call; in mode "forward+backward" it computes the gradients of query, key, value and lambda.

    Args:
        implementation: "diff BACKEND", our op with H heads of width 2 D and a lambda for each; "softmax BACKEND", our op for
            the same-size Transformer with 2 H heads of width D; "torch sdpa" or "torch cudnn", PyTorch's kernels for it.
        data: Result of `draw`, shared between implementations.
    """
    family, _, name = implementation.partition(" ")
    inputs = by_head(data, shape, maps=2 if family == "diff" else 1)
    if family == "diff":
        inputs.append(torch.full((shape.heads,), LAMBDA, device=data[0].device))
        return timed_call(partial(differential_attention, *inputs, is_causal=True, backend=name), inputs, shape)
    if family == "softmax":
        return timed_call(partial(softmax_attention, *inputs, is_causal=True, backend=name), inputs, shape)

    query, key, value = inputs

    def attend() -> Tensor:
        with nullcontext() if data[0].device.type == "cpu" else sdpa_kernel(TORCH_KERNELS[name], set_priority=True):
            # PyTorch aligns a causal mask top-left: the one query of decoding would see one key.
            return F.scaled_dot_product_attention(query, key, value, is_causal=shape.mode != "decode")

    return timed_call(attend, inputs, shape)


def timed_call(attend: Callable[[], Tensor], inputs: list[Tensor], shape: AttentionShape) -> Callable[[], Tensor]:
    """Build a call of `attend`, with the gradients of its inputs in mode "forward+backward"."""
    for tensor in inputs:
        tensor.requires_grad_(shape.has_backward)
    grad = torch.randn_like(inputs[2])  # outputs have the value's shape

    def call() -> Tensor:
        with torch.set_grad_enabled(shape.has_backward):
            out = attend()
            if shape.has_backward:
                torch.autograd.grad(out, inputs, grad)
        return out

    return call
