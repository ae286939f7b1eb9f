"""Training, prefill and decoding of whole models of one shape: DIFF, its twin, transformers' Llama and DiffLlama."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ..model import DiffTransformerConfig, DiffTransformerForCausalLM
from ..model.dtypes import DTYPES
from ..results import Dtype, ModelTiming, ModelWork
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
    _, rows, context = SIZES[size]
    models = {name: model.to(device) for name, model in build_models(size).items()}
    calls: dict[str, Callable[[], None]] = {}
    for name, model in models.items():
        if work == "training step":
            calls[name] = training_work(model, rows, context, dtype)
        elif work == "prefill":
            calls[name] = prefill_work(model.to(DTYPES[dtype]), 1, context)
        else:
            calls[name] = decode_work(model.to(DTYPES[dtype]), 1, context, DECODED_TOKENS)
    timings = time_interleaved(calls, rounds=rounds, budget_seconds=budget_seconds, device=device)
    seconds = {name: timing.median_seconds for name, timing in timings.items()}
    diffllama = min(seconds[name] for name in DIFFLLAMAS)
    return [
        ModelTiming(
            **vars(timing),
            model=size,
            dtype=dtype,
            work=work,
            batch=rows if work == "training step" else 1,
            context_tokens=context,
            parameters=models[name].num_parameters(),
            implementation=name,
            ratio_to_twin=seconds[name] / seconds[TWIN],
            ratio_to_llama=seconds[name] / seconds[LLAMA],
            ratio_to_diffllama=seconds[name] / diffllama,
        )
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
