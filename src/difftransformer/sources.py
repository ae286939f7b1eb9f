"""Where a model may come from. Checked here before anything heavy is imported."""

from pathlib import Path

from .errors import CheckpointError

RECIPE_FILE = "config.yaml"
"""The recipe of a run, in its folder."""
DIRECTORY_FILE = "directory"
"""Where a run was begun and relative paths of its recipe begin, as a path from its folder or an absolute one, in its folder."""
_SHIPPED = Path(__file__).parent / "shipped"


def shipped_models() -> dict[str, Path]:
    """Return the folders of the small trained models that come with the package, by name."""
    return {path.parent.name: path.parent for path in sorted(_SHIPPED.glob("*/config.json"))}


def find_model(model: Path | str) -> Path:
    """Return the path of a model. The name of a shipped model stands for its folder, unless there is such a file here."""
    path = Path(model)
    return path if path.exists() else shipped_models().get(str(model), path)


def name_of(model: Path | str) -> str:
    """Return the name of a model for folders of results, which for a checkpoint begins with its run's."""
    path = Path(model).resolve()
    return f"{path.parents[1].name}-{path.name}" if path.parent.name == "checkpoints" else path.name


def check_model(model: Path | str) -> None:
    """Check that a model may be where its name says: a folder, a GGUF file, owner/name on the hub, or a shipped one.

    Raises:
        CheckpointError: It cannot be.
    """
    path = find_model(model)
    if path.is_file() and path.suffix != ".gguf":
        raise CheckpointError(f"{path} is a file; name a folder with config.json and safetensors or a .gguf file")
    if not path.exists() and (path.is_absolute() or str(model).count("/") != 1):
        raise CheckpointError(
            f"{model}: no such folder; name a folder, a .gguf file, owner/name on the hub, or a shipped model: "
            f"{', '.join(shipped_models())}"
        )


def where_begun(run: Path) -> Path:
    """Return where relative paths of a run's recipe begin if that is recorded, still there and not here; else an empty path."""
    if not (record := run / DIRECTORY_FILE).is_file():
        return Path()
    place = run.resolve() / record.read_text(encoding="utf-8", errors="replace").strip()
    return place if place.is_dir() and not place.samefile(Path()) else Path()
