"""Training, prefill and decoding of whole models: DIFF, its twin, transformers' Llama and DiffLlama, all of one shape; and
every attention type with as many parameters as the twin."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from difftransformer.attention import variants
from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM, count
from difftransformer.model.counts import matching_width
from difftransformer.model.weights import DTYPES

from ..results import Dtype, ModelTiming, ModelWork, VariantTiming
from .timing import time_interleaved
from .work import decode_work, prefill_work, training_work

DIFF, TWIN, LLAMA = "DIFF", "twin", "Llama sdpa"
DIFFLLAMAS = ("DiffLlama sdpa", "DiffLlama eager")
WORKS: tuple[ModelWork, ...] = ("training step", "prefill", "decoding")
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
SIZES = {
    # The model of the demo.
    "0.5M": ModelSize(
        {"vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}, 16, 128
    ),
    "5M": ModelSize({"hidden_size": 256, **_SMALL}, 4, 512),
    "20M": ModelSize({"hidden_size": 512, **_SMALL}, 2, 512),
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
}


def time_models(
    size: str, dtype: Dtype, work: ModelWork, *, device: str = "cpu", rounds: int, budget_seconds: float
) -> list[ModelTiming]:
    """Time one kind of work of all models, interleaved.

    Args:
        size: A name in `SIZES`.
        dtype: Data type of weights and activations; in a training step "bf16" and "fp16" mean autocast.
        work: "training step" (forward, backward, fused AdamW), "prefill" into a cache or "decoding" behind one.
        device: "cpu" or "cuda".
        rounds: Largest number of timed rounds.
        budget_seconds: As in `time_interleaved`.

    Returns:
        A timing for each model, with its ratio to the twin, to Llama and to the faster DiffLlama.
    """
    parts, timings = _time(build_models(size), size, dtype, work, device, rounds, budget_seconds)
    seconds = {timing["implementation"]: timing["median_seconds"] for timing in timings}
    diffllama = min(seconds[name] for name in DIFFLLAMAS)
    return [
        ModelTiming(
            **parts,
            **timing,
            ratio_to_twin=timing["median_seconds"] / seconds[TWIN],
            ratio_to_llama=timing["median_seconds"] / seconds[LLAMA],
            ratio_to_diffllama=timing["median_seconds"] / diffllama,
        )
        for timing in timings
    ]


def time_variants(
    size: str, dtype: Dtype, work: ModelWork, *, device: str = "cpu", rounds: int, budget_seconds: float
) -> list[VariantTiming]:
    """Time one kind of work of a model of each attention type, interleaved. The arguments are those of `time_models`.

    Returns:
        A timing for each type, with its ratio to the twin.
    """
    parts, timings = _time(build_variants(size), size, dtype, work, device, rounds, budget_seconds)
    (twin,) = [timing["median_seconds"] for timing in timings if timing["implementation"] == "softmax"]
    return [VariantTiming(**parts, **timing, ratio_to_twin=timing["median_seconds"] / twin) for timing in timings]


def _time(
    models: Mapping[str, PreTrainedModel],
    size: str,
    dtype: Dtype,
    work: ModelWork,
    device: str,
    rounds: int,
    budget_seconds: float,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what all timings have in common, and the rest of each."""
    _, rows, context = SIZES[size]
    calls: dict[str, Callable[[], None]] = {}
    for name, model in models.items():
        model.to(device)
        if work == "training step":
            calls[name] = training_work(model, rows, context, dtype)
        elif work == "prefill":
            calls[name] = prefill_work(model.to(DTYPES[dtype]), 1, context)
        else:
            calls[name] = decode_work(model.to(DTYPES[dtype]), 1, context, DECODED_TOKENS)
    timings = time_interleaved(calls, rounds=rounds, budget_seconds=budget_seconds, device=device)
    batch = rows if work == "training step" else 1
    parts = {"model": size, "dtype": dtype, "work": work, "batch": batch, "context_tokens": context}
    return parts, [
        {**vars(timing), "implementation": name, "parameters": models[name].num_parameters()}
        for name, timing in timings.items()
    ]


def build_models(size: str) -> Mapping[str, PreTrainedModel]:
    """Build the models of one shape in fp32."""
    config = DiffTransformerConfig(**SIZES[size].fields, attention_type="diff")
    shape = {name: getattr(config, name) for name in _SHAPE}
    models: dict[str, PreTrainedModel] = {
        DIFF: DiffTransformerForCausalLM(config),
        TWIN: DiffTransformerForCausalLM(config.twin()),
        LLAMA: LlamaForCausalLM(LlamaConfig(**shape, attn_implementation="sdpa")),
    }
    for name in DIFFLLAMAS:
        models[name] = DiffLlamaForCausalLM(DiffLlamaConfig(**shape, attn_implementation=name.split()[1]))
    return models


def build_variants(size: str) -> Mapping[str, PreTrainedModel]:
    """Build a model of each attention type in fp32, with an MLP that makes its parameters those of the twin, to the nearest."""
    models: dict[str, PreTrainedModel] = {}
    for name in variants():
        config = DiffTransformerConfig(**SIZES[size].fields, attention_type=name)
        config.intermediate_size = matching_width(config, count(config.twin()).parameters)
        models[name] = DiffTransformerForCausalLM(config)
    return models
