"""Rotary position embedding in the half-split form of Hugging Face's Llama: feature i is paired with feature i + D/2.

Dimensions: B batch, T positions, H heads, D head width, F = D/2 pairs. A name that ends in `_BTHD`, say, is a tensor of
those dimensions.
"""

import torch
from torch import Tensor

from ..errors import ConfigError, ShapeError
from .problem import LOW_PRECISION


def inverse_frequencies(head_dim: int, theta: float = 10000.0, device: torch.device | str | None = None) -> Tensor:
    """Angular frequencies theta^(-2i / head_dim) for i = 0 ... head_dim/2 - 1 (arXiv:2104.09864 eq. 15).

    Args:
        head_dim: Width D that is rotated; even.
        theta: Base of the frequencies.
        device: Device of the result.

    Returns:
        (D/2,) in fp32, radians per position.

    Raises:
        ConfigError: head_dim is odd or less than 2.
    """
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"head_dim={head_dim}; rotary embedding pairs features, so it must be even and at least 2")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    return 1.0 / theta**exponents


def rotary_tables(position_ids: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position times frequency (arXiv:2104.09864 eq. 34).

    Args:
        position_ids: (B, T) or (T,), integers.
        inv_freq: (D/2,), radians per position.

    Returns:
        cos and sin, (B, T, D/2) or (T, D/2) each, in fp32: one value for each pair of features.
    """
    angles_BTF = position_ids.unsqueeze(-1).float() * inv_freq.float()
    return angles_BTF.cos(), angles_BTF.sin()


def apply_rotary(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x_i, x_(i + D/2)) by its angle (arXiv:2104.09864 eq. 34).

    Args:
        x_BTHD: (B, T, H, D), queries or keys; any floating dtype.
        cos: From `rotary_tables`, (B, T, D/2) or (T, D/2).
        sin: From `rotary_tables`, of the same shape.

    Returns:
        (B, T, H, D) in the dtype of x; low precision is rotated in fp32 and rounded once.

    Raises:
        ShapeError: The tables are of another shape.
    """
    shape = (x_BTHD.shape[1], *(1,) * (x_BTHD.dim() - 4), x_BTHD.shape[-1] // 2)  # `accelerate` divides H in two
    batch = cos.shape[: -len(shape)]
    if cos.shape != sin.shape or cos.shape[-len(shape) :] != shape or batch not in ((), (1,), (x_BTHD.shape[0],)):
        raise ShapeError(
            f"rotary tables have shapes {tuple(cos.shape)} and {tuple(sin.shape)}, expected ({shape[0]}, {shape[-1]}) or "
            f"({x_BTHD.shape[0]} or 1, {shape[0]}, {shape[-1]}) each: a row for each token and a column for each pair of "
            f"{x_BTHD.shape[-1]} features; make them with rotary_tables(positions, inverse_frequencies({x_BTHD.shape[-1]}))"
        )
    cos_BT1F, sin_BT1F = cos.unsqueeze(-2), sin.unsqueeze(-2)
    if x_BTHD.dtype not in LOW_PRECISION:
        cos_BT1F, sin_BT1F = cos_BT1F.to(x_BTHD.dtype), sin_BT1F.to(x_BTHD.dtype)
    first, second = x_BTHD.chunk(2, -1)
    rotated = torch.cat((first * cos_BT1F - second * sin_BT1F, second * cos_BT1F + first * sin_BT1F), -1)
    return rotated.to(x_BTHD.dtype)
