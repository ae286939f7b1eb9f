"""Attention in C++ (`csrc/`), built on first use: fused forward and backward, O(n) memory, the same bits on any threads.

The forward buffers a block of queries' rows of both maps and forms A = P1 - lam P2 in fp32 before one product with V: 4
units of 2 n n D, as the Transformer's 2H heads. The backward saves nothing but the two log-sum-exps: 10 units. How the work
is laid out is said in `csrc/forward.h` and `csrc/backward.h`.
"""

from typing import Any

import torch
from torch import Tensor

from ..errors import BackendUnavailable
from . import build
from .problem import Problem, Restrictions

DESCRIPTION = "fused C++ for x86-64 (AVX2, AVX-512, AMX), built on first use; subtracts in fp32, once"

_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? lam, Tensor? attn_mask, bool is_causal, int? window, "
    "Tensor? kv_start, Tensor? kv_lengths, Tensor? cu_seqlens, float scale, Tensor? norm_weight, float? norm_eps, "
    "float norm_factor"
)
_library = torch.library.Library("difftransformer", "FRAGMENT")
_library.define(f"cpu_attention({_ARGUMENTS}) -> (Tensor out, Tensor lse, Tensor plain, Tensor inverse_rms)")
_library.define(
    f"cpu_attention_backward(Tensor grad, Tensor lse, Tensor plain, Tensor inverse_rms, {_ARGUMENTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def supports(problem: Problem) -> str | None:
    """Why this backend cannot run the problem, or None. The first call builds the library where it is not yet there."""
    if problem.device_type != "cpu":
        return f"runs on the CPU, not on {problem.device_type}"
    if problem.dtype == torch.float64:
        return "takes float32, bfloat16 and float16, not float64"
    return build.load()


def has_quadratic_memory(problem: Problem) -> bool:
    """Never: a mask is read where it lies, and buffers hold the rows of one block."""
    return False


def run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lam: Tensor | None,
    restrictions: Restrictions,
    scale: float | None,
    weight: Tensor | None = None,
    eps: float | None = None,
    factor: float = 1.0,
) -> Tensor:
    """Arguments and result as in `reference.run`; with `eps`, heads go through factor * RMSNorm(head) * weight."""
    if scale is None:
        scale = (query.shape[-1] if lam is None else query.shape[-1] // 2) ** -0.5
    if scale <= 0:
        # The kernels take maxima of unscaled scores, so theirs is positive.
        query, scale = (-query, -scale) if scale < 0 else (query * 0, 1.0)
    out: Tensor = torch.ops.difftransformer.cpu_attention(
        query, key, value, lam, *restrictions, scale, weight, eps, factor
    )[0]
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


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, lam, attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens, scale, weight, *norm = (
        inputs
    )
    _, lse, plain, inverse_rms = output
    ctx.mark_non_differentiable(lse, plain, inverse_rms)
    ctx.save_for_backward(
        lse, plain, inverse_rms, query, key, value, lam, attn_mask, kv_start, kv_lengths, cu_seqlens, weight
    )
    ctx.is_causal, ctx.window, ctx.scale, ctx.norm = is_causal, window, scale, norm


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    lse, plain, inverse_rms, query, key, value, lam, attn_mask, kv_start, kv_lengths, cu_seqlens, weight = (
        ctx.saved_tensors
    )
    dq, dk, dv, dlam, dweight = torch.ops.difftransformer.cpu_attention_backward(
        grad,
        lse,
        plain,
        inverse_rms,
        query,
        key,
        value,
        lam,
        attn_mask,
        ctx.is_causal,
        ctx.window,
        kv_start,
        kv_lengths,
        cu_seqlens,
        ctx.scale,
        weight,
        *ctx.norm,
    )
    dlam = None if lam is None else dlam
    dweight = None if weight is None else dweight.to(weight.dtype)
    return dq, dk, dv, dlam, *(None,) * 7, dweight, None, None


torch.library.register_autograd("difftransformer::cpu_attention", _differentiate, setup_context=_save)


def _refuse(ctx: Any, *_: Any) -> None:
    raise BackendUnavailable("backend 'cpu' has no second derivatives; name backend='reference'")


torch.library.register_autograd("difftransformer::cpu_attention_backward", _refuse)
