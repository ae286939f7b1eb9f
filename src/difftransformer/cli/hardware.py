"""The words for hardware that several commands take."""

import torch

from ..errors import ConfigError

DEVICES = ("cpu", "cuda")


def use_threads(threads: int | None) -> None:
    """Let torch use so many CPU threads; None leaves it as it is.

    Raises:
        ConfigError: below 1.
    """
    if threads is None:
        return
    if threads < 1:
        raise ConfigError(f"--threads {threads}: give at least 1")
    torch.set_num_threads(threads)


def check_device(device: str) -> None:
    """Refuse a device that is not here.

    Raises:
        ConfigError: an unknown device, or cuda where torch finds none.
    """
    if device not in DEVICES:
        raise ConfigError(f"--device {device}: choose one of {', '.join(DEVICES)}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device here; use --device cpu")
