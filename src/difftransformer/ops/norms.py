"""Root-mean-square normalisation. A name that ends in `_D` is a tensor whose last dimension is the normalised one."""

import torch.nn.functional as F
from torch import Tensor

from .problem import LOW_PRECISION


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
