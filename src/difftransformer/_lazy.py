"""Import the public names of a package on first use (PEP 562), so that importing the package stays cheap."""

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package that imports its names under `if TYPE_CHECKING:`.

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

    def __getattr__(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    public = sorted(home)
    return __getattr__, lambda: public, public
