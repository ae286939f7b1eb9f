"""Differential attention, V1 (arXiv:2410.05258): the difference of two softmax maps, normalised head by head."""

from typing import ClassVar

from .differential import Differential, DifferentialOptions


class DifferentialAttention(Differential):
    """Multi-head differential attention, causal unless forward gets is_causal=False (arXiv:2410.05258 eq. 1-3).

    head = (softmax(Q1 K1^T / sqrt(D)) - lambda softmax(Q2 K2^T / sqrt(D))) V
    output = concat((1 - lambda_init) RMSNorm(head)) W_O
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init

    Two heads of the same-size Transformer make one, with a value of 2 D, so the number of parameters is equal except for
    lambda and the gain. lambda is one number for each layer, shared by the heads, and may leave (0, 1). `DifferentialOptions`
    has all that can be chosen otherwise.
    """

    name: ClassVar[str] = "diff"
    label: ClassVar[str] = "DIFF Transformer"
    can_upcycle: ClassVar[bool] = True
    twin_heads: ClassVar[int] = 2
    defaults: ClassVar[DifferentialOptions] = DifferentialOptions(
        lambda_form="layer", head_norm="gain", shared_key=False
    )
