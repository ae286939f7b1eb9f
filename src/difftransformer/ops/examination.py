"""What `difftransformer doctor` finds out: which backends agree with the equations here, how fast they are, and the machine."""

import platform
import subprocess
import time
from importlib import metadata
from typing import Any

import torch

from .._version import __version__
from ..errors import BackendUnavailable
from . import build, processor, trust
from .attention import differential_attention
from .backends import BACKENDS, Backend

SECONDS = 6.0  # for the checks of a backend in a dtype: two minutes for all that a device has
TIMED_LENGTHS = {"cpu": 512, "cuda": 2048}


def examine_backends(device: torch.device) -> list[dict[str, Any]]:
    """Check and time every backend in every dtype on a device; one that fails is switched off from then on."""
    return [_check(backend, device, dtype) for backend in BACKENDS.values() for dtype in trust.DTYPES]


def _check(backend: Backend, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Check and time a backend: verdict, reason, error (largest difference over largest number) and milliseconds."""
    found: dict[str, Any] = {"backend": backend.name, "dtype": str(dtype).removeprefix("torch."), "verdict": "ok"}
    problem = trust.problem_of(trust.FIRST[-1], device, dtype)
    reason, error, milliseconds = backend.supports(problem), None, None
    if reason is not None:
        found["verdict"] = "cannot run"
    else:
        verdict = trust.examine(backend, device, dtype, SECONDS)
        if verdict is None:
            found["verdict"], reason = "not checked", "memory ran out"
        else:
            reason, error = verdict
            if reason is None:
                milliseconds = _milliseconds(backend, device, dtype)
            else:
                found["verdict"] = "off"
    return found | {"reason": reason, "error": error, "milliseconds": milliseconds}


def _milliseconds(backend: Backend, device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the shortest of three times of a causal call with 4 heads of width 64, with gradients where there are any."""
    length = TIMED_LENGTHS[device.type]
    try:
        inputs = [torch.ones(1, 4, length, 128, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]
        with torch.set_grad_enabled(backend.name != "flex" or device.type == "cuda"):
            return 1e3 * min(_seconds(backend.name, inputs) for _ in range(4))
    except (BackendUnavailable, torch.OutOfMemoryError):
        return None


def _seconds(name: str, inputs: list[torch.Tensor]) -> float:
    start = time.perf_counter()
    query, key, value = inputs
    out = differential_attention(query, key, value, 0.5, is_causal=True, backend=name)
    if out.requires_grad:
        torch.autograd.grad(out.sum(), inputs)
    if out.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def machine_facts(device: torch.device) -> dict[str, str]:
    """Return what a bug report needs to say of this machine."""
    facts = {"difftransformer": __version__} | trust.versions() | {"platform": platform.platform()}
    for package in ("transformers", "safetensors"):
        facts[package] = metadata.version(package)
    facts |= {
        "processor": processor.name(),
        "threads": str(torch.get_num_threads()),
        "instruction sets": ", ".join(processor.available()) or "none that the kernels are built for",
        "compiler": _compiler(),
        "CPU kernels": build.load() or _library(),
        "cache folder": str(build.cache_folder()),
    }
    if device.type == "cuda":
        gpu = trust.describe(device)
        facts |= {"GPU": f"{gpu['name']}, compute capability {gpu['capability']}", "driver": gpu["driver"]}
    return facts


def _library() -> str:
    library = build.loaded()
    return "" if library is None else str(library.path)


def _compiler() -> str:
    try:
        done = subprocess.run([*build.compiler(), "--version"], capture_output=True, text=True, check=True, timeout=20)
        return done.stdout.partition("\n")[0]
    except (BackendUnavailable, OSError, subprocess.SubprocessError) as error:
        return " ".join(str(error).split())
