"""Compare a backend with `reference` in float64 on small calls.

Triton compiles its kernels on each machine, and has compiled wrong ones, so a process checks them before it first uses them
on a GPU. `difftransformer doctor` checks every backend, on more calls.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import reference
from .norms import rms_norm
from .problem import Call, Problem, Restrictions

# An environment variable: "0" leaves the check out.
VARIABLE = "DIFFTRANSFORMER_CHECK_BACKENDS"
# Largest difference from float64 over the largest number. Sound backends stay below a fifth of it; one wrong key exceeds it.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class CheckOutcome(NamedTuple):
    """What a check found: why the backend must not be used, or None, and the largest error, None if it took no call."""

    problem: str | None
    error: float | None = None


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
    normed: bool = False
    needs_grad: bool = True
    restrictions: Restrictions = Restrictions(is_causal=True)

    def call(self, dtype: torch.dtype, device: torch.device, is_exact: bool = False) -> Call:
        """Return the call with numbers of a dtype, or with the same numbers in float64."""
        generator = torch.Generator().manual_seed(0)  # not the global one, which stays as it is
        wide = torch.float64 if dtype == torch.float64 else torch.float32

        def normal(*shape: int, rounded: torch.dtype = dtype) -> Tensor:
            x = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(rounded)
            return (x.double() if is_exact else x).to(device).requires_grad_(self.needs_grad)

        key = normal(self.B, self.G, self.S, self.D if self.shared_key else self.maps * self.D)
        query, value = normal(self.B, self.H, self.T, self.maps * self.D), normal(self.B, self.G, self.S, self.E)
        lam = normal(1, self.H, 1, rounded=wide) if self.maps == 2 else None
        norm = (normal(self.E, rounded=wide), 1e-5, 0.7) if self.normed else None
        placed: Any = (x.to(device) if isinstance(x, Tensor) else x for x in self.restrictions)
        return Call(query, key, value, lam, Restrictions(*placed), self.D**-0.5, norm)


# Training and decoding as in a model: grouped heads, a causal mask, lengths that no tile divides, the norm of heads.
FIRST = (Trial(normed=True), Trial(T=1, needs_grad=False))
_outcomes: dict[tuple[torch.device, torch.dtype], CheckOutcome] = {}


def why_not(backend: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a backend must not be used on a GPU and in a dtype, or None. The first call of a process checks it.

    The check waits for a later call while a graph is traced or captured, and if memory runs out.
    """
    if (device, dtype) not in _outcomes:
        is_traced = torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None
        is_traced = is_traced or torch.utils._python_dispatch._get_current_dispatch_mode() is not None
        is_idle = device.type != "cuda" or (torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing())
        if os.environ.get(VARIABLE) == "0" or is_traced or not is_idle:
            return None
        if (outcome := check(backend, device, dtype)) is None:
            return None
        _outcomes[device, dtype] = outcome
    return _outcomes[device, dtype].problem


def check(
    backend: Any, device: torch.device, dtype: torch.dtype, trials: Sequence[Trial] = FIRST
) -> CheckOutcome | None:
    """Check a `Backend`; return None if memory ran out.

    The check has a thread of its own, and so none of the caller's grad mode, autocast, hooks and modes.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_check, backend, device, dtype, trials).result()


def _check(backend: Any, device: torch.device, dtype: torch.dtype, trials: Sequence[Trial]) -> CheckOutcome | None:
    worst = None
    for trial in trials if backend.norms else [trial._replace(normed=False) for trial in trials]:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            call = trial.call(dtype, device)
            if backend.supports(Problem.of(call)) is not None:
                continue
            outputs = _results(backend.run, call)
        except torch.OutOfMemoryError:
            return None
        except Exception as raised:  # whatever a kernel or its compiler raises
            return CheckOutcome(f"it raised {type(raised).__name__}: {' '.join(str(raised).split())[:200]}")
        exact = _results(_exactly, trial.call(dtype, torch.device("cpu"), is_exact=True))
        for x, right in zip(outputs, exact, strict=True):
            error = float((x.cpu().double() - right).abs().max() / right.abs().max())
            if not error <= TOLERANCES[dtype]:  # also where it is NaN
                sizes = f"T={trial.T}, S={trial.S}, D={trial.D}, E={trial.E}"
                words = f"its error is {error:.1e}, at most {TOLERANCES[dtype]:.0e} is allowed ({sizes})"
                return CheckOutcome(words, error)
            worst = max(error, worst or 0.0)
    return CheckOutcome(None, worst)


def _results(run: Callable[[Call], Tensor], call: Call) -> list[Tensor]:
    """Return the output and, where it has one, its gradients."""
    out = run(call)
    leaves = [x for x in (*call[:4], call.norm and call.norm[0]) if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        return [out]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64, device="cpu").to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _exactly(call: Call) -> Tensor:
    weight, eps, factor = call.norm or (None, None, 1.0)
    return reference.run(call) if eps is None else rms_norm(reference.run(call), weight, eps) * factor
