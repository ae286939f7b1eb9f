"""Plain softmax attention: the Transformer twin's layer."""

from typing import ClassVar

from .base import Attention, AttentionConfig, HeadLayout


class SoftmaxAttention(Attention):
    """Multi-head attention of the same-size Transformer, causal unless forward gets is_causal=False.

    It has Llama's form: no bias, rotary embedding, grouped keys and values.

    Args:
        embed_dim: M, width of the hidden states.
        num_heads: Heads.
        num_key_value_heads: Key/value heads; None means num_heads.
        head_dim: Width of a head; None means embed_dim / num_heads.
        layer_index: Index of the layer in the model, from 0.
        backend: The op's backend, or "auto".
    """

    name: ClassVar[str] = "softmax"
    label: ClassVar[str] = "Transformer"
    description: ClassVar[str] = "softmax attention, the same-size twin of a Differential Transformer"
    tags: ClassVar[tuple[str, ...]] = ()
    can_upcycle: ClassVar[bool] = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        layer_index: int = 0,
        backend: str = "auto",
    ) -> None:
        head_dim = head_dim or embed_dim // num_heads
        layout = HeadLayout(
            num_heads=num_heads,
            num_key_value_heads=num_key_value_heads or num_heads,
            head_dim=head_dim,
            query_maps=1,
            key_maps=1,
            value_head_dim=head_dim,
        )
        super().__init__(embed_dim, layout, layer_index=layer_index, backend=backend)

    @classmethod
    def layout_of(cls, config: AttentionConfig) -> HeadLayout:
        """Return the configuration's heads unchanged."""
        return HeadLayout(
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            query_maps=1,
            key_maps=1,
            value_head_dim=config.head_dim,
        )
