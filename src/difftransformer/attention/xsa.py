"""Exclusive self-attention (arXiv:2603.09078): the Transformer's heads without their part along their own value."""

from typing import ClassVar

from .own_value import WithoutOwnValue
from .softmax import SoftmaxAttention


class ExclusiveSelfAttention(WithoutOwnValue, SoftmaxAttention):
    """Exclusive self-attention, causal unless forward gets is_causal=False (arXiv:2603.09078).

    head_i = y_i - (y_i . v_i) v_i / |v_i|^2, y = softmax(Q K^T / sqrt(D)) V
    output = concat(head) W_O

    Parameters and cache are as in the Transformer. Takes the arguments of `SoftmaxAttention`.
    """

    name: ClassVar[str] = "xsa"
    label: ClassVar[str] = "XSA"
    description: ClassVar[str] = "exclusive self-attention"
    tags: ClassVar[tuple[str, ...]] = ("arxiv:2603.09078",)
    can_upcycle: ClassVar[bool] = False
