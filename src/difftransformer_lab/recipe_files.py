"""Recipes, studies, plans and suites as YAML files, of the user or shipped with the package.

They are checked here before anything heavy is imported, so that a mistake is answered at once.
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from difftransformer.errors import ConfigError
from difftransformer.reading import is_plain_name, parse_yaml
from difftransformer.typed import short


def shipped_recipes(kind: str = ".") -> dict[str, Path]:
    """Recipes that come with the package, by name: beside its modules in a wheel, at the top of a source tree.

    Args:
        kind: Subfolder; by default the recipes for training.
    """
    package = Path(__file__).parent
    folders = [folder for folder in (package / "recipes", package.parents[1] / "recipes") if folder.is_dir()]
    return {path.stem: path for folder in folders[:1] for path in sorted((folder / kind).glob("*.yaml"))}


def read_recipe(path: Path | str) -> dict[str, Any]:
    """Read a recipe as plain data, or one that is shipped by its name; see `read_mapping`."""
    shipped = shipped_recipes() | shipped_recipes("paper")
    document = read_mapping(
        path,
        shipped,
        "a recipe is a mapping with name, model, data and training",
        otherwise="difftransformer train TEXT writes a recipe for a folder or file of .txt, .md, .py or .jsonl; the column "
        "text of a .csv or .parquet file is data.source: hf:FILE in a recipe",
    )
    if isinstance(document.get("name"), str):
        try:
            check_name(document["name"])
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    return document


def check_name(name: str) -> None:
    """Raise a ConfigError unless a recipe's name can name folders."""
    if not name.strip() or not is_plain_name(name) or not name.isprintable():
        raise ConfigError(f"name: {short(name)} names folders; use letters, digits, spaces and _ . -")


def read_mapping(
    path: Path | str, shipped: dict[str, Path], expected: str, *, otherwise: str = "name a YAML file"
) -> dict[str, Any]:
    """Read a YAML file, or one that is shipped by its name.

    Args:
        path: The file, or a name in `shipped`.
        shipped: Files that come with the package.
        expected: What is said where the file holds no mapping.
        otherwise: Advice where a folder or another kind of file is named.
    """
    path = shipped.get(str(path), Path(path))
    advice = "" if path.suffix in (".yaml", ".yml") else f"; {otherwise}"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = get_close_matches(str(path), shipped, n=1)
        advice = (
            f"did you mean {near[0]}?" if near else f"name a YAML file, or one that is shipped: {', '.join(shipped)}"
        )
        raise ConfigError(f"{path}: no such file; {advice}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: a folder; {expected}{advice}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read ({error}){advice}") from None
    try:
        document = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}{advice}") from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: {expected}; got {short(document)}{advice}")
    return document
