"""Attention in C++ (`csrc/`), built on first use: fused forward and backward, O(n) memory, the same bits on any threads.

The forward buffers a block of queries' rows of both maps and forms A = P1 - lam P2 in fp32 before one product with V: 4
units of 2 n n D, as many as the Transformer's 2H heads take. The backward needs 10 units and saves only the two
log-sum-exps. `csrc/forward.h` and `csrc/backward.h` describe how the work is divided.
"""

from typing import Any

import torch
from torch import Tensor

from . import build, fused
from .problem import Call, Problem

DESCRIPTION = "fused C++ for x86-64 (AVX2, AVX-512, AMX) and AArch64, built on first use; subtracts in fp32, once"

_library, _attend = fused.define("cpu", ("lse", "plain", "inverse_rms"))


def supports(problem: Problem) -> str | None:
    """Return why this backend cannot run the problem, or None. The first call builds the library if it is not built yet."""
    if problem.device_type != "cpu":
        return f"runs on the CPU, not on {problem.device_type}"
    if problem.dtype == torch.float64:
        return "takes float32, bfloat16 and float16, not float64"
    return fused.untraceable() or build.load()


def run(call: Call) -> Tensor:
    """Attend as `reference.run` does, and normalise heads in the same pass."""
    out: Tensor = _attend(*fused.arguments_of(call))[0]
    return out


@torch.library.register_fake("difftransformer::cpu_attention")
def _(query: Tensor, key: Tensor, value: Tensor, lam: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    batch, heads, queries = query.shape[:3]
    normed = batch if rest[-2] is not None else 0
    width = value.shape[3]
    return (
        query.new_empty(batch, queries, heads, width).transpose(1, 2),
        query.new_empty(1 if lam is None else 2, batch, heads, queries, dtype=torch.float32),
        query.new_empty(normed, queries, heads, width).transpose(1, 2),
        query.new_empty(normed, heads, queries, dtype=torch.float32),
    )


@torch.library.register_fake("difftransformer::cpu_attention_backward")
def _(
    grad: Tensor,
    lse: Tensor,
    plain: Tensor,
    inverse_rms: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lam: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    batch, heads, queries, width = query.shape
    return (
        query.new_empty(batch, queries, heads, width).transpose(1, 2),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        query.new_empty((0,) if lam is None else lam.shape, dtype=torch.float32),
        query.new_empty(0 if rest[-2] is None else value.shape[3], dtype=torch.float32),
    )
