"""Training steps, prefill and decoding of whole models, as calls that can be timed again and again."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache

from difftransformer.model import DiffTransformerForCausalLM
from difftransformer.model.nll import loss_chunk, summed_next_token_nll
from difftransformer.model.weights import DTYPES

SPARE_TOKENS = 256  # of a static cache, for the timed rounds
CacheKind = Literal["static", "dynamic"]


def training_work(model: PreTrainedModel, rows: int, context: int, dtype: str = "fp32") -> Callable[[], None]:
    """Return a training step with AdamW on `rows` rows of `context` random tokens; "bf16" and "fp16" mean autocast.

    The loss is that of the training loop, in chunks where a model can and its logits are many.
    """
    model.train()
    device = model.device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(model.config.vocab_size, (rows, context + 1), device=device)
    if hasattr(model, "loss_chunk_tokens"):
        model.loss_chunk_tokens = loss_chunk(rows * context, model.config.vocab_size, device)

    def step() -> None:
        with torch.autocast(device, DTYPES[dtype], enabled=dtype != "fp32"):
            loss = summed_next_token_nll(model, ids[:, :-1], ids[:, 1:]) / (rows * context)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def prefill_work(model: PreTrainedModel, rows: int, context: int) -> Callable[[], None]:
    """Return a call that reads `rows` prompts of `context` tokens into a cache."""
    ids = torch.randint(model.config.vocab_size, (rows, context), device=model.device)
    model.eval()

    @torch.inference_mode()
    def call() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return call


def decode_work(model: PreTrainedModel, rows: int, context: int, tokens: int) -> Callable[[], None]:
    """Return a call that decodes `tokens` tokens one by one after `rows` prompts of `context` tokens."""
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


def next_token_work(model: PreTrainedModel, cached_tokens: int, kind: CacheKind) -> Callable[[], Tensor]:
    """Return a call that decodes one token and returns its logits.

    At first the cache holds random keys and values of `cached_tokens` tokens; every call adds one token. A static cache has
    room for SPARE_TOKENS calls.
    """
    model.eval()
    cache: Cache = DynamicCache(config=model.config)
    if kind == "static":
        cache = StaticCache(model.config, max_cache_len=cached_tokens + SPARE_TOKENS)
    heads, width = model.config.num_key_value_heads, model.config.head_dim
    if isinstance(model, DiffTransformerForCausalLM):
        layout = model.config.head_layout()
        heads, width = layout.num_key_value_heads, layout.key_width
    for index in range(model.config.num_hidden_layers):
        key, value = torch.randn(2, 1, heads, cached_tokens, width, device=model.device, dtype=model.dtype)
        cache.update(key, value, index)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)

    @torch.inference_mode()
    def call() -> Tensor:
        return model(token, past_key_values=cache).logits

    return call
