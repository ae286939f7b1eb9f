"""A model under coarser numbers: attention logits of few bits, and int8 or int4 Linear layers. Rounding is simulated."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from difftransformer.errors import EvaluationError
from difftransformer.ops.reference import observe_logits

from ..probes.hooks import written_out
from .rounding import quantize_last, quantize_symmetric

UNTOUCHED_BITS = 16
"""From this number of bits on, logits are left unchanged."""

INT4_GROUP = 32
"""Weights of one row that share a step size in 4 bits."""


@contextmanager
def quantized_logits(model: Any, bits: int, granularity: str) -> Iterator[None]:
    """Round a model's attention logits to `bits` bits, each map separately; 16 bits or more leave them unchanged.

    See `rounding.quantize_symmetric`: keys that a query may not attend to do not count for the largest value.
    """
    if bits >= UNTOUCHED_BITS:
        yield
        return
    with written_out(model), observe_logits(lambda x, allowed: quantize_symmetric(x, bits, allowed, granularity)):
        yield


@contextmanager
def quantized_linears(model: Any, weights: str, activations: str) -> Iterator[None]:
    """Round the weights and inputs of every Linear but the output layer; the weights are restored at the end.

    Args:
        model: A causal language model with the interface of transformers.
        weights: "none"; "int8" with one step size for each output channel; or "int4" with one for each 32 weights of a channel.
        activations: "none", or "int8" with one step size for each token.
    """
    groups: dict[str, tuple[int, int | None]] = {"int8": (8, None), "int4": (4, INT4_GROUP)}
    with ExitStack() as undo:
        if (weights, activations) != ("none", "none"):
            last = model.get_output_embeddings()
            linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not last]
            if not linears:
                raise EvaluationError(f"{type(model).__name__}: no Linear layer to quantize; use --weights none")
            for linear in linears:
                if weights != "none":
                    undo.callback(setattr, linear.weight, "data", linear.weight.data)
                    with torch.inference_mode(False), torch.no_grad():
                        linear.weight.data = quantize_last(linear.weight.data, *groups[weights])
                if activations != "none":
                    hook = linear.register_forward_pre_hook(
                        lambda _, inputs: (quantize_last(inputs[0], 8), *inputs[1:])
                    )
                    undo.callback(hook.remove)
        yield
