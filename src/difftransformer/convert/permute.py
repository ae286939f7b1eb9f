"""Row permutations that layouts differ by, and the folding of a gain, on plain tensors.

Rows are those of a projection's weight (rows, M) or of its bias (rows,). There are H heads with two maps each, and D is the
width of one map. Each permutation has an inverse.
"""

import torch
from torch import Tensor


def maps_first(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows from (head, map, D) to (map, head, D): head i pairs with head i + H instead of 2 i with 2 i + 1."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(0, 1).flatten(0, 2)


def heads_first(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows from (map, head, D) to (head, map, D), the inverse of `maps_first`."""
    return rows.unflatten(0, (2, heads, -1)).transpose(0, 1).flatten(0, 2)


def half_split(rows: Tensor, head_dim: int) -> Tensor:
    """Move the rotary pairs (2 i, 2 i + 1) of every D rows to (i, i + D / 2)."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Move the rotary pairs (i, i + D / 2) of every D rows to (2 i, 2 i + 1), the inverse of `half_split`."""
    return rows.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def fold_gain(o_proj: Tensor, gain: Tensor) -> Tensor:
    """Fold the gain of the headwise norm into the output projection.

    W_O diag(g, ..., g) x = W_O (g x for every head), so the gain moves into the columns. Narrow types multiply in fp32.

    Args:
        o_proj: Output projection, (M, H * E).
        gain: Gain that all heads share, (E,).

    Returns:
        (M, H * E) in o_proj's dtype.
    """
    wide = torch.promote_types(o_proj.dtype, torch.float32)
    return (o_proj.unflatten(1, (-1, len(gain))).to(wide) * gain.to(wide)).flatten(1).to(o_proj.dtype)
