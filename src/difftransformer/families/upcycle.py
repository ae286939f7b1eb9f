"""Make a pretrained language model differential without changing the function that it computes; see `llama.py` for the reasons.

A model of Llama's layout becomes one of this package. Another one keeps its family's class (`models.py`): rows of its queries
and keys are made by the variant, and a bias, or the gain of a norm over all heads, is treated as one more column of their
weight.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from ..attention import Attention, PlainLayer
from ..attention.base import PROJECTIONS
from ..errors import ConfigError
from ..model.weights import CONFIG_FILE
from .checkpoint_io import Converted, WeightsReader, naming_config, read_config, refuse_used, write_converted
from .conversion import Conversion, Read, Shape, kept
from .differential_layer import OUTPUTS
from .llama import chosen_variant, drawn, from_llama, has_llamas_layout, kept_options, notes
from .models import attention_fields, family_config, refused_features, shapes_in_files
from .table import FAMILIES, REFUSED

ATTENTION = "self_attn.", "mixer."  # a mixer may be a layer of another kind
QKV = PROJECTIONS[:3]
OUTPUT_WEIGHTS = tuple(f"{name}.weight" for name in OUTPUTS)


@dataclass(frozen=True, kw_only=True)
class Upcycled:
    """What was written.

    Attributes:
        converted: Folder, files, notes.
        parameters: Of the result.
        added_parameters: Of these, those that the source does not have.
    """

    converted: Converted
    parameters: int
    added_parameters: int


def upcycle_folder(
    source: Path | str,
    target: Path | str,
    *,
    to: str,
    head_norm: str | None = None,
    seed: int = 0,
    **options: Any,
) -> Upcycled:
    """Make a pretrained language model differential without changing its function; see `llama.py` for how.

    A Llama or Mistral becomes a model of this package. Another one of `families.FAMILIES` keeps its class, and only its
    attention layers change.

    Args:
        source: A folder with config.json and safetensors.
        target: The folder to make. It may exist if it is empty.
        to: A variant that has `can_upcycle`, such as "diff" or "dex"; "softmax" is the plain model in this package's layout,
            and "softmax+diff" the plain model with MLPs wider by as many parameters as "diff" adds.
        head_norm: "none" or None: a headwise norm could not keep the function.
        seed: Seed of the random draws.
        **options: Options of the attention type, such as dex_heads for "dex".

    Raises:
        ConfigError: the source's attention has a feature that differential attention does not have, an adapter lies beside
            its weights, or the target folder is in use.
        CheckpointError: files are missing or damaged, or tensors don't fit the configuration.
        ShapeError: a tensor's shape contradicts config.json.
    """
    source, target = Path(source), Path(target)
    refuse_used(target)
    document = read_config(source)
    at, model_type = source / CONFIG_FILE, str(document.get("model_type"))
    if model_type not in FAMILIES:
        if model_type in REFUSED:
            raise ConfigError(f"{at}: model_type={model_type!r} cannot be made differential: {REFUSED[model_type]}")
        raise ConfigError(f"{at}: model_type={model_type!r} is not supported; expected one of {', '.join(FAMILIES)}")
    if document.get("quantization_config") is not None:
        raise ConfigError(f"{at}: quantization_config is set, expected none; name the model before it is quantized")
    with naming_config(at, model_type):
        config = CONFIG_MAPPING[model_type].from_dict(document)
        convert = from_llama if has_llamas_layout(config) else from_family
        conversion = convert(config, to=to, head_norm=head_norm, seed=seed, **options)
    converted = write_converted(source, target, conversion, to)
    before = sum(math.prod(shape) for name, shape in conversion.needs.items() if name not in conversion.ties)
    with WeightsReader(target) as weights:
        after = sum(map(math.prod, weights.shapes.values()))
    return Upcycled(converted=converted, parameters=after, added_parameters=after - before)


def from_family(
    config: PreTrainedConfig, *, to: str, head_norm: str | None = None, seed: int = 0, **options: Any
) -> Conversion:
    """Describe the conversion of a language model of one of `FAMILIES`. The arguments are as in `from_llama`.

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
    if features := refused_features(config):
        raise ConfigError(
            f"model_type={family!r} has {' and '.join(features)}, which differential attention does not have"
        )
    heads = attention_fields(config)
    document = config.to_dict() | kept_options(kind, heads, options)
    document |= {"family": family, "attention_type": to, "attention_dropout": 0.0}
    ours = family_config(family).from_dict(document)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(ours)
    ours.architectures, ours.dtype = [type(target).__name__], config.dtype
    needs, ties = shapes_in_files(source), dict(target.all_tied_weights_keys)
    makes = {}
    for name, shape in shapes_in_files(target).items():
        if name not in ties:
            layer, part = _split(name, needs)
            own = _AttentionLayer(layer, kind, ours.attention_fields(), needs, seed)
            makes[name] = own.maker(part, shape) if layer else kept(name)
    return Conversion(
        config=json.loads(ours.to_json_string()),
        needs=needs,
        ties=ties,
        makes=makes,
        notes=notes(config),
        unread=tuple(source._keys_to_ignore_on_load_unexpected or ()),
    )


def _split(name: str, needs: Mapping[str, Shape]) -> tuple[str, str]:
    """Return the prefix of the attention layer that has a tensor, "" for any other tensor, and the rest of the name."""
    for inside in ATTENTION:
        before, attention, part = name.rpartition(inside)
        if attention and (inside == ATTENTION[0] or f"{before}{inside}o_proj.weight" in needs):
            return before + inside, part
    return "", name


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
            return torch.cat([self._rows(name, what, read) for name in QKV])
        if module in QKV:
            return self._rows(module, what, read)
        if module in ("q_norm", "k_norm") and self.needs[self.prefix + part] != shape:
            gain = read(self.prefix + part)
            return self._upcycled(f"{module[0]}_proj.weight", lambda _: gain.view(-1, 1), read).view(shape)
        if part in OUTPUT_WEIGHTS or module.partition(".")[0] == "differential":
            name = OUTPUT_WEIGHTS[0] if part in OUTPUT_WEIGHTS else part.removeprefix("differential.")
            return self._upcycled(name, lambda name: self._read(name, read), read, shape)
        return read(self.prefix + part)

    def _read(self, name: str, read: Read) -> Tensor:
        """Read a tensor of the layer by the name that a variant knows."""
        names = OUTPUT_WEIGHTS if name in OUTPUT_WEIGHTS else (name,)
        return read(next(self.prefix + one for one in names if self.prefix + one in self.needs))

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
            rows = read(fused).split([heads * width, groups * width, groups * width])[QKV.index(module)]
        else:
            rows = read(f"{self.prefix}{module}.{what}")
        return rows.view(rows.shape[0], -1)

    def _upcycled(self, name: str, of: Read, read: Read, shape: Shape = ()) -> Tensor:
        def normal(key: str, shape: Shape, std: float) -> Tensor:
            return drawn(shape, std, self.prefix.removesuffix(ATTENTION[0]) + key, self.seed)

        def tensor(wanted: str) -> Tensor:
            # New parameters take the dtype of o_proj.weight.
            return of(wanted) if wanted == name else self._read(wanted, read)

        return self.kind.upcycled(name, shape, PlainLayer(self.config, tensor, normal))
