"""The configuration of a model and of its twin: Llama's field names, and one word that chooses the attention."""

import copy
import dataclasses
import math
from typing import Any, Self, get_args

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from ..attention import Attention, HeadLayout, config_options, variant
from ..errors import ConfigError
from ..ops.backends import backend_names
from ..typed import build, short
from .presets import paper_ffn_width

UNSET_COUNTS = ("intermediate_size", "num_key_value_heads", "head_dim", "sliding_window")
COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    *UNSET_COUNTS,
)
MOST_LAYERS, LARGEST_COUNT = 10_000, 2**31 - 1
INITIALIZATIONS = ("fan_in", "normal")
DEFAULT_ROPE_THETA = 10_000.0  # Llama's; the paper states 640,000 for its 64K models only


def refuse_remote_code(cls: Any, auto_class: Any) -> None:
    """Refuse to save the code of a class beside a model, unless the class is from there.

    Raises:
        ConfigError: The class is this package's.
    """
    if cls._auto_class is not None:
        return
    raise ConfigError(
        f"register_for_auto_class({getattr(auto_class, '__name__', auto_class)!r}): transformers would save one file of this "
        "package, which needs the others; `import difftransformer` registers the Auto classes, and `difftransformer export "
        "--with-code` writes code that needs no other file"
    )


class DiffTransformerConfig(PreTrainedConfig):
    """Configuration of a Differential Transformer or of its same-size Transformer twin.

    `num_attention_heads`, `num_key_value_heads` and `head_dim` always describe the same-size plain Transformer. Every
    attention type derives its own heads from them, so `attention_type` alone turns a model into its twin.

    The options of all attention types (`attention.config_options()`), such as lambda_form or num_noise_heads, are fields
    too. Each type's class documents its own.

    Args:
        attention_type: A name in `attention.VARIANTS`, such as "diff" (DIFF V1, arXiv:2410.05258) or "softmax" (the plain
            Transformer).
        vocab_size: Number of tokens.
        hidden_size: Width of the model.
        intermediate_size: Inner width of SwiGLU; None means round(8/3 hidden_size) (arXiv:2410.05258 section 2.2).
        num_hidden_layers: Number of layers.
        num_attention_heads: Heads of the plain Transformer.
        num_key_value_heads: Key/value heads of the plain Transformer; None means num_attention_heads.
        head_dim: Width of a head of the plain Transformer and of one differential map; None means
            hidden_size / num_attention_heads.
        rms_norm_eps: eps of the RMSNorms of the residual stream, queries and keys.
        qk_norm: Whether queries and keys are normalised before they are rotated, each map's by itself, as in Qwen3
            (`Attention`). It is the same for every attention type.
        hidden_act: Activation of the gated MLP.
        max_position_embeddings: Longest trained length, in tokens.
        rope_parameters: transformers' rotary settings; None means the default type with rope_theta 10,000.
        sliding_window: Number of last positions that a query attends to, itself included; None means all.
        is_causal: Whether tokens see only themselves and what precedes them. False makes a bidirectional encoder, which needs
            sliding_window=None.
        initialization: How matrices start (see `model.initialization`; the paper states nothing): "fan_in" by the width of
            their input, or "normal" from N(0, initializer_range^2). "mimetic", as early versions saved it, means "normal" with
            mimetic_attention.
        initializer_range: Standard deviation of the "normal" start.
        embedding_multiplier: Factor of the embeddings before the first layer, also of `inputs_embeds`; None means
            sqrt(hidden_size) with the "fan_in" start and 1 with the "normal" one.
        depth_scaled_residual: Whether o_proj and down_proj start divided by sqrt(2 num_hidden_layers), as in GPT-2.
        mimetic_attention: Whether attention starts as a lookup of like tokens (`Attention.mimetic_key`), from which small
            models learn retrieval in far fewer steps. It is the same for every attention type.
        small_first_logits: Whether the gain of the last norm starts at 1 / sqrt(hidden_size), so that the first loss of a
            model with tied embeddings is near ln(vocab_size). Otherwise it starts at 1, and with the "fan_in" start such a
            model begins by naming the token that it has just read, with a logit near sqrt(hidden_size).
        tie_word_embeddings: Whether the output layer is the embedding.
        pad_token_id, bos_token_id, eos_token_id: Ids of the tokens that pad, begin and end a text, as in transformers; None for
            none.
        use_cache: Whether generation keeps keys and values.
        attn_backend: Backend of the attention op: "auto" or a name that `difftransformer info backends` lists.
        attention_dropout: Must be 0: the paper uses none, and a fused map cannot drop weights.

    Raises:
        ConfigError: A field or a combination of fields is impossible.
    """

    model_type = "difftransformer"
    keys_to_ignore_at_inference = ["past_key_values"]
    attention_type: str = "diff"
    vocab_size: int = 32_000
    hidden_size: int = 512
    intermediate_size: int = None  # type: ignore[assignment]  # filled in below, like the next two
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = None  # type: ignore[assignment]
    head_dim: int = None  # type: ignore[assignment]
    rms_norm_eps: float = 1e-5
    qk_norm: bool = False
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] | None = None
    sliding_window: int | None = None
    is_causal: bool = True
    initialization: str = "fan_in"
    initializer_range: float = 0.02
    embedding_multiplier: float = None  # type: ignore[assignment]
    depth_scaled_residual: bool = False
    mimetic_attention: bool = False
    small_first_logits: bool = False
    tie_word_embeddings: bool = True
    use_cache: bool = True
    attn_backend: str = "auto"
    attention_dropout: float = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        counts, unset = [*COUNTS], [*UNSET_COUNTS]
        for name, option in config_options().items():
            value = kwargs.pop(name, option.default)
            if int in (option.type, *get_args(option.type)):
                counts.append(name)
                if option.default is None:
                    unset.append(name)
            else:
                value = build(option.type, value, source="", key=name, error=ConfigError)
            setattr(self, name, value)
        for field in counts:
            value = getattr(self, field)
            if value is None and field in unset:
                continue
            most = MOST_LAYERS if field == "num_hidden_layers" else LARGEST_COUNT
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{field}={short(value)}: give a whole number of at least 1 and at most {most:,}")
        for field in ("qk_norm", "is_causal", "tie_word_embeddings", "use_cache"):
            setattr(self, field, build(bool, getattr(self, field), source="", key=field, error=ConfigError))
        if self.initialization == "mimetic":
            self.initialization, self.mimetic_attention = "normal", True
        if self.embedding_multiplier is None:
            self.embedding_multiplier = self.hidden_size**0.5 if self.initialization == "fan_in" else 1.0
        for field in ("rms_norm_eps", "initializer_range", "embedding_multiplier", "attention_dropout"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ConfigError(f"{field}={short(value)}: give a finite number of at least 0")
        for field, what in (("initializer_range", "a standard deviation"), ("embedding_multiplier", "a factor")):
            if getattr(self, field) == 0:
                raise ConfigError(f"{field}={getattr(self, field)}: give {what} above 0")
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
        elif self.rope_parameters is not None:
            theta = self.rope_parameters.get("rope_theta") if isinstance(self.rope_parameters, dict) else None
            if not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
                raise ConfigError(f"rope_parameters={short(self.rope_parameters)}: give rope_theta as a number above 0")
            part = self.rope_parameters.get("partial_rotary_factor", 1.0)
            if part != 1 and self.rope_parameters.get("rope_type", "default") == "default":
                raise ConfigError(f"partial_rotary_factor={part}: all features of a head are turned; leave it out")
        choices = {"attn_backend": ("auto", *backend_names()), "initialization": INITIALIZATIONS}
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                raise ConfigError(f"{field}={getattr(self, field)!r} is unknown; choose one of {', '.join(allowed)}")
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACT2FN:
            raise ConfigError(
                f"hidden_act={self.hidden_act!r} is not an activation of transformers; the paper uses silu"
            )
        if self.sliding_window is not None and not self.is_causal:
            raise ConfigError(
                f"sliding_window={self.sliding_window} with is_causal=False: only causal attention has a window; drop one"
            )
        if self.attention_dropout:
            raise ConfigError(
                f"attention_dropout={self.attention_dropout}: differential attention has no dropout on its maps; set 0"
            )
        # A negative one counts from the end, such as Llama's -1.
        if self.pad_token_id is not None and not -self.vocab_size <= self.pad_token_id < self.vocab_size:
            raise ConfigError(
                f"pad_token_id={self.pad_token_id}: the vocabulary has {self.vocab_size} tokens; give one of them or None"
            )
        self.head_layout()  # raises an error for impossible heads before anything is built
        if (
            self._auto_class is None
        ):  # this is not the code beside the weights that auto_map names, which is not saved again
            kwargs.pop("auto_map", None)
        super().__post_init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the configuration of weights that exist already, as `PreTrainedConfig.from_dict` does.

        A document that does not state the start describes weights without an embedding multiplier: those of an early version,
        or of another layout.
        """
        return super().from_dict({"initialization": "normal", **config_dict}, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Refuse what transformers' method of this name does; see `refuse_remote_code`."""
        refuse_remote_code(cls, auto_class)

    def __eq__(self, other: object) -> bool:
        names = [*(field.name for field in dataclasses.fields(self)), *config_options()]
        return type(other) is type(self) and all(
            getattr(self, name, None) == getattr(other, name, None) for name in names
        )

    @classmethod
    def field_types(cls) -> dict[str, Any]:
        """Return the type of every field, the attention types' options included."""
        return cls.__annotations__ | {name: option.type for name, option in config_options().items()}

    @property
    def attention(self) -> type[Attention]:
        """The class of the attention layers."""
        return variant(self.attention_type)

    @property
    def base_model_tp_plan(self) -> dict[str, str]:
        """transformers' tensor-parallel plan."""
        plan = self.attention.tensor_parallel(self)
        attention = {f"layers.*.self_attn.{name}".rstrip("."): how for name, how in plan.items()}
        mlp = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
        return attention | {f"layers.*.mlp.{name}": how for name, how in mlp.items()}

    @base_model_tp_plan.setter
    def base_model_tp_plan(self, plan: dict[str, str]) -> None:
        # transformers 5.19 adds its entry for tied embeddings to any plan; without it every process holds the whole embedding.
        del plan

    @property
    def per_layer_config(self) -> list[Self]:
        """This configuration with the heads and width of the cache, for each layer; transformers allocates caches from it."""
        return [with_heads_of_cache(self, self.head_layout())] * self.num_hidden_layers

    def head_layout(self) -> HeadLayout:
        """Return the heads and widths of this attention type."""
        return self.attention.layout_of(self)

    def twin(self, attention_type: str = "softmax") -> Self:
        """Return the configuration of the same model with another attention type: equal width, depth, MLP and initialization.

        Raises:
            ConfigError: The heads do not fit that type.
        """
        twin = copy.deepcopy(self)
        twin.attention_type = attention_type
        twin.head_layout()
        return twin


def with_heads_of_cache(config: Any, layout: HeadLayout) -> Any:
    """Return a copy of a configuration with the heads and width of the cache."""
    cached = copy.copy(config)
    cached.num_key_value_heads, cached.head_dim = layout.cache_heads, layout.value_width
    if layout.key_width != layout.value_width:
        cached.qk_head_dim = layout.key_width  # transformers then allocates at the first update
    return cached
