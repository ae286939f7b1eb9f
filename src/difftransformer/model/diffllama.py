"""transformers' DiffLlama on this package's attention op, in place.

`accelerate` gives each attention layer another class, whose forward calls `normed_differential_attention` once where theirs
calls ordinary attention twice, each time on repeated values. Parameters, state dict and cache stay as they are.

DiffLlama pairs heads by halves: differential head i has the maps i and H + i, key group g the keys g and G + g and the value
[V_g; V_(G + g)]. The op wants what belongs together side by side in the last dimension. The rotation writes queries, and keys
where there is no cache, in that order; values, and what a cache returns, are copied into it (with more than one group no
strides could say it).

Dimensions: B batch, T new positions, S key positions, H differential heads, G their key/value groups, D width of one map.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

from ..ops import apply_rotary, normed_differential_attention
from ..ops.problem import LOW_PRECISION

# attn_implementation of which the masks are understood: bool or None, and additive. Others have masks of their kernels' own.
ATTN_IMPLEMENTATIONS = ("sdpa", "eager")
# What transformers' attention functions take beside a mask and the op does not.
_NOT_IN_THE_OP = ("position_bias", "softcap", "cache")


class AcceleratedDiffLlamaAttention(DiffLlamaAttention):
    """DiffLlama's attention layer with one call of the op; made by `accelerate`."""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """(B, T, M) to (B, T, M), and None in place of the maps. What the op cannot say goes through DiffLlama's forward."""
        if not self._op_can_say(attention_mask, kwargs):
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        batch, length = hidden_states.shape[:2]
        # Their tables hold every angle twice.
        cos_BTF, sin_BTF = (table.chunk(2, -1)[0] for table in position_embeddings)
        rotation_of_pairs = cos_BTF.unsqueeze(-2), sin_BTF.unsqueeze(-2)
        query, key, value = (
            projection(hidden_states).view(batch, length, -1, self.head_dim)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query_BHTX = apply_rotary(_by_pairs(query), *rotation_of_pairs).flatten(3).transpose(1, 2)
        is_causal = attention_mask is None and length > 1 and self._no_mask_is_causal(kwargs)
        if past_key_values is None:
            key_BGSX = apply_rotary(_by_pairs(key), *rotation_of_pairs).flatten(3).transpose(1, 2)
            value_BGSX = _by_pairs(value).flatten(3).transpose(1, 2)
        else:
            key = apply_rotary(key, cos_BTF, sin_BTF).transpose(1, 2)
            key, value = past_key_values.update(key, value.transpose(1, 2), self.layer_idx)
            if is_causal:
                # No mask means that the cache was empty: of a static one, what lies behind is not filled yet.
                key, value = key[:, :, :length], value[:, :, :length]
            key_BGSX, value_BGSX = (
                _by_pairs(cached.transpose(1, 2)).transpose(1, 2).flatten(3) for cached in (key, value)
            )
        mask = None if attention_mask is None else _allowed(attention_mask)
        if mask is not None and length == key_BGSX.shape[2] and _is_causal(mask):
            is_causal = True  # kernels then skip what the mask forbids anyway
        norm = self.groupnorm
        heads_BHTX = normed_differential_attention(
            query_BHTX,
            key_BGSX.to(query.dtype),  # what DiffLlama itself cached under autocast is in fp32
            value_BGSX.to(query.dtype),
            self._lam(query.dtype),
            None,
            eps=torch.finfo(query.dtype).eps if norm.eps is None else norm.eps,
            factor=1 - self.lambda_init,
            attn_mask=mask,
            is_causal=is_causal,
            scale=self.scaling,
        )
        return self.o_proj(heads_BHTX.transpose(1, 2).flatten(2)), None

    def _op_can_say(self, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
        if self.config._attn_implementation not in ATTN_IMPLEMENTATIONS:
            return False
        if kwargs.get("output_attentions", self.config.output_attentions):
            return False
        if any(kwargs.get(name) is not None for name in _NOT_IN_THE_OP):
            return False
        return mask is None or _is_yes_or_no(mask)

    def _no_mask_is_causal(self, kwargs: dict[str, Any]) -> bool:
        """Whether a missing mask means causal: to their SDPA unless the caller says otherwise, to their eager code never."""
        given = kwargs.get("is_causal")
        return self.config._attn_implementation == "sdpa" and bool(self.is_causal if given is None else given)

    def _lam(self, dtype: torch.dtype) -> Tensor:
        """Lambda (arXiv:2410.05258 eq. 2) with their roundings, but for those to low precision: there it stays in fp32."""
        vectors = (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2)
        q1, k1, q2, k2 = (vector.float() if vector.dtype in LOW_PRECISION else vector for vector in vectors)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        first, second = (
            torch.exp(torch.sum(q * k, dim=-1, dtype=torch.float32)).to(wide) for q, k in ((q1, k1), (q2, k2))
        )
        return first - second + self.lambda_init


def _by_pairs(x_BTXD: Tensor) -> Tensor:
    """(B, T, 2 N, D), where halves of the heads belong together, as a view (B, T, N, 2, D)."""
    return x_BTXD.unflatten(2, (2, -1)).transpose(2, 3)


def _is_yes_or_no(mask: Tensor) -> bool:
    """Whether a mask says, for both maps alike, which keys may be seen and no more. Additive ones are read, so never traced."""
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[1] != 1:
        return False
    if mask.dtype == torch.bool:
        return True
    if not mask.is_floating_point() or torch.compiler.is_compiling():
        return False
    return bool(((mask == 0) | _is_forbidding(mask)).all())


def _allowed(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else ~_is_forbidding(mask)


def _is_forbidding(mask: Tensor) -> Tensor:
    """Where an additive mask leaves nothing of a key. transformers writes the lowest number of the dtype there, others -inf."""
    return mask <= torch.finfo(mask.dtype).min / 2


def _is_causal(mask: Tensor) -> bool:
    """Whether no query may see a later key; asked only where the values are at hand."""
    if mask.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not bool(mask.triu(1).any())
