"""Softmax attention with DIFF's headwise norm, a control: the norm without a second map."""

from typing import Any, ClassVar

from .base import AttentionConfig, Option
from .head_norm import HEAD_NORM_EPS, HeadNorm
from .softmax import SoftmaxAttention


class NormedSoftmaxAttention(SoftmaxAttention):
    """`SoftmaxAttention` with head_norm="gain", the headwise RMSNorm of DIFF V1 (arXiv:2410.05258 Table 6, third row).

    The heads share one gain of D numbers, and there is no factor. Takes the arguments of `SoftmaxAttention`.
    """

    name: ClassVar[str] = "softmax_norm"
    label: ClassVar[str] = "Transformer with headwise norm"
    description: ClassVar[str] = "softmax attention with a headwise norm"
    can_upcycle: ClassVar[bool] = False  # the norm discards the size of each row
    config_options: ClassVar[dict[str, Option]] = {"head_norm_eps": Option(float, HEAD_NORM_EPS)}

    def __init__(self, embed_dim: int, num_heads: int, *, head_norm: HeadNorm = "gain", **arguments: Any) -> None:
        super().__init__(embed_dim, num_heads, head_norm=head_norm, **arguments)

    @classmethod
    def norm_of(cls, config: AttentionConfig) -> HeadNorm:
        """Return "gain"."""
        return "gain"
