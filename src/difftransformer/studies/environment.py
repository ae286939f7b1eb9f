"""Where a result was measured, and how it was asked for."""

import datetime
import platform
import shlex
import sys

import torch
import transformers

from .._version import __version__
from ..ops import processor
from ..results import Environment


def environment(device: str = "cpu") -> Environment:
    """This machine, as a result records it."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return Environment(
        difftransformer=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        platform=platform.platform(),
        processor=processor.name(),
        device=name,
        threads=torch.get_num_threads(),
    )


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat()


def command_line() -> str:
    """The command that is running, as it would be typed."""
    return shlex.join(["difftransformer", *sys.argv[1:]])
