"""The backward's loop over queries for Hopper (compute capability 9.0), in Gluon: warps that load, multiply and add dQ.

It computes what `backward.keys_kernel` does in its "atomic" form, with the same products in the same order, for causal
attention of two maps with keys of their own and values twice as wide, as many key as query heads, and lambda of a head. One
warp copies tiles by the tensor memory accelerator, two warpgroups multiply, and one warp adds dQ in fp32 and in no fixed order.

Gluon belongs to Triton's experimental part and does not run in the interpreter: without a part of it, importing this fails.
"""

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

WARPS, REGISTERS = 8, 168  # of the multiplying warps; of a thread at the start: 65536 for 12 warps


@builtin
def _add(target, at, source, _semantic=None):
    """Add a tile in shared memory to a tensor."""
    kind = gl._core.ir.DESCRIPTOR_REDUCE_KIND.ADD
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(kind, target.handle, at, source.handle)


# Triton 3.8 renamed the copies.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def _tile(buffer):
    """View a buffer (1, 1, rows, columns) as a matrix."""
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.jit
def load_partition(sources, sinks, buffers, barriers, where, KEY_2: gl.constexpr, D: gl.constexpr):
    """Copy the tiles of keys and values once, then those of each block of queries."""
    queries, keys, values, grads, rows = sources
    q_buffers, k_buffers, v_buffer, grad_buffers, row_buffers, _, _ = buffers
    loaded, ready, empty, _, _ = barriers
    b, h, column, steps, head_rows = where
    STAGES: gl.constexpr = grad_buffers.shape[0]
    BLOCK_T: gl.constexpr = grad_buffers.shape[3]
    mbarrier.expect(loaded, 2 * keys.block_type.nbytes + values.block_type.nbytes)
    _load(keys, [b, h, column, 0], loaded, k_buffers.index(0))
    _load(keys, [b, h, column, KEY_2], loaded, k_buffers.index(1))
    _load(values, [b, h, column, 0], loaded, v_buffer)
    for step in range(steps):
        stage = step % STAGES
        row = column + step * BLOCK_T
        bar = ready.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(bar, 2 * queries.block_type.nbytes + grads.block_type.nbytes + rows.block_type.nbytes)
        _load(queries, [b, h, row, 0], bar, q_buffers.index(2 * stage))
        _load(queries, [b, h, row, D], bar, q_buffers.index(2 * stage + 1))
        _load(rows, [(head_rows + row) * 4], bar, row_buffers.index(stage))
        _load(grads, [b, h, row, 0], bar, grad_buffers.index(stage))


@gluon.jit
def add_partition(sources, sinks, buffers, barriers, where, KEY_2: gl.constexpr, D: gl.constexpr):
    """Add dQ of each block of queries."""
    query_grads, _, _ = sinks
    dq_buffers = buffers[6]
    _, _, _, full, free = barriers
    b, h, column, steps, _ = where
    BLOCK_T: gl.constexpr = dq_buffers.shape[3]
    for step in range(steps):
        row = column + step * BLOCK_T
        mbarrier.wait(full, step & 1)
        _add(query_grads, [b, h, row, 0], dq_buffers.index(0))
        _add(query_grads, [b, h, row, D], dq_buffers.index(1))
        tma.store_wait(0)
        mbarrier.arrive(free)


@gluon.jit
def multiply_partition(sinks, buffers, barriers, where, lam, c, s, KEY_2: gl.constexpr, D: gl.constexpr,
                       E: gl.constexpr, AHEAD: gl.constexpr):  # fmt: skip
    """Compute dK and dV of a block of keys, and dQ of each block of queries. With AHEAD, the scores of the next block are
    computed while dQ is written."""
    _, key_grads, value_grads = sinks
    q_buffers, k_buffers, v_buffer, grad_buffers, row_buffers, ds_buffers, dq_buffers = buffers
    loaded, ready, empty, full, free = barriers
    b, h, column, steps, _ = where
    STAGES: gl.constexpr = grad_buffers.shape[0]
    BLOCK_T: gl.constexpr = grad_buffers.shape[3]
    BLOCK_S: gl.constexpr = v_buffer.shape[2]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_T, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, E, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, D // 2, 16])
    k_left: gl.constexpr = gl.DotOperandLayout(0, dk_layout, 2)
    v_left: gl.constexpr = gl.DotOperandLayout(0, dv_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    k1, k2, v = _tile(k_buffers.index(0)), _tile(k_buffers.index(1)), _tile(v_buffer)
    dk1 = gl.zeros([BLOCK_S, D], gl.float32, dk_layout)
    dk2 = gl.zeros([BLOCK_S, D], gl.float32, dk_layout)
    dv = gl.zeros([BLOCK_S, E], gl.float32, dv_layout)
    no_scores = gl.zeros([BLOCK_S, BLOCK_T], gl.float32, score_layout)
    no_dq = gl.zeros([BLOCK_T, D], gl.float32, dq_layout)
    columns = gl.arange(0, BLOCK_S, gl.SliceLayout(1, score_layout))
    local = gl.arange(0, BLOCK_T, row_layout)
    mbarrier.wait(loaded, 0)
    s1, s2 = no_scores, no_scores
    if AHEAD:
        mbarrier.wait(ready.index(0), 0)
        s1 = warpgroup_mma(k1, _tile(q_buffers.index(0)).permute([1, 0]), no_scores, use_acc=False, is_async=True)
        s2 = warpgroup_mma(k2, _tile(q_buffers.index(1)).permute([1, 0]), no_scores, use_acc=False, is_async=True)
        s1, s2 = warpgroup_mma_wait(0, [s1, s2])
    for step in range(steps):
        stage = step % STAGES
        q1, q2 = _tile(q_buffers.index(2 * stage)), _tile(q_buffers.index(2 * stage + 1))
        grad, numbers = _tile(grad_buffers.index(stage)), row_buffers.index(stage)
        if not AHEAD:
            mbarrier.wait(ready.index(stage), step // STAGES & 1)
            s1 = warpgroup_mma(k1, q1.permute([1, 0]), no_scores, use_acc=False, is_async=True)
            s2 = warpgroup_mma(k2, q2.permute([1, 0]), no_scores, use_acc=False, is_async=True)
        dp = warpgroup_mma(v, grad.permute([1, 0]), no_scores, use_acc=False, is_async=True)
        if not AHEAD:
            s1 = warpgroup_mma_wait(2, [s1])
        p1 = gl.exp2(s1 * c - numbers.slice(0, BLOCK_T).load(row_layout)[None, :])
        if not AHEAD:
            s2 = warpgroup_mma_wait(1, [s2])
        p2 = gl.exp2(s2 * c - numbers.slice(BLOCK_T, BLOCK_T).load(row_layout)[None, :]) * lam
        if step * BLOCK_T < BLOCK_S:
            allowed = step * BLOCK_T + local[None, :] >= columns[:, None]
            p1, p2 = gl.where(allowed, p1, 0.0), gl.where(allowed, p2, 0.0)
        p = gl.convert_layout((p1 - p2).to(gl.bfloat16), v_left)
        dv = warpgroup_mma(p, grad, dv, is_async=True)
        dp = warpgroup_mma_wait(1, [dp])
        ds1 = (p1 * (dp - numbers.slice(2 * BLOCK_T, BLOCK_T).load(row_layout)[None, :])).to(gl.bfloat16)
        ds2 = (p2 * (numbers.slice(3 * BLOCK_T, BLOCK_T).load(row_layout)[None, :] - dp)).to(gl.bfloat16)
        ds_buffers.index(0).store(ds1)
        ds_buffers.index(1).store(ds2)
        fence_async_shared()
        dk1 = warpgroup_mma(gl.convert_layout(ds1, k_left), q1, dk1, is_async=True)
        dk2 = warpgroup_mma(gl.convert_layout(ds2, k_left), q2, dk2, is_async=True)
        gl.thread_barrier()
        dq1 = warpgroup_mma(ds_buffers.index(0).permute([1, 0]), k1, no_dq, use_acc=False, is_async=True)
        dq2 = warpgroup_mma(ds_buffers.index(1).permute([1, 0]), k2, no_dq, use_acc=False, is_async=True)
        if AHEAD:
            more = step + 1 < steps
            following = (step + 1) % STAGES
            mbarrier.wait(ready.index(following), (step + 1) // STAGES & 1, pred=more)
            q = _tile(q_buffers.index(2 * following)).permute([1, 0])
            s1 = warpgroup_mma(k1, q, no_scores, use_acc=False, is_async=True)
            q = _tile(q_buffers.index(2 * following + 1)).permute([1, 0])
            s2 = warpgroup_mma(k2, q, no_scores, use_acc=False, is_async=True)
            dv, dk1, dk2, dq1, dq2 = warpgroup_mma_wait(2, [dv, dk1, dk2, dq1, dq2])
        else:
            dv, dk1, dk2, dq1, dq2 = warpgroup_mma_wait(0, [dv, dk1, dk2, dq1, dq2])
        mbarrier.arrive(empty.index(stage))
        mbarrier.wait(free, (step & 1) ^ 1)
        _tile(dq_buffers.index(0)).store(dq1 * s)
        _tile(dq_buffers.index(1)).store(dq2 * s)
        fence_async_shared()
        mbarrier.arrive(full)
        if AHEAD:
            s1, s2 = warpgroup_mma_wait(0, [s1, s2])
    # Nothing reads the keys and values any more: their gradients take their place.
    gl.thread_barrier()
    k1.store((dk1 * s).to(gl.bfloat16))
    k2.store((dk2 * s).to(gl.bfloat16))
    v.store(dv.to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    _store(key_grads, [b, h, column, 0], k_buffers.index(0))
    _store(key_grads, [b, h, column, KEY_2], k_buffers.index(1))
    _store(value_grads, [b, h, column, 0], v_buffer)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["H", "T", "TOGETHER", "c", "s", "lam_b", "lam_h"])
def hopper_keys_kernel(queries, keys, values, grads, rows, query_grads, key_grads, value_grads, Lam, lam_b, lam_h, H, T,
                       TOGETHER, c, s, KEY_2: gl.constexpr, D: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr,
                       AHEAD: gl.constexpr):  # fmt: skip
    """Compute dK and dV of a block of keys; query_grads, fp32 and initially zero, collects dQ.

    TOGETHER heads of consecutive programs start with their first keys, which have the most queries.
    """
    BLOCK_S: gl.constexpr = keys.block_type.shape[2]
    BLOCK_T: gl.constexpr = queries.block_type.shape[2]
    program, blocks = gl.program_id(0), T // BLOCK_S
    first = program // (blocks * TOGETHER) * TOGETHER
    among = gl.minimum(gl.num_programs(0) // blocks - first, TOGETHER)
    rest = program - first * blocks
    head = first + rest % among
    column = rest // among * BLOCK_S
    b, h = head // H, head % H
    lam = gl.load(Lam + b.to(gl.int64) * lam_b + h * lam_h)
    q_buffers = gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 1, 1, BLOCK_T, D], queries.layout)
    k_buffers = gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, BLOCK_S, D], keys.layout)
    v_buffer = gl.allocate_shared_memory(gl.bfloat16, [1, 1, BLOCK_S, E], values.layout)
    grad_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BLOCK_T, E], grads.layout)
    row_buffers = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * BLOCK_T], rows.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ds_buffers = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_S, BLOCK_T], ds_layout)
    dq_buffers = gl.allocate_shared_memory(gl.float32, [2, 1, 1, BLOCK_T, D], query_grads.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    sources = (queries, keys, values, grads, rows)
    sinks = (query_grads, key_grads, value_grads)
    buffers = (q_buffers, k_buffers, v_buffer, grad_buffers, row_buffers, ds_buffers, dq_buffers)
    barriers = (loaded, ready, empty, full, free)
    where = (b, h, column, (T - column) // BLOCK_T, head * T)
    gl.warp_specialize(
        [
            (multiply_partition, (sinks, buffers, barriers, where, lam, c, s, KEY_2, D, E, AHEAD)),
            (load_partition, (sources, sinks, buffers, barriers, where, KEY_2, D)),
            (add_partition, (sources, sinks, buffers, barriers, where, KEY_2, D)),
        ],
        [1, 1],
        [24, 24],
    )


def descriptor(x: Tensor, *block: int) -> Any:
    """Describe a tensor whose tiles are copied, (B, heads, positions, width) or of one dimension."""
    shape = [1] * (x.dim() - len(block)) + list(block)
    dtype = gl.float32 if x.element_size() == 4 else gl.bfloat16
    return TensorDescriptor.from_tensor(x, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype))
