"""Make a pretrained language model differential without changing the function that it computes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from ..model import DiffTransformerConfig, count
from .checkpoint_io import CONFIG_FILE, Converted, naming_config, read_config, refuse_used, write_converted
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
    dex_heads: Sequence[Sequence[int]] | None = None,
    seed: int = 0,
) -> Upcycled:
    """Make a Llama or Mistral differential without changing its function; see `llama.py` for how.

    Args:
        source: A folder with config.json and safetensors.
        target: The folder to make. It may exist if it is empty.
        to: "diff", "diff_v2", "dex", or "softmax" for the plain model in this package's layout.
        head_norm: Only "none": a headwise norm could not keep the function.
        dex_heads: For "dex", the heads that each layer extends, equally many in each; None means all.
        seed: Of what is drawn at random.

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
        conversion = from_llama(
            CLASSES[model_type].from_dict(document), to=to, head_norm=head_norm, dex_heads=dex_heads, seed=seed
        )
    converted = write_converted(source, target, conversion, str(model_type), to)
    before = sum(math.prod(shape) for name, shape in conversion.needs.items() if name not in conversion.ties)
    after = count(DiffTransformerConfig(**conversion.config)).parameters
    return Upcycled(converted=converted, parameters=after, added_parameters=after - before)
