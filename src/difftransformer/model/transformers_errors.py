"""What transformers says and raises while models are opened: the errors of files that make no sense to it, and its warnings."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers.utils import logging

MOST_STEPS = 2_000_000  # of a chat template, which takes some hundred

FOREIGN_FAULTS = (
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    SafetensorError,
    StrictDataclassError,
    TemplateError,
)


@contextmanager
def bounded() -> Iterator[None]:
    """Raise a RuntimeError in Python code, such as that of a chat template, that takes more than `MOST_STEPS` steps."""
    left, before = MOST_STEPS, sys.gettrace()

    def count(frame: Any, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError(f"it takes more than {MOST_STEPS:,} steps")
        return count

    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def quietly() -> Iterator[None]:
    """Hide the progress bars and warnings of transformers. This package reports errors itself."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
