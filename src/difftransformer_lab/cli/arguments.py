"""Arguments that several commands share."""

import os
from typing import Any

from difftransformer.errors import ConfigError

DEVICES = ("cpu", "cuda")
MOST_THREADS = (
    64  # or as many as there are cores; the runs of other machines can be repeated with their number of threads
)
# How a command with a recipe declares `set` (see main.py).
SET: dict[str, dict[str, Any]] = {
    "--set": {
        "action": "append",
        "metavar": "KEY=VALUE",
        "help": "Replace a value of the recipe, such as training.steps=100 or model.attention_type=softmax. May be repeated.",
    }
}


def use_threads(threads: int | None) -> None:
    """Set the number of CPU threads that torch uses. None keeps the current number.

    Raises:
        ConfigError: The number is below 1, or larger than any machine needs.
    """
    check_positive(threads=threads)
    if threads is not None:
        most = max(MOST_THREADS, os.cpu_count() or 1)
        if threads > most:
            raise ConfigError(f"--threads {threads}: give at most {most}")
        import torch

        torch.set_num_threads(threads)


def check_positive(**flags: int | None) -> None:
    """Check that flags, by name, are at least 1; None passes.

    Raises:
        ConfigError: A flag is below 1.
    """
    for name, value in flags.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value}: give at least 1")


def check_device(device: str) -> None:
    """Check that a device exists.

    Raises:
        ConfigError: The device is unknown, or "cuda" on a machine without a CUDA device.
    """
    if device not in DEVICES:
        raise ConfigError(f"--device {device}: choose one of {', '.join(DEVICES)}")
    if device == "cuda":
        import torch

        if torch.cuda.is_available():
            return
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu")
