"""The pieces of work that benchmarks time and weigh."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..model import DiffTransformerForCausalLM
from ..model.nll import next_token_nll
from ..ops import differential_attention, normed_differential_attention, softmax_attention
from ..results import AttentionShape
from .peers import DiffLlamaCore

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAMBDA = 0.8  # where most layers' lambda starts and stays (arXiv:2410.05258)

Attend = tuple[Callable[[], Tensor], list[Tensor]]  # what computes an output, and the tensors that get gradients


def attention_work(implementation: str, shape: AttentionShape, device: str = "cpu") -> Callable[[], Tensor]:
    """One causal call with batch 1; in mode "forward+backward" with the gradients of query, key, value and lambda.

    Args:
        implementation: "diff BACKEND", our op with H heads of 2 D and a lambda for each; "normed BACKEND", the same with
            the headwise norm, without gain as in DiffLlama; "softmax BACKEND", our op for the
            same-size Transformer, 2 H heads of D; "torch sdpa", PyTorch's function for the same; "DiffLlama sdpa" or
            "DiffLlama eager", `DiffLlamaCore`.
        shape: What is computed.
        device: "cpu" or "cuda".

    Returns:
        A function that does the work and returns the output.
    """
    family, _, name = implementation.partition(" ")
    attend, inputs = _FAMILIES[family](name, shape, device)
    for tensor in inputs:
        tensor.requires_grad_(shape.has_backward)
    grad = torch.randn_like(inputs[2]) if shape.has_backward else None  # outputs are shaped like the value

    def call() -> Tensor:
        with torch.set_grad_enabled(shape.has_backward):
            out = attend()
        if shape.has_backward:
            torch.autograd.grad(out, inputs, grad)
        _wait(device)
        return out

    return call


def _diff(backend: str, shape: AttentionShape, device: str) -> Attend:
    query, key, value = _draw(shape, device, shape.heads, 2 * shape.head_dim)
    lam = torch.full((shape.heads,), LAMBDA, device=device)
    attend = lambda: differential_attention(query, key, value, lam, is_causal=True, backend=backend)  # noqa: E731
    return attend, [query, key, value, lam]


def _normed(backend: str, shape: AttentionShape, device: str) -> Attend:
    query, key, value = _draw(shape, device, shape.heads, 2 * shape.head_dim)
    lam = torch.full((shape.heads,), LAMBDA, device=device)

    def attend() -> Tensor:
        return normed_differential_attention(
            query, key, value, lam, None, eps=1e-5, factor=1 - LAMBDA, is_causal=True, backend=backend
        )

    return attend, [query, key, value, lam]


def _softmax(backend: str, shape: AttentionShape, device: str) -> Attend:
    query, key, value = _draw(shape, device, 2 * shape.heads, shape.head_dim)
    return lambda: softmax_attention(query, key, value, is_causal=True, backend=backend), [query, key, value]


def _torch(_: str, shape: AttentionShape, device: str) -> Attend:
    query, key, value = _draw(shape, device, 2 * shape.heads, shape.head_dim)
    is_causal = shape.mode != "decode"  # PyTorch aligns causal top-left: one query would see one key
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=is_causal), [query, key, value]


def _diffllama(attn_implementation: str, shape: AttentionShape, device: str) -> Attend:
    query, key, value = (x.squeeze(1) for x in _draw(shape, device, 1, 2 * shape.heads * shape.head_dim))
    core = DiffLlamaCore(query, key, value, head_dim=shape.head_dim, attn_implementation=attn_implementation)
    return core, [query, key, value, *core.parameters()]


_FAMILIES: dict[str, Callable[[str, AttentionShape, str], Attend]] = {
    "diff": _diff,
    "normed": _normed,
    "softmax": _softmax,
    "torch": _torch,
    "DiffLlama": _diffllama,
}


def _draw(shape: AttentionShape, device: str, heads: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query (1, heads, T, width), key and value (1, heads, S, width)."""
    lengths = (shape.queries_tokens, shape.length_tokens, shape.length_tokens)
    query, key, value = (torch.randn(1, heads, n, width, device=device).to(DTYPES[shape.dtype]) for n in lengths)
    return query, key, value


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def training_work(
    model: DiffTransformerForCausalLM, rows: int, context: int, dtype: str = "fp32"
) -> Callable[[], None]:
    """One training step with AdamW on random tokens, `rows` rows of `context` tokens; "bf16" means autocast."""
    model.train()
    device = model.device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(model.config.vocab_size, (rows, context + 1), device=device)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "bf16"):
            loss = next_token_nll(model, ids[:, :-1], ids[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        _wait(device)

    return step


def prefill_work(model: DiffTransformerForCausalLM, rows: int, context: int) -> Callable[[], None]:
    """Read `rows` prompts of `context` tokens into a cache."""
    ids = torch.randint(model.config.vocab_size, (rows, context))
    model.eval()

    @torch.inference_mode()
    def call() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return call


def decode_work(model: DiffTransformerForCausalLM, rows: int, context: int, tokens: int) -> Callable[[], None]:
    """Make `tokens` tokens one by one after `rows` prompts of `context` tokens."""
    ids = torch.randint(model.config.vocab_size, (rows, context))
    model.eval()
    with torch.inference_mode():
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values

    @torch.inference_mode()
    def call() -> None:
        for _ in range(tokens):
            model(input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-tokens)

    return call
