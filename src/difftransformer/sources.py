"""Where a model may come from. Checked here before anything heavy is imported."""

from pathlib import Path

from .errors import CheckpointError


def check_model(model: Path | str) -> None:
    """Check that a model may be where its name says: a folder, a GGUF file, or owner/name on the hub.

    Raises:
        CheckpointError: It cannot be.
    """
    path = Path(model)
    if path.is_file() and path.suffix != ".gguf":
        raise CheckpointError(f"{path} is a file; name a folder with config.json and safetensors or a .gguf file")
    if not path.exists() and (path.is_absolute() or str(model).count("/") != 1):
        raise CheckpointError(f"{model}: no such folder; name a folder, a .gguf file, or owner/name on the hub")
