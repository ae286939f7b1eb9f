"""Differential attention as ordinary calls of the flash-attn package, where it is installed.

FlashAttention-2 needs a value as wide as the query, so the value is cut into chunks of width D, and each chunk is multiplied
by both maps: four calls where E = 2D. Microsoft's fork `flex_head_fa` takes a value of 2D for some D: two calls. (In units
of 2 T S D a head: 8 forward and 20 backward with four calls, 6 and 14 with two. FlashAttention-3 pads a value of 2D to 4D,
and FlashAttention-4 supports few pairs of widths, so neither is used.)

The outputs are rounded to the input dtype before they are subtracted, as in `sdpa`. A query that may attend to nothing has an
output of zero, as the package documents. Nothing is read from the device: for packed documents the package gets T, an upper
bound, as the length of the longest document.

Dimensions: B batch, H differential heads, G key/value groups, T query positions, S key positions, D width of one map's
queries and keys, E value width, C width of a chunk of the value. The package's layout is (B, T, H, D).
"""

import functools
import importlib
import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .fused import positive_scale
from .problem import LOW_PRECISION, Call, Problem, Restrictions

DESCRIPTION = "the flash-attn package, two or four calls; subtracts outputs that are already rounded"

DTYPES = LOW_PRECISION
MAX_WIDTH = 256
# The first release with a backward pass of width 256 on every GPU; since 2.1 causal is aligned to the bottom right.
OLDEST = (2, 5, 5)
# Query width -> value width that the fork compiles beside equal ones (its README).
WIDE_VALUES = {32: 64, 64: 128, 96: 192, 128: 256}
HOW_TO_INSTALL = "pip install flash-attn --no-build-isolation"


def supports(problem: Problem) -> str | None:
    """Return why this backend cannot run the problem, or None."""
    if not _is_gpu(problem.device_type):
        return f"runs on CUDA, not on {problem.device_type}"
    if problem.dtype not in DTYPES:
        return f"takes bfloat16 and float16, not {str(problem.dtype).removeprefix('torch.')}"
    if problem.keys == 0 or problem.queries == 0 or problem.batch == 0:
        return "no queries or no keys, which flash-attn does not take"
    if problem.width > MAX_WIDTH:
        return f"width {problem.width}; flash-attn takes at most {MAX_WIDTH}"
    if problem.attn_mask:
        return "flash-attn takes no attn_mask"
    if problem.kv_start:
        return "flash-attn takes no kv_start"
    if problem.kv_range and problem.needs_grad:
        return "kv_lengths with gradients: flash-attn's attention to a cache has no backward pass"
    if problem.kv_range and torch.compiler.is_compiling():
        return "kv_lengths inside torch.compile: flash-attn's attention to a cache is not an operator that it can trace"
    if _takes_wide_value(problem.width, problem.value_width, problem.kv_range):
        return None
    return _missing("flash_attn")


def run(call: Call) -> Tensor:
    """Attend as `reference.run` does; the two rounded outputs are subtracted in fp32, and the result is rounded again."""
    query, key, value, lam, restrictions, scale, _ = call
    width, value_width = call.width, value.shape[-1]
    query, scale = positive_scale(query, scale)
    wide = _takes_wide_value(width, value_width, restrictions.kv_lengths is not None)
    queries = query.transpose(1, 2).split(width, -1)
    keys = key.transpose(1, 2).split(width, -1)
    if len(keys) < len(queries):
        keys = keys * 2

    width_C = value_width if wide else width
    pieces = []
    for v_BSGC in value.transpose(1, 2).split(width_C, -1):
        rest = v_BSGC.shape[-1]
        v_BSGC = F.pad(v_BSGC, (0, width_C - rest)) if rest < width_C else v_BSGC
        outs = [
            _attend(q_BTHD, k_BSGD, v_BSGC, restrictions, scale, wide)[..., :rest]
            for q_BTHD, k_BSGD in zip(queries, keys, strict=True)
        ]
        if lam is None:
            pieces.append(outs[0])
        else:
            # lam stays fp32: the product and the difference are formed there and rounded once.
            pieces.append((outs[0] - lam.transpose(1, 2).unsqueeze(-1) * outs[1]).to(value.dtype))
    return torch.cat(pieces, -1).transpose(1, 2)


def _attend(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGC: Tensor, restrictions: Restrictions, scale: float, wide: bool
) -> Tensor:
    """softmax(s Q K^T) V of one map and one chunk of the value, (B, T, H, C)."""
    if wide:
        import flex_head_fa as library  # type: ignore[import-not-found, unused-ignore]
    else:
        import flash_attn as library  # type: ignore[import-not-found, unused-ignore]
    _, is_causal, window, _, kv_lengths, cu_seqlens = restrictions
    arguments: dict[str, Any] = {
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size": (-1, -1) if window is None else (window - 1, 0),
    }
    if kv_lengths is not None:
        # The package needs a cache whose last dimension is contiguous.
        k_BSGD, v_BSGC = (x if x.stride(-1) == 1 else x.contiguous() for x in (k_BSGD, v_BSGC))
        return library.flash_attn_with_kvcache(
            q_BTHD, k_BSGD, v_BSGC, cache_seqlens=kv_lengths.to(torch.int32), **arguments
        )
    arguments["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if cu_seqlens is None:
        return library.flash_attn_func(q_BTHD, k_BSGD, v_BSGC, **arguments)
    bounds = cu_seqlens.to(torch.int32)
    # Not below 2: with a longest document of 1 the package fails on empty ones (its issue 1537).
    longest = max(q_BTHD.shape[1], 2)
    out_THC = library.flash_attn_varlen_func(
        q_BTHD[0], k_BSGD[0], v_BSGC[0], bounds, bounds, longest, longest, **arguments
    )
    return out_THC.unsqueeze(0)


def _is_gpu(device_type: str) -> bool:
    return device_type == "cuda"


def _takes_wide_value(width: int, value_width: int, is_cache: bool) -> bool:
    """Whether the fork is installed and takes the value in one piece; for a cache it does not document that it can."""
    return not is_cache and WIDE_VALUES.get(width) == value_width and _missing("flex_head_fa") is None


@torch.compiler.assume_constant_result
def _missing(package: str) -> str | None:
    """Return why a package cannot be used here, or None."""
    return _outcome(package)


@functools.cache
def _outcome(package: str) -> str | None:
    try:
        library = importlib.import_module(package)
    except (ImportError, OSError) as error:
        # A package that was built for another torch fails here, too.
        return f"{package} cannot be imported ({' '.join(str(error).split())}): {HOW_TO_INSTALL}"
    # FlashAttention-4 shares the name, but not the functions.
    absent = [name for name in ("flash_attn_func", "flash_attn_varlen_func") if not hasattr(library, name)]
    if absent:
        return f"{package} has no {absent[0]}, so it is not FlashAttention-2: {HOW_TO_INSTALL}"
    version = str(getattr(library, "__version__", "unknown"))
    if package == "flash_attn" and tuple(int(part) for part in re.findall(r"\d+", version)[:3]) < OLDEST:
        return f"flash_attn {version}; at least {'.'.join(map(str, OLDEST))} is needed: {HOW_TO_INSTALL}"
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return f"{package} needs a GPU of compute capability 8.0 or newer (Ampere)"
    return None
