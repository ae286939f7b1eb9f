"""What pages say, and what they insert from records."""

import importlib.util
import tempfile
from functools import cache
from math import exp
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SCRIPT = DOCS / "inserted.py"


def text_of(name: str) -> str:
    """Return a page by its path from the root, with one space in place of each line end."""
    return " ".join((ROOT / name).read_text("utf-8").split())


def factor(effect: float, low: float, high: float) -> str:
    """Write an effect on a logarithm as a factor, with its interval, as pages do."""
    return f"{exp(effect):.2f} [{exp(low):.2f}, {exp(high):.2f}]"


def sooner(effect: float, low: float, high: float) -> str:
    """Write how many times as soon, from an effect on the logarithm of steps."""
    return f"{exp(-effect):.1f} [{exp(-high):.1f}, {exp(-low):.1f}]"


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
    return str(pages().fill((DOCS / page).read_text("utf-8")))
