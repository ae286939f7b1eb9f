"""A pretrained model of another family made differential without changing its function; see `llama.py` for the reasons.

The model keeps its family's class (`difftransformer.families`). Rows of its queries and keys are made by the variant, and a
bias, or the gain of a norm over all heads, is treated as one more column of their weight.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..attention import Attention, PlainLayer
from ..errors import ConfigError
from ..families import FAMILIES, attention_fields, family_config, refused_features
from .conversion import Conversion, Read, Shape, shapes_of
from .llama import chosen_variant, drawn, kept_options, notes

ATTENTION = "self_attn."
PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def from_family(
    config: PreTrainedConfig, *, to: str, head_norm: str | None = None, seed: int = 0, **options: Any
) -> Conversion:
    """Describe the conversion of a language model of one of `FAMILIES`. The arguments are those of `from_llama`.

    Raises:
        ConfigError: the target is unknown, or the source's attention has a feature that differential attention does not.
    """
    (kind, matched), family = chosen_variant(to, head_norm, options), config.model_type
    if matched is not None:
        raise ConfigError(
            f"--to {to!r}: only a Llama or Mistral without biases can get wider MLPs; choose another --to"
        )
    with torch.device("meta"):
        source = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if features := refused_features(source, config):
        raise ConfigError(
            f"model_type={family!r} has {' and '.join(features)}, which differential attention does not have"
        )
    if family not in FAMILIES:
        raise ConfigError(f"model_type={family!r} is not supported; expected one of {', '.join(FAMILIES)}")
    heads = attention_fields(config)
    document = config.to_dict() | kept_options(kind, heads, options)
    document |= {"family": family, "attention_type": to, "attention_dropout": 0.0}
    ours = family_config(family).from_dict(document)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(ours)
    ours.architectures, ours.dtype = [type(target).__name__], config.dtype
    needs, ties = shapes_of(source.state_dict()), dict(target.all_tied_weights_keys)
    makes = {}
    for name, shape in shapes_of(target.state_dict()).items():
        if name not in ties:
            prefix, inside, part = name.rpartition(ATTENTION)
            layer = _AttentionLayer(prefix + inside, kind, ours.attention_fields(), needs, seed)
            makes[name] = layer.maker(part, shape) if inside else _copy(name)
    return Conversion(
        config=json.loads(ours.to_json_string()), needs=needs, ties=ties, makes=makes, notes=notes(config)
    )


def _copy(name: str) -> Callable[[Read], Tensor]:
    return lambda read: read(name)


@dataclass(frozen=True)
class _AttentionLayer:
    """How the tensors of one attention layer are made from the source's."""

    prefix: str  # of the layer's tensors
    kind: type[Attention]
    config: Any  # the head fields and the variant's options
    needs: Mapping[str, Shape]
    seed: int

    def maker(self, part: str, shape: Shape) -> Callable[[Read], Tensor]:
        """Return the function that makes the tensor `part` of the layer."""
        return lambda read: self._make(part, shape, read)

    def _make(self, part: str, shape: Shape, read: Read) -> Tensor:
        module, _, what = part.rpartition(".")
        if module == "qkv_proj":
            return torch.cat([self._rows(name, what, read) for name in PROJECTIONS])
        if module in PROJECTIONS:
            return self._rows(module, what, read)
        if module in ("q_norm", "k_norm") and self.needs[self.prefix + part] != shape:
            gain = read(self.prefix + part)
            return self._upcycled(f"{module[0]}_proj.weight", lambda _: gain[:, None], read).flatten()
        if part == "o_proj.weight" or module.partition(".")[0] == "differential":
            name = part.removeprefix("differential.")
            return self._upcycled(name, lambda name: read(self.prefix + name), read, shape)
        return read(self.prefix + part)

    def _rows(self, module: str, what: str, read: Read) -> Tensor:
        """Make the weight or bias of a projection; a bias is one more column."""
        made = self._upcycled(f"{module}.weight", lambda name: self._source_rows(name, what, read), read)
        return made.flatten() if what == "bias" else made

    def _source_rows(self, name: str, what: str, read: Read) -> Tensor:
        module = name.removesuffix(".weight")
        fused = f"{self.prefix}qkv_proj.{what}"
        if fused in self.needs:
            heads, groups, width = (
                self.config.num_attention_heads,
                self.config.num_key_value_heads,
                self.config.head_dim,
            )
            rows = read(fused).split([heads * width, groups * width, groups * width])[PROJECTIONS.index(module)]
        else:
            rows = read(f"{self.prefix}{module}.{what}")
        return rows.view(rows.shape[0], -1)

    def _upcycled(self, name: str, of: Read, read: Read, shape: Shape = ()) -> Tensor:
        def normal(key: str, shape: Shape, std: float) -> Tensor:
            return drawn(shape, std, self.prefix.removesuffix(ATTENTION) + key, self.seed)

        def tensor(wanted: str) -> Tensor:
            # New parameters take the dtype of o_proj.weight.
            return of(wanted) if wanted == name else read(self.prefix + wanted)

        return self.kind.upcycled(name, shape, PlainLayer(self.config, tensor, normal))
