"""A training step of DIFF beside its twin's: the twin on PyTorch's attention is the Transformer as PyTorch runs it."""

import dataclasses

from ..model import DiffTransformerConfig, DiffTransformerForCausalLM, count
from ..results import Dtype, TrainingTiming
from .timing import time_interleaved
from .work import training_work

_SHARED = {"vocab_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "max_position_embeddings": 512}
MODELS = {"5M": {"hidden_size": 256, **_SHARED}, "20M": {"hidden_size": 512, **_SHARED}}
ROWS, CONTEXT_TOKENS = 8, 512
TWIN = "twin sdpa"
# Implementation -> attention_type and attn_backend.
IMPLEMENTATIONS = {"diff auto": ("diff", "auto"), TWIN: ("softmax", "sdpa"), "twin auto": ("softmax", "auto")}


def time_training(
    model: str, dtype: Dtype, *, device: str = "cpu", rounds: int, budget_seconds: float
) -> list[TrainingTiming]:
    """Time a training step (forward, backward, fused AdamW) of DIFF and of its twin, interleaved.

    Args:
        model: A name in `MODELS`.
        dtype: "bf16" means autocast.
        device: "cpu" or "cuda".
        rounds: Timed rounds at most.
        budget_seconds: As in `time_interleaved`.
    """
    work, parameters = {}, {}
    for name, (attention_type, backend) in IMPLEMENTATIONS.items():
        config = DiffTransformerConfig(attention_type=attention_type, attn_backend=backend, **MODELS[model])
        parameters[name] = count(config).parameters
        network = DiffTransformerForCausalLM(config).to(device)
        work[name] = training_work(network, ROWS, CONTEXT_TOKENS, dtype)
    timings = time_interleaved(work, rounds=rounds, budget_seconds=budget_seconds)
    return [
        TrainingTiming(
            **dataclasses.asdict(timing),
            model=model,
            parameters=parameters[name],
            dtype=dtype,
            implementation=name,
            ratio_to_twin=timing.median_seconds / timings[TWIN].median_seconds,
        )
        for name, timing in timings.items()
    ]
