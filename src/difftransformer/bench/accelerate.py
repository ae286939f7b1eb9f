"""transformers' DiffLlama as it is and accelerated: its attention layer, a training step of the model, and decoding."""

import dataclasses
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from transformers import Cache, DiffLlamaConfig, DiffLlamaForCausalLM, DynamicCache, StaticCache

from ..acceleration import accelerate
from ..model.dtypes import DTYPES
from ..results import DiffLlamaTiming, Dtype
from .timing import time_interleaved

THEIRS, OURS = "DiffLlama", "DiffLlama accelerated"
# 38M parameters with heads of 64, whose number DiffLlama wants even.
MODEL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "attn_implementation": "sdpa",
}
CONTEXT_TOKENS = 2048  # of a training step
CACHED_TOKENS = 4096  # when decoding starts
SPARE_TOKENS = 256  # of the static cache, for the rounds


def time_diffllama(
    work: str, dtype: Dtype, *, device: str = "cpu", rounds: int, budget_seconds: float
) -> list[DiffLlamaTiming]:
    """Time one kind of work of both, interleaved, on the same weights.

    Args:
        work: A name in `WORKS`.
        dtype: Of weights and activations.
        device: "cpu" or "cuda".
        rounds: Timed rounds at most.
        budget_seconds: As in `time_interleaved`.
    """
    prepare, tokens = WORKS[work]
    torch.manual_seed(0)
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**MODEL)).to(device, DTYPES[dtype])
    models = {THEIRS: model, OURS: accelerate(deepcopy(model))}
    calls = {name: prepare(candidate) for name, candidate in models.items()}
    timings = time_interleaved(
        calls, rounds=min(rounds, SPARE_TOKENS - 1), budget_seconds=budget_seconds, device=device
    )
    return [
        DiffLlamaTiming(
            **dataclasses.asdict(timing),
            work=work,
            dtype=dtype,
            tokens=tokens,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            implementation=name,
            ratio_to_diffllama=timing.median_seconds / timings[THEIRS].median_seconds,
        )
        for name, timing in timings.items()
    ]


def _attention(model: DiffLlamaForCausalLM) -> Callable[[], None]:
    """The first layer's attention, projections included, forward and backward."""
    layer = model.model.layers[0].self_attn.train()
    hidden = torch.randn(1, CONTEXT_TOKENS, MODEL["hidden_size"], device=model.device, dtype=model.dtype)
    hidden.requires_grad_()
    grad = torch.randn_like(hidden)
    rotation = model.model.rotary_emb(hidden, torch.arange(CONTEXT_TOKENS, device=model.device)[None])

    def call() -> None:
        layer(hidden, rotation)[0].backward(grad)
        layer.zero_grad()
        hidden.grad = None

    return call


def _training(model: DiffLlamaForCausalLM) -> Callable[[], None]:
    """Forward, backward and AdamW of one row."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(MODEL["vocab_size"], (1, CONTEXT_TOKENS), device=model.device)

    def call() -> None:
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


def _decoding(is_static: bool) -> Callable[[DiffLlamaForCausalLM], Callable[[], None]]:
    """One token more at every call."""

    def prepare(model: DiffLlamaForCausalLM) -> Callable[[], None]:
        model.eval()
        cache: Cache = DynamicCache(config=model.config)
        if is_static:
            cache = StaticCache(model.config, max_cache_len=CACHED_TOKENS + SPARE_TOKENS)
        shape = (1, MODEL["num_key_value_heads"], CACHED_TOKENS, MODEL["head_dim"])
        for index in range(MODEL["num_hidden_layers"]):
            key, value = torch.randn(2, *shape, device=model.device, dtype=model.dtype)
            cache.update(key, value, index)
        token = torch.zeros(1, 1, dtype=torch.long, device=model.device)

        @torch.inference_mode()
        def call() -> None:
            model(token, past_key_values=cache)

        return call

    return prepare


# Name -> what makes the call to time, and its tokens or, in decoding, those in the cache.
WORKS: dict[str, tuple[Callable[[DiffLlamaForCausalLM], Callable[[], None]], int]] = {
    "attention layer, forward+backward": (_attention, CONTEXT_TOKENS),
    "training step": (_training, CONTEXT_TOKENS),
    "decoding, dynamic cache": (_decoding(is_static=False), CACHED_TOKENS),
    "decoding, static cache": (_decoding(is_static=True), CACHED_TOKENS),
}
