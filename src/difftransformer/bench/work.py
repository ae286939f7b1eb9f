"""The pieces of work that benchmarks time and weigh."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import deterministic
from transformers import PreTrainedModel

from ..model.dtypes import DTYPES
from ..model.nll import next_token_nll
from ..ops import differential_attention, normed_differential_attention, softmax_attention
from ..results import AttentionShape, Dtype
from .peers import DiffLlamaCore
from .timing import Prepared

LAMBDA = 0.8  # where most layers' lambda starts and stays (arXiv:2410.05258)
DETERMINISTIC = " deterministic"  # at the end of an implementation's name

Data = tuple[Tensor, Tensor, Tensor]  # all numbers of query, key and value, in no shape yet
Attend = tuple[Callable[[], Tensor], list[Tensor]]  # what computes an output, and the tensors that get gradients
Work = Callable[[], Tensor] | Prepared[Tensor]


def attention_work(implementation: str, shape: AttentionShape, device: str = "cpu", data: Data | None = None) -> Work:
    """One causal call; in mode "forward+backward" with the gradients of query, key, value and lambda.

    Args:
        implementation: "diff BACKEND", our op with H heads of 2 D and a lambda for each; "normed BACKEND", the same with
            the headwise norm, without gain as in DiffLlama; "softmax BACKEND", our op for the
            same-size Transformer, 2 H heads of D; "torch sdpa" or "torch cudnn", PyTorch's function for the same, as
            `pinned` says; "DiffLlama sdpa" or "DiffLlama eager", `DiffLlamaCore`. With " deterministic" at the end,
            under torch.use_deterministic_algorithms.
        shape: What is computed.
        device: "cpu" or "cuda".
        data: What `draw` returned, to be shared between implementations; None draws anew.

    Returns:
        A function that does the work and returns the output; in mode "backward", whose forward pass comes before, in two
        parts.
    """
    family, _, name = implementation.removesuffix(DETERMINISTIC).partition(" ")
    guard = deterministically if implementation.endswith(DETERMINISTIC) else contextlib.nullcontext
    attend, inputs = _FAMILIES[family](name, shape, data or draw(shape, device))
    for tensor in inputs:
        tensor.requires_grad_(shape.has_backward)
    grad = torch.randn_like(inputs[2]) if shape.has_backward else None  # outputs are shaped like the value

    def forward() -> Tensor:
        with torch.set_grad_enabled(shape.has_backward), guard():
            return attend()

    def backward(out: Tensor) -> Tensor:
        with guard():
            torch.autograd.grad(out, inputs, grad)
        return out

    if shape.mode == "backward":
        return Prepared(forward, backward)
    return (lambda: backward(forward())) if shape.has_backward else forward


def draw(shape: AttentionShape, device: str) -> Data:
    """Normal numbers for query, key and value: as many for H heads of 2 D as for 2 H heads of D."""
    numbers = 2 * shape.batch * shape.heads * shape.head_dim
    lengths = (shape.queries_tokens, shape.length_tokens, shape.length_tokens)
    query, key, value = (torch.randn(numbers * n, device=device).to(DTYPES[shape.dtype]) for n in lengths)
    return query * (shape.score_factor or 1), key, value


def pinned(name: str, dtype: Dtype, device: str) -> contextlib.AbstractContextManager[None]:
    """Hold PyTorch's attention on a GPU to one kernel: "sdpa" to flash, which in fp32 there is not, so there to the
    memory-efficient one; "cudnn" to cuDNN's. On the CPU there is nothing to choose.
    """
    if device == "cpu":
        return contextlib.nullcontext()
    flash = SDPBackend.EFFICIENT_ATTENTION if dtype == "fp32" else SDPBackend.FLASH_ATTENTION
    return sdpa_kernel({"sdpa": flash, "cudnn": SDPBackend.CUDNN_ATTENTION}[name])


@contextlib.contextmanager
def deterministically() -> Iterator[None]:
    """Ask for deterministic algorithms alone: filling new memory, which the same switch turns on, would be timed too."""
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    memory: Any = deterministic  # a module that types do not know the switches of
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        memory.fill_uninitialized_memory = fill


def _diff(backend: str, shape: AttentionShape, data: Data) -> Attend:
    query, key, value = _by_head(data, shape, maps=2)
    lam = torch.full((shape.heads,), LAMBDA, device=query.device)
    attend = partial(differential_attention, query, key, value, lam, is_causal=True, backend=backend)
    return attend, [query, key, value, lam]


def _normed(backend: str, shape: AttentionShape, data: Data) -> Attend:
    query, key, value = _by_head(data, shape, maps=2)
    lam = torch.full((shape.heads,), LAMBDA, device=query.device)

    def attend() -> Tensor:
        return normed_differential_attention(
            query, key, value, lam, None, eps=1e-5, factor=1 - LAMBDA, is_causal=True, backend=backend
        )

    return attend, [query, key, value, lam]


def _softmax(backend: str, shape: AttentionShape, data: Data) -> Attend:
    query, key, value = _by_head(data, shape, maps=1)
    return partial(softmax_attention, query, key, value, is_causal=True, backend=backend), [query, key, value]


def _torch(name: str, shape: AttentionShape, data: Data) -> Attend:
    query, key, value = _by_head(data, shape, maps=1)
    is_causal = shape.mode != "decode"  # PyTorch aligns causal top-left: one query would see one key

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
    "normed": _normed,
    "softmax": _softmax,
    "torch": _torch,
    "DiffLlama": _diffllama,
}


def _by_head(data: Data, shape: AttentionShape, maps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query (B, heads, T, width), key and value (B, heads, S, width), of two maps H heads of 2 D, of one 2 H of D."""
    heads, width = 2 * shape.heads // maps, maps * shape.head_dim
    query, key, value = (x.detach().view(shape.batch, heads, -1, width) for x in data)
    return query, key, value


def training_work(model: PreTrainedModel, rows: int, context: int, dtype: str = "fp32") -> Callable[[], None]:
    """One training step with AdamW on random tokens, `rows` rows of `context` tokens; "bf16" and "fp16" mean autocast."""
    model.train()
    device = model.device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(model.config.vocab_size, (rows, context + 1), device=device)

    def step() -> None:
        with torch.autocast(device, DTYPES[dtype], enabled=dtype != "fp32"):
            loss = next_token_nll(model, ids[:, :-1], ids[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def prefill_work(model: PreTrainedModel, rows: int, context: int) -> Callable[[], None]:
    """Read `rows` prompts of `context` tokens into a cache."""
    ids = torch.randint(model.config.vocab_size, (rows, context), device=model.device)
    model.eval()

    @torch.inference_mode()
    def call() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return call


def decode_work(model: PreTrainedModel, rows: int, context: int, tokens: int) -> Callable[[], None]:
    """Make `tokens` tokens one by one after `rows` prompts of `context` tokens."""
    ids = torch.randint(model.config.vocab_size, (rows, context), device=model.device)
    model.eval()
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values

    @torch.inference_mode()
    def call() -> None:
        for _ in range(tokens):
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-tokens)

    return call
