"""Root-mean-square normalisation."""

import torch.nn.functional as F
from torch import Tensor

from .problem import LOW_PRECISION, Norm


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467 eq. 4).

    The norm of a low-precision input is computed in fp32, weight included, and rounded once.

    Args:
        x: (..., D), any floating dtype.
        weight: (D,), any floating dtype, or None for 1.
        eps: Added to the mean square.

    Returns:
        (..., D) in the dtype of x.
    """
    if x.dtype not in LOW_PRECISION:
        return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)
    wide = F.rms_norm(x.float(), x.shape[-1:], None if weight is None else weight.float(), eps)
    return wide.to(x.dtype)


def with_plain_factor(norm: Norm, width: int) -> Norm:
    """Multiply a factor that is a tensor into the weight, in fp32 or float64, and return the norm with factor 1.0.

    Operators take the factor as a float, and compiled graphs would hold it as a constant.
    """
    weight, eps, factor = norm
    if not isinstance(factor, Tensor):
        return norm
    if weight is None:
        return factor.expand(width), eps, 1.0
    return (weight.float() if weight.dtype in LOW_PRECISION else weight) * factor, eps, 1.0
