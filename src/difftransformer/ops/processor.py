"""Instruction sets that the C++ kernels are built for, and those that this machine supports."""

import contextlib
import os
import platform
import sys

import torch

from ..errors import BackendUnavailable

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")
# The best comes last. Each set includes the ones above it of the same architecture.
FLAGS_OF: dict[str, tuple[str, ...]] = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
    "neon": (),
    "sve256": ("-march=armv8.2-a+sve", "-msve-vector-bits=256"),
}
# An environment variable that selects a lower set than the best.
VARIABLE = "DIFFTRANSFORMER_INSTRUCTION_SET"


def instruction_set() -> str | None:
    """Return the best instruction set that torch finds on this machine, or None.

    ATEN_CPU_CAPABILITY lowers what torch finds. The variable DIFFTRANSFORMER_INSTRUCTION_SET selects another set.

    Raises:
        BackendUnavailable: This machine does not support the selected set.
    """
    sets = available()
    wish = os.environ.get(VARIABLE)
    if not wish:
        return sets[-1] if sets else None
    if wish not in sets:
        raise BackendUnavailable(f"{VARIABLE}={wish}: this machine has {', '.join(sets) or 'none of the sets'}")
    return wish


def of_architecture() -> tuple[str, ...]:
    """Return the sets of this machine's architecture, best last. It can build for all of them, even if it lacks some."""
    if _is_aarch64():
        return ("neon",) if sys.platform == "darwin" else ("neon", "sve256")
    return tuple(isa for isa in FLAGS_OF if isa not in ("neon", "sve256")) if platform.machine() == "x86_64" else ()


def available() -> tuple[str, ...]:
    """Return the sets that this machine supports, best last."""
    if sys.platform not in ("linux", "darwin"):
        return ()
    if _is_aarch64():
        # Code for 256-bit vectors is wrong for any other length.
        return ("neon", "sve256") if torch.backends.cpu.get_cpu_capability() == "SVE256" else ("neon",)
    if platform.machine() != "x86_64":
        return ()
    capability = torch.backends.cpu.get_cpu_capability()
    if capability == "AVX2":
        return ("avx2",)
    if capability != "AVX512":
        return ()
    sets: tuple[str, ...] = ("avx2", "avx512")
    if _has("_is_avx512_bf16_supported"):
        sets = (*sets, "avx512_bf16")
        # The second call asks the operating system for permission to use tiles.
        if _has("_is_amx_tile_supported") and _has("_init_amx"):
            sets = (*sets, "amx")
    return sets


def name() -> str:
    """Return the processor's name as the system gives it."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _is_aarch64() -> bool:
    return platform.machine() in ("aarch64", "arm64")


def _has(name: str) -> bool:
    return bool(getattr(torch.cpu, name, lambda: False)())
