"""Language models of Llama's layout made differential, or this package's plain Transformer, without changing their function.

Every source head stays one head, with a value of its own width, so that odd head counts are no obstacle:

| to        | what is added                                           | why nothing changes at the start               |
| --------- | ------------------------------------------------------- | ---------------------------------------------- |
| `softmax` | nothing                                                 | it is the same model                           |
| `diff`    | Q2, K2 (copies of Q1, K1), four lambda vectors a layer  | both exponents are equal and lambda_init is 0  |
| `diff_v2` | Q2 (a copy of Q1), the projection of lambda (zeros)     | lambda is sigmoid(0) = 1/2, and W_O is doubled |
| `grouped_diff` | noise heads (copies of signal heads), as for `diff` | as for `diff`                                  |
| `grouped_diff_v2` | as for `diff_v2`, and the gate's projection (zeros) | as `diff_v2`; the gate is 1/2, W_O quadrupled |
| `dex`     | W_D (random) and lambda (0) for each chosen head        | lambda is 0                                    |
| `gate`    | the gate's projection (zeros)                           | the gate is 1/2, and W_O is doubled            |
| `diff_gate` | as for `diff` and `gate`                              | as for `diff` and `gate`                       |
| `softmax+TYPE` | MLPs wider by as many parameters as TYPE adds      | the new columns of down_proj are 0             |

With another lambda_form, lambda starts at 0 as in `diff`, or by token at 1/2 as in `diff_v2`.

Each lambda has a gradient from the first step, and what only lambda lets through from the second.

A headwise norm would discard the size of every row, which W_O has learned to read, so `diff` starts without one.
"""

import json
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..attention import Attention, AttentionConfig, PlainLayer, SoftmaxAttention, variant, variants
from ..attention.dex import DifferentialExtension
from ..errors import ConfigError
from ..model import DiffTransformerConfig, DiffTransformerForCausalLM, count, matching_width
from .conversion import Conversion, Read, Shape, kept, shapes_of, with_multiplier_folded
from .diffllama import SHARED_FIELDS, TIES, left_out, stock_fields

MODEL_TYPES = ("llama", "mistral")
HEAD_FIELDS = ("num_attention_heads", "num_key_value_heads", "head_dim")
MUST_BE = {"attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}


def targets() -> list[str]:
    """Return the attention types that a pretrained Transformer can be given without changing its function."""
    return [name for name, kind in variants().items() if kind.can_upcycle]


def has_llamas_layout(config: PreTrainedConfig) -> bool:
    """Whether a model of this package can express the source."""
    return config.model_type in MODEL_TYPES and not beyond_layout(config)


def beyond_layout(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the fields with values that no model of this package has."""
    values = {field: getattr(config, field, expected) for field, expected in MUST_BE.items()}
    return {field: value for field, value in values.items() if value != MUST_BE[field]}


def from_llama(
    config: PreTrainedConfig,
    *,
    to: str,
    head_norm: str | None = None,
    seed: int = 0,
    **options: Any,
) -> Conversion:
    """Describe the conversion of a Llama or Mistral.

    Args:
        config: The source's configuration; `has_llamas_layout` holds.
        to: One of `targets()`, or softmax+TYPE: the plain Transformer with as many parameters as TYPE would have.
        head_norm: "none" or None; see above.
        seed: Seed of the random draws.
        **options: Options of the attention type, such as dex_heads.

    Raises:
        ConfigError: the target is unknown, or an option is not one of its options.
    """
    kind, matched = chosen_variant(to, head_norm, options)
    fields: dict[str, Any] = {name: getattr(config, name) for name in (*SHARED_FIELDS, *HEAD_FIELDS)} | {
        "attention_type": kind.name,
        "sliding_window": getattr(config, "sliding_window", None),
        "rope_parameters": dict(config.rope_parameters),
    }
    fields |= kept_options(kind, config, options)
    of_model = {"architectures": ["DiffTransformerForCausalLM"], "dtype": config.dtype}
    ours = DiffTransformerConfig.from_dict(fields | of_model)
    if matched is not None:
        larger = DiffTransformerConfig.from_dict(
            fields | {"attention_type": matched.name} | matched.upcycled_options(config, {})
        )
        ours.intermediate_size = matching_width(ours, count(larger).parameters)
    ties = TIES if config.tie_word_embeddings else {}
    with torch.device("meta"):
        needs = shapes_of(AutoModelForCausalLM.from_config(config, attn_implementation="eager").state_dict())
        wanted = shapes_of(DiffTransformerForCausalLM(ours).state_dict())
    makes = {name: _make(name, shape, ours, seed) for name, shape in wanted.items() if name not in ties}
    return Conversion(
        config=json.loads(ours.to_json_string()), needs=needs, ties=ties, makes=makes, notes=notes(config)
    )


def to_llama(config: DiffTransformerConfig, *, untie: bool = False) -> Conversion:
    """Describe the conversion of a softmax twin, or of a DEX model, to transformers' Llama.

    The tensors are the same, but for the embedding: Llama has no multiplier, so it is folded in. DEX's maps of outputs are
    multiplied into o_proj (O W_O^T with O - lambda O W_D in place of O).

    Args:
        config: The source's configuration.
        untie: Whether a tied output layer becomes a matrix of its own.

    Raises:
        ConfigError: Llama cannot express the model; the message names the field, its value and what is possible.
    """
    possible = {
        "softmax_head_norm": "none",
        "softmax_head_scale": 1.0,
        "qk_norm": False,
        "sliding_window": None,
        "is_causal": True,
    }
    kind = config.attention
    if kind not in (SoftmaxAttention, DifferentialExtension):
        raise ConfigError(
            f"attention_type={kind.name!r}: Llama can express 'softmax' and 'dex' only; export --with-code"
        )
    for field, expected in possible.items():
        if getattr(config, field) != expected:
            raise ConfigError(
                f"{field}={getattr(config, field)!r}: Llama can express {expected!r} only; export --with-code"
            )
    if config.hidden_size % config.num_attention_heads:  # which transformers asks of a Llama, whatever its head_dim
        raise ConfigError(
            f"num_attention_heads={config.num_attention_heads}: Llama can express divisors of hidden_size="
            f"{config.hidden_size} only; export --with-code"
        )
    fields = {name: getattr(config, name) for name in (*SHARED_FIELDS, *HEAD_FIELDS)} | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
    }
    ties = TIES if config.tie_word_embeddings else {}
    with torch.device("meta"):
        needs = shapes_of(DiffTransformerForCausalLM(config).state_dict())
    makes = {name: kept(name) for name in needs if name not in ties and ".self_attn.dex_" not in name}
    if kind is DifferentialExtension:
        for layer_index in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer_index}.self_attn."
            chosen = kind.arguments_of(config, layer_index)["dex_heads"]
            heads = range(config.num_attention_heads) if chosen is None else sorted(chosen)
            makes[f"{prefix}o_proj.weight"] = partial(_with_extension, prefix, heads, config.head_dim)
    conversion = Conversion(
        config=fields | stock_fields(config), needs=needs, ties=ties, makes=makes, notes=left_out(config, "Llama")
    )
    return with_multiplier_folded(conversion, config, "Llama", untie=untie)


def check_target(to: str) -> tuple[type[Attention], type[Attention] | None]:
    """Return the class of a target, and for softmax+TYPE that of TYPE.

    Raises:
        ConfigError: there is no such target.
    """
    name, plus, matched = to.partition("+")
    if name not in targets() or (plus and (name != SoftmaxAttention.name or matched not in targets())):
        raise ConfigError(
            f"--to {to!r} is unknown; choose one of {', '.join(targets())}, or softmax+TYPE with one of them"
        )
    return variant(name), variant(matched) if plus else None


def chosen_variant(
    to: str, head_norm: str | None, options: Collection[str]
) -> tuple[type[Attention], type[Attention] | None]:
    """Return `check_target` after checking that the target can keep a pretrained model's function with these options."""
    kind, matched = check_target(to)
    if head_norm not in (None, "none"):
        raise ConfigError(
            f"head_norm={head_norm!r}: a headwise norm discards the size of each row, so the model could not keep its "
            "function; use 'none'"
        )
    for name in options:
        if name not in kind.config_options:
            raise ConfigError(f"{name} is not an option of --to {to!r}; leave it out")
    return kind, matched


def kept_options(kind: type[Attention], config: AttentionConfig, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options and those with which a pretrained model keeps its function.

    Raises:
        ConfigError: a given option is another than that.
    """
    needed = kind.upcycled_options(config, options)
    for name, value in options.items():
        if name in needed and value != needed[name]:
            raise ConfigError(
                f"{name}={value!r}: the model would not keep its function; leave it out, which means {needed[name]!r}"
            )
    return {**options, **needed}


def _make(name: str, shape: Shape, config: DiffTransformerConfig, seed: int) -> Callable[[Read], Tensor]:
    """Return the function that makes one tensor of the result from the source's tensors."""
    layer, attention, part = name.partition("self_attn.")
    if ".mlp." in name:
        return partial(_wider, name, shape, config.initializer_range, seed)
    if not attention:
        return kept(name)

    def make(read: Read) -> Tensor:
        def normal(key: str, shape: Shape, std: float) -> Tensor:
            return drawn(shape, std, f"{layer}{key}", seed)

        plain = PlainLayer(config, lambda part: read(f"{layer}self_attn.{part}"), normal)
        return config.attention.upcycled(part, shape, plain)

    return make


def _with_extension(prefix: str, heads: Sequence[int], width: int, read: Read) -> Tensor:
    """Multiply I - lambda W_D of the chosen heads into o_proj's weight (M, H E): W_O - lambda W_O W_D^T."""
    weight = read(f"{prefix}o_proj.weight")
    parts = weight.double().unflatten(1, (-1, width))
    lam, maps = read(f"{prefix}dex_lambda").double(), read(f"{prefix}dex_proj").double()
    for place, head in enumerate(heads):
        parts[:, head] -= lam[place] * parts[:, head] @ maps[place].T
    return parts.flatten(1).to(weight.dtype)


def _wider(name: str, shape: Shape, std: float, seed: int, read: Read) -> Tensor:
    """Append random rows to gate_proj and up_proj, and zero columns to down_proj, up to the shape; at most one of the two."""
    old = read(name)
    rows, columns = (new - there for new, there in zip(shape, old.shape, strict=True))
    if rows:
        old = torch.cat((old, drawn((rows, shape[1]), std, name, seed).to(old.dtype)))
    return torch.cat((old, old.new_zeros(shape[0], columns)), 1) if columns else old


def drawn(shape: Shape, std: float, name: str, seed: int) -> Tensor:
    """Draw a tensor from N(0, std^2), the same for the same name and seed."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
    return torch.randn(shape, generator=generator) * std


def notes(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return sentences about what the result leaves out."""
    dropout = getattr(config, "attention_dropout", 0.0)
    return (f"attention_dropout={dropout} is left out: maps here have no dropout",) if dropout else ()
