"""Training steps, prefill and decoding of whole models of one shape: DIFF, DIFF V2, the twin, and transformers' Llama."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch.nn.attention import sdpa_kernel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.model.nll import loss_chunk, summed_next_token_nll
from difftransformer.model.weights import DTYPES

from ..results import BenchRow, Dtype
from .attention import TORCH_KERNELS
from .settings import Settings, Size, Work
from .timing import time_rows

WORKS = get_args(Work)
DECODED_TOKENS = 8  # tokens that a call decodes, one by one
# Fields that transformers' configurations share.
SHARED_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip


_SMALL = {"vocab_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "max_position_embeddings": 1024}
# GPT-3's two smallest shapes (arXiv:2005.14165 Table 2.1) with GPT-2's vocabulary, padded; inner widths are multiples of 16.
_LARGE = {"vocab_size": 50_304, "max_position_embeddings": 4096}
_SMALLEST = {"vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
# SmolLM2-135M, but its 9 heads cannot be paired: 8 heads with 4 of keys and values have as many weights as 9 with 3.
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 8, "head_dim": 64}
_350M = {"hidden_size": 1024, "intermediate_size": 2736, "num_hidden_layers": 24, "num_attention_heads": 16}
# Fields, rows of a training step and context in tokens; prefill and decoding have one row.
SIZES: dict[str, tuple[dict[str, Any], int, int]] = {
    "0.5M": (_SMALLEST, 16, 128),  # the model of the demo
    "5M": ({"hidden_size": 256, **_SMALL}, 4, 512),
    "20M": ({"hidden_size": 512, **_SMALL}, 2, 512),
    "125M": ({"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, **_LARGE}, 8, 2048),
    "135M": (SMOLLM2 | {"vocab_size": 49_152, "num_hidden_layers": 30, "num_key_value_heads": 4}, 2, 256),
    "350M": (_LARGE | _350M, 8, 2048),
}
DEFAULT_SIZES: dict[str, list[Size]] = {"cpu": ["0.5M", "5M", "20M"], "cuda": ["125M", "350M"]}


def model_steps(settings: Settings) -> dict[str, Callable[[], list[BenchRow]]]:
    """List the works of models, with a label for each."""
    return {
        f"{work} of {size}, {dtype}": partial(time_models, size, dtype, work, settings)
        for work in settings.works or WORKS
        for size in settings.sizes or DEFAULT_SIZES[settings.device]
        for dtype in settings.dtypes or ()
    }


def time_models(
    size: str,
    dtype: Dtype,
    work: str,
    settings: Settings,
    models: Mapping[str, PreTrainedModel] | None = None,
    part: str = "models",
) -> list[BenchRow]:
    """Time one kind of work of all models, interleaved.

    Args:
        dtype: Data type of weights and activations; in a training step "bf16" and "fp16" mean autocast.
        work: "training step" (forward, backward, fused AdamW; on a GPU with compiled layers, as recipes train), "prefill" into
            a cache or "decoding" behind one.
        models: Models by name, in place of `build_models`.
    """
    models, device = models or build_models(size), settings.device
    _, rows, context = SIZES[size]
    if work != "training step":
        rows = 1

    def build(model: PreTrainedModel) -> Callable[[], None]:
        if work == "training step":
            return compiled_work(model.to(device), rows, context, dtype)
        model.to(device, DTYPES[dtype])
        return (
            prefill_work(model, rows, context)
            if work == "prefill"
            else decode_work(model, rows, context, DECODED_TOKENS)
        )

    shape = {"model": size, "batch": rows, "context_tokens": context}
    timed = time_rows(
        {name: partial(build, model) for name, model in models.items()},
        settings,
        partial(BenchRow, part=part, work=work, dtype=dtype, shape=shape),
    )
    return [replace(row, figures={"parameters": float(models[row.implementation].num_parameters())}) for row in timed]


def build_models(size: str) -> dict[str, PreTrainedModel]:
    """Build the models of one shape in fp32. The twin runs as `auto` chooses, and once more on PyTorch's attention."""
    config = DiffTransformerConfig(**SIZES[size][0], attention_type="diff")
    v2 = DiffTransformerConfig(**SIZES[size][0], attention_type="diff_v2")
    on_sdpa = config.twin()
    on_sdpa.attn_backend = "sdpa"
    llama = LlamaConfig(**{name: getattr(config, name) for name in SHARED_FIELDS}, attn_implementation="sdpa")
    configs = {"DIFF": config, "DIFF V2": v2, "twin": config.twin(), "twin sdpa": on_sdpa}
    ours: dict[str, PreTrainedModel] = {name: DiffTransformerForCausalLM(one) for name, one in configs.items()}
    return ours | {"Llama sdpa": LlamaForCausalLM(llama)}


def training_work(model: PreTrainedModel, rows: int, context: int, dtype: str = "fp32") -> Callable[[], None]:
    """Build a training step with AdamW on `rows` rows of `context` random tokens; "bf16" and "fp16" mean autocast.

    The loss is computed as in the training loop, in chunks where a model can and its logits are many.
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


def compiled_work(model: PreTrainedModel, rows: int, context: int, dtype: Dtype) -> Callable[[], None]:
    """Build a training step; on a GPU with compiled layers, and cuDNN where PyTorch's attention can use it."""
    step = training_work(model, rows, context, dtype)
    if model.device.type == "cpu":
        return step
    for layer in model.model.layers:
        layer.compile()

    def call() -> None:
        with sdpa_kernel(
            [kernel for kernels in reversed(TORCH_KERNELS.values()) for kernel in kernels], set_priority=True
        ):
            step()

    return call


def prefill_work(model: PreTrainedModel, rows: int, context: int) -> Callable[[], None]:
    """Build a call that reads `rows` prompts of `context` tokens into a cache."""
    ids = torch.randint(model.config.vocab_size, (rows, context), device=model.device)
    model.eval()

    @torch.inference_mode()
    def call() -> None:
        model(input_ids=ids, use_cache=True, logits_to_keep=1)

    return call


def decode_work(model: PreTrainedModel, rows: int, context: int, tokens: int) -> Callable[[], None]:
    """Build a call that decodes `tokens` tokens one by one after `rows` prompts of `context` tokens."""
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
