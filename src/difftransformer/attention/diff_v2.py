"""Differential attention, V2: two queries for each head of the Transformer, with the Transformer's keys and values."""

from typing import ClassVar

from torch import Tensor

from .base import PlainLayer
from .differential import Differential, DifferentialOptions


class DifferentialAttentionV2(Differential):
    """DIFF V2, causal unless forward gets is_causal=False (microsoft/unilm, Diff-Transformer/Diff-Transformer-V2, 2026).

    head = (softmax(Q1 K^T / sqrt(D)) - sigmoid(X w) softmax(Q2 K^T / sqrt(D))) V
    output = concat(head) W_O

    There are as many heads, keys and values as in the Transformer, so the cache is the same, and twice as many queries: W_Q
    doubles, and a projection of lambda is added. lambda is one number for each token and head. There is no headwise norm.
    """

    name: ClassVar[str] = "diff_v2"
    label: ClassVar[str] = "DIFF V2"
    can_upcycle: ClassVar[bool] = True
    twin_heads: ClassVar[int] = 1
    defaults: ClassVar[DifferentialOptions] = DifferentialOptions(
        lambda_form="token", head_norm="none", shared_key=True
    )

    @classmethod
    def upcycled(cls, name: str, shape: tuple[int, ...], plain: PlainLayer) -> Tensor:
        """Give both maps the Transformer's queries. lambda is sigmoid(0) = 1/2, so W_O doubles."""
        if name == "q_proj.weight":
            return plain.twice(name, plain.config.num_attention_heads)
        if name == "o_proj.weight":
            return 2 * plain.read(name)
        return plain.zeros(shape) if name == "lambda_proj.weight" else super().upcycled(name, shape, plain)
