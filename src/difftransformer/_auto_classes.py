"""Make transformers' Auto classes know the model type, in either order of import, without importing transformers.

transformers has no entry points: a model type is known once it is registered, which our configuration module does at its
end. That loads transformers and torch, which `import difftransformer` must not. So it is imported when transformers' own
configuration_auto is. The model classes follow when the first configuration is made: by then no import is half done.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

THEIRS = "transformers.models.auto.configuration_auto"
OURS = "difftransformer.model.config"


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets the usual finders find the waited-for module, and imports ours after it was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != THEIRS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(OURS)  # a no-op where ours is what asked for transformers

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register_auto_classes() -> None:
    """Register now if transformers' Auto classes are loaded, else when they are."""
    if THEIRS in sys.modules:
        importlib.import_module(OURS)
    else:
        sys.meta_path.insert(0, _AfterImport())
