"""Plain softmax attention: the Transformer twin's layer."""

from collections.abc import Mapping
from typing import Any, ClassVar

from .base import QK_NORM_EPS, REPLICATED, AttentionConfig, HeadLayout, Option, head_width
from .head_norm import HEAD_NORM_EPS, HeadNorm, NormedAttention, check_head_scale


class SoftmaxAttention(NormedAttention):
    """Multi-head attention of the same-size Transformer, causal unless forward gets is_causal=False.

    It has Llama's form: no bias, rotary embedding, grouped keys and values. As a control for the Differential Transformer it
    can have that model's headwise norm (arXiv:2410.05258 Table 6, third row), and a factor of its heads.

    In a configuration they are `softmax_head_norm` and `softmax_head_scale`, because `head_norm` and `head_scale` describe the
    differential model.

    Args:
        embed_dim: M, width of the hidden states.
        num_heads: Heads.
        num_key_value_heads: Key/value heads; None means num_heads.
        head_dim: Width of a head; None means embed_dim / num_heads.
        layer_index: Index of the layer in the model, from 0.
        head_norm: "gain", a headwise RMSNorm with one learned gain; "plain", the same without the gain; "none".
        head_norm_eps: eps of the headwise norm.
        head_scale: Factor of each head, after the norm if there is one.
        backend: The op's backend, or "auto".
        qk_norm: Whether queries and keys are normalised, as in Qwen3.
        qk_norm_eps: eps of these norms.

    Raises:
        ConfigError: head_norm has another value, or head_scale is 0 or not finite.
    """

    name: ClassVar[str] = "softmax"
    label: ClassVar[str] = "Transformer"
    description: ClassVar[str] = "softmax attention, the same-size twin of a Differential Transformer"
    tags: ClassVar[tuple[str, ...]] = ()
    can_upcycle: ClassVar[bool] = True
    config_options: ClassVar[dict[str, Option]] = {
        "softmax_head_norm": Option(HeadNorm, "none"),
        "softmax_head_scale": Option(float, 1.0),
        "head_norm_eps": Option(float, HEAD_NORM_EPS),
    }

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        layer_index: int = 0,
        head_norm: HeadNorm = "none",
        head_norm_eps: float = HEAD_NORM_EPS,
        head_scale: float = 1.0,
        backend: str = "auto",
        qk_norm: bool = False,
        qk_norm_eps: float = QK_NORM_EPS,
    ) -> None:
        head_dim = head_dim or head_width(embed_dim, num_heads)
        layout = HeadLayout(
            num_heads=num_heads,
            num_key_value_heads=num_key_value_heads or num_heads,
            head_dim=head_dim,
            query_maps=1,
            key_maps=1,
            value_head_dim=head_dim,
        )
        norms: dict[str, Any] = {"qk_norm": qk_norm, "qk_norm_eps": qk_norm_eps}
        super().__init__(embed_dim, layout, layer_index=layer_index, backend=backend, **norms)
        self.add_head_norm(head_norm, eps=head_norm_eps, scale=head_scale)

    @classmethod
    def arguments_of(cls, config: AttentionConfig, layer_index: int) -> dict[str, Any]:
        """Pass the headwise norm, its eps and the factor of the heads."""
        norm, scale = cls.norm_of(config), cls.scale_of(config)
        return {"head_norm": norm, "head_norm_eps": cls.option(config, "head_norm_eps"), "head_scale": scale}

    @classmethod
    def norm_of(cls, config: AttentionConfig) -> HeadNorm:
        """Return the headwise norm of a configuration; a subclass without the option has none."""
        norm: HeadNorm = "none"
        return cls.option(config, "softmax_head_norm") if "softmax_head_norm" in cls.config_options else norm

    @classmethod
    def scale_of(cls, config: AttentionConfig) -> float:
        """Return the factor of the heads in a configuration; a subclass without the option has none.

        Raises:
            ConfigError: it is 0 or not finite.
        """
        if "softmax_head_scale" not in cls.config_options:
            return 1.0
        scale: float = cls.option(config, "softmax_head_scale")
        check_head_scale(scale, "softmax_head_scale")
        return scale

    @classmethod
    def own_parameters(cls, config: AttentionConfig) -> int:
        """Count the gain of the norm."""
        return config.head_dim if cls.norm_of(config) == "gain" else 0

    @classmethod
    def tensor_parallel(cls, config: AttentionConfig) -> dict[str, str]:
        """Let every process hold the gain of the norm."""
        plan = super().tensor_parallel(config)
        return plan | {"head_norm": REPLICATED} if cls.norm_of(config) == "gain" else plan

    @classmethod
    def upcycled_options(cls, config: AttentionConfig, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Have no norm, which would discard the size of each row, and no factor."""
        return {"softmax_head_norm": "none", "softmax_head_scale": 1.0}

    @classmethod
    def layout_of(cls, config: AttentionConfig) -> HeadLayout:
        """Return the configuration's heads unchanged.

        Raises:
            ConfigError: softmax_head_scale is 0 or not finite.
        """
        cls.scale_of(config)  # a configuration is checked by asking for its heads
        return HeadLayout(
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            query_maps=1,
            key_maps=1,
            value_head_dim=config.head_dim,
        )
