"""The kernels of each pass, and their tile sizes.

In bf16 on Hopper (compute capability 9.0) the compiler fits these tilings into the 227 KiB of shared memory of a program,
without spilling registers and with products that need not wait for each other. `tests/ops/kernel_budget.json` holds the
compiler's numbers and the exceptions. GPUs that have 99 KiB, of compute capability 8.6, 8.9 and 12.0, take smaller tiles, and
so does an A100, with 163 KiB, for a mask. On an H200 the twin trains on these tilings as fast as on PyTorch's flash kernel
(docs/performance-gpu.md); others have not been tried.
"""

import functools
import math
import os
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
import triton
from triton import knobs
from triton.runtime.errors import OutOfResources
from triton.testing import do_bench

INTERPRETED: bool = knobs.runtime.interpret

# Largest number of rows of a group, H // G * T, for which a call without gradients is split over its keys.
DECODE_ROWS = 64
DECODE_SPLITS = 64
DECODE_MIN_KEYS = 256  # smallest share of the keys that is worth a program
# Shared memory of a processor from which programs take the tiles of Hopper, without and with a mask. An A100 has 164 KiB.
ROOMY_BYTES, ROOMY_BYTES_WITH_MASK = 160 * 1024, 200 * 1024


class Tiling(NamedTuple):
    """Queries and keys of a tile, warps of a program, and the number of tiles that are loaded at a time."""

    queries: int
    keys: int
    warps: int
    stages: int

    def options(self) -> dict[str, int | bool]:
        """Return the tiling as keywords of a kernel."""
        return {
            "BLOCK_T": self.queries,
            "BLOCK_S": self.keys,
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,
        }


class Form(NamedTuple):
    """The kernels of a pass, by name, and their tilings."""

    name: str
    tilings: tuple[Tiling, ...]


# `hopper.hopper_keys_kernel`; the warps belong to one of its two multiplying partitions.
HOPPER = Form("hopper", (Tiling(64, 128, 4, 2),))
HOPPER_VERSIONS = (3, 6), (3, 9)  # of Triton, the first and the last that are known to compile it


def padded(width: int, least: int = 16) -> int:
    """Return the power of two that a width is padded to."""
    return max(least, 1 << (width - 1).bit_length())


@functools.cache
def is_small(device: torch.device, has_mask: bool) -> bool:
    """Whether a device has too little shared memory for the tiles of Hopper."""
    if INTERPRETED:
        return False
    has = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    return bool(has < (ROOMY_BYTES_WITH_MASK if has_mask else ROOMY_BYTES))


@functools.cache
def hopper_refusal(device: torch.device) -> str | None:
    """Return why backwards on a device do not try the form for Hopper, or None."""
    first, last = HOPPER_VERSIONS
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    if INTERPRETED:
        return "does not run in Triton's interpreter"
    if (capability := torch.cuda.get_device_capability(device)) != (9, 0):
        return "needs a GPU of compute capability 9.0, this is {}.{}".format(*capability)
    if not first <= version <= last:
        return f"needs Triton {first[0]}.{first[1]} to {last[0]}.{last[1]}, this is {triton.__version__}"
    if os.environ.get("DIFFTRANSFORMER_HOPPER") != "1":
        return "is off until it has been measured on more machines; DIFFTRANSFORMER_HOPPER=1 lets calls try it"
    return None


def forward_forms(
    *,
    width: int,
    value_width: int,
    is_differential: bool,
    low: bool,
    starts_late: bool,
    has_mask: bool = False,
    save: bool = False,
    small: bool = False,
) -> tuple[Form, ...]:
    """Return the forms of a forward pass, the default first.

    Args:
        width: D.
        value_width: E.
        is_differential: Whether there are two maps.
        low: Whether the dtype is fp16 or bf16.
        starts_late: Whether a row's keys may start after the first key, which takes a third loop.
        has_mask: Whether there is an `attn_mask`, whose tiles take registers.
        save: Whether O and O2 are kept in fp32 for the backward. With the registers that this takes, both maps together
            would spill, and with a mask their products would wait for each other.
        small: Whether 99 KiB of shared memory must do.
    """
    if INTERPRETED:
        tiling = Tiling(32, 64, 1, 1)
        by_map = Form("by_map", (tiling,))
        return (Form("both_maps", (tiling,)), by_map) if is_differential and not save else (by_map,)
    wide = padded(value_width) > 128
    if not low:
        return (Form("by_map", (Tiling(16 if wide else 32, 32, 8, 1),)),)
    if small:
        return (Form("by_map", (Tiling(64, 32, 4, 2),)),)
    # With a third loop, larger tiles or fewer stages would make the assembler serialise the products.
    by_map = Form("by_map", (Tiling(128, 32, 8, 3) if starts_late and (wide or save) else Tiling(128, 64, 8, 2),))
    if not is_differential or save:
        return (by_map,)
    if wide:
        # With padded columns or masked rows, both maps together would spill registers.
        if starts_late or has_mask or padded(width) != width:
            return (by_map,)
        return by_map, Form("both_maps", (Tiling(64, 32, 8, 2),))
    if starts_late:
        return (Form("both_maps", (Tiling(128, 32, 8, 3 if width <= 64 else 4),)),)
    return (Form("both_maps", (Tiling(128, 64, 8, 3),)),)


def backward_forms(
    *, width: int, value_width: int, key_maps: int, low: bool, has_mask: bool = False, small: bool = False
) -> tuple[Form, ...]:
    """Return the forms of a backward pass, the default first: "split" gives the same bits every time, "atomic" does not.

    The tilings are those of `keys_kernel` (if there are two, the first is for dV alone and the second for dK) and, for
    "split", of `queries_kernel`.

    Args:
        width: D.
        value_width: E.
        key_maps: Number of keys that get gradients, 1 or 2.
        low: Whether the dtype is fp16 or bf16.
        has_mask: Whether there is an `attn_mask`, whose tiles take registers.
        small: Whether 99 KiB of shared memory must do.
    """
    if INTERPRETED:
        first, other = Tiling(32, 64, 1, 1), Tiling(64, 32, 1, 1)
        launches = (first,) if value_width <= 128 else (other, first)
        return Form("split", (*launches, other)), Form("atomic", launches)
    wide = padded(value_width) > 128 or padded(width) > 64
    if not low:
        tiling, queries = (Tiling(16, 16, 8, 1),) * 2 if wide else (Tiling(16, 32, 8, 1), Tiling(32, 16, 8, 1))
        return Form("split", (tiling, queries)), Form("atomic", (tiling,))
    if small and wide:  # with dQ as well, the loop over queries would not fit
        return (Form("split", (Tiling(16, 64, 8, 1), Tiling(64, 32, 8, 1))),)
    if small:
        keys = Tiling(32, 64, 8, 2)
        return Form("split", (keys, Tiling(64, 32, 8, 2))), Form("atomic", (keys,))
    queries = Tiling(128, 32, 8, 2) if wide else Tiling(128, 64, 8, 3)
    # Up to this width, the sums of 128 keys take half of the registers. Beyond it, dV gets a launch of its own, which computes
    # the scores again (16 or 12 units instead of 14 or 10) but needs neither small tiles nor spilled registers.
    if padded(value_width) + key_maps * padded(width) > 256:
        values = Tiling(32, 128, 8, 2)
        keys = Tiling(16 if has_mask else 32, 128, 8, 2)
        return Form("split", (values, keys, queries)), Form("atomic", (values, Tiling(16, 128, 8, 2)))
    tiling = Tiling(16 if has_mask else 32, 128, 8, 2 if wide else 3)
    return Form("split", (tiling, queries)), Form("atomic", (Tiling(16, 64 if has_mask else 128, 8, 2),))


def decode_tiling(*, width: int, value_width: int, rows: int, low: bool, small: bool = False) -> Tiling:
    """Return the tiling of a decoding call; its `queries` are the rows of a group. `small` as in `backward_forms`."""
    rows = padded(rows)
    if INTERPRETED:
        return Tiling(rows, 32, 1, 1)
    if not low:
        return Tiling(rows, 16, 8, 1)
    if small:
        return Tiling(rows, 32 if padded(value_width) <= 128 else 16, 4 if rows <= 16 else 8, 2)
    if padded(value_width) <= 128:
        return Tiling(rows, 64, 4 if rows <= 32 else 8, 3)
    return Tiling(rows, 32 if rows <= 32 else 16, 4 if rows <= 16 else 8, 3)


def decode_splits(programs: int, keys: int, device: torch.device) -> int:
    """Return the number of shares of the keys that occupies all processors, whatever the filling of a cache."""
    if INTERPRETED:
        return min(3, max(1, keys // 32))
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(DECODE_SPLITS, -(-2 * processors // programs), keys // DECODE_MIN_KEYS))


_fastest: dict[Hashable, Form] = {}


def choose(forms: Sequence[Form], key: Hashable, run: Callable[[Form], object]) -> Form:
    """Return the fastest form for calls with this `key`, timed at the first such call; one that the device cannot hold is not.

    The first form is taken if results must not depend on timing (`torch.use_deterministic_algorithms`), while a CUDA graph is
    captured, in the interpreter, and with DIFFTRANSFORMER_AUTOTUNE=0.
    """
    if (
        len(forms) == 1
        or INTERPRETED
        or torch.are_deterministic_algorithms_enabled()
        or os.environ.get("DIFFTRANSFORMER_AUTOTUNE") == "0"
    ):
        return forms[0]
    if key not in _fastest:
        if torch.cuda.is_current_stream_capturing():
            return forms[0]
        _fastest[key] = min(forms, key=lambda form: _milliseconds(lambda: run(form)))
    return _fastest[key]


def _milliseconds(run: Callable[[], object]) -> float:
    try:
        return float(do_bench(run, warmup=5, rep=20, return_mode="median"))
    except OutOfResources:
        return math.inf
