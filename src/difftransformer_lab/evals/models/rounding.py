"""Simulated low precision: numbers rounded to few levels, in their own dtype.

It measures what rounding costs in accuracy. Nothing is computed in integers, so nothing gets faster.
"""

import torch
from torch import Tensor

from difftransformer.errors import ConfigError

_SHARED_BY = {"tensor": (1, 2, 3), "head": (2, 3), "row": (3,)}
"""Dimensions of (B, H, T, S) that share one step. Rows of a batch never do: an answer must depend on its own tokens alone."""


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
