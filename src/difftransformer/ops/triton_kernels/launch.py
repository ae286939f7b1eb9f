"""Allocate the kernels' outputs, choose their form and launch them.

Outputs and gradients are laid out as (B, T, H, width), the order that a model's projections need, and returned as views
(B, H, T, width).
"""

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..problem import LOW_PRECISION, Call, Norm, Restrictions
from . import backward as backward_kernels
from . import decode as decode_kernels
from . import forward as forward_kernels
from .configs import (
    DECODE_ROWS,
    HOPPER,
    Form,
    Tiling,
    backward_forms,
    choose,
    decode_splits,
    decode_tiling,
    forward_forms,
    hopper_refusal,
    is_small,
    padded,
)
from .tiles import Seen

LOG2_E = math.log2(math.e)
# Rows of a program that works row by row, and its options.
ROWS = 32
ROWS_OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
# Triton loads 16 bytes at a time where it knows that this divides a stride.
STRIDE_FACTOR = 16


class Forward(NamedTuple):
    """The tensors that a forward pass returns. Those that its backward does not need are empty.

    Attributes:
        out: (B, H, T, E).
        lse: (B, H, T, maps), log2 of the sums of the exponentials, fp32; +inf where a query may attend to nothing.
        second: (B, H, T, E), the second map's output, fp32.
        plain: (B, H, T, E), heads before the norm and before they are rounded, fp32; not for ordinary attention without norm.
        inverse_rms: (B, H, T), fp32.
    """

    out: Tensor
    lse: Tensor
    second: Tensor
    plain: Tensor
    inverse_rms: Tensor


def aligned(x: Tensor) -> Tensor:
    """Return x, (B, heads, positions, width), or a copy of it, with a last dimension of stride 1.

    In low precision its rows also start at multiples of 16 numbers. For rows at other addresses Triton 3.6 compiled a backward
    for Hopper that gave wrong gradients or read out of range.
    """
    if x.stride(-1) == 1 and (x.dtype not in LOW_PRECISION or _is_aligned(x)):
        return x
    if x.dtype not in LOW_PRECISION:
        return x.contiguous()
    return _aligned_like(x).copy_(x)


def _is_aligned(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and not any(stride % STRIDE_FACTOR for stride in x.stride()[:3])


def _aligned_like(x: Tensor) -> Tensor:
    """Allocate a tensor of this shape, (B, heads, positions, width), with rows that start at multiples of 16 numbers."""
    batch, heads, positions, width = x.shape
    room = triton.cdiv(width, STRIDE_FACTOR) * STRIDE_FACTOR
    return x.new_empty(batch, positions, heads, room)[..., :width].transpose(1, 2)


class Inputs:
    """The tensors of a call as the kernels take them: aligned, with lambda expanded to (B, H, T)."""

    def __init__(self, call: Call) -> None:
        query, key, value, lam, restrictions, self.scale, _ = call
        self.query, self.key, self.value = (aligned(x) for x in (query, key, value))
        self.is_differential = lam is not None
        self.batch, self.heads, self.queries = query.shape[:3]
        self.groups, self.keys, self.value_width = value.shape[1:]
        self.maps = 2 if self.is_differential else 1
        self.width = call.width
        self.shape = (self.batch, self.heads, self.queries)
        self.lam = None if lam is None else lam.expand(self.shape)
        self.lam_strides = (0, 0, 0) if self.lam is None else self.lam.stride()
        # The column at which the second map's key starts; 0 where the maps share one.
        self.key_2 = self.width if self.is_differential and key.shape[3] != self.width else 0
        self.is_causal = restrictions.is_causal
        self.seen = seen_of(restrictions, self.shape, self.keys)
        self.low = query.dtype in LOW_PRECISION
        self.has_mask = self.seen.attn_mask is not None
        self.small = is_small(query.device, self.has_mask)
        self.starts_late = any(x is not None for x in (self.seen.kv_start, self.seen.window, self.seen.document_first))

    def sizes(self) -> tuple[int, int, int, int]:
        """Return H, G, T and S."""
        return self.heads, self.groups, self.queries, self.keys

    def widths(self) -> dict[str, int]:
        """Return the widths as keywords of a kernel."""
        return {
            "D": self.width,
            "E": self.value_width,
            "BLOCK_D": padded(self.width),
            "BLOCK_E": padded(self.value_width, 32),
        }

    def new(self, positions: int, heads: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Allocate (B, heads, positions, width)."""
        return self.query.new_empty(self.batch, positions, heads, width, dtype=dtype).transpose(1, 2)

    def key_of(self, *more: object) -> tuple[object, ...]:
        """Return the facts that decide the speed of a kernel, with lengths rounded up to powers of two."""
        return (
            self.query.device,
            self.query.dtype,
            self.width,
            self.value_width,
            self.is_differential,
            self.key_2,
            self.is_causal,
            self.starts_late,
            self.has_mask,
            self.heads // self.groups,
            padded(self.batch * self.heads),
            padded(self.queries),
            padded(self.keys),
            *more,
        )


def seen_of(restrictions: Restrictions, shape: tuple[int, int, int], keys: int) -> Seen:
    """Convert restrictions to the kernels' form, without reading a value back from the device."""
    attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens = restrictions
    kv_start, kv_lengths = (x if x is None else x.contiguous() for x in (kv_start, kv_lengths))
    if not is_causal or (window is not None and window >= keys):  # near 2^31 it would overflow the kernels' int32
        window = None
    seen = Seen(kv_start=kv_start, kv_lengths=kv_lengths, window=window)
    if cu_seqlens is not None:
        queries = shape[2]
        bounds = cu_seqlens.to(torch.int32).clamp(0, queries)
        positions = torch.arange(queries, dtype=torch.int32, device=bounds.device)
        document = (torch.searchsorted(bounds, positions, right=True) - 1).clamp_(0, len(bounds) - 2)
        seen = seen._replace(document_first=bounds[document], document_last=bounds[document + 1])
    if attn_mask is not None:
        spread = attn_mask.expand(*shape, keys)
        strides = dict(zip(("mask_b", "mask_h", "mask_t", "mask_s"), spread.stride(), strict=True))
        seen = seen._replace(attn_mask=spread.view(torch.uint8), **strides)
    return seen


def forward(inputs: Inputs, norm: Norm | None, save: bool) -> Forward:
    """Compute attention, with normalised heads if `norm` is given; with `save`, also the tensors that `backward` needs."""
    if inputs.query.shape[:3].numel() * inputs.keys == 0:
        return _without_more(inputs.new(inputs.queries, inputs.heads, inputs.value_width).zero_())
    if not save and inputs.heads // inputs.groups * inputs.queries <= DECODE_ROWS:
        return _without_more(_decode(inputs, norm))
    forms = forward_forms(
        width=inputs.width,
        value_width=inputs.value_width,
        is_differential=inputs.is_differential,
        low=inputs.low,
        starts_late=inputs.starts_late,
        has_mask=inputs.has_mask,
        save=save,
        small=inputs.small,
    )
    form = choose(forms, inputs.key_of("forward", norm is None, save), lambda form: _forward(inputs, norm, save, form))
    return _forward(inputs, norm, save, form)


def _forward(inputs: Inputs, norm: Norm | None, save: bool, form: Form) -> Forward:
    weight, eps, factor = norm or (None, 0.0, 1.0)
    batch, heads, queries = inputs.shape
    tiling = form.tilings[0]

    def in_fp32() -> Tensor:
        return inputs.new(queries, heads, inputs.value_width, torch.float32)

    out = inputs.new(queries, heads, inputs.value_width)
    by_the_way = norm is not None and form.name == "both_maps" and padded(inputs.value_width) <= 128
    lse = second = plain = inverse_rms = None
    if save:
        lse = out.new_empty(*inputs.shape, inputs.maps, dtype=torch.float32)
        second = in_fp32() if inputs.is_differential else None
        inverse_rms = None if norm is None else out.new_empty(inputs.shape, dtype=torch.float32)
    if (save and (inputs.is_differential or norm is not None)) or (norm is not None and not by_the_way):
        plain = in_fp32()
    written = out if norm is None or by_the_way else plain
    strides = (
        *(x.stride()[:3] for x in (inputs.query, inputs.key, inputs.value)),
        inputs.lam_strides,
        out.stride()[:3],
    )
    c = inputs.scale * LOG2_E
    grid = (triton.cdiv(queries, tiling.queries) * batch * heads,)
    options = {"CAUSAL": inputs.is_causal, **inputs.widths(), **tiling.options()}
    if form.name == "both_maps":
        forward_kernels.both_maps_kernel[grid](
            inputs.query, inputs.key, inputs.value, inputs.lam, written, weight, *strides, inputs.seen, *inputs.sizes(),
            c, eps, factor, KEY_2=inputs.key_2, NORM=by_the_way, **options)  # fmt: skip
    else:
        options["MAPS"] = inputs.maps
        waiting = second
        if inputs.is_differential:
            waiting = in_fp32() if second is None else second
            forward_kernels.one_map_kernel[grid](
                inputs.query[..., inputs.width :], inputs.key[..., inputs.key_2 :], inputs.value, None, None, waiting,
                None if lse is None else lse[..., 1], None, *strides, inputs.seen, *inputs.sizes(), c, **options)  # fmt: skip
        forward_kernels.one_map_kernel[grid](
            inputs.query, inputs.key, inputs.value, inputs.lam, waiting, written, lse, None if written is plain else plain,
            *strides, inputs.seen, *inputs.sizes(), c, **options)  # fmt: skip
    if written is not out:
        forward_kernels.norm_kernel[(triton.cdiv(queries, ROWS) * batch * heads,)](
            written, out, inverse_rms, weight, out.stride()[:3], heads, queries, eps, factor,
            E=inputs.value_width, BLOCK_E=padded(inputs.value_width, 32), BLOCK_T=ROWS, **ROWS_OPTIONS)  # fmt: skip
    kept = (lse, second, plain if save else None, inverse_rms)
    return Forward(out, *(out.new_empty(0) if x is None else x for x in kept))


def _decode(inputs: Inputs, norm: Norm | None) -> Tensor:
    weight, eps, factor = norm or (None, 0.0, 1.0)
    batch, (heads, groups, queries, keys) = inputs.batch, inputs.sizes()
    out = inputs.new(queries, heads, inputs.value_width)
    tiling = decode_tiling(
        width=inputs.width,
        value_width=inputs.value_width,
        rows=heads // groups * queries,
        low=inputs.low,
        small=inputs.small,
    )
    splits = decode_splits(batch * groups, keys, out.device)
    shares = (inputs.maps, splits, batch * heads * queries)
    top, total = out.new_empty(2, *shares, dtype=torch.float32)
    sums = out.new_empty(*shares, inputs.value_width, dtype=torch.float32)
    options = tiling.options()
    options["BLOCK_R"] = options.pop("BLOCK_T")
    decode_kernels.decode_kernel[(batch * groups * splits,)](
        inputs.query, inputs.key, inputs.value, top, total, sums,
        *(x.stride()[:3] for x in (inputs.query, inputs.key, inputs.value)), inputs.seen, batch, *inputs.sizes(),
        inputs.scale * LOG2_E, splits, DIFF=inputs.is_differential, CAUSAL=inputs.is_causal, KEY_2=inputs.key_2,
        **inputs.widths(), **options)  # fmt: skip
    decode_kernels.combine_kernel[(batch * heads * queries,)](
        top, total, sums, inputs.lam, out, weight, inputs.lam_strides, out.stride()[:3], batch, heads, queries, splits, eps,
        factor, DIFF=inputs.is_differential, NORM=norm is not None, E=inputs.value_width,
        BLOCK_E=padded(inputs.value_width, 32), BLOCK_SPLITS=padded(splits, 1), **ROWS_OPTIONS)  # fmt: skip
    return out


def _without_more(out: Tensor) -> Forward:
    """Return an output with nothing for its backward."""
    return Forward(out, *(out.new_empty(0) for _ in range(4)))


def backward(
    inputs: Inputs, norm: Norm | None, saved: Forward, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, lam (B, H, T) and the norm's weight (E,), given the output's gradient.

    The last two are in fp32, and empty without lam or weight.
    """
    batch, (heads, groups, queries, keys) = inputs.batch, inputs.sizes()
    weight_grad = inputs.query.new_zeros(
        0 if norm is None or norm[0] is None else inputs.value_width, dtype=torch.float32
    )
    if batch * heads * queries * keys == 0:
        return (
            inputs.new(queries, heads, inputs.query.shape[3]).zero_(),
            inputs.new(keys, groups, inputs.key.shape[3]).zero_(),
            inputs.new(keys, groups, inputs.value_width).zero_(),
            inputs.query.new_zeros(inputs.shape if inputs.is_differential else 0, dtype=torch.float32),
            weight_grad,
        )
    delta = torch.empty_like(saved.lse)
    grad = aligned(grad)
    plain = saved.plain if inputs.is_differential or norm is not None else saved.out
    grid = (triton.cdiv(queries, ROWS) * batch * heads,)
    heads_grad = grad
    by_program = None
    if norm is not None:
        heads_grad = _aligned_like(saved.out)
        if weight_grad.numel():
            by_program = plain.new_empty(*grid, inputs.value_width, dtype=torch.float32)
    weight, _, factor = norm or (None, 0.0, 1.0)
    second = saved.second if inputs.is_differential else None
    backward_kernels.rows_kernel[grid](
        grad, plain, second, inputs.lam, saved.lse, saved.inverse_rms, weight, heads_grad, by_program, delta,
        grad.stride()[:3], plain.stride()[:3], (0, 0, 0) if second is None else second.stride()[:3], inputs.lam_strides,
        heads_grad.stride()[:3], heads, queries, factor,
        NORM=norm is not None, E=inputs.value_width, BLOCK_E=padded(inputs.value_width, 32), BLOCK_T=ROWS,
        **ROWS_OPTIONS)  # fmt: skip
    forms = backward_forms(
        width=inputs.width,
        value_width=inputs.value_width,
        key_maps=2 if inputs.key_2 else 1,
        low=inputs.low,
        has_mask=inputs.has_mask,
        small=inputs.small,
    )
    if _suits_hopper(inputs, heads_grad) and hopper_refusal(grad.device) is None:
        forms += (HOPPER,)
    form = choose(
        forms, inputs.key_of("backward", len(forms)), lambda form: _backward(inputs, saved.lse, delta, heads_grad, form)
    )
    query_grad, key_grad, value_grad = _backward(inputs, saved.lse, delta, heads_grad, form)
    lam_grad = -delta[..., 1] if inputs.is_differential else delta.new_empty(0)
    if by_program is not None:
        weight_grad = by_program.sum(0)
    return query_grad, key_grad, value_grad, lam_grad, weight_grad


def _suits_hopper(inputs: Inputs, grad: Tensor) -> bool:
    """Whether `hopper.hopper_keys_kernel` can compute the backward of a call."""
    same = (
        inputs.heads == inputs.groups and inputs.queries == inputs.keys and inputs.queries % HOPPER.tilings[0].keys == 0
    )
    return (
        same
        and inputs.query.dtype == torch.bfloat16
        and (inputs.width, inputs.value_width, inputs.key_2) == (64, 128, 64)
        and inputs.is_causal
        and not (inputs.starts_late or inputs.has_mask or inputs.seen.kv_lengths is not None)
        and inputs.lam_strides[2] == 0
        and all(0 not in x.stride() for x in (inputs.query, inputs.key, inputs.value, grad))
    )


def _hopper_backward(
    inputs: Inputs, lse: Tensor, delta: Tensor, grad: Tensor, grads: tuple[Tensor, Tensor, Tensor], tiling: Tiling
) -> None:
    from . import hopper

    rows, width, wide = tiling.queries, inputs.width, inputs.value_width
    numbers = torch.cat((lse, delta), -1).view(-1, rows, 4).transpose(1, 2).contiguous().view(-1)
    tensors = (inputs.query, inputs.key, inputs.value, grad, numbers, *grads)
    widths = (width, width, wide, wide, 0, width, width, wide)
    tiles = (hopper.descriptor(x, *((rows, w) if w else (4 * rows,))) for x, w in zip(tensors, widths, strict=True))
    hopper.hopper_keys_kernel[(inputs.keys // tiling.keys * inputs.batch * inputs.heads,)](
        *tiles, inputs.lam, *inputs.lam_strides[:2], inputs.heads, inputs.queries,
        hopper.TOGETHER, inputs.scale * LOG2_E, inputs.scale, KEY_2=inputs.key_2, D=width, E=wide, STAGES=tiling.stages,
        EARLY=hopper.EARLY, SHARED=hopper.SHARED, num_warps=tiling.warps, maxnreg=hopper.REGISTERS,
        enable_fp_fusion=True)  # fmt: skip


def _backward(inputs: Inputs, lse: Tensor, delta: Tensor, grad: Tensor, form: Form) -> tuple[Tensor, Tensor, Tensor]:
    batch, (heads, groups, queries, keys) = inputs.batch, inputs.sizes()
    adds = form.name != "split"
    query_grad = inputs.new(queries, heads, inputs.query.shape[3], torch.float32 if adds else None)
    key_grad = inputs.new(keys, groups, inputs.key.shape[3])
    value_grad = inputs.new(keys, groups, inputs.value_width)
    if adds:
        query_grad.zero_()
    if form is HOPPER:
        _hopper_backward(inputs, lse, delta, grad, (query_grad, key_grad, value_grad), form.tilings[0])
        return query_grad.to(inputs.query.dtype), key_grad, value_grad
    reads = (inputs.query, inputs.key, inputs.value, grad, inputs.lam, lse, delta)
    strides = (*(x.stride()[:3] for x in reads[:4]), inputs.lam_strides)
    numbers = (inputs.seen, *inputs.sizes(), inputs.scale * LOG2_E, inputs.scale)
    options = {"DIFF": inputs.is_differential, "CAUSAL": inputs.is_causal, "KEY_2": inputs.key_2, **inputs.widths()}
    tilings = list(form.tilings)
    queries_tiling = None if adds else tilings.pop()
    *values_tiling, keys_tiling = tilings
    for tiling in tilings:
        makes_keys, makes_values = tiling is keys_tiling, not values_tiling or tiling is not keys_tiling
        backward_kernels.keys_kernel[(triton.cdiv(keys, tiling.keys) * batch * groups,)](
            *reads, key_grad if makes_keys else None, value_grad if makes_values else None,
            query_grad if adds and makes_keys else None,
            *strides, key_grad.stride()[:3], value_grad.stride()[:3], query_grad.stride()[:3], *numbers,
            LAM_BY_QUERY=inputs.lam_strides[2] != 0, **options, **tiling.options())  # fmt: skip
    if queries_tiling is None:
        return query_grad.to(inputs.query.dtype), key_grad, value_grad
    backward_kernels.queries_kernel[(triton.cdiv(queries, queries_tiling.queries) * batch * heads,)](
        *reads, query_grad, *strides, query_grad.stride()[:3], *numbers, **options, **queries_tiling.options())  # fmt: skip
    return query_grad, key_grad, value_grad
