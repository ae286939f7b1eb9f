"""transformers' DiffLlama as it is and accelerated: its attention layer, a training step of the model, and decoding."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from generation import MODEL as GENERATING_MODEL
from generation import SPARE_TOKENS, next_token_work
from script import Steps, run
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from difftransformer.families import accelerate
from difftransformer.model.weights import DTYPES
from difftransformer_lab.bench.settings import Settings
from difftransformer_lab.bench.timing import time_rows
from difftransformer_lab.results import BenchRow

CONTEXT_TOKENS, CACHED_TOKENS = 2048, 4096  # of a training row, and in the cache when decoding starts
MODEL = GENERATING_MODEL | {  # 46M parameters
    "hidden_size": 512,
    "intermediate_size": 1376,
    "tie_word_embeddings": False,
    "attn_implementation": "sdpa",
}
WORKS = ("attention layer, forward+backward", "training step", "decoding, dynamic cache", "decoding, static cache")


def steps(settings: Settings) -> Steps:
    """List the work and the data types."""
    return {
        f"DiffLlama, {work}, {dtype}": partial(measure, work, dtype, settings)
        for dtype in settings.dtypes or ()
        for work in WORKS
    }


def measure(work: str, dtype: str, settings: Settings) -> list[BenchRow]:
    """Time one kind of work of both models, interleaved, with the same weights."""
    torch.manual_seed(0)
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**MODEL)).to(settings.device, DTYPES[dtype])
    models = {"DiffLlama": model, "DiffLlama accelerated": accelerate(deepcopy(model))}
    tokens = CACHED_TOKENS if work.startswith("decoding") else CONTEXT_TOKENS
    return time_rows(
        {name: partial(work_of, one, work) for name, one in models.items()},
        replace(settings, repeats=min(settings.repeats, SPARE_TOKENS - 1)),
        partial(
            BenchRow,
            part="diffllama",
            work="DiffLlama accelerated",
            dtype=dtype,
            shape={"work": work, "tokens": tokens},
        ),
    )


def work_of(model: DiffLlamaForCausalLM, work: str) -> Callable[[], object]:
    if work.startswith("decoding"):
        return next_token_work(model, CACHED_TOKENS, "static" if "static" in work else "dynamic")
    return training_step(model) if work == "training step" else attention_layer(model)


def attention_layer(model: DiffLlamaForCausalLM) -> Callable[[], None]:
    """Build a call of the first layer's attention, projections included, forward and backward."""
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


def training_step(model: DiffLlamaForCausalLM) -> Callable[[], None]:
    """Build a training step (forward, backward, AdamW) on one row."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(MODEL["vocab_size"], (1, CONTEXT_TOKENS), device=model.device)

    def call() -> None:
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return call


if __name__ == "__main__":
    run(steps, __doc__)
