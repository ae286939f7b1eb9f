"""Activation checkpointing: what the backward pass computes again, to save memory."""

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..model import DiffTransformerForCausalLM
from .config import TrainingConfig

# Results that "selective" keeps: those of matrix products, and of the attention operators, whatever their backend.
PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
OPERATORS = "difftransformer::"


def recompute_activations(model: DiffTransformerForCausalLM, config: TrainingConfig) -> None:
    """Let the layers keep what the configuration says for the backward pass, and compute the rest again."""
    if not config.gradient_checkpointing:
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if config.gradient_checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    # Newer releases of transformers rename the method and warn about the old name.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


def _policy(context: Any, operator: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    kept = operator in PRODUCTS or str(operator.name()).startswith(OPERATORS)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
