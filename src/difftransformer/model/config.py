"""The configuration of a model and of its twin: Llama's field names, and one word that chooses the attention."""

import copy
from typing import Any, Self

from transformers import AutoConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from ..attention import HeadLayout, variant
from ..errors import ConfigError
from ..ops import backend_names
from .presets import paper_ffn_width

UNSET_COUNTS = (
    "intermediate_size",
    "num_key_value_heads",
    "head_dim",
    "num_differential_heads",
    "num_differential_key_value_heads",
    "num_noise_heads",
    "value_head_dim",
)
COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", *UNSET_COUNTS)
INITIALIZATIONS = ("normal", "mimetic")
DEFAULT_ROPE_THETA = 10_000.0  # Llama's; the paper states 640,000 for its 64K models only


class DiffTransformerConfig(PreTrainedConfig):
    """Configuration of a Differential Transformer or of its same-size Transformer twin.

    `num_attention_heads`, `num_key_value_heads` and `head_dim` always describe the same-size plain Transformer; every
    attention type derives its own heads from them. So `attention_type` alone turns a model into its twin.

    Args:
        attention_type: "diff" (DIFF V1, arXiv:2410.05258), "diff_v2" (DIFF V2), "grouped_diff" (arXiv:2510.06949),
            "dex" (arXiv:2505.16333) or "softmax" (the Transformer).
        vocab_size, hidden_size, num_hidden_layers, hidden_act, rms_norm_eps, tie_word_embeddings, use_cache: See `LlamaConfig`.
        intermediate_size: Inner width of SwiGLU; None means round(8/3 hidden_size) (arXiv:2410.05258 section 2.2).
        num_attention_heads: Heads of the plain Transformer; "diff" makes half as many differential heads, "diff_v2" as many.
        num_key_value_heads: Number of key/value heads of the plain Transformer; None means num_attention_heads.
        head_dim: Width of a head of the plain Transformer and of one differential map; None means
            hidden_size / num_attention_heads.
        num_differential_heads: Number of differential heads; None means the attention type's own number.
        num_differential_key_value_heads: Number of differential key/value heads; None means the attention type's own.
        num_noise_heads: For "grouped_diff", the number of heads whose maps are subtracted, each shared by equally many
            others; None means one of five, or of four where five does not divide.
        value_head_dim: Width of a differential head's value; None means 2 head_dim for "diff" and "grouped_diff", head_dim
            for "diff_v2".
        lambda_form: "layer", "head", "token" or "constant" (`DifferentialOptions`); None means the attention type's own.
        lambda_init: Initial lambda; None means the paper's schedule by depth.
        head_norm: "gain", "plain" or "none"; None means the attention type's own.
        shared_key: Whether both maps use the same key; None means the attention type's own.
        dex_heads: For "dex", the heads that each layer extends, equally many in each; None means all.
        head_norm_eps: Epsilon of the headwise norm.
        max_position_embeddings: Maximum length in tokens.
        rope_parameters: transformers' rotary settings; None means the default type with rope_theta 10,000.
        sliding_window: Number of last positions that a query attends to, its own included; None means all.
        initializer_range: Standard deviation of the initial weights (the paper does not state its own).
        initialization: "normal", or "mimetic" to start attention as a lookup of like tokens (`Attention.init_mimetic`), which
            teaches small models retrieval in far fewer steps. The same for every attention type.
        attn_backend: Backend of the attention op: "auto" or a name that `difftransformer info backends` lists.
        attention_dropout: Must be 0: the paper uses none, and a fused map cannot drop weights.

    Raises:
        ConfigError: A field or a combination of fields is impossible.
    """

    model_type = "difftransformer"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    attention_type: str = "diff"
    vocab_size: int = 32_000
    hidden_size: int = 512
    intermediate_size: int = None  # type: ignore[assignment]  # filled in below, like the next two
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    num_differential_heads: int | None = None
    num_differential_key_value_heads: int | None = None
    num_noise_heads: int | None = None
    value_head_dim: int | None = None
    lambda_form: str | None = None
    lambda_init: float | None = None
    head_norm: str | None = None
    shared_key: bool | None = None
    dex_heads: list[list[int]] | None = None
    head_norm_eps: float = 1e-5
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] | None = None
    sliding_window: int | None = None
    initializer_range: float = 0.02
    initialization: str = "normal"
    tie_word_embeddings: bool = True
    use_cache: bool = True
    attn_backend: str = "auto"
    attention_dropout: float = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for field in COUNTS:
            value = getattr(self, field)
            if value is None and field in UNSET_COUNTS:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{field}={value!r}: give a whole number of at least 1")
        if self.initializer_range <= 0:
            raise ConfigError(f"initializer_range={self.initializer_range}: give a standard deviation above 0")
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ConfigError(
                    f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}; "
                    "change one of them or set head_dim"
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = paper_ffn_width(self.hidden_size)
        if self.rope_parameters is None and "rope_theta" not in kwargs:
            self.rope_parameters = {"rope_type": "default", "rope_theta": DEFAULT_ROPE_THETA}
        elif self.rope_parameters is not None and not isinstance(self.rope_parameters.get("rope_theta"), (int, float)):
            raise ConfigError(f"rope_parameters={self.rope_parameters}: give rope_theta as a number")
        choices = {"attn_backend": ("auto", *backend_names()), "initialization": INITIALIZATIONS}
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ConfigError(f"{field}={getattr(self, field)!r} is unknown; choose one of {', '.join(allowed)}")
        if self.hidden_act not in ACT2FN:
            raise ConfigError(f"hidden_act={self.hidden_act!r} is no activation of transformers; the paper uses silu")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ConfigError(f"sliding_window={self.sliding_window}: a window holds at least the query; use 1 or more")
        if self.attention_dropout:
            raise ConfigError(
                f"attention_dropout={self.attention_dropout}: differential attention has no dropout on its maps; set 0"
            )
        if self.dex_heads is not None and (
            len(self.dex_heads) != self.num_hidden_layers or len({len(set(heads)) for heads in self.dex_heads}) != 1
        ):
            raise ConfigError(
                f"dex_heads={self.dex_heads}: give a list of heads for each of the {self.num_hidden_layers} layers, "
                "equally long"
            )
        self.head_layout()  # impossible heads are refused here, before anything is built
        super().__post_init__(**kwargs)

    def head_layout(self) -> HeadLayout:
        """Return heads and widths of this attention type."""
        return variant(self.attention_type).layout_of(self)

    def twin(self, attention_type: str = "softmax") -> Self:
        """Return the same model with another attention type: equal width, depth, MLP and initialisation."""
        twin = copy.deepcopy(self)
        twin.attention_type = attention_type
        twin.head_layout()
        return twin


AutoConfig.register(DiffTransformerConfig.model_type, DiffTransformerConfig, exist_ok=True)
