"""Where a result was measured, and how it was asked for."""

import datetime
import functools
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from difftransformer._version import __version__
from difftransformer.errors import ConfigError
from difftransformer.ops import build, processor

from .results import Environment


def environment(device: str = "cpu") -> Environment:
    """Describe this machine and this code for a result."""
    library = build.loaded()
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
        commit=commit(),
        compiler=library.compiler if library else "",
        instruction_set=library.instruction_set if library else torch.backends.cpu.get_cpu_capability().lower(),
    )


def now() -> str:
    return datetime.datetime.now(datetime.UTC).replace(microsecond=0).isoformat()


def command_line() -> str:
    """Return the running command as a user would type it."""
    return shlex.join(["difftransformer", *sys.argv[1:]])


def foreign_cpu_share() -> Callable[[], float | None]:
    """Return a function that measures the share of CPU time that other processes take from now on; None off Linux."""
    begun, before = time.monotonic(), foreign_cpu_seconds()

    def share() -> float | None:
        now, cpu_seconds = foreign_cpu_seconds(), (time.monotonic() - begun) * (os.cpu_count() or 1)
        return None if before is None or now is None else max(0.0, now - before) / cpu_seconds

    return share


def foreign_cpu_seconds() -> float | None:
    """Return the CPU seconds that other processes and other machines took since the start; None off Linux."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except OSError:
        return None
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])  # of this process and its finished children


@functools.cache
def commit() -> str:
    """Return the commit of the source, from the checkout or from pip; "" if unknown."""
    folder = Path(__file__).parent
    try:
        # A package that is installed in another project's checkout is not among that project's files.
        git(folder, "ls-files", "--error-unmatch", Path(__file__).name)
        return git(folder, "rev-parse", "HEAD") + ("-dirty" if _changed(folder) else "")
    except (OSError, subprocess.SubprocessError):
        return _installed_commit()


def _changed(folder: Path) -> str:
    """List the changes against the commit: tracked files except records, which studies write, and new code and recipes."""
    tracked = git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs/results")
    return tracked or git(folder, "status", "--porcelain", "--", ":/src", ":/recipes")


def check_committed() -> None:
    """Check that the code is committed, and that a branch or tag holds the commit: records name it."""
    here, folder, again = commit(), Path(__file__).parent, "then start the study again: its records name a commit"
    if here.endswith("-dirty"):
        _, changed = (_changed(folder) or "M code").splitlines()[0].split(maxsplit=1)
        raise ConfigError(f"the plan's runs need committed code, and {changed} is not; commit or stash it, {again}")
    try:
        held = git(folder, "for-each-ref", "--count=1", "--contains", here, "refs/heads", "refs/remotes", "refs/tags")
    except (OSError, subprocess.SubprocessError):
        return  # an installed package, without a history
    if here and not held:
        raise ConfigError(f"no branch holds commit {here}, whose code runs; git branch NAME {here}, {again}")


def git(folder: Path, *words: str) -> str:
    """Run git in a folder and return its output. Raises OSError without git, SubprocessError if it fails or takes 10 s."""
    command = ["git", "--no-optional-locks", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def _installed_commit() -> str:
    try:
        source = importlib.metadata.distribution("difftransformer").read_text("direct_url.json")
        return str(json.loads(source or "{}")["vcs_info"]["commit_id"])
    except (importlib.metadata.PackageNotFoundError, KeyError, ValueError):
        return ""
