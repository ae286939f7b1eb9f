"""The evaluation tasks, one file each. Importing this package registers all of them; see `evals.registry`."""

import importlib
import pkgutil

from ..registry import registered_tasks, task_kind

__all__ = ["registered_tasks", "task_kind"]

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
