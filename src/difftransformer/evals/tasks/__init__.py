"""The tasks. Each is one file with a dataclass `Options` and a function `make(options, setting)`, and one line here."""

import importlib
from typing import Any

from ..task import Task
from ..texts import Setting

TASKS = (
    "perplexity",
    "needle",
    "allocation",
    "icl",
    "order",
    "hallucination",
    "outliers",
    "quantized",
    "recall",
    "math",
    "harness",
    "maps",
)


def options_class(name: str) -> type:
    """The dataclass of a task's options, whose fields are its flags."""
    cls: type = _module(name).Options
    return cls


def load_task(name: str, options: Any, setting: Setting) -> Task:
    """Read a task's data and turn it into requests for a model.

    Raises:
        DataError: the data cannot be read, or does not fit the model.
    """
    task: Task = _module(name).make(options, setting)
    return task


def _module(name: str) -> Any:
    return importlib.import_module(f".{name}", __package__)
