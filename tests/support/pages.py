"""What the documentation inserts from records."""

import importlib.util
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[2] / "docs" / "inserted.py"


def load(path: Path) -> Any:
    """Return a script of docs as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


@cache
def pages() -> Any:
    """Return the functions of docs/inserted.py, with figures in a folder that is not kept."""
    return load(SCRIPT).Inserted(Path(tempfile.mkdtemp()))


@cache
def filled(page: str) -> str:
    """Return a page of docs as the site shows it."""
    return str(pages().fill((SCRIPT.parent / page).read_text("utf-8")))
