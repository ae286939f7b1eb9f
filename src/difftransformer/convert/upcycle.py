"""Make a pretrained language model differential without changing the function that it computes."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..model import DiffTransformerConfig, count
from ..model.weights import CONFIG_FILE
from .checkpoint_io import Converted, naming_config, read_config, refuse_used, write_converted
from .llama import CLASSES, from_llama


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
    """Make a Llama or Mistral differential without changing its function; see `llama.py` for how.

    Args:
        source: A folder with config.json and safetensors.
        target: The folder to make. It may exist if it is empty.
        to: One of `llama.targets()`, such as "diff", or "softmax" for the plain model in this package's layout.
        head_norm: "none" or None: a headwise norm could not keep the function.
        seed: Seed of the random draws.
        **options: Options of the attention type, such as dex_heads for "dex".

    Raises:
        ConfigError: the source is no Llama, has a feature that no model of ours has, or the target folder is in use.
        CheckpointError: files are missing or damaged, or tensors are not those of the configuration.
        ShapeError: a tensor's shape contradicts config.json.
    """
    source, target = Path(source), Path(target)
    refuse_used(target)
    document = read_config(source)
    at, model_type = source / CONFIG_FILE, document.get("model_type")
    if model_type not in CLASSES:
        raise ConfigError(
            f"{at}: model_type={model_type!r} does not have Llama's layout; expected one of {', '.join(map(repr, CLASSES))}"
        )
    if document.get("quantization_config") is not None:
        raise ConfigError(f"{at}: quantization_config is set, expected none; name the model before it is quantized")
    with naming_config(at, str(model_type)):
        source_config = CLASSES[model_type].from_dict(document)
        conversion = from_llama(source_config, to=to, head_norm=head_norm, seed=seed, **options)
    converted = write_converted(source, target, conversion, str(model_type), to)
    before = sum(math.prod(shape) for name, shape in conversion.needs.items() if name not in conversion.ties)
    after = count(DiffTransformerConfig(**conversion.config)).parameters
    return Upcycled(converted=converted, parameters=after, added_parameters=after - before)
