"""This package's operator as an attention function of transformers, for models with softmax attention.

transformers keeps a table of attention functions and a table of functions that build their masks. Here the mask is None
wherever attention is only causal, also with a cache, where SDPA needs an explicit mask. Calls that the operator does not
support go to transformers' own "sdpa".
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..ops import softmax_attention

IMPLEMENTATION = "difftransformer"

# Arguments of transformers' attention functions that the operator does not support.
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
    """Compute softmax attention, with the signature that transformers expects of an attention function.

    Args:
        module: Attention layer that calls the function.
        query, key, value: (B, H, T, D), (B, G, S, D) and (B, G, S, E) with H % G == 0.
        attention_mask: Bool mask that broadcasts to (B, H, T, S), additive mask, or None (see `mask`).
        dropout: Dropout probability of attention weights.
        scaling: Factor of the logits. Defaults to 1/sqrt(D).
        is_causal: Whether attention without a mask is causal. Defaults to the layer's `is_causal`.
        **options: Other arguments that models of transformers pass.

    Returns:
        (B, T, H, E), and None in place of the attention maps.
    """
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and attention_mask is None
    if (
        dropout
        or (attention_mask is not None and attention_mask.dtype != torch.bool)
        or options.get("output_attentions")
        or any(options.get(name) is not None for name in NOT_IN_THE_OP)
    ):
        if is_causal and 1 < query.shape[2] < key.shape[2]:
            length = query.shape[2], key.shape[2]
            # SDPA aligns a causal mask to the first key; here the last query sees the last key.
            attention_mask = query.new_ones(length, dtype=torch.bool).tril(length[1] - length[0])[None, None]
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, is_causal, **options)  # type: ignore[no-any-return]
    heads_BHTE = softmax_attention(
        query,
        key.to(query.dtype),  # under autocast, the cache holds fp32
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
    """Return transformers' bool mask (B, 1, T, S), or None if it is only causal and the last query sees the last key.

    The arguments are those of transformers' `sdpa_mask`. The offsets are the positions of the first query and key; the
    `attention_mask` is (B, past + T) with 0 for padding.
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


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, mask)
