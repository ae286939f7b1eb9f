"""Root-mean-square normalisation. A name that ends in `_D` is a tensor whose last dimension is the normalised one."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .problem import LOW_PRECISION, without_autocast


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
    if x.dtype in LOW_PRECISION:
        return _normed(x.float(), None if weight is None else weight.float(), eps).to(x.dtype)
    return _normed(x, None if weight is None else weight.to(x.dtype), eps)


def _normed(x_D: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    # On the CPU PyTorch differentiates six operations one by one; elsewhere it has a kernel, or a compiler makes one.
    if (
        torch.is_grad_enabled()
        and weight_D is not None
        and x_D.device.type == "cpu"
        and not torch.compiler.is_compiling()
    ):
        normed: Tensor = _RMSNorm.apply(x_D, weight_D, eps)
        return normed
    return F.rms_norm(x_D, x_D.shape[-1:], weight_D, eps)


class _RMSNorm(torch.autograd.Function):
    """With y = x r w, r = 1 / rms(x) and p = dy x r: dw = sum(p) over rows, dx = r (dy w - x r mean(p w))."""

    @staticmethod
    def forward(x_D: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return x_D * _inverse_rms(x_D, eps) * weight_D

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        x_D, weight_D, ctx.eps = inputs
        ctx.save_for_backward(x_D, weight_D)

    @staticmethod
    def backward(ctx: Any, grad_D: Tensor) -> tuple[Tensor, Tensor, None]:
        x_D, weight_D = ctx.saved_tensors
        inverse_rms = _inverse_rms(x_D, ctx.eps)  # anew, so that second derivatives go through it
        unit_D = x_D * inverse_rms
        product_D = grad_D * unit_D
        with without_autocast(grad_D.device.type):
            mean = (product_D @ weight_D).unsqueeze(-1) / x_D.shape[-1]
        dx_D = torch.addcmul(grad_D * weight_D, unit_D, mean, value=-1) * inverse_rms
        return dx_D, product_D.reshape(-1, x_D.shape[-1]).sum(0), None


def _inverse_rms(x_D: Tensor, eps: float) -> Tensor:
    mean_square = torch.linalg.vector_norm(x_D, dim=-1, keepdim=True).square() / x_D.shape[-1]
    return torch.rsqrt(mean_square + eps)
