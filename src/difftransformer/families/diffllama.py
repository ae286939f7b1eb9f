"""DiffLlama, the Differential Transformer of transformers (`transformers/models/diffllama/modeling_diffllama.py`).

It differs from a V1 model of this package in these points:
- Heads: DiffLlama counts twice as many. Its head i makes a differential head with head i + H, ours with its neighbour. Key
  heads and the two halves of a value pair in the same way.
- Headwise norm: DiffLlama's has no gain. Our gain is folded into the columns of o_proj; on the way back the model gets
  `head_norm="plain"`, which has none either.
- eps: rms_norm_eps serves all of its norms.
- lambda_init always follows the paper's schedule by depth.
- Embeddings: DiffLlama has no multiplier. Ours is folded into the embedding.

Both split rotary embeddings into halves.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import __version__ as transformers_version

from ..attention import DifferentialAttention, HeadLayout
from ..errors import ConfigError
from ..model import DiffTransformerConfig, DiffTransformerForCausalLM
from .attention_weights import fold_gain, heads_first, maps_first
from .conversion import EMBEDDING, OUTPUT, Conversion, Read, kept, shapes_of, with_multiplier_folded

SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
)
TIES = {OUTPUT: EMBEDDING}


def to_diffllama(config: DiffTransformerConfig, *, untie: bool = False) -> Conversion:
    """Describe the conversion of a V1 model of this package.

    Args:
        config: The source's configuration.
        untie: Whether a tied output layer becomes a matrix of its own.

    Raises:
        ConfigError: DiffLlama cannot express the model; the message names the field, its value and what is possible.
    """
    _refuse_what_diffllama_lacks(config)
    layout = config.head_layout()
    fields = {name: getattr(config, name) for name in SHARED_FIELDS} | {
        "model_type": DiffLlamaConfig.model_type,
        "architectures": ["DiffLlamaForCausalLM"],
        "num_attention_heads": 2 * layout.num_heads,
        "num_key_value_heads": 2 * layout.num_key_value_heads,
        "head_dim": layout.head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "lambda_std_dev": 0.1,
    }
    document = fields | stock_fields(config)
    notes = left_out(config, "DiffLlama")
    conversion = _conversion(document, DiffTransformerForCausalLM, config, layout, maps_first, notes)
    return with_multiplier_folded(conversion, config, "DiffLlama", untie=untie)


def from_diffllama(config: DiffLlamaConfig) -> Conversion:
    """Describe the conversion of a DiffLlama. Converting the result back restores every tensor to the bit.

    Raises:
        ConfigError: A field has a value that no model of this package has.
    """
    _refuse_what_ours_lacks(config)
    fields = {name: getattr(config, name) for name in SHARED_FIELDS} | {
        "attention_type": DifferentialAttention.name,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "head_norm": "plain",
        "head_norm_eps": config.rms_norm_eps,
        "rope_parameters": dict(config.rope_parameters),
    }
    if 2 * config.head_dim * config.num_attention_heads == config.hidden_size:
        # A head_dim of this size would otherwise be refused as one that was halved twice.
        fields["num_differential_heads"] = config.num_attention_heads // 2
        fields["num_differential_key_value_heads"] = config.num_key_value_heads // 2
    fields |= {"architectures": ["DiffTransformerForCausalLM"], "dtype": config.dtype}
    ours = DiffTransformerConfig.from_dict(fields)
    document = json.loads(ours.to_json_string())
    return _conversion(document, DiffLlamaForCausalLM, config, ours.head_layout(), heads_first)


def _conversion(
    document: dict[str, Any],
    source_class: type[PreTrainedModel],
    source_config: PreTrainedConfig,
    layout: HeadLayout,
    permute: Callable[[Tensor, int], Tensor],
    notes: tuple[str, ...] = (),
) -> Conversion:
    """Convert all tensors of the source: permute heads, fold a gain into o_proj, keep the rest."""
    with torch.device("meta"):  # allocates nothing
        needs = shapes_of(source_class(source_config).state_dict())
    ties = TIES if source_config.tie_word_embeddings else {}

    def make(name: str) -> Callable[[Read], Tensor]:
        gain = name.replace(".o_proj.", ".head_norm.")
        if name.endswith((".q_proj.weight", ".k_proj.weight", ".v_proj.weight")):
            heads = layout.num_heads if name.endswith(".q_proj.weight") else layout.num_key_value_heads
            return lambda read: permute(read(name), heads)
        if gain != name and gain in needs:
            return lambda read: fold_gain(read(name), read(gain))
        return kept(name)

    names = [name for name in needs if name not in ties and not name.endswith(".head_norm.weight")]
    return Conversion(config=document, needs=needs, ties=ties, makes={name: make(name) for name in names}, notes=notes)


def _refuse_what_diffllama_lacks(config: DiffTransformerConfig) -> None:
    if config.attention_type != DifferentialAttention.name:
        raise ConfigError(
            f"attention_type={config.attention_type!r}: DiffLlama has V1 attention alone; "
            f"only attention_type={DifferentialAttention.name!r} can be exported"
        )
    options, layout = DifferentialAttention.options_of(config), config.head_layout()
    for field, value, possible, reason in (
        ("lambda_form", options.lambda_form, ("layer",), "has one lambda a layer"),
        ("lambda_init", options.lambda_init, (None,), "computes lambda_init from the depth and has no setting for it"),
        ("lambda_value", options.lambda_value, (None,), "has lambda_init as the constant term of lambda"),
        ("head_scale", options.head_scale, (None,), "multiplies heads by 1 - lambda_init"),
        ("head_norm", options.head_norm, ("gain", "plain"), "always normalises heads"),
        ("shared_key", options.shared_key, (False,), "has a key for each map"),
        ("value_head_dim", layout.value_head_dim, (2 * layout.head_dim,), "has values of twice the head_dim"),
        ("head_norm_eps", config.head_norm_eps, (config.rms_norm_eps,), "uses rms_norm_eps in every norm"),
        ("qk_norm", config.qk_norm, (False,), "has no norm of queries and keys"),
        ("sliding_window", config.sliding_window, (None,), "sees all positions and ignores the field"),
        ("is_causal", config.is_causal, (True,), "is a decoder"),
    ):
        if value not in possible:
            expected = " or ".join(map(repr, possible))
            raise ConfigError(f"{field}={value!r}: DiffLlama {reason}; it can express {expected} only")


def _refuse_what_ours_lacks(config: DiffLlamaConfig) -> None:
    for field, value in (("attention_bias", config.attention_bias), ("attention_dropout", config.attention_dropout)):
        if value:
            raise ConfigError(
                f"{field}={value!r}: models of this package have neither biases nor dropout in attention; expected "
                f"{field}={type(value)()!r}"
            )
    for field in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, field)
        if count < 2 or count % 2:
            raise ConfigError(f"{field}={count}: DiffLlama makes one differential head of two; expected an even number")


def left_out(config: DiffTransformerConfig, target: str) -> tuple[str, ...]:
    """Return sentences about fields that a model of transformers does not have."""
    defaults = {
        "attn_backend": "auto",
        "initialization": "normal",
        "depth_scaled_residual": False,
        "mimetic_attention": False,
        "small_first_logits": False,
    }
    return tuple(
        f"{field}={getattr(config, field)!r} is left out: {target} has no such field, and it does not belong to the weights"
        for field, default in defaults.items()
        if getattr(config, field) != default
    )


def stock_fields(config: DiffTransformerConfig) -> dict[str, Any]:
    """Return rope_parameters for transformers 5, the fields that earlier releases and other tools read, dtype and version."""
    parameters = dict(config.rope_parameters or {})
    fields: dict[str, Any] = {"rope_parameters": parameters, "rope_theta": parameters["rope_theta"]}
    if parameters.get("rope_type", "default") != "default":
        fields["rope_scaling"] = {name: value for name, value in parameters.items() if name != "rope_theta"}
    if config.dtype is not None:
        fields["dtype"] = str(config.dtype).removeprefix("torch.")
    return fields | {"transformers_version": transformers_version}
