"""The ways to compute attention, which of them can run a problem, and the order in which `auto` tries them.

A new backend is one file with `DESCRIPTION`, `supports` and `run`, and `has_quadratic_memory` if it may take O(n^2) memory; one
line in `BACKENDS`, rows in `TABLE` with the measurements behind them, and its name in `hub/plain_backends.py`.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ..errors import BackendUnavailable
from . import chunked, cpu, cudnn, reference, sdpa, selfcheck, triton
from .problem import LOW_PRECISION, Call, Problem

logger = logging.getLogger("difftransformer")

# Above this many positions squared, `auto` takes no backend that materialises a map or a mask.
QUADRATIC_MEMORY_MAX_LENGTH = 1024


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Attributes:
        name: The value that `backend=` takes.
        description: One line for the command line.
        supports: Returns why a problem cannot be run, or None.
        has_quadratic_memory: Returns whether a problem would take O(n^2) memory.
        run: Returns the output (B, H, T, E) of a call, in the value's dtype: zeros for a query that sees nothing, and
            differentiable in query, key, value and lambda, by autograd (as `sdpa.py`) or by an operator of `fused.py`.
        norms: Whether `run` also normalises the heads. The caller does it otherwise.
        multiplies_all: Whether `run` multiplies keys and values also where the weight is zero, so that the caller keeps NaN
            out (`isolated`). Kernels that skip such keys do without.
        is_checked: Whether a process compares `run` with `reference` before its first use on a GPU; see `selfcheck`.
    """

    name: str
    description: str
    supports: Callable[[Problem], str | None]
    has_quadratic_memory: Callable[[Problem], bool]
    run: Callable[[Call], Tensor]
    norms: bool = False
    multiplies_all: bool = False
    is_checked: bool = False


@dataclass(frozen=True)
class Row:
    """One row of `TABLE`. `auto` takes the first row that fits a problem and names a backend that can run it.

    Attributes:
        backend: A name in `BACKENDS`.
        op: "differential", "softmax" or None for both.
        device_type: The device type, or None for all.
        dtypes: The dtypes, or None for all.
        max_length: Largest max(T, S), or None for any.
        min_queries: Smallest T.
        needs_mask: Required value of `Problem.needs_mask`, or None for any.
    """

    backend: str
    op: str | None = None
    device_type: str | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    max_length: int | None = None
    min_queries: int = 0
    needs_mask: bool | None = None

    def fits(self, problem: Problem) -> bool:
        """Whether the row applies to this problem."""
        return (
            (self.op is None or self.op == problem.op)
            and (self.device_type is None or self.device_type == problem.device_type)
            and (self.dtypes is None or problem.dtype in self.dtypes)
            and (self.max_length is None or max(problem.queries, problem.keys) <= self.max_length)
            and problem.queries >= self.min_queries
            and (self.needs_mask is None or self.needs_mask == problem.needs_mask)
        )


def _backend(module: ModuleType, **flags: bool) -> Backend:
    name = module.__name__.rpartition(".")[2]
    has_quadratic_memory = getattr(module, "has_quadratic_memory", lambda problem: False)
    return Backend(name, module.DESCRIPTION, module.supports, has_quadratic_memory, module.run, **flags)


BACKENDS: dict[str, Backend] = {
    "reference": _backend(reference, multiplies_all=True),
    "cpu": _backend(cpu, norms=True),
    "triton": _backend(triton, norms=True, is_checked=True),
    "chunked": _backend(chunked, multiplies_all=True),
    "sdpa": _backend(sdpa, multiplies_all=True),
    "cudnn": _backend(cudnn),
}

# Milliseconds, causal, forward + backward unless stated otherwise; sizes are B x H x T x D. For `cpu`: wall time of two
# threads, AMD EPYC with AVX512_BF16. For the others: CPU time of one thread, AVX-512 and AMX. torch 2.13.
TABLE: tuple[Row, ...] = (
    # cpu v chunked: fp32 16x2x256x32 9.8 v 22, bf16 6.7 v 24 (docs/performance.md has more); 4x2x16x32 0.38 v 1.07,
    # reference 0.68. One query, forward, 8x8x1x64 with S = 1024: 2.3 v 6.3, bf16 1.4 v 7.5.
    # softmax, cpu v sdpa: 16x4x256x32 9.5 v 17.6, bf16 6.6 v 22; 4x4x64x32 level; below that sdpa leads in fp32, 0.36 v 0.31.
    Row("cpu", device_type="cpu"),
    # The next rows apply where the kernels cannot be built.
    # PyTorch's own attention where it needs no n x n mask, level with chunked in fp32:
    # 16x4x256x32 27.7 v 27.5, 1x16x1024x64 142 v 124 (bf16 38 v 24, 116 v 100). Not for T = 1: 14.9 v 2.7 in bf16.
    Row("sdpa", op="softmax", device_type="cpu", min_queries=2),
    # Up to this length the calls for each block cost more than the maps: 4x2x64x32 fp32 1.24 v chunked 1.42 v sdpa 1.40,
    # bf16 1.37 v 1.73 v 2.98. At T = 128 chunked leads: fp32 3.5 v 4.7 v 4.1, bf16 3.1 v 3.5 v 7.0.
    Row("reference", op="differential", device_type="cpu", max_length=64),
    # Chunked v reference v sdpa: fp32 16x2x256x32 30 v 69 v 53, 1x8x2048x64 482 v 3338 v 946; bf16 27 v 77 v 58,
    # 534 v 2889 v 725. One query, 8x8x1x64 with S = 1024, forward: 10.6 v 11.2 v 97; bf16 11.0 v 9.6 v 66.
    Row("chunked", device_type="cpu"),
    # CUDA. triton v sdpa on an H200 in bf16: 8x16x2048x64 2.65 v 5.15, 2x8x8192x128 8.62 v 11.0, 1x16x32768x64 58 v 55;
    # one query, 8x16x1x64 with S = 8192: 0.14 v 1.54. softmax: 2x32x8192x64 triton 6.9 v sdpa 7.3, forward alone 1.6 v 1.9.
    Row("triton", op="differential", device_type="cuda", dtypes=LOW_PRECISION),
    Row("sdpa", device_type="cuda", needs_mask=False),
    Row("triton", device_type="cuda", dtypes=LOW_PRECISION),
    # All other problems and devices, not measured: fused attention calls where they need no n x n mask.
    Row("sdpa"),
    Row("chunked"),
)

_forced_backend: ContextVar[str | None] = ContextVar("difftransformer_backend", default=None)
_announced: set[tuple[str, str, str, str]] = set()


def backend_names() -> tuple[str, ...]:
    """Return the names that `backend=` takes besides "auto"."""
    return tuple(BACKENDS)


def explain(problem: Problem) -> dict[str, str | None]:
    """Return for each backend why it cannot run the problem, or None where it can."""
    return {name: backend.supports(problem) for name, backend in BACKENDS.items()}


def _refusal(backend: Backend, problem: Problem, device: torch.device | None) -> str | None:
    reason = backend.supports(problem)
    if reason is None and backend.is_checked and device is not None and device.type == "cuda":
        return _check(backend.name, device, problem.dtype)
    return reason


@torch.compiler.assume_constant_result
def _check(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    wrong = selfcheck.why_not(BACKENDS[name], device, dtype)
    return wrong and f"not used on {device}: {wrong}; `difftransformer doctor` checks it again"


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Make calls with `backend="auto"` use one backend inside the block, for tests and benchmarks.

    A backend named in the call itself takes precedence. `torch.compile` reads the choice once, when it compiles: enter the
    block before that.

    Raises:
        BackendUnavailable: no backend has that name.
    """
    if name != "auto":
        _known(name)
    token = _forced_backend.set(None if name == "auto" else name)
    try:
        yield
    finally:
        _forced_backend.reset(token)


def select_backend(problem: Problem, name: str = "auto", device: torch.device | None = None) -> Backend:
    """Return the named backend, or for "auto" the first of `TABLE` that fits.

    Args:
        problem: What is to be computed.
        name: A name of `backend_names()`, or "auto".
        device: Where it will be computed; None leaves out the check of Triton's kernels.

    Raises:
        BackendUnavailable: no backend has that name, or it cannot run the problem (with every backend's reason).
    """
    if name == "auto":
        name = _forced_name() or "auto"
    if name == "auto":
        backend = _first_of_table(problem, device)
        _announce(problem.op, problem.device_type, str(problem.dtype), backend.name)
        return backend
    backend = _known(name)
    refusal = _refusal(backend, problem, device)
    if refusal is not None:
        reasons = "; ".join(f"{other}: {why or 'can'}" for other, why in (explain(problem) | {name: refusal}).items())
        raise BackendUnavailable(f"backend {name!r} cannot run this problem ({reasons}); name another or use 'auto'")
    return backend


def _known(name: str) -> Backend:
    backend = BACKENDS.get(name) if isinstance(name, str) else None
    if backend is None:
        raise BackendUnavailable(f"no backend is named {name!r}; use 'auto' or one of {', '.join(BACKENDS)}")
    return backend


def _first_of_table(problem: Problem, device: torch.device | None) -> Backend:
    if reference.is_exporting():  # the program may run where this package's operators are not
        return BACKENDS["reference"]
    for row in TABLE:
        if not row.fits(problem):
            continue
        backend = BACKENDS[row.backend]
        # In this order: an exported program must not depend on a bound of its lengths.
        if backend.has_quadratic_memory(problem) and problem.queries * problem.keys > QUADRATIC_MEMORY_MAX_LENGTH**2:
            continue
        if _refusal(backend, problem, device) is None:
            return backend
    return BACKENDS["reference"]  # the last row of the table runs every problem


@torch.compiler.assume_constant_result
def _forced_name() -> str | None:
    return _forced_backend.get()


@torch.compiler.assume_constant_result
def _announce(op: str, device_type: str, dtype: str, name: str) -> None:
    choice = (op, device_type, dtype, name)
    if choice not in _announced:
        _announced.add(choice)
        logger.info("%s attention on %s in %s: backend %s (chosen by 'auto')", *choice)
