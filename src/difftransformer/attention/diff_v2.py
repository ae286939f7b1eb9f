"""Differential attention, V2: two queries for each head of the Transformer, with the Transformer's keys and values."""

from typing import ClassVar

from .differential import V2, Differential, DifferentialOptions


class DifferentialAttentionV2(Differential):
    """DIFF V2, causal unless forward gets is_causal=False (microsoft/unilm, Diff-Transformer/Diff-Transformer-V2, 2026).

    head = (softmax(Q1 K^T / sqrt(D)) - sigmoid(X w) softmax(Q2 K^T / sqrt(D))) V
    output = concat(head) W_O

    There are as many heads, keys and values as in the Transformer, so the cache is the same, and twice as many queries: W_Q
    doubles, and a projection of lambda is added. lambda is one number for each token and head. There is no headwise norm.

    Takes the arguments of `DifferentialAttention`, with num_heads as in the same-size Transformer. head_dim None means
    embed_dim / H, and value_head_dim None means D.

    Raises:
        ConfigError: The heads do not divide embed_dim, or the key/value heads do not divide the heads.
    """

    name: ClassVar[str] = "diff_v2"
    label: ClassVar[str] = "DIFF V2"
    can_upcycle: ClassVar[bool] = True
    twin_heads: ClassVar[int] = 1
    defaults: ClassVar[DifferentialOptions] = V2
