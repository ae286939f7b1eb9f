"""Where models and texts come from. Checked here before anything heavy is imported."""

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


def attribution(source: str) -> str | None:
    """Return whom the text of a source is by, where its licence asks to say so (CC BY-SA 4.0); None for other sources."""
    name, _, language = source.partition(":")
    if name == "wiki-offline":
        return f"Lead sections of vital articles by the contributors of Wikipedia, {language or 'en'}.wikipedia.org"
    if "wikitext" in source.lower():
        return "WikiText-2 (arXiv:1609.07843), from articles by the contributors of Wikipedia"
    return None
