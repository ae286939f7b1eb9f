"""A model under coarser numbers: attention logits of few bits, and int8 or int4 Linear layers.

Rounding is simulated: numbers keep their dtype, so it measures what rounding costs in accuracy, and nothing gets faster.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from difftransformer.errors import ConfigError, EvaluationError
from difftransformer.ops.reference import observe_logits

from ..probes.hooks import written_out

UNTOUCHED_BITS = 16
"""From this number of bits on, logits are left unchanged."""

INT4_GROUP = 32
"""Weights of one row that share a step size in 4 bits."""

_SHARED_BY = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}
"""Dimensions of (B, H, T, S) that share one step. Rows of a batch never do: an answer must depend on its own tokens alone."""


@contextmanager
def quantized_logits(model: Any, bits: int, granularity: str) -> Iterator[None]:
    """Round a model's attention logits to `bits` bits, each map separately; 16 bits or more leave them unchanged.

    See `quantize_symmetric`: keys that a query may not attend to do not count for the largest value.
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


def quantize_symmetric(x: Tensor, bits: int, allowed: Tensor | None, granularity: str) -> Tensor:
    """Round attention logits to a signed grid of 2^(bits - 1) - 1 steps on each side of zero (absmax quantisation).

        step = max |x| / (2^(bits - 1) - 1),    x' = step * round(x / step)

    Args:
        x: (B, H, T, S).
        bits: At least 2.
        allowed: bool, broadcastable to x, the entries that count in max |x|; the rest is returned unchanged. None for all.
        granularity: The part that shares a step: "tensor" (all heads of a batch row), "head" or "row" (one query of one head).

    Returns:
        (B, H, T, S) in the dtype of x.
    """
    if granularity not in _SHARED_BY:
        raise ConfigError(f"granularity={granularity!r}: choose one of {', '.join(_SHARED_BY)}")
    size = x.abs()
    if allowed is not None:
        size = size.masked_fill(~allowed, 0)
    rounded = _round(x, size.amax(_SHARED_BY[granularity], keepdim=True), bits)
    return rounded if allowed is None else torch.where(allowed, rounded, x)


def quantize_last(x: Tensor, bits: int, group: int | None = None) -> Tensor:
    """Round numbers as in `quantize_symmetric`, with a step for each `group` of the last dimension, computed in fp32.

    Args:
        x: (..., N): weights (outputs, N), or activations (..., tokens, N).
        bits: At least 2.
        group: Count of numbers that share a step; the last group may have fewer. None for N.

    Returns:
        A tensor of the shape and dtype of x.
    """
    width = x.shape[-1]
    group = width if group is None else group
    parts = torch.nn.functional.pad(x.float(), (0, -width % group)).unflatten(-1, (-1, group))
    rounded = _round(parts, parts.abs().amax(-1, keepdim=True), bits)
    return rounded.flatten(-2)[..., :width].to(x.dtype)


def _round(x: Tensor, absmax: Tensor, bits: int) -> Tensor:
    if bits < 2:
        raise ConfigError(f"bits={bits}: a signed grid needs at least 2")
    step = absmax / (2 ** (bits - 1) - 1)
    step = step.masked_fill(step == 0, 1)
    return torch.round(x / step) * step
