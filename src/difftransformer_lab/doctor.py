"""What `difftransformer doctor` finds out: which backends agree with the equations here, how fast they are, and the machine."""

import contextlib
import dataclasses
import math
import platform
import subprocess
import time
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from difftransformer._version import __version__
from difftransformer.errors import BackendUnavailable
from difftransformer.ops import BACKENDS, Backend, Restrictions, build, differential_attention, processor, triton
from difftransformer.ops.problem import Problem
from difftransformer.ops.selfcheck import FIRST, CheckOutcome, Trial, check

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SECONDS = 6.0  # for the checks of a backend in a dtype: two minutes for all that a device has
TIMED_LENGTHS = {"cpu": 512, "cuda": 2048}


def _integers(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


TRIALS = (
    *FIRST,
    Trial(),
    Trial(T=35, S=70, H=3, G=1, D=24, E=40, restrictions=Restrictions()),
    Trial(D=5, E=7),
    Trial(D=64, E=128, T=129, S=129, shared_key=True),
    Trial(D=128, E=256, H=1, G=1, T=33, S=33, normed=True),
    Trial(restrictions=Restrictions(is_causal=True, window=9)),
    Trial(B=2, T=9, restrictions=Restrictions(is_causal=True, kv_start=_integers(5, 66))),
    Trial(B=2, T=9, restrictions=Restrictions(is_causal=True, kv_lengths=_integers(33, 66))),
    Trial(restrictions=Restrictions(is_causal=True, cu_seqlens=_integers(0, 5, 5, 40, 67))),
    Trial(T=9, restrictions=Restrictions(torch.arange(9 * 67).view(9, 67) % 5 > 1)),
    Trial(maps=1),
    Trial(T=257, S=257, H=2, G=1, restrictions=Restrictions()),
)


def examine_backends(device: torch.device) -> list[dict[str, Any]]:
    """Check and time every backend in every dtype on a device."""
    return [_examine(backend, device, dtype) for backend in BACKENDS.values() for dtype in DTYPES]


def _examine(backend: Backend, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Check and time a backend: outcome, reason, error (largest difference over largest number) and milliseconds."""
    facts: dict[str, Any] = {"backend": backend.name, "dtype": str(dtype).removeprefix("torch."), "outcome": "ok"}
    call = FIRST[-1].call(dtype, torch.device("cpu"))
    problem = dataclasses.replace(Problem.of(call), device_type=device.type)
    reason, error, milliseconds = backend.supports(problem), None, None
    if reason is not None:
        facts["outcome"] = "cannot run"
    elif (outcome := _check(backend, device, dtype)) is None:
        facts["outcome"], reason = "not checked", "memory ran out"
    else:
        reason, error = outcome
        error = error if error is not None and math.isfinite(error) else None  # JSON has no NaN
        facts["outcome"] = "wrong" if reason else "ok"
        milliseconds = None if reason else _milliseconds(backend, device, dtype)
    return facts | {"reason": reason, "error": error, "milliseconds": milliseconds}


def _check(backend: Backend, device: torch.device, dtype: torch.dtype) -> CheckOutcome | None:
    """Check a backend on as many trials as there is time for. New tensors are full of NaN, except those made in C++."""
    start, worst = time.monotonic(), 0.0
    for trial in TRIALS:
        with warnings.catch_warnings(action="ignore"), _deterministic():
            outcome = check(backend, device, dtype, [trial])
        if outcome is None or outcome.problem is not None:
            return outcome
        worst = max(worst, outcome.error or 0.0)
        if time.monotonic() - start > SECONDS:
            break
    return CheckOutcome(None, worst)


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    mode = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)


def _milliseconds(backend: Backend, device: torch.device, dtype: torch.dtype) -> float | None:
    """Time a causal call with 4 heads of width 64, forward and backward; the best of four."""
    length = TIMED_LENGTHS[device.type]
    try:
        inputs = [torch.ones(1, 4, length, 128, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
        return 1e3 * min(_seconds(backend.name, inputs) for _ in range(4))
    except (BackendUnavailable, torch.OutOfMemoryError):
        return None


def _seconds(name: str, inputs: list[torch.Tensor]) -> float:
    start = time.perf_counter()
    query, key, value = inputs
    out = differential_attention(query, key, value, 0.5, is_causal=True, backend=name)
    torch.autograd.grad(out.sum(), inputs)
    if out.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def machine_facts(device: torch.device) -> dict[str, str]:
    """Describe this machine for a bug report."""
    facts = {"difftransformer": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in ("torch", "transformers", "safetensors", "triton"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            facts[package] = metadata.version(package)
    facts |= {
        "processor": processor.name(),
        "threads": str(torch.get_num_threads()),
        "instruction sets": ", ".join(processor.available()) or "none that the kernels are built for",
        "compiler": _compiler(),
        "CPU kernels": build.load() or (str(library.path) if (library := build.loaded()) else ""),
        "cache folder": str(build.cache_folder()),
    }
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        facts["GPU"] = f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"
        facts["backward for Hopper"] = triton.refusal_of_hopper(device) or "timed beside the others"
        with contextlib.suppress(OSError):
            facts["driver"] = Path("/proc/driver/nvidia/version").read_text("utf-8").splitlines()[0]
    return facts


def _compiler() -> str:
    try:
        done = subprocess.run([*build.compiler(), "--version"], capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.partition("\n")[0]
    except (BackendUnavailable, OSError, subprocess.SubprocessError) as error:
        return " ".join(str(error).split())
