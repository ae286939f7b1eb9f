"""Import what a package needs no sooner than it is used, so that importing the package stays cheap."""

import ast
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that imports its names under `if TYPE_CHECKING:` (PEP 562).

    The block is read from the package's source. So the names are written once, as imports that type checkers and
    import-linter see.

    Args:
        package: `__name__` of the package.
    """
    spec = sys.modules[package].__spec__
    source: str = spec.loader.get_source(package)  # type: ignore[union-attr]
    home = {
        alias.name: f"{'.' * statement.level}{statement.module}"
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    modules = {module.lstrip(".").partition(".")[0] for module in home.values()}

    def __getattr__(name: str) -> Any:
        if name in home:
            value = getattr(importlib.import_module(home[name], package), name)
            setattr(sys.modules[package], name, value)
            return value
        if name in modules:
            return importlib.import_module(f".{name}", package)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    public = sorted(home)
    return __getattr__, lambda: public, public


def import_after(first: str, then: str) -> None:
    """Import the module `then` once `first` has been imported, unless `then` lacks something that it imports."""
    if first in sys.modules:
        _import(then)
    else:
        sys.meta_path.insert(0, _After(first, then))


class _After(MetaPathFinder):
    def __init__(self, first: str, then: str) -> None:
        self.first, self.then = first, then

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return what the other finders find of `first`, with a loader that imports `then` at its end."""
        if name != self.first:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_both(module: ModuleType) -> None:
                execute(module)
                _import(self.then)

            spec.loader.exec_module = execute_both  # type: ignore[method-assign]
        return spec


def _import(module: str) -> None:
    with suppress(ImportError):  # which the module raises again on first use
        importlib.import_module(module)
