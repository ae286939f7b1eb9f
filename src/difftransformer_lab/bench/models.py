"""Training step, prefill and decoding of whole models of one shape: DIFF, its twin, transformers' Llama and DiffLlama."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from difftransformer.errors import ConfigError
from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.model.weights import DTYPES

from ..results import BenchRow, Dtype
from .attention_work import pinned
from .memory import device_peak_bytes
from .model_work import decode_work, prefill_work, training_work
from .settings import Settings, Step
from .timing import attempt_each, time_interleaved

DIFF, TWIN, TWIN_SDPA, LLAMA = "DIFF", "twin", "twin sdpa", "Llama sdpa"
DIFFLLAMAS = ("DiffLlama sdpa", "DiffLlama eager")
WORKS = ("training step", "prefill", "decoding")
DECODED_TOKENS = 8  # tokens that a call decodes, one by one

# Fields that transformers' configurations share.
_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
)


class ModelSize(NamedTuple):
    """The size of a model, and the rows of a training step; prefill and decoding have one row of the same length."""

    fields: Mapping[str, Any]
    rows: int
    context_tokens: int


_SMALL = {"vocab_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "max_position_embeddings": 1024}
# GPT-3's two smallest shapes (arXiv:2005.14165 Table 2.1) with GPT-2's vocabulary, padded; inner widths are multiples of 16.
_LARGE = {"vocab_size": 50_304, "max_position_embeddings": 4096}
_SMALLEST = {"vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {
    "0.5M": ModelSize(_SMALLEST, 16, 128),  # the model of the demo
    "5M": ModelSize({"hidden_size": 256, **_SMALL}, 4, 512),
    "20M": ModelSize({"hidden_size": 512, **_SMALL}, 2, 512),
    "125M": ModelSize({"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, **_LARGE}, 8, 2048),
    # SmolLM2-135M, but its 9 heads cannot be paired: 8 heads with 4 of keys and values have as many weights as 9 with 3.
    "135M": ModelSize(
        {
            "vocab_size": 49_152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        2,
        256,
    ),
    "350M": ModelSize(
        _LARGE | {"hidden_size": 1024, "intermediate_size": 2736, "num_hidden_layers": 24, "num_attention_heads": 16},
        8,
        2048,
    ),
}


def model_steps(settings: Settings) -> list[Step]:
    sizes = settings.sizes or settings.defaults.models
    if unknown := [size for size in sizes if size not in SIZES]:
        raise ConfigError(f"--sizes: {unknown[0]!r} is unknown; choose from {', '.join(SIZES)}")
    return [
        Step(f"{work} of {size}, {dtype}", partial(time_models, size, dtype, work, settings))
        for work in WORKS
        for size in sizes
        for dtype in settings.dtypes or settings.defaults.dtypes
    ]


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
        work: "training step" (forward, backward, fused AdamW), "prefill" into a cache or "decoding" behind one.
    """
    models, device = models or build_models(size), settings.device
    rows, context = SIZES[size].rows if work == "training step" else 1, SIZES[size].context_tokens
    figures = {name: {"parameters": float(model.num_parameters())} for name, model in models.items()}

    def build(name: str) -> Callable[[], None]:
        held = 0 if device == "cpu" else torch.cuda.memory_allocated()
        model = models[name].to(device) if work == "training step" else models[name].to(device, DTYPES[dtype])
        if work != "training step":
            tokens = (DECODED_TOKENS,) if work == "decoding" else ()
            return (decode_work if tokens else prefill_work)(model, rows, context, *tokens)
        call = training_work(model, rows, context, dtype)
        if device == "cpu":
            return call

        def step() -> None:
            with pinned("sdpa", dtype, device):  # affects only models that call PyTorch's attention
                call()

        step()  # creates the optimizer's moments and compiles; all later steps are alike
        figures[name]["peak_bytes"] = device_peak_bytes(step, held)
        return step

    calls, reasons = attempt_each(models, build, device)
    timings = time_interleaved(calls, rounds=settings.repeats, budget_seconds=settings.seconds, device=device)
    return [
        BenchRow(
            part=part,
            work=work,
            dtype=dtype,
            shape={"model": size, "batch": rows, "context_tokens": context},
            implementation=name,
            timing=timings.get(name),
            figures=figures[name],
            left_out=reasons.get(name),
        )
        for name in models
    ]


def build_models(size: str) -> dict[str, PreTrainedModel]:
    """Build the models of one shape in fp32. The twin runs on our kernels, and once more on PyTorch's attention."""
    config = DiffTransformerConfig(**SIZES[size].fields, attention_type="diff")
    shape = {name: getattr(config, name) for name in _SHAPE}
    on_sdpa = config.twin()
    on_sdpa.attn_backend = "sdpa"
    models: dict[str, PreTrainedModel] = {
        DIFF: DiffTransformerForCausalLM(config),
        TWIN: DiffTransformerForCausalLM(config.twin()),
        TWIN_SDPA: DiffTransformerForCausalLM(on_sdpa),
        LLAMA: LlamaForCausalLM(LlamaConfig(**shape, attn_implementation="sdpa")),
    }
    for name in DIFFLLAMAS:
        models[name] = DiffLlamaForCausalLM(DiffLlamaConfig(**shape, attn_implementation=name.split()[1]))
    return models
