"""Find a model by name: a run, a folder, a GGUF file, or a model on the Hugging Face hub."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..errors import CheckpointError, ConfigError, on_one_line
from ..families.checkpoint_io import CARRIED
from ..files import naming
from ..model.transformers_errors import FOREIGN_FAULTS, quietly
from ..model.weights import CONFIG_FILE, INDEX_FILE
from ..sources import check_model, find_model
from ..train import latest_checkpoint

HUB_FILES = (CONFIG_FILE, "*.safetensors", INDEX_FILE, *(name for name in CARRIED if not name.endswith(".py")))


@contextmanager
def source_folder(model: Path | str) -> Iterator[Path]:
    """Provide a model as a folder with config.json and safetensors.

    Args:
        model: Run folder, of which the newest checkpoint is taken; checkpoint or folder of a saved model; GGUF file, which
            is dequantized to fp32; owner/name on the Hugging Face hub, from where no code and no pickle is fetched; or the
            name of a shipped model.

    Raises:
        CheckpointError: The model is none of these, or cannot be read or fetched.
        ConfigError: A package that reads GGUF files is missing.
    """
    check_model(model)
    path = find_model(model)
    if path.is_dir():
        yield latest_checkpoint(path)
    elif path.is_file():
        with tempfile.TemporaryDirectory() as temporary:
            yield _from_gguf(path, Path(temporary))
    else:
        yield _from_hub(str(model))


def _from_gguf(path: Path, folder: Path) -> Path:
    try:
        import gguf  # noqa: F401 - transformers reads the file with it
        from transformers import GgufConfig
    except ImportError:
        raise ConfigError(f"{path}: reading GGUF files needs two more packages; pip install gguf accelerate") from None
    here: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    try:
        with quietly():
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32, **here
            )
            # Readers of the folder would take its weights for quantized ones.
            if hasattr(model.config, "quantization_config"):
                del model.config.quantization_config
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **here)
    except FOREIGN_FAULTS as error:
        raise CheckpointError(f"{path}: cannot be read as a GGUF model ({on_one_line(error)})") from error
    with quietly(), naming(folder):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{name}: no such folder, and it was not found on the hub ({on_one_line(error)})"
        ) from None
