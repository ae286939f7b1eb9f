"""The instruction sets that the C++ kernels are built for, and which of them this machine takes."""

import os
import platform
import sys

import torch

from ..errors import BackendUnavailable

_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")
# Best last. Each includes those above it of the same architecture.
FLAGS_OF: dict[str, tuple[str, ...]] = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_bf16": _AVX512_BF16,
    "amx": (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
    "neon": (),
    "sve256": ("-march=armv8.2-a+sve", "-msve-vector-bits=256"),
}
# Takes kernels for less than the machine has.
VARIABLE = "DIFFTRANSFORMER_INSTRUCTION_SET"


def instruction_set() -> str | None:
    """The best set that this machine has, by torch's view of it (ATEN_CPU_CAPABILITY lowers it), or None.

    The variable DIFFTRANSFORMER_INSTRUCTION_SET names another.

    Raises:
        BackendUnavailable: the variable names one that this machine has not.
    """
    found = available()
    wish = os.environ.get(VARIABLE)
    if not wish:
        return found[-1] if found else None
    if wish not in found:
        raise BackendUnavailable(f"{VARIABLE}={wish}: this machine has {', '.join(found) or 'none of the sets'}")
    return wish


def of_architecture() -> tuple[str, ...]:
    """Those of this machine's architecture, best last: it can build for all, whichever it has."""
    if _is_aarch64():
        return ("neon",) if sys.platform == "darwin" else ("neon", "sve256")
    return tuple(isa for isa in FLAGS_OF if isa not in ("neon", "sve256")) if platform.machine() == "x86_64" else ()


def available() -> tuple[str, ...]:
    """Those that this machine has, best last."""
    if sys.platform not in ("linux", "darwin"):
        return ()
    if _is_aarch64():
        # Code for vectors of 256 bits is wrong on longer and shorter ones.
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
        # The second asks the kernel for permission to use tiles.
        if _has("_is_amx_tile_supported") and _has("_init_amx"):
            sets = (*sets, "amx")
    return sets


def _is_aarch64() -> bool:
    return platform.machine() in ("aarch64", "arm64")


def _has(name: str) -> bool:
    return bool(getattr(torch.cpu, name, lambda: False)())
