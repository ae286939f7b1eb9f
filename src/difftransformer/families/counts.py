"""Parameters, FLOPs and cache bytes of a differential model of another family, from its tensors' shapes."""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ..model.counts import BACKWARD_AND_FORWARD, Counts, mean_keys
from .models import attention_layers


def count_family(config: Any, *, context_tokens: int | None = None, cache_itemsize: int = 2) -> Counts:
    """Count what `model.count` counts. The model is built without memory for its weights.

    Args:
        config: Configuration of a family with differential attention.
        context_tokens: Length at which attention's FLOPs are counted; None means max_position_embeddings.
        cache_itemsize: Bytes of a cached number (2 for bf16).
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    context = context_tokens or config.max_position_embeddings
    layout, layers = config.head_layout(), attention_layers(model)
    windows = [
        getattr(layer, "sliding_window", None) or getattr(layer.config, "sliding_window", None) for layer in layers
    ]
    linears = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    keys = sum(mean_keys(context, window) for window in windows)
    forward = 2 * linears + keys * layout.map_flops_per_pair()
    return Counts(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        embedding_parameters=model.get_input_embeddings().weight.numel(),
        attention_parameters=sum(parameter.numel() for layer in layers for parameter in layer.parameters()),
        forward_flops_per_token=round(forward),
        train_flops_per_token=round(BACKWARD_AND_FORWARD * forward),
        kv_bytes_per_token=len(layers) * layout.cached_values_per_token() * cache_itemsize,
        context_tokens=context,
    )
