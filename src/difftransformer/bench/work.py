"""The pieces of work that benchmarks time and weigh."""

from collections.abc import Callable

import torch

from ..model import DiffTransformerForCausalLM
from ..model.nll import next_token_nll
from ..ops import differential_attention, softmax_attention

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LAMBDA = 0.8  # where most layers' lambda starts and stays (arXiv:2410.05258)


def attention_work(
    op: str, backend: str, heads: int, length: int, head_dim: int, dtype: str, *, backward: bool = True
) -> Callable[[], None]:
    """One causal call with batch 1: "diff" with `heads` differential heads, or "softmax" with twice as many of its twin.

    Args:
        op: "diff" or "softmax".
        backend: Of the op.
        heads: Differential heads H; softmax gets 2 H heads of the same head_dim, the same-size Transformer's.
        length: T = S, in tokens.
        head_dim: D.
        dtype: "fp32" or "bf16".
        backward: Whether gradients are computed too, those of lambda among them.
    """
    count, query_width, value_width = (
        (heads, 2 * head_dim, 2 * head_dim) if op == "diff" else (2 * heads, head_dim, head_dim)
    )
    widths = (query_width, query_width, value_width)
    query, key, value = (
        torch.randn(1, count, length, width).to(DTYPES[dtype]).requires_grad_(backward) for width in widths
    )
    lam = torch.full((heads,), LAMBDA, requires_grad=backward)
    grad = torch.randn(1, count, length, value_width).to(DTYPES[dtype])

    def call() -> None:
        with torch.set_grad_enabled(backward):
            if op == "diff":
                out = differential_attention(query, key, value, lam, is_causal=True, backend=backend)
            else:
                out = softmax_attention(query, key, value, is_causal=True, backend=backend)
        if backward:
            inputs = (query, key, value, lam) if op == "diff" else (query, key, value)
            torch.autograd.grad(out, inputs, grad)

    return call


def training_work(
    model: DiffTransformerForCausalLM, rows: int, context: int, dtype: str = "fp32"
) -> Callable[[], None]:
    """One training step with AdamW on random tokens, `rows` rows of `context` tokens."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(model.config.vocab_size, (rows, context + 1))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
            loss = next_token_nll(model, ids[:, :-1], ids[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

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
