"""Names of a package that are imported on first use (PEP 562), so that `--help` loads neither torch nor transformers."""

import importlib
import sys
from collections.abc import Callable
from typing import Any


def lazy_names(
    package: str, modules: dict[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package.

    Args:
        package: The package's `__name__`.
        modules: Relative module name -> public names that it defines.
    """
    home = {name: module for module, names in modules.items() for name in names}
    public = sorted(home)

    def __getattr__(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return public

    return __getattr__, __dir__, public
