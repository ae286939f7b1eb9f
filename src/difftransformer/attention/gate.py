"""Gated attention (arXiv:2505.06708): the Transformer's heads, scaled by a sigmoid of the hidden states."""

from typing import ClassVar

from .output_gate import OutputGate
from .softmax import SoftmaxAttention


class GatedAttention(OutputGate, SoftmaxAttention):
    """Gated attention, causal unless forward gets is_causal=False (arXiv:2505.06708, the gate of Qwen3-Next).

    output = (sigmoid(X W_G) * concat(softmax(Q K^T / sqrt(D)) V)) W_O

    W_G has as many numbers as W_O. Takes the arguments of `SoftmaxAttention`.
    """

    name: ClassVar[str] = "gate"
    label: ClassVar[str] = "gated Transformer"
    description: ClassVar[str] = "softmax attention with a sigmoid output gate"
    tags: ClassVar[tuple[str, ...]] = ("arxiv:2505.06708",)
