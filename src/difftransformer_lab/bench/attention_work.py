"""One call of attention by each implementation that benchmarks compare."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from difftransformer.model.weights import DTYPES
from difftransformer.ops import differential_attention, normed_differential_attention, softmax_attention

from ..results import Dtype, Mode
from .diffllama import DiffLlamaCore
from .timing import deterministically

LAMBDA = 0.8  # close to lambda in most layers, at the start and after training (arXiv:2410.05258)
DETERMINISTIC = " deterministic"  # suffix of an implementation's name

Data = tuple[Tensor, Tensor, Tensor]  # the numbers of query, key and value, each in one dimension
# A function that computes the output, and the tensors with gradients.
Attend = tuple[Callable[[], Tensor], list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """A causal attention call with `heads` differential heads or twice as many ordinary ones.

    `length_tokens` counts the keys. There are as many queries, or one in mode "decode". `head_dim` is the width of one map.
    `score_factor` multiplies queries whose scores have a standard deviation of 1 nat.
    """

    dtype: Dtype
    mode: Mode
    length_tokens: int
    heads: int
    head_dim: int
    batch: int = 1
    score_factor: float = 1

    @property
    def queries_tokens(self) -> int:
        """Number of queries, T."""
        return 1 if self.mode == "decode" else self.length_tokens

    @property
    def has_backward(self) -> bool:
        return self.mode == "forward+backward"

    @property
    def sizes(self) -> dict[str, float]:
        names = ("batch", "length_tokens", "heads", "head_dim")
        factor = {} if self.score_factor == 1 else {"score_factor": self.score_factor}
        return {name: getattr(self, name) for name in names} | factor

    def __str__(self) -> str:
        batch = f"b={self.batch} " if self.batch > 1 else ""
        return f"{self.dtype} {self.mode} {batch}n={self.length_tokens} h={self.heads} d={self.head_dim}"


def attention_work(
    implementation: str, shape: AttentionShape, device: str = "cpu", data: Data | None = None
) -> Callable[[], Tensor]:
    """Return one causal call; in mode "forward+backward" it computes the gradients of query, key, value and lambda.

    Args:
        implementation: "diff BACKEND", our op with H heads of width 2 D and a lambda for each; "normed BACKEND", the same
            with the headwise norm, without gain as in DiffLlama; "softmax BACKEND", our op for the same-size Transformer
            with 2 H heads of width D; "torch sdpa" or "torch cudnn", PyTorch's function for the same, see `pinned`;
            "DiffLlama sdpa" or "DiffLlama eager", see `DiffLlamaCore`. The suffix " deterministic" runs the call under
            torch.use_deterministic_algorithms.
        data: Result of `draw`, to be shared between implementations; None draws new numbers.

    Returns:
        A function that does the work and returns the output.
    """
    family, _, name = implementation.removesuffix(DETERMINISTIC).partition(" ")
    guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    if implementation.endswith(DETERMINISTIC):
        guard = partial(deterministically, fill_memory=False)
    attend, inputs = _FAMILIES[family](name, shape, data or draw(shape, device))
    for tensor in inputs:
        tensor.requires_grad_(shape.has_backward)
    grad = torch.randn_like(inputs[2]) if shape.has_backward else None  # outputs have the value's shape

    def call() -> Tensor:
        with torch.set_grad_enabled(shape.has_backward), guard():
            out = attend()
            if shape.has_backward:
                torch.autograd.grad(out, inputs, grad)
        return out

    return call


def draw(shape: AttentionShape, device: str) -> Data:
    """Draw normal numbers for query, key and value; H heads of 2 D and 2 H heads of D have equally many."""
    numbers = 2 * shape.batch * shape.heads * shape.head_dim
    lengths = (shape.queries_tokens, shape.length_tokens, shape.length_tokens)
    query, key, value = (torch.randn(numbers * n, device=device).to(DTYPES[shape.dtype]) for n in lengths)
    return query * shape.score_factor, key, value


def pinned(name: str, dtype: Dtype, device: str) -> contextlib.AbstractContextManager[None]:
    """Restrict PyTorch's attention on a GPU to one kernel; on the CPU there is nothing to choose.

    "sdpa" means the flash kernel, or in fp32, which that lacks, the memory-efficient one. "cudnn" means cuDNN's.
    """
    if device == "cpu":
        return contextlib.nullcontext()
    flash = SDPBackend.EFFICIENT_ATTENTION if dtype == "fp32" else SDPBackend.FLASH_ATTENTION
    return sdpa_kernel({"sdpa": flash, "cudnn": SDPBackend.CUDNN_ATTENTION}[name])


def fastest_attention() -> contextlib.AbstractContextManager[None]:
    """Let PyTorch's attention use cuDNN where that can run a call, and its own kernels elsewhere."""
    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kernels, set_priority=True)


def _diff(backend: str, shape: AttentionShape, data: Data, is_normed: bool = False) -> Attend:
    query, key, value = _by_head(data, shape, maps=2)
    lam = torch.full((shape.heads,), LAMBDA, device=query.device)
    attend: Callable[..., Tensor] = differential_attention
    if is_normed:
        attend = partial(normed_differential_attention, weight=None, eps=1e-5, factor=1 - LAMBDA)
    return partial(attend, query, key, value, lam, is_causal=True, backend=backend), [query, key, value, lam]


def _softmax(backend: str, shape: AttentionShape, data: Data) -> Attend:
    query, key, value = _by_head(data, shape, maps=1)
    return partial(softmax_attention, query, key, value, is_causal=True, backend=backend), [query, key, value]


def _torch(name: str, shape: AttentionShape, data: Data) -> Attend:
    query, key, value = _by_head(data, shape, maps=1)
    is_causal = shape.mode != "decode"  # PyTorch aligns a causal mask top-left: one query would see one key

    def attend() -> Tensor:
        with pinned(name, shape.dtype, query.device.type):
            return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)

    return attend, [query, key, value]


def _diffllama(attn_implementation: str, shape: AttentionShape, data: Data) -> Attend:
    width = 2 * shape.heads * shape.head_dim
    query, key, value = (x.detach().view(shape.batch, -1, width) for x in data)
    core = DiffLlamaCore(query, key, value, head_dim=shape.head_dim, attn_implementation=attn_implementation)
    return core, [query, key, value, *core.parameters()]


_FAMILIES: dict[str, Callable[[str, AttentionShape, Data], Attend]] = {
    "diff": _diff,
    "normed": partial(_diff, is_normed=True),
    "softmax": _softmax,
    "torch": _torch,
    "DiffLlama": _diffllama,
}


def _by_head(data: Data, shape: AttentionShape, maps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query (B, heads, T, width), key and value (B, heads, S, width): H heads of 2 D for two maps, else 2 H of D."""
    heads, width = 2 * shape.heads // maps, maps * shape.head_dim
    query, key, value = (x.detach().view(shape.batch, heads, -1, width) for x in data)
    return query, key, value
