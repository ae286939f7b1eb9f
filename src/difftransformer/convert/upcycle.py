"""Make a pretrained language model differential without changing the function that it computes."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import ConfigError
from ..families import FAMILIES
from ..model.weights import CONFIG_FILE
from .checkpoint_io import Converted, WeightsReader, naming_config, read_config, refuse_used, write_converted
from .families import from_family
from .llama import from_llama, has_llamas_layout


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
        to: One of `llama.targets()`, such as "diff", or "softmax" for the plain model in this package's layout;
            "softmax+diff" for the plain model with MLPs wider by as many parameters as "diff" adds.
        head_norm: "none" or None: a headwise norm could not keep the function.
        seed: Seed of the random draws.
        **options: Options of the attention type, such as dex_heads for "dex".

    Raises:
        ConfigError: the source's attention has a feature that differential attention does not have, or the target folder is
            in use.
        CheckpointError: files are missing or damaged, or tensors are not those of the configuration.
        ShapeError: a tensor's shape contradicts config.json.
    """
    source, target = Path(source), Path(target)
    refuse_used(target)
    document = read_config(source)
    at, model_type = source / CONFIG_FILE, str(document.get("model_type"))
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ConfigError(
            f"{at}: model_type={model_type!r} is no language model of transformers; name one of {', '.join(FAMILIES)}"
        )
    if document.get("quantization_config") is not None:
        raise ConfigError(f"{at}: quantization_config is set, expected none; name the model before it is quantized")
    with naming_config(at, model_type):
        config = CONFIG_MAPPING[model_type].from_dict(document)
        convert = from_llama if has_llamas_layout(config) else from_family
        conversion = convert(config, to=to, head_norm=head_norm, seed=seed, **options)
    converted = write_converted(source, target, conversion, model_type, to)
    before = sum(math.prod(shape) for name, shape in conversion.needs.items() if name not in conversion.ties)
    with WeightsReader(target) as weights:
        after = sum(map(math.prod, weights.shapes.values()))
    return Upcycled(converted=converted, parameters=after, added_parameters=after - before)
