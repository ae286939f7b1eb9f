"""Attention with an optional norm and factor of each head before the output projection."""

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

from torch import Tensor

from ..errors import ConfigError
from ..ops.attention import attend
from ..ops.norms import rms_norm, with_plain_factor
from ..ops.problem import LOW_PRECISION, Norm, Restrictions
from .base import Attention, RMSNorm
from .constants import Constants

HeadNorm = Literal["gain", "plain", "none"]

HEAD_NORM_EPS = 1e-5  # eps of the headwise norm (the paper's code)


class HeadwiseRMSNorm(RMSNorm):
    """The norm of each head's output, factor * RMSNorm(head) * weight (arXiv:2410.05258 eq. 3).

    The attention operator fuses the norm, so this module calls the operator. Hooks that load or gather the weight (accelerate,
    DeepSpeed, FSDP) then run before the weight is read.
    """

    def forward(  # type: ignore[override]
        self, compute: Callable[..., Tensor], *tensors: Any, factor: Tensor | float, **options: Any
    ) -> Tensor:
        """Return compute(*tensors, norm=(weight, eps, factor), **options)."""
        return compute(*tensors, norm=(self.weight, self.eps, factor), **options)


def check_head_scale(scale: float, name: str = "head_scale") -> None:
    """Raise ConfigError for a factor of the heads, by its name in the message, that is 0 or not finite."""
    if not math.isfinite(scale):
        raise ConfigError(f"{name}={scale}: give a finite number")
    if scale == 0:
        raise ConfigError(f"{name}=0 gives heads of zero; use another number")


class NormedAttention(Constants, Attention):
    """Base of the variants with an optional headwise norm.

    Attributes:
        head_norm: The norm of each head's output, or None.
        head_scale: Factor of each head's output, after the norm if there is one; None for 1.
    """

    head_norm: HeadwiseRMSNorm | None
    head_scale: Tensor | None

    def add_head_norm(self, kind: HeadNorm, *, eps: float, scale: float) -> None:
        """Set `head_norm`, without a norm if `kind` is "none", and `head_scale`.

        Raises:
            ConfigError: there is no such kind, or the scale is 0 or not finite.
        """
        check_head_scale(scale)
        if kind not in get_args(HeadNorm):
            raise ConfigError(f"head_norm={kind!r} is unknown; choose one of {', '.join(get_args(HeadNorm))}")
        self.head_norm = None
        self.add_constants(head_scale=None if scale == 1 else scale)
        if kind != "none":
            self.head_norm = HeadwiseRMSNorm(self.layout.value_head_dim, eps=eps, gain=kind == "gain")

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, lam: Tensor | float | None, restrictions: Restrictions
    ) -> Tensor:
        """Call the op, which normalises the heads in the same pass where it can. Returns (B, H, T, E)."""
        if self.head_norm is None or type(self).finish is not NormedAttention.finish:
            return super().attend(query, key, value, lam, restrictions)
        tensors = (query, key, value, lam)
        return self.head_norm(
            attend, *tensors, restrictions=restrictions, factor=self._factor(value), backend=self.backend
        )

    def finish(self, heads: Tensor) -> Tensor:
        """Normalise and scale each head, from and to (B, H, T, E)."""
        if self.head_norm is not None:
            return self.head_norm(_normed, heads, factor=self._factor(heads))
        if self.head_scale is None:
            return heads
        wide = heads.float() if heads.dtype in LOW_PRECISION else heads
        return (wide * self._factor(heads)).to(heads.dtype)

    def _factor(self, like: Tensor) -> Tensor | float:
        return 1.0 if self.head_scale is None else self.constant("head_scale", like)


def _normed(heads: Tensor, *, norm: Norm) -> Tensor:
    weight, eps, factor = with_plain_factor(norm, heads.shape[-1])
    return rms_norm(heads, weight, eps) * factor
