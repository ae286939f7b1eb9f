"""Functions that the kernels share: intervals of keys, loading and masking of tiles, a product, a step of a softmax.

Every restriction except a mask lets a query attend to one interval of keys, first <= j < last, and both ends rise with the
query's position. So the keys of a block of queries divide into a masked prefix, a middle without masks (from the first key of
the last row to the last key of the first row), and a masked suffix. In the same way, each key is read by one interval of
queries.

Scores are kept as powers of two: softmax(s S) = exp2(c S - max) / sum with c = s log2(e) > 0.

Names as in `ops/attention.py`: D width of one map's queries and keys, E value width, T queries, S keys. Blocks are padded to
powers of two, BLOCK_D >= D and BLOCK_E >= E.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
# Columns of an accumulator that are written together: written whole, it would take twice its registers.
PIECE = tl.constexpr(32)


class Seen(NamedTuple):
    """The restrictions as the kernels take them. A field that is None costs nothing: it is known at compile time.

    Attributes:
        kv_start: (B,) integers or None.
        kv_lengths: (B,) integers or None.
        document_first: (T,) int32, the first position of the document that contains position t, or None.
        document_last: (T,) int32, one past its last position, or None.
        window: Number of positions, or None.
        attn_mask: (B, H, T, S) bytes, or None.
        mask_b: Stride of the mask's rows.
        mask_h: Stride of its heads.
        mask_t: Stride of its queries.
        mask_s: Stride of its keys.
    """

    kv_start: Any = None
    kv_lengths: Any = None
    document_first: Any = None
    document_last: Any = None
    window: Any = None
    attn_mask: Any = None
    mask_b: int = 0
    mask_h: int = 0
    mask_t: int = 0
    mask_s: int = 0


@triton.jit
def wide(position):
    """Convert a position to int64: its product with a stride may exceed 2^31."""
    return tl.full((), 0, tl.int64) + position


@triton.jit
def stored_keys(b, S, seen):
    """Return the interval of keys, first <= j < last, that row b of the batch stores."""
    first = 0
    last = S
    if seen.kv_start is not None:
        first = tl.minimum(tl.maximum(tl.load(seen.kv_start + b).to(tl.int32), 0), S)
    if seen.kv_lengths is not None:
        last = tl.minimum(tl.maximum(tl.load(seen.kv_lengths + b).to(tl.int32), 0), S)
    return first, last


@triton.jit
def keys_seen(t, first, last, T, seen, CAUSAL: tl.constexpr):
    """Return the interval of stored keys that the query at position t < T attends to; t is a number or a vector."""
    if CAUSAL:
        newest = t + (last - T)
        if seen.window is not None:
            first = tl.maximum(first, newest - seen.window + 1)
        last = tl.minimum(last, newest + 1)
    if seen.document_first is not None:
        first = tl.maximum(first, tl.load(seen.document_first + t, t < T, 0))
        last = tl.minimum(last, tl.load(seen.document_last + t, t < T, 0))
    return first + 0 * t, last + 0 * t


@triton.jit
def queries_seeing(j, last, T, S, seen, CAUSAL: tl.constexpr):
    """Return the interval of queries, from <= t < to, that attend to the stored key j; j is a number or a vector."""
    begin = 0 * j
    end = T + 0 * j
    if CAUSAL:
        own = j - (last - T)
        begin = tl.maximum(begin, own)
        if seen.window is not None:
            end = tl.minimum(end, own + seen.window)
    if seen.document_first is not None:
        begin = tl.maximum(begin, tl.load(seen.document_first + j, j < S, 0))
        end = tl.minimum(end, tl.load(seen.document_last + j, j < S, 0))
    return begin, end


@triton.jit
def loop_bounds(outer_first, outer_last, inner_first, inner_last, BLOCK: tl.constexpr):
    """Divide the blocks from outer_first to outer_last into a masked prefix, an unmasked middle and a masked suffix.

    Returns begin, free_begin, free_end and end, aligned to blocks.
    """
    begin = tl.maximum(outer_first, 0) // BLOCK * BLOCK
    end = tl.maximum(outer_last, 0)
    free_begin = tl.maximum(begin, (tl.maximum(inner_first, 0) + BLOCK - 1) // BLOCK * BLOCK)
    free_end = tl.maximum(inner_last, 0) // BLOCK * BLOCK
    has_free = free_end > free_begin
    return begin, tl.where(has_free, free_begin, begin), tl.where(has_free, free_end, begin), end


@triton.jit
def load_rows(base, rows, stride, valid, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load the tile [rows, BLOCK] of a tensor, with zeros beyond WIDTH and in rows that are not `valid` (None: all are)."""
    columns = tl.arange(0, BLOCK)
    pointers = base + rows[:, None] * stride + columns[None, :]
    if WIDTH >= BLOCK:
        if valid is None:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, valid[:, None], 0.0)
    else:
        if valid is None:
            tile = tl.load(pointers, columns[None, :] < WIDTH, 0.0)
        else:
            tile = tl.load(pointers, valid[:, None] & (columns[None, :] < WIDTH), 0.0)
    return tile


@triton.jit
def store_rows(base, rows, stride, tile, valid, column, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write a tile whose first column is `column` to the `valid` rows of a tensor, rounded to its dtype."""
    columns = column + tl.arange(0, BLOCK)
    pointers = base + rows[:, None] * stride + columns[None, :]
    tl.store(pointers, tile.to(base.dtype.element_ty), valid[:, None] & (columns[None, :] < WIDTH))


@triton.jit
def at_rows(b, h, row, T, H):
    """Return the offset of a row in a contiguous (B, H, T)."""
    return (wide(b) * H + h) * T + row


@triton.jit
def pieces(tile, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Cut a tile into a tuple of column blocks of at most PIECE."""
    if COLUMNS <= PIECE:
        return (tile,)
    else:
        left, right = tl.split(tl.permute(tl.reshape(tile, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))
        return pieces(left, ROWS, COLUMNS // 2) + pieces(right, ROWS, COLUMNS // 2)


@triton.jit
def dot(left, right):
    """Return left @ right in fp32, without rounding fp32 factors."""
    if INTERPRETED:  # the interpreter multiplies the bits of bf16 as integers
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def dot_add(left, right, total):
    """Return total + left @ right, with `left` rounded to the dtype of `right`."""
    left = left.to(right.dtype)
    if INTERPRETED:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def mask_tile(b, h, rows, columns, T, S, seen):
    """Load the bool mask of a tile, [rows, columns]."""
    base = seen.attn_mask + wide(b) * seen.mask_b + wide(h) * seen.mask_h
    pointers = base + wide(rows)[:, None] * seen.mask_t + wide(columns)[None, :] * seen.mask_s
    return tl.load(pointers, (rows[:, None] < T) & (columns[None, :] < S), 0) != 0


@triton.jit
def softmax_step(scores, top, total, c, MASKED: tl.constexpr):
    """Take one step of an online softmax over [rows, keys].

    Args:
        scores: Q K^T, -inf where a row does not attend to a key.
        top: Largest c * score of each row so far, -inf at the start.
        total: Sum of exp2(c * score - top) so far.
        c: s log2(e).
        MASKED: Whether a row may have met no key yet.

    Returns:
        exp2(c * scores - top), the factor for earlier sums, and the new top and total.
    """
    new_top = tl.maximum(top, tl.max(scores, 1) * c)
    subtracted = new_top
    if MASKED:
        subtracted = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * c - subtracted[:, None])
    decay = tl.exp2(top - subtracted)
    return weights, decay, new_top, total * decay + tl.sum(weights, 1)


@triton.jit
def log_sum(top, total):
    """Return log2 of the sum of exp2 of a row's scores; +inf where it met no key, so that exp2(score - inf) is zero."""
    return tl.where(total == 0.0, float("inf"), top + tl.log2(tl.where(total == 0.0, 1.0, total)))


@triton.jit
def inverse(total):
    """Return 1 / total, or 0 where a row met no key."""
    return tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
