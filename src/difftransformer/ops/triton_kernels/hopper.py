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

REGISTERS = 168  # of a thread at the start: 65536 for 12 warps
TOGETHER, EARLY, SHARED = 8, False, False


@builtin
def _add(target, at, source, _semantic=None):
    """Add a tile in shared memory to a tensor."""
    kind = gl._core.ir.DESCRIPTOR_REDUCE_KIND.ADD
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(kind, target.handle, at, source.handle)


# Later versions of Triton renamed these.
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def _tile(buffer):
    """View a buffer (1, 1, rows, columns) as a matrix."""
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.jit
def load_partition(sources, buffers, barriers, where, KEY_2: gl.constexpr, D: gl.constexpr):
    """Copy the tiles of keys and values once, then the tiles of each block of queries."""
    queries, keys, values, grads, rows = sources
    q_buffers, k_buffers, v_buffers, grad_buffers, row_buffers, _, _ = buffers
    loaded, ready, empty, _, _, _, _ = barriers
    b, h, column, steps, head_rows = where
    STAGES: gl.constexpr = grad_buffers.shape[0]
    BLOCK: gl.constexpr = grad_buffers.shape[3]
    mbarrier.expect(loaded, 4 * keys.block_type.nbytes + 2 * values.block_type.nbytes)
    for part in gl.static_range(2):
        _load(keys, [b, h, column + part * BLOCK, 0], loaded, k_buffers.index(part))
        _load(keys, [b, h, column + part * BLOCK, KEY_2], loaded, k_buffers.index(2 + part))
        _load(values, [b, h, column + part * BLOCK, 0], loaded, v_buffers.index(part))
    for step in range(steps):
        stage = step % STAGES
        row = column + step * BLOCK
        bar = ready.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(bar, 2 * queries.block_type.nbytes + grads.block_type.nbytes + rows.block_type.nbytes)
        _load(queries, [b, h, row, 0], bar, q_buffers.index(2 * stage))
        _load(queries, [b, h, row, D], bar, q_buffers.index(2 * stage + 1))
        _load(rows, [(head_rows + row) * 4], bar, row_buffers.index(stage))
        _load(grads, [b, h, row, 0], bar, grad_buffers.index(stage))


@gluon.jit
def add_partition(query_grads, buffers, barriers, where, D: gl.constexpr):
    """Add dQ of each block of queries."""
    dq_buffers = buffers[6]
    full, free = barriers[5], barriers[6]
    b, h, column, steps, _ = where
    BLOCK: gl.constexpr = dq_buffers.shape[3]
    for step in range(steps):
        for part in gl.static_range(2):
            mbarrier.wait(full.index(part), step & 1)
            _add(query_grads, [b, h, column + step * BLOCK, part * D], dq_buffers.index(part))
        tma.store_wait(0)
        mbarrier.arrive(free)


@gluon.jit
def multiply_partition(sinks, buffers, barriers, where, lam, c, s, PART: gl.constexpr, KEY_2: gl.constexpr,
                       D: gl.constexpr, E: gl.constexpr, EARLY: gl.constexpr, SHARED: gl.constexpr):  # fmt: skip
    """Compute dK and dV of half of the keys, and dQ of map PART from all of them, which takes dS of the other warpgroup.

    EARLY multiplies dP together with the scores. SHARED multiplies by dS from shared memory rather than from registers.
    """
    key_grads, value_grads = sinks
    q_buffers, k_buffers, v_buffers, grad_buffers, row_buffers, ds_buffers, dq_buffers = buffers
    loaded, ready, empty, written, read, full, free = barriers
    b, h, column, steps, _ = where
    STAGES: gl.constexpr = grad_buffers.shape[0]
    BLOCK: gl.constexpr = grad_buffers.shape[3]
    OTHER: gl.constexpr = 1 - PART
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    e_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, E, 16])
    row_layout: gl.constexpr = gl.SliceLayout(0, score_layout)
    k1, k2, v = _tile(k_buffers.index(PART)), _tile(k_buffers.index(2 + PART)), _tile(v_buffers.index(PART))
    own, other = _tile(k_buffers.index(3 * PART)), _tile(k_buffers.index(2 * PART + OTHER))
    dk1 = gl.zeros([BLOCK, D], gl.float32, d_layout)
    dk2 = gl.zeros([BLOCK, D], gl.float32, d_layout)
    dv = gl.zeros([BLOCK, E], gl.float32, e_layout)
    none = gl.zeros([BLOCK, BLOCK], gl.float32, score_layout)
    no_dq = gl.zeros([BLOCK, D], gl.float32, d_layout)
    columns = PART * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, score_layout))
    local = gl.arange(0, BLOCK, row_layout)
    mbarrier.wait(loaded, 0)
    for step in range(steps):
        stage = step % STAGES
        q1, q2 = _tile(q_buffers.index(2 * stage)), _tile(q_buffers.index(2 * stage + 1))
        grad, numbers = _tile(grad_buffers.index(stage)), row_buffers.index(stage)
        mbarrier.wait(ready.index(stage), step // STAGES & 1)
        s1 = warpgroup_mma(k1, q1.permute([1, 0]), none, use_acc=False, is_async=True)
        s2 = warpgroup_mma(k2, q2.permute([1, 0]), none, use_acc=False, is_async=True)
        if EARLY:
            dp = warpgroup_mma(v, grad.permute([1, 0]), none, use_acc=False, is_async=True)
            s1 = warpgroup_mma_wait(2, [s1])
        else:
            s1 = warpgroup_mma_wait(1, [s1])
        p1 = gl.exp2(s1 * c - numbers.slice(0, BLOCK).load(row_layout)[None, :])
        if EARLY:
            s2 = warpgroup_mma_wait(1, [s2])
        else:
            s2 = warpgroup_mma_wait(0, [s2])
        p2 = gl.exp2(s2 * c - numbers.slice(BLOCK, BLOCK).load(row_layout)[None, :]) * lam
        if step < 2:
            allowed = step * BLOCK + local[None, :] >= columns[:, None]
            p1, p2 = gl.where(allowed, p1, 0.0), gl.where(allowed, p2, 0.0)
        p = gl.convert_layout((p1 - p2).to(gl.bfloat16), gl.DotOperandLayout(0, e_layout, 2))
        dv = warpgroup_mma(p, grad, dv, is_async=True)
        if EARLY:
            dp = warpgroup_mma_wait(1, [dp])
        else:
            dv = warpgroup_mma_wait(0, [dv])
            dp = warpgroup_mma(v, grad.permute([1, 0]), none, use_acc=False, is_async=True)
            dp = warpgroup_mma_wait(0, [dp])
        ds1 = (p1 * (dp - numbers.slice(2 * BLOCK, BLOCK).load(row_layout)[None, :])).to(gl.bfloat16)
        ds2 = (p2 * (numbers.slice(3 * BLOCK, BLOCK).load(row_layout)[None, :] - dp)).to(gl.bfloat16)
        mbarrier.wait(read.index(OTHER), (step & 1) ^ 1)
        ds_buffers.index(PART).store(ds1)
        ds_buffers.index(2 + PART).store(ds2)
        fence_async_shared()
        mbarrier.arrive(written.index(PART))
        if SHARED:
            dk1 = warpgroup_mma(ds_buffers.index(PART), q1, dk1, is_async=True)
            dk2 = warpgroup_mma(ds_buffers.index(2 + PART), q2, dk2, is_async=True)
        else:
            dk1 = warpgroup_mma(gl.convert_layout(ds1, gl.DotOperandLayout(0, d_layout, 2)), q1, dk1, is_async=True)
            dk2 = warpgroup_mma(gl.convert_layout(ds2, gl.DotOperandLayout(0, d_layout, 2)), q2, dk2, is_async=True)
        dq = warpgroup_mma(ds_buffers.index(3 * PART).permute([1, 0]), own, no_dq, use_acc=False, is_async=True)
        mbarrier.wait(written.index(OTHER), step & 1)
        dq = warpgroup_mma(ds_buffers.index(2 * PART + OTHER).permute([1, 0]), other, dq, is_async=True)
        dv, dk1, dk2, dq = warpgroup_mma_wait(0, [dv, dk1, dk2, dq])
        mbarrier.arrive(read.index(PART))
        mbarrier.arrive(empty.index(stage))
        mbarrier.wait(free, (step & 1) ^ 1)
        _tile(dq_buffers.index(PART)).store(dq * s)
        fence_async_shared()
        mbarrier.arrive(full.index(PART))
    # Once the other warpgroup has read the keys for the last time, gradients take the place of keys and values.
    mbarrier.wait(read.index(OTHER), (steps & 1) ^ 1)
    k1.store((dk1 * s).to(gl.bfloat16))
    k2.store((dk2 * s).to(gl.bfloat16))
    v.store(dv.to(gl.bfloat16))
    fence_async_shared()
    _barrier()
    at = column + PART * BLOCK
    _store(key_grads, [b, h, at, 0], k_buffers.index(PART))
    _store(key_grads, [b, h, at, KEY_2], k_buffers.index(2 + PART))
    _store(value_grads, [b, h, at, 0], v_buffers.index(PART))
    tma.store_wait(0)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate barriers."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit(do_not_specialize=["H", "T", "TOGETHER", "c", "s", "lam_b", "lam_h"])
def hopper_keys_kernel(queries, keys, values, grads, rows, query_grads, key_grads, value_grads, Lam, lam_b, lam_h, H, T,
                       TOGETHER, c, s, KEY_2: gl.constexpr, D: gl.constexpr, E: gl.constexpr, STAGES: gl.constexpr,
                       EARLY: gl.constexpr, SHARED: gl.constexpr):  # fmt: skip
    """Compute dK and dV of a block of keys; query_grads, fp32 and initially zero, collects dQ.

    TOGETHER heads of consecutive programs start with their first keys, which have the most queries.
    """
    BLOCK: gl.constexpr = queries.block_type.shape[2]
    program, blocks = gl.program_id(0), T // (2 * BLOCK)
    first = program // (blocks * TOGETHER) * TOGETHER
    among = gl.minimum(gl.num_programs(0) // blocks - first, TOGETHER)
    rest = program - first * blocks
    head = first + rest % among
    column = rest // among * (2 * BLOCK)
    b, h = head // H, head % H
    lam = gl.load(Lam + b.to(gl.int64) * lam_b + h * lam_h).to(gl.float32)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    buffers = (
        gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 1, 1, BLOCK, D], queries.layout),
        gl.allocate_shared_memory(gl.bfloat16, [4, 1, 1, BLOCK, D], keys.layout),
        gl.allocate_shared_memory(gl.bfloat16, [2, 1, 1, BLOCK, E], values.layout),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES, 1, 1, BLOCK, E], grads.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 4 * BLOCK], rows.layout),
        gl.allocate_shared_memory(gl.bfloat16, [4, BLOCK, BLOCK], ds_layout),
        gl.allocate_shared_memory(gl.float32, [2, 1, 1, BLOCK, D], query_grads.layout),
    )
    # In the order in which the partitions take them apart: tiles are loaded, dS is written and read, dQ is full and free.
    barriers = (
        _barriers(1, 1).index(0),
        _barriers(STAGES, 1),
        _barriers(STAGES, 2),
        _barriers(2, 1),
        _barriers(2, 1),
        _barriers(2, 1),
        _barriers(1, 1).index(0),
    )
    fence_async_shared()
    sources, sinks = (queries, keys, values, grads, rows), (key_grads, value_grads)
    where = (b, h, column, (T - column) // BLOCK, head * T)
    gl.warp_specialize(
        [
            (multiply_partition, (sinks, buffers, barriers, where, lam, c, s, 0, KEY_2, D, E, EARLY, SHARED)),
            (multiply_partition, (sinks, buffers, barriers, where, lam, c, s, 1, KEY_2, D, E, EARLY, SHARED)),
            (load_partition, (sources, buffers, barriers, where, KEY_2, D)),
            (add_partition, (query_grads, buffers, barriers, where, D)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


def descriptor(x: Tensor, *block: int) -> Any:
    """Describe a tensor whose tiles are copied, (B, heads, positions, width) or of one dimension."""
    shape = [1] * (x.dim() - len(block)) + list(block)
    dtype = gl.float32 if x.element_size() == 4 else gl.bfloat16
    return TensorDescriptor.from_tensor(x, shape, gl.NVMMASharedLayout.get_default_for(shape, dtype))
