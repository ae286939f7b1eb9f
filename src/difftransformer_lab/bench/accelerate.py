"""transformers' DiffLlama as it is and accelerated: its attention layer, a training step of the model, and decoding."""

from collections.abc import Callable
from copy import deepcopy

import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from difftransformer.families import accelerate
from difftransformer.model.weights import DTYPES

from ..results import DiffLlamaTiming, Dtype
from .timing import time_interleaved
from .work import CACHED_TOKENS, SMALL_MODEL, SPARE_TOKENS, next_token_work

THEIRS, OURS = "DiffLlama", "DiffLlama accelerated"
MODEL = SMALL_MODEL | {"hidden_size": 512, "intermediate_size": 1376, "attn_implementation": "sdpa"}  # 38M parameters
CONTEXT_TOKENS = 2048  # length of a training row
WORKS = ("attention layer, forward+backward", "training step", "decoding, dynamic cache", "decoding, static cache")


def time_diffllama(
    work: str, dtype: Dtype, *, device: str = "cpu", rounds: int, budget_seconds: float
) -> list[DiffLlamaTiming]:
    """Time one kind of work of both models, interleaved, with the same weights.

    Args:
        work: A name in `WORKS`.
        dtype: Data type of weights and activations.
        device: "cpu" or "cuda".
        rounds: Largest number of timed rounds.
        budget_seconds: As in `time_interleaved`.
    """
    torch.manual_seed(0)
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**MODEL)).to(device, DTYPES[dtype])
    calls = {THEIRS: _work_of(model, work), OURS: _work_of(accelerate(deepcopy(model)), work)}
    timings = time_interleaved(
        calls, rounds=min(rounds, SPARE_TOKENS - 1), budget_seconds=budget_seconds, device=device
    )
    return [
        DiffLlamaTiming(
            **vars(timing),
            work=work,
            dtype=dtype,
            tokens=CACHED_TOKENS if work.startswith("decoding") else CONTEXT_TOKENS,
            parameters=model.num_parameters(),
            implementation=name,
            ratio_to_diffllama=timing.median_seconds / timings[THEIRS].median_seconds,
        )
        for name, timing in timings.items()
    ]


def _work_of(model: DiffLlamaForCausalLM, work: str) -> Callable[[], object]:
    if work.startswith("decoding"):
        return next_token_work(model, CACHED_TOKENS, "static" if "static" in work else "dynamic")
    return _training_step(model) if work == "training step" else _attention_layer(model)


def _attention_layer(model: DiffLlamaForCausalLM) -> Callable[[], None]:
    """Return a call of the first layer's attention, projections included, forward and backward."""
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


def _training_step(model: DiffLlamaForCausalLM) -> Callable[[], None]:
    """Return a training step (forward, backward, AdamW) on one row."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(MODEL["vocab_size"], (1, CONTEXT_TOKENS), device=model.device)

    def call() -> None:
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return call
