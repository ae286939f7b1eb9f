"""Differential attention, V1 (arXiv:2410.05258): the difference of two softmax maps, normalised head by head."""

from typing import ClassVar

from .differential import V1, Differential, DifferentialOptions


class DifferentialAttention(Differential):
    """Multi-head differential attention, causal unless forward gets is_causal=False (arXiv:2410.05258 eq. 1-3).

    head = (softmax(Q1 K1^T / sqrt(D)) - lambda softmax(Q2 K2^T / sqrt(D))) V
    output = concat((1 - lambda_init) RMSNorm(head)) W_O
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init

    Two heads of the same-size Transformer make one, with a value of 2 D, so the number of parameters is equal except for
    lambda and the gain. lambda is one number for each layer, shared by the heads, and may leave (0, 1). `DifferentialOptions`
    has all that can be chosen otherwise.

    Args:
        embed_dim: M, width of the hidden states.
        num_heads: H, differential heads, half as many as the twin has.
        num_key_value_heads: Differential key/value heads; None means num_heads.
        head_dim: D, width of one map; None means embed_dim / (2 H).
        value_head_dim: E; None means 2 D.
        layer_index: Index of the layer in the model, from 0; sets lambda_init.
        head_norm_eps: eps of the headwise norm.
        backend: The op's backend, or "auto".
        options: Choices that differ from the variant's `defaults`.
        qk_norm: Whether the query and the key of each map are normalised, as in Qwen3.
        qk_norm_eps: eps of these norms.

    Raises:
        ConfigError: The heads do not divide embed_dim, or the key/value heads do not divide the heads.
    """

    name: ClassVar[str] = "diff"
    label: ClassVar[str] = "DIFF Transformer"
    can_upcycle: ClassVar[bool] = True
    twin_heads: ClassVar[int] = 2
    defaults: ClassVar[DifferentialOptions] = V1
