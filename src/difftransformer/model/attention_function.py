"""This package's op as one of transformers' attention functions, for its models with ordinary softmax attention.

transformers' models call a function of a table with queries, keys, values and a mask that the table's other column makes.
Here the mask is None wherever it would say "causal" and no more, also behind a cache, where SDPA needs it written out. What the
op cannot say goes through transformers' own "sdpa".
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..ops import softmax_attention

IMPLEMENTATION = "difftransformer"

# What transformers hands to attention functions beside a mask and the op does not take.
NOT_IN_THE_OP = ("position_bias", "softcap", "s_aux", "head_mask", "cache")


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' form.

    Args:
        module: The attention layer.
        query: (B, H, T, D).
        key: (B, G, S, D), H % G == 0.
        value: (B, G, S, E).
        attention_mask: bool, broadcastable to (B, H, T, S), or additive; None as `mask` makes it.
        dropout: Of attention weights.
        scaling: Of the logits; 1/sqrt(D) if None.
        is_causal: Whether no mask means causal; the layer's own if None.
        **options: Others that transformers' models give.

    Returns:
        (B, T, H, E), and None in place of the maps.
    """
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and attention_mask is None
    if (
        dropout
        or not _is_bool(attention_mask)
        or options.get("output_attentions")
        or any(options.get(name) is not None for name in NOT_IN_THE_OP)
    ):
        if is_causal and 1 < query.shape[2] < key.shape[2]:
            length = query.shape[2], key.shape[2]
            # SDPA would align the causal mask to the first key.
            attention_mask = query.new_ones(length, dtype=torch.bool).tril(length[1] - length[0])[None, None]
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **options)  # type: ignore[no-any-return]
    heads_BHTE = softmax_attention(
        query,
        key.to(query.dtype),  # what was cached under autocast is in fp32
        value.to(query.dtype),
        attn_mask=attention_mask,
        is_causal=is_causal,
        scale=scaling,
    )
    return heads_BHTE.transpose(1, 2).contiguous(), None


def mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Tensor | None:
    """transformers' bool mask (B, 1, T, S), or None where it would be causal with the last query at the last key.

    Args:
        q_length: T.
        kv_length: S.
        q_offset: Position of the first query.
        kv_offset: Position of the first key.
        attention_mask: (B, past + T), 0 for padding, or None.
        local_size: Sliding window or chunk, or None.
        allow_is_causal_skip: Whether the mask is a causal one, but for padding and window.
        **options: As transformers' `sdpa_mask` takes them.
    """
    is_causal = (
        allow_is_causal_skip
        and isinstance(q_offset, int)
        and q_offset + q_length == kv_offset + kv_length
        and (local_size is None or kv_length < local_size)
        and (attention_mask is None or (not torch.compiler.is_compiling() and bool(attention_mask.all())))
    )
    if is_causal:
        return None
    return sdpa_mask(  # type: ignore[no-any-return]
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=False,
        **options,
    )


def _is_bool(attention_mask: Tensor | None) -> bool:
    return attention_mask is None or attention_mask.dtype == torch.bool


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, mask)
