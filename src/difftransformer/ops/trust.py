"""Check a backend against `reference` before its first use on a device, and remember the verdict.

A backend is checked once for a device and a dtype: output and gradients of small calls against float64, with new memory full of
NaN, and where it promises so, the same bits twice. Verdicts are kept in torch's extension cache by what they depend on: device,
driver, versions and the sources of this package's operators.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import platform
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from . import build, processor, reference
from .norms import rms_norm
from .problem import Call, Norm, Problem, Restrictions

logger = logging.getLogger("difftransformer")
_memory: Any = torch.utils.deterministic  # a module that makes its attributes when it is imported

# An environment variable: "0" trusts every backend.
VARIABLE = "DIFFTRANSFORMER_CHECK_BACKENDS"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Largest difference from float64 over the largest number. Sound backends stay below a fifth of it; one wrong key exceeds it.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
NORM_EPS = 1e-5
SOURCES = (".py", ".cpp", ".h")


class Backend(Protocol):
    """What is needed of a backend; see `ops/backends.py`."""

    @property
    def name(self) -> str: ...
    @property
    def supports(self) -> Callable[[Problem], str | None]: ...
    @property
    def run(self) -> Callable[[Call], Tensor]: ...
    @property
    def norms(self) -> bool: ...
    @property
    def has_quadratic_memory(self) -> Callable[[Problem], bool]: ...
    @property
    def multiplies_all(self) -> bool: ...


class Trial(NamedTuple):
    """A call that a backend is checked on. Sizes are named as in `ops/attention.py`."""

    H: int = 4
    G: int = 2
    T: int = 67
    S: int = 67
    D: int = 16
    E: int = 32
    B: int = 1
    maps: int = 2
    shared_key: bool = False
    is_causal: bool = True
    window: int | None = None
    kv_start: tuple[int, ...] = ()
    kv_lengths: tuple[int, ...] = ()
    cu_seqlens: tuple[int, ...] = ()
    masked: bool = False
    normed: bool = False
    needs_grad: bool = True


# Training and decoding with what a model uses: grouped heads, a causal mask, lengths that no tile divides, the norm of heads.
FIRST = (Trial(normed=True), Trial(T=1, B=2, kv_lengths=(67, 41), needs_grad=False))
FULL = (
    *FIRST,
    Trial(),
    Trial(is_causal=False, T=35, S=70, H=3, G=1, D=24, E=40),
    Trial(D=5, E=7),
    Trial(D=64, E=128, T=129, S=129, shared_key=True),
    Trial(D=128, E=256, H=1, G=1, T=33, S=33, normed=True),
    Trial(window=9),
    Trial(B=2, kv_start=(5, 66), T=9),
    Trial(B=2, kv_lengths=(33, 66), T=9),
    Trial(cu_seqlens=(0, 5, 5, 40, 67)),
    Trial(masked=True, is_causal=False, T=9),
    Trial(maps=1),
    Trial(T=257, S=257, H=2, G=1, is_causal=False),
)


class Verdict(NamedTuple):
    """What a check found.

    Attributes:
        reason: Why the backend is switched off, or None.
        error: Largest difference from float64 over the largest number; None if nothing was compared.
    """

    reason: str | None
    error: float | None = None


_verdicts: dict[tuple[str, torch.device, torch.dtype], Verdict] = {}
_lock = threading.Lock()


def refusal(backend: Backend, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a backend is switched off for a device and a dtype, or None. Its first call checks the backend.

    The check waits for a later call while a graph is traced or captured, or tensors have no numbers.
    """
    key = (backend.name, device, dtype)
    found = _verdicts.get(key)
    if found is None:
        if backend.name == "reference" or os.environ.get(VARIABLE) == "0" or _must_wait(device):
            return None
        with _lock:
            found = _verdicts.get(key) or _first_verdict(backend, device, dtype)
        if found is None:
            return None
        _verdicts[key] = found
    return found.reason


def _first_verdict(backend: Backend, device: torch.device, dtype: torch.dtype) -> Verdict | None:
    path = _path(backend.name, device, dtype)
    verdict = _read(path)
    if verdict is None:
        # Maps in memory are formed by PyTorch's plain operations, as the reference forms them; no kernel of their own runs.
        trials = [trial for trial in FIRST if not backend.has_quadratic_memory(problem_of(trial, device, dtype))]
        verdict = check(backend, device, dtype, trials)
        if verdict is None:
            return None
        _write(path, verdict)
    if verdict.reason:
        logger.warning(
            "backend %s is switched off on %s in %s: %s; 'auto' uses the others, `difftransformer doctor` checks it again",
            backend.name, device, _short(dtype), verdict.reason,
        )  # fmt: skip
    return verdict


def examine(backend: Backend, device: torch.device, dtype: torch.dtype, seconds: float) -> Verdict | None:
    """Check a backend on many calls, whatever was found before, and remember the verdict; see `check`."""
    verdict = check(backend, device, dtype, FULL, seconds)
    if verdict is not None:
        _write(_path(backend.name, device, dtype), verdict)
        _verdicts[backend.name, device, dtype] = verdict
    return verdict


def check(
    backend: Backend, device: torch.device, dtype: torch.dtype, trials: Sequence[Trial], seconds: float = math.inf
) -> Verdict | None:
    """Return the verdict on a backend, without an error if it takes none of the calls; None if memory ran out.

    No trial but the first starts after so many `seconds`.
    The check has a thread of its own, and so none of the caller's state: grad mode, autocast, hooks, observers, modes.
    """
    found: list[Verdict | None] = []  # empty if the thread dies
    thread = threading.Thread(target=lambda: found.append(_check(backend, device, dtype, trials, seconds)))
    thread.start()
    thread.join()
    return found[0] if found else None


def _check(
    backend: Backend, device: torch.device, dtype: torch.dtype, trials: Sequence[Trial], seconds: float
) -> Verdict | None:
    worst: float | None = None
    allowed = _tolerance(device, dtype)
    start = time.monotonic()
    for number, trial in enumerate(trials):
        if number and time.monotonic() - start > seconds:
            break
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            if backend.supports(problem_of(trial, device, dtype)) is not None:
                trial = trial._replace(needs_grad=False)  # FlexAttention has no gradients on the CPU
                if backend.supports(problem_of(trial, device, dtype)) is not None:
                    continue
            call, grad = _call(trial, device, dtype, normed=backend.norms)
            error, differs = _errors(backend, call, grad)
        except torch.OutOfMemoryError:
            return None
        except Exception as raised:  # whatever a kernel or its compiler raises
            words = " ".join(str(raised).split())[:200]
            return Verdict(f"it raised {type(raised).__name__}: {words}")
        if not error <= allowed:
            return Verdict(f"its error is {error:.1e}, at most {allowed:.0e} is allowed ({_named(trial)})", error)
        if differs:
            return Verdict(f"equal calls give different bits ({_named(trial)})", error)
        worst = max(error, worst or 0.0)
    return Verdict(None, worst)


def _errors(backend: Backend, call: Call, grad: Tensor | None) -> tuple[float, bool]:
    """Return the largest error of three calls, and whether two that should be equal to the bit are not."""
    exact = _results(_exactly, _in_float64(call), None if grad is None else grad.cpu().double())
    first = _results(backend.run, call, grad)
    with _poisoned_memory():
        second, third = (_results(backend.run, call, grad) for _ in range(2))
    errors = [_error(x, right) for found in (first, second, third) for x, right in zip(found, exact, strict=True)]
    error = math.nan if any(map(math.isnan, errors)) else max(errors)
    differs = not backend.multiplies_all and any(not torch.equal(x, y) for x, y in zip(second, third, strict=True))
    return error, differs


def _results(run: Callable[[Call], Tensor], call: Call, grad: Tensor | None) -> list[Tensor]:
    """Return the output and, with its gradient, those of the inputs."""
    norm = call.norm
    leaves = [x for x in (call.query, call.key, call.value, call.lam, norm and norm[0]) if isinstance(x, Tensor)]
    if grad is None:
        with torch.no_grad():
            return [run(call)]
    for leaf in leaves:
        leaf.requires_grad_()
    out = run(call)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _exactly(call: Call) -> Tensor:
    out = reference.run(call)
    if call.norm is None:
        return out
    weight, eps, factor = call.norm
    return rms_norm(out, weight, eps) * factor


def _error(x: Tensor, right: Tensor) -> float:
    """Return the largest difference over the largest number; NaN where one is not finite."""
    return float((x.cpu().double() - right).abs().max() / right.abs().max())


def _call(trial: Trial, device: torch.device, dtype: torch.dtype, *, normed: bool) -> tuple[Call, Tensor | None]:
    generator = torch.Generator().manual_seed(0)  # not the global one, which stays as it is

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)

    def integers(values: tuple[int, ...]) -> Tensor | None:
        return torch.tensor(values, dtype=torch.int32, device=device) if values else None

    B, H, G, T, S, D, E, maps = (getattr(trial, name) for name in ("B", "H", "G", "T", "S", "D", "E", "maps"))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    lam = normal(1, H, 1).to(wide) if maps == 2 else None
    mask = torch.rand(T, S, generator=generator, device="cpu").gt(0.4).to(device) if trial.masked else None
    restrictions = Restrictions(
        mask, trial.is_causal, trial.window, *map(integers, (trial.kv_start, trial.kv_lengths, trial.cu_seqlens))
    )
    norm: Norm | None = (normal(E).to(wide), NORM_EPS, 0.7) if normed and trial.normed else None
    key = normal(B, G, S, D if trial.shared_key else maps * D)
    call = Call(normal(B, H, T, maps * D), key, normal(B, G, S, E), lam, restrictions, D**-0.5, norm)
    return call, normal(B, H, T, E) if trial.needs_grad else None


def _in_float64(call: Call) -> Call:
    def moved(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.detach().cpu()
        return x.double() if x.is_floating_point() else x

    norm = None if call.norm is None else (moved(call.norm[0]), *call.norm[1:])
    restrictions = Restrictions(*map(moved, call.restrictions))
    return Call(*(moved(x) for x in call[:4]), restrictions, call.scale, norm)  # type: ignore[call-arg]


def problem_of(trial: Trial, device: torch.device, dtype: torch.dtype) -> Problem:
    """Return what a backend's `supports` is asked about a trial."""
    call, grad = _call(trial, torch.device("meta"), dtype, normed=False)
    problem = Problem.of(call._replace(query=call.query.requires_grad_(grad is not None)))
    return dataclasses.replace(problem, device_type=device.type, needs_grad=grad is not None)


def _tolerance(device: torch.device, dtype: torch.dtype) -> float:
    """Return the tolerance; where the user lets fp32 products be rounded, as TF32 does, that of fp16."""
    if dtype == torch.float32 and device.type != "cpu" and torch.get_float32_matmul_precision() != "highest":
        dtype = torch.float16
    return TOLERANCES[dtype]


def _named(trial: Trial) -> str:
    """Return the sizes of a trial, and what else is not the default."""
    return ", ".join(
        f"{name}={value}"
        for name, value in trial._asdict().items()
        if name in ("T", "S", "D", "E") or value != Trial._field_defaults[name]
    )


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Fill new tensors with NaN and ask kernels for the same bits every time, as torch's deterministic mode does."""
    mode = torch.get_deterministic_debug_mode()
    fills = _memory.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        _memory.fill_uninitialized_memory = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        _memory.fill_uninitialized_memory = fills


def _must_wait(device: torch.device) -> bool:
    """Whether a graph is traced or captured, a mode or a transform sees every operation, or the device is not there."""
    if (
        torch.compiler.is_compiling()
        or torch.utils._python_dispatch._get_current_dispatch_mode() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return True
    if device.type == "meta":
        return True
    return device.type == "cuda" and (not torch.cuda.is_available() or torch.cuda.is_current_stream_capturing())


# Verdicts on disk, one file each.


def _folder() -> Path:
    return build.cache_folder() / "verdicts"


def _path(name: str, device: torch.device, dtype: torch.dtype) -> Path | None:
    """Return the file of a verdict, whose name covers everything that the verdict depends on."""
    try:
        parts = (name, _short(dtype), describe(device), _library(name), versions(), _source_hash(), FIRST)
        key = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
        return _folder() / f"{name}-{device.type}-{_short(dtype)}-{key}.json"
    except (OSError, RuntimeError):
        return None


def describe(device: torch.device) -> dict[str, str]:
    """Return the device's name and what its results may depend on."""
    if device.type == "cpu":
        return {"name": processor.name(), "capability": torch.backends.cpu.get_cpu_capability()}
    if device.type != "cuda":
        return {"name": device.type}
    major, minor = torch.cuda.get_device_capability(device)
    return {"name": torch.cuda.get_device_name(device), "capability": f"{major}.{minor}", "driver": _driver()}


def _library(name: str) -> tuple[str, int, int] | None:
    """Return the library that the `cpu` backend has loaded: another compiler may have made another one."""
    library = build.loaded() if name == "cpu" else None
    if library is None:
        return None
    found = library.path.stat()
    return str(library.path), found.st_size, found.st_mtime_ns


def versions() -> dict[str, str]:
    """Return the versions of what kernels are made of."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("triton", "flash-attn"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def _driver() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/driver/nvidia/version").read_text("utf-8").splitlines()[0]
    return str(getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")())


@functools.cache
def _source_hash() -> str:
    sources = (path for path in sorted(Path(__file__).parent.rglob("*")) if path.suffix in SOURCES)
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()[:16]


def _read(path: Path | None) -> Verdict | None:
    """Return a verdict, or None where there is none that can be read."""
    try:
        return None if path is None else Verdict(**json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path | None, verdict: Verdict) -> None:
    """Write a verdict in one step. Where nothing can be written, the next process checks again."""
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            json.dump(verdict._asdict(), file)
        os.replace(file.name, path)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
