"""The fields that differential attention adds to the configuration of another family's model."""

from types import SimpleNamespace
from typing import Any

from ..attention import Attention, HeadLayout, config_options, variant
from ..errors import ConfigError
from ..ops import backend_names
from ..typed import build


class DifferentialFields:
    """The base that stands before a family's configuration class.

    Attributes:
        family: The family's `model_type`, such as "qwen2".
        attention_type: A name in `attention.VARIANTS`.
        attn_backend: Backend of the attention op.

    The options of all variants (`attention.config_options()`) are fields too.
    """

    family: str
    attention_type: str
    attn_backend: str

    def __post_init__(self, **kwargs: Any) -> None:
        for name, option in config_options().items():
            setattr(
                self, name, build(option.type, kwargs.pop(name, option.default), source="", key=name, error=ConfigError)
            )
        if self.attn_backend not in ("auto", *backend_names()):
            raise ConfigError(
                f"attn_backend={self.attn_backend!r} is unknown; choose one of auto, {', '.join(backend_names())}"
            )
        super().__post_init__(**kwargs)  # type: ignore[misc]
        self.head_layout()  # raises an error for impossible heads before anything is built

    @property
    def attention(self) -> type[Attention]:
        """The class of the attention variant."""
        return variant(self.attention_type)

    def head_layout(self) -> HeadLayout:
        """Return the heads and widths of this attention type."""
        return self.attention.layout_of(self.attention_fields())

    def attention_fields(self) -> Any:
        """Return what a variant reads of a configuration."""
        return attention_fields(self, **{name: getattr(self, name) for name in config_options()})


def attention_fields(config: Any, **options: Any) -> Any:
    """Return the head fields of any family's configuration under the names that a variant reads, with its options."""
    heads = config.num_attention_heads
    return SimpleNamespace(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        qk_norm=False,  # a family that has such norms keeps its own
        attn_backend=getattr(config, "attn_backend", "auto"),
        **options,
    )
