"""A training step of DIFF beside its twin's. The twin on PyTorch's attention is the Transformer as PyTorch runs it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM, count

from ..results import Dtype, TrainingSkip, TrainingTiming
from .attempt import attempt_each
from .defaults import DEFAULTS
from .memory import device_peak_bytes
from .timing import time_interleaved
from .work import pinned, training_work

TWIN = "twin sdpa"
# attention_type and attn_backend of each implementation.
IMPLEMENTATIONS = {"diff auto": ("diff", "auto"), TWIN: ("softmax", "sdpa"), "twin auto": ("softmax", "auto")}


class _Candidate(NamedTuple):
    """A training step, and its peak memory where that is measured in the same process."""

    step: Callable[[], None]
    parameters: int
    peak_bytes: int | None


def time_training(
    model: str,
    dtype: Dtype,
    *,
    device: str = "cpu",
    context_tokens: int | None = None,
    rounds: int,
    budget_seconds: float,
) -> list[TrainingTiming | TrainingSkip]:
    """Time a training step (forward, backward, fused AdamW) of DIFF and of its twin, interleaved.

    Args:
        model: A name in the device's `Defaults.models`.
        dtype: "fp32", or "bf16" and "fp16" for autocast.
        device: "cpu" or "cuda".
        context_tokens: Tokens of a row; None means the device's first. A step has as many rows as make up the device's
            `training_tokens`.
        rounds: Largest number of timed rounds.
        budget_seconds: As in `time_interleaved`.
    """
    context = context_tokens or DEFAULTS[device].training_contexts_tokens[0]
    batch = max(1, DEFAULTS[device].training_tokens // context)
    candidates, reasons = attempt_each(
        IMPLEMENTATIONS, lambda name: _candidate(name, model, dtype, device, batch, context), base=TWIN, device=device
    )
    steps = {name: candidate.step for name, candidate in candidates.items()}
    timings = time_interleaved(steps, rounds=rounds, budget_seconds=budget_seconds, device=device) if steps else {}
    shared: dict[str, Any] = {"model": model, "dtype": dtype, "batch": batch, "context_tokens": context}
    rows: list[TrainingTiming | TrainingSkip] = [
        TrainingTiming(
            **vars(timing),
            **shared,
            parameters=candidates[name].parameters,
            implementation=name,
            ratio_to_twin=timing.median_seconds / timings[TWIN].median_seconds,
            peak_bytes=candidates[name].peak_bytes,
        )
        for name, timing in timings.items()
    ]
    return rows + [TrainingSkip(**shared, implementation=name, reason=reason) for name, reason in reasons.items()]


def _candidate(name: str, model: str, dtype: Dtype, device: str, batch: int, context_tokens: int) -> _Candidate:
    attention_type, backend = IMPLEMENTATIONS[name]
    config = DiffTransformerConfig(
        attention_type=attention_type, attn_backend=backend, **DEFAULTS[device].models[model]
    )
    before = 0 if device == "cpu" else torch.cuda.memory_allocated()
    network = DiffTransformerForCausalLM(config).to(device)
    work = training_work(network, batch, context_tokens, dtype)
    if device == "cpu":
        return _Candidate(work, count(config).parameters, None)

    def step() -> None:
        with pinned("sdpa", dtype, device):  # affects only models that call PyTorch's attention
            work()

    step()  # creates the optimizer's moments and compiles; all later steps are alike
    return _Candidate(step, count(config).parameters, device_peak_bytes(step, before))
