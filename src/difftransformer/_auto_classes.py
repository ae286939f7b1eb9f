"""Make transformers' Auto classes know the model, in either order of import, without importing transformers.

transformers has no entry points: a model type is known once it is registered, which our configuration and modeling
modules do at their end. They load transformers and torch, which `import difftransformer` must not. So they are imported
when transformers' own auto modules are.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_WAITING = {
    "transformers.models.auto.configuration_auto": "difftransformer.model.config",
    "transformers.models.auto.modeling_auto": "difftransformer.model.modeling",
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Lets the usual finders find one of the waited-for modules, and imports ours after it was executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _WAITING:
            return None
        ours = _WAITING.pop(fullname)
        if not _WAITING:
            sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(ours)  # a no-op where ours is what asked for transformers

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register_auto_classes() -> None:
    """Register with the auto modules that are loaded, and wait for those that are not."""
    for name in [name for name in _WAITING if name in sys.modules]:
        importlib.import_module(_WAITING.pop(name))
    if _WAITING:
        sys.meta_path.insert(0, _AfterImport())
