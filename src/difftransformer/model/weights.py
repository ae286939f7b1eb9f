"""The files that hold the weights of a saved model: safetensors inside its folder, and nothing else.

A pickle can run code when it is opened, and a name or a link in a folder from elsewhere can lead to any file of the machine.
"""

from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError, ConfigError
from ..reading import is_plain_name, read_json
from ..typed import short

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
INDEX_FILE = WEIGHTS_FILE + ".index.json"
GENERATION_FILE = "generation_config.json"
ADAPTER_FILE, ADAPTER_CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
PIECES = "shard-*-model-*-of-*.safetensors"  # one of each process, of save_pretrained(distributed_checkpoint=True)
# Names of floating-point types, as commands and results files write them.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def weights_files(folder: Path, variant: str | None = None) -> list[str]:
    """Return the names of a folder's weights files.

    Args:
        folder: The folder.
        variant: A part of the files' names, as in `save_pretrained(folder, variant="fp16")`.

    Raises:
        CheckpointError: There are none, or the index, the configuration or a link leads to a pickle or out of the folder.
    """
    _check_files(folder)
    listed = weight_map(folder, variant)
    whole = _of_variant(WEIGHTS_FILE, variant)
    if (folder / whole).is_file():  # as transformers chooses
        return [whole]
    if listed:
        return sorted(set(listed.values()))
    if pieces := sorted(path.name for path in folder.glob(PIECES)):
        return pieces
    if pickles := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
        raise CheckpointError(
            f"{folder / pickles[0]} is a pickle, which can run code when it is opened, and is not read; load the model with "
            "transformers where you trust it, and save_pretrained it as safetensors"
        )
    index = _of_variant(INDEX_FILE, variant)
    raise CheckpointError(f"{folder} has neither {whole} nor {index}; name the folder of a saved model")


def check_weights(folder: Path, variant: str | None = None) -> None:
    """Check a folder as `weights_files` does. That of an adapter may name another folder with its model, which is checked too.

    Raises:
        CheckpointError: As in `weights_files`.
    """
    if (folder / ADAPTER_CONFIG_FILE).is_file() and not (folder / CONFIG_FILE).is_file():
        _check_files(folder)
        folder = Path(str(_read_object(folder / ADAPTER_CONFIG_FILE).get("base_model_name_or_path")))
    if folder.is_dir():
        weights_files(folder, variant)


def refuse_adapter(folder: Path, done: str) -> None:
    """Refuse an adapter beside a model's weights: opening the folder would apply it.

    Args:
        folder: The folder.
        done: What is done with the weights alone, as in "exported".

    Raises:
        ConfigError: There is one.
    """
    if (folder / ADAPTER_FILE).is_file():
        raise ConfigError(f"{folder / ADAPTER_FILE}: adapters are not {done}; merge them into the model")


def weight_map(folder: Path, variant: str | None = None) -> dict[str, str]:
    """Return the file of each tensor that a folder's index lists; an empty mapping without an index.

    Raises:
        CheckpointError: The index is damaged, or names anything but safetensors files of its folder.
    """
    path = folder / _of_variant(INDEX_FILE, variant)
    if not path.exists():
        return {}
    index: Any = read_json(path, error=CheckpointError, advice="copy it again")
    listed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{path}: weight_map is missing, expected tensor names and their files")
    for name in listed.values():
        if not isinstance(name, str) or not is_plain_name(name) or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{path}: {short(name)} is not a safetensors file of this folder; expected plain names"
            )
    return listed


def _of_variant(name: str, variant: str | None) -> str:
    stem, _, ending = name.rpartition(".")
    return name if variant is None else f"{stem}.{variant}.{ending}"


def _read_object(path: Path) -> dict[str, Any]:
    document: Any = read_json(path, error=CheckpointError, advice="copy it again")
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} holds a {type(document).__name__}, expected a JSON object")
    return document


def _check_files(folder: Path) -> None:
    """Check links, settings, which must not name other weights, as transformers lets them, and that no adapter is a pickle."""
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            check_inside(path)
    for path in (folder / CONFIG_FILE, folder / GENERATION_FILE):
        if path.is_file():
            other = _read_object(path).get("transformers_weights")
            if other not in (None, WEIGHTS_FILE, INDEX_FILE):
                raise CheckpointError(
                    f"{path}: transformers_weights={short(other)} is not read; expected {WEIGHTS_FILE}"
                )
    if (folder / ADAPTER_CONFIG_FILE).is_file() and not (folder / ADAPTER_FILE).is_file():
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG_FILE} names an adapter, and there is no {ADAPTER_FILE} here; save it as safetensors, or "
            "merge it into the model"
        )


def check_inside(path: Path) -> None:
    """Check that a file of a model's folder is not a link that leads out of the folder.

    In the cache of the Hugging Face hub, files are links to the blobs of the same model.

    Raises:
        CheckpointError: It is one.
    """
    if not path.is_symlink():
        return
    folder = path.parent.resolve()
    allowed = [folder, *([folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else [])]
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # a loop
        raise CheckpointError(f"{path} is a link that leads nowhere; copy the file into the folder") from None
    if not any(target.is_relative_to(place) for place in allowed):
        raise CheckpointError(f"{path} is a link out of the folder, to {target}; copy the file into the folder")
