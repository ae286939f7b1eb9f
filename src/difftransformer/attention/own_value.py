"""Attention with heads that leave out their part along the value of their own token."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError
from ..ops.problem import LOW_PRECISION
from .base import Attention


class WithoutOwnValue(Attention):
    """Mixin of the variants with exclusive self-attention; it comes first among their bases.

    head_i' = head_i - (head_i . v_i) v_i / |v_i|^2, v_i the value of token i itself in the head's group (arXiv:2603.09078)

    So no head has a part along its own token's value, which the residual stream carries already. It adds no parameters. A
    headwise norm comes before it, so that W_O reads heads without that part. The first token of a sequence sees itself alone,
    and its heads are 0 up to rounding: a norm after it would blow the rounding up.
    """

    def with_own_value(self, heads: Tensor, value: Tensor | None) -> Tensor:
        """Remove from each head (B, H, T, E) its part along its own value (B, G, T, E); computed in fp32 or above.

        Raises:
            ConfigError: there is no own value, in cross-attention.
        """
        if value is None:
            raise ConfigError(
                f"{type(self).__name__} attends to a context, whose values are of other tokens; leave context out, or use "
                "another attention type"
            )
        wide = torch.float32 if heads.dtype in LOW_PRECISION else heads.dtype
        grouped = heads.to(wide).unflatten(1, (value.shape[1], -1))
        direction = F.normalize(value.to(wide), dim=-1).unsqueeze(2)
        along = (grouped * direction).sum(-1, keepdim=True) * direction
        return (grouped - along).flatten(1, 2).to(heads.dtype)
