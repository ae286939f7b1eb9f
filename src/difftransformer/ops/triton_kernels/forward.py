"""The forward pass: O = O1 - lam O2 with O_m = softmax(s Q_m K_m^T) V, subtracted in fp32 and rounded once.

A program computes BLOCK_T queries of one head in a loop over their keys. The two sums of a softmax are known only at the end
of the loop, so there are two forms with equal work (6 units of 2 n n D, as two calls of ordinary attention with a wide value;
four calls take 8):

* `both_maps_kernel`: one loop, which reads V once, with two accumulators of [BLOCK_T, E] in fp32. For calls without gradients.
* `one_map_kernel`, first for map 2 and then for map 1: one accumulator, for training and for wide heads. O2 is kept in memory
  in fp32 between the calls. The same kernel computes ordinary attention.

Training keeps the log-sum-exps, O and O2 for the backward, since rowsum(dO * O) alone gives neither rowsum(dO * O1) nor
rowsum(dO * O2). O and O2 are kept in fp32: rounded, they would leave a gradient of up to eps |dO V| to a query that sees one
key and has none.
"""

import triton
import triton.language as tl

from .tiles import (
    PIECE,
    at_rows,
    dot,
    dot_add,
    inverse,
    keys_seen,
    load_rows,
    log_sum,
    loop_bounds,
    mask_tile,
    pieces,
    softmax_step,
    store_rows,
    stored_keys,
    wide,
)


@triton.jit
def place(T, H, BLOCK_T: tl.constexpr, CAUSAL: tl.constexpr):
    """Return batch row, head and first query of a program. In a causal call, programs with the most keys start first."""
    blocks = tl.cdiv(T, BLOCK_T)
    program = tl.program_id(0)
    block = program % blocks
    if CAUSAL:
        block = blocks - 1 - block
    head = program // blocks
    return head // H, head % H, block * BLOCK_T


@triton.jit
def masked_scores(scores, columns, where, T, S, seen, CAUSAL: tl.constexpr, BLOCK_T: tl.constexpr):
    """Set scores to -inf where a row does not attend to a column."""
    b, h, row, first, last = where
    rows = row + tl.arange(0, BLOCK_T)
    row_first, row_last = keys_seen(rows, first, last, T, seen, CAUSAL)
    allowed = (columns[None, :] >= row_first[:, None]) & (columns[None, :] < row_last[:, None])
    if seen.attn_mask is not None:
        allowed = allowed & mask_tile(b, h, rows, columns, T, S, seen)
    return tl.where(allowed, scores, float("-inf"))


@triton.jit
def walk(q1, q2, K, V, k_t, v_t, state, begin, end, where, T, S, seen, c,
         MASKED: tl.constexpr, CAUSAL: tl.constexpr, BOTH: tl.constexpr, KEY_2: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
         BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """Accumulate the softmax of one or both maps and its product with V over the keys begin <= j < end."""
    top1, total1, acc1, top2, total2, acc2 = state
    _, _, _, first, last = where
    columns = tl.arange(0, BLOCK_S)
    for j in tl.range(begin, end, BLOCK_S):
        valid = None
        if MASKED:
            valid = (j + columns >= first) & (j + columns < last)
        scores = dot(q1, tl.trans(load_rows(K + wide(j) * k_t, columns, k_t, valid, D, BLOCK_D)))
        if MASKED:
            scores = masked_scores(scores, j + columns, where, T, S, seen, CAUSAL, BLOCK_T)
        weights, decay, top1, total1 = softmax_step(scores, top1, total1, c, MASKED)
        acc1 = acc1 * decay[:, None]
        v = load_rows(V + wide(j) * v_t, columns, v_t, valid, E, BLOCK_E)
        # Issued before the second map's scores: the product overlaps the second softmax and frees its weights early.
        acc1 = dot_add(weights, v, acc1)
        if BOTH:
            if KEY_2 > 0:
                scores = dot(q2, tl.trans(load_rows(K + wide(j) * k_t + KEY_2, columns, k_t, valid, D, BLOCK_D)))
            else:
                scores = dot(q2, tl.trans(load_rows(K + wide(j) * k_t, columns, k_t, valid, D, BLOCK_D)))
            if MASKED:
                scores = masked_scores(scores, j + columns, where, T, S, seen, CAUSAL, BLOCK_T)
            weights, decay, top2, total2 = softmax_step(scores, top2, total2, c, MASKED)
            acc2 = acc2 * decay[:, None]
            acc2 = dot_add(weights, v, acc2)
    return top1, total1, acc1, top2, total2, acc2


@triton.jit
def attend(q1, q2, K, V, k_t, v_t, b, h, row, T, S, seen, c,
           CAUSAL: tl.constexpr, BOTH: tl.constexpr, KEY_2: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
           BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """Call `walk` for all keys of a block of queries, with masks only where they can matter."""
    # Masks take registers, which smaller tiles leave free.
    MASKED_S: tl.constexpr = min(BLOCK_S, 32)
    first, last = stored_keys(b, S, seen)
    where = (b, h, row, first, last)
    outer_first, inner_last = keys_seen(row, first, last, T, seen, CAUSAL)
    inner_first, outer_last = keys_seen(tl.minimum(row + BLOCK_T, T) - 1, first, last, T, seen, CAUSAL)
    begin, free_begin, free_end, end = loop_bounds(outer_first, outer_last, inner_first, inner_last, BLOCK_S)
    lowest = tl.full([BLOCK_T], float("-inf"), tl.float32)
    nothing = tl.zeros([BLOCK_T], tl.float32)
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    if BOTH:
        state = (lowest, nothing, acc, lowest, nothing, acc)
    else:
        state = (lowest, nothing, acc, 0, 0, 0)
    if seen.attn_mask is not None:
        state = walk(q1, q2, K, V, k_t, v_t, state, begin, end, where, T, S, seen, c, True, CAUSAL, BOTH, KEY_2,
                     D, E, BLOCK_T, MASKED_S, BLOCK_D, BLOCK_E)  # fmt: skip
    else:
        if (seen.kv_start is not None) or (seen.window is not None) or (seen.document_first is not None):
            state = walk(q1, q2, K, V, k_t, v_t, state, begin, free_begin, where, T, S, seen, c, True, CAUSAL, BOTH, KEY_2,
                         D, E, BLOCK_T, MASKED_S, BLOCK_D, BLOCK_E)  # fmt: skip
        state = walk(q1, q2, K, V, k_t, v_t, state, free_begin, free_end, where, T, S, seen, c, False, CAUSAL, BOTH, KEY_2,
                     D, E, BLOCK_T, BLOCK_S, BLOCK_D, BLOCK_E)  # fmt: skip
        state = walk(q1, q2, K, V, k_t, v_t, state, free_end, end, where, T, S, seen, c, True, CAUSAL, BOTH, KEY_2,
                     D, E, BLOCK_T, MASKED_S, BLOCK_D, BLOCK_E)  # fmt: skip
    return state


@triton.jit
def write_normed(parts, at, row, T, Out, Weight, stride, eps, factor, E: tl.constexpr, BLOCK_T: tl.constexpr):
    """Write factor * RMSNorm(heads) * weight of heads given in pieces of columns."""
    local = tl.arange(0, BLOCK_T)
    inside = row + local < T
    squares = tl.zeros([BLOCK_T], tl.float32)
    for i in tl.static_range(len(parts)):
        squares += tl.sum(parts[i] * parts[i], 1)
    inverse_rms = tl.rsqrt(squares / E + eps)
    for i in tl.static_range(len(parts)):
        tl.debug_barrier()
        piece = parts[i] * (inverse_rms * factor)[:, None]
        if Weight is not None:
            columns = i * PIECE + tl.arange(0, PIECE)
            piece = piece * tl.load(Weight + columns, columns < E, 0.0).to(tl.float32)[None, :]
        store_rows(Out + at, local, stride, piece, inside, i * PIECE, E, PIECE)


@triton.jit
def both_maps_kernel(Q, K, V, Lam, Out, Weight,
                     q_strides, k_strides, v_strides, lam_strides, out_strides, seen, H, G, T, S, c, eps, factor,
                     CAUSAL: tl.constexpr, KEY_2: tl.constexpr, NORM: tl.constexpr,
                     D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
                     BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):  # fmt: skip
    """Compute both maps in one loop. KEY_2 is the column of K at which K2 starts: D, or 0 where the maps share a key."""
    b, h, row = place(T, H, BLOCK_T, CAUSAL)
    g = h // (H // G)
    local = tl.arange(0, BLOCK_T)
    inside = row + local < T
    Q += wide(b) * q_strides[0] + wide(h) * q_strides[1] + wide(row) * q_strides[2]
    K += wide(b) * k_strides[0] + wide(g) * k_strides[1]
    V += wide(b) * v_strides[0] + wide(g) * v_strides[1]
    q1 = load_rows(Q, local, q_strides[2], inside, D, BLOCK_D)
    q2 = load_rows(Q + D, local, q_strides[2], inside, D, BLOCK_D)
    _, total1, acc1, _, total2, acc2 = attend(
        q1, q2, K, V, k_strides[2], v_strides[2], b, h, row, T, S, seen, c,
        CAUSAL, True, KEY_2, D, E, BLOCK_T, BLOCK_S, BLOCK_D, BLOCK_E)  # fmt: skip
    at = wide(b) * out_strides[0] + wide(h) * out_strides[1] + wide(row) * out_strides[2]
    lam = tl.load(Lam + wide(b) * lam_strides[0] + h * lam_strides[1] + (row + local) * lam_strides[2], inside, 0.0)
    scale1, scale2 = inverse(total1), inverse(total2)
    firsts, seconds = pieces(acc1, BLOCK_T, BLOCK_E), pieces(acc2, BLOCK_T, BLOCK_E)
    heads = ()
    for i in tl.static_range(len(firsts)):
        head = firsts[i] * scale1[:, None] - lam[:, None] * (seconds[i] * scale2[:, None])
        if NORM:
            heads = heads + (head,)
        else:
            store_rows(Out + at, local, out_strides[2], head, inside, i * PIECE, E, PIECE)
    if NORM:
        write_normed(heads, at, row, T, Out, Weight, out_strides[2], eps, factor, E, BLOCK_T)


@triton.jit
def one_map_kernel(Q, K, V, Lam, Waiting, Out, Lse, Plain,
                   q_strides, k_strides, v_strides, lam_strides, out_strides, seen, H, G, T, S, c,
                   MAPS: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
                   BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):  # fmt: skip
    """Compute one map of MAPS. Waiting is the other map's output, subtracted times lam, or None.

    Waiting and Plain, which gets the unrounded result, are in fp32 and Out's layout.
    """
    b, h, row = place(T, H, BLOCK_T, CAUSAL)
    g = h // (H // G)
    local = tl.arange(0, BLOCK_T)
    inside = row + local < T
    Q += wide(b) * q_strides[0] + wide(h) * q_strides[1] + wide(row) * q_strides[2]
    K += wide(b) * k_strides[0] + wide(g) * k_strides[1]
    V += wide(b) * v_strides[0] + wide(g) * v_strides[1]
    q = load_rows(Q, local, q_strides[2], inside, D, BLOCK_D)
    top, total, acc, _, _, _ = attend(
        q, q, K, V, k_strides[2], v_strides[2], b, h, row, T, S, seen, c,
        CAUSAL, False, 0, D, E, BLOCK_T, BLOCK_S, BLOCK_D, BLOCK_E)  # fmt: skip
    if Lse is not None:
        tl.store(Lse + (at_rows(b, h, row, T, H) + local) * MAPS, log_sum(top, total), inside)
    at = wide(b) * out_strides[0] + wide(h) * out_strides[1] + wide(row) * out_strides[2]
    scale, parts = inverse(total), pieces(acc, BLOCK_T, BLOCK_E)
    if Waiting is not None:
        lam = tl.load(Lam + wide(b) * lam_strides[0] + h * lam_strides[1] + (row + local) * lam_strides[2], inside, 0.0)
    for i in tl.static_range(len(parts)):
        head = parts[i] * scale[:, None]
        if Waiting is not None:
            tl.debug_barrier()  # without it, the loads of all pieces are issued together and take registers
            second = load_rows(Waiting + at + i * PIECE, local, out_strides[2], inside, E - i * PIECE, PIECE)
            head -= lam[:, None] * second
        store_rows(Out + at, local, out_strides[2], head, inside, i * PIECE, E, PIECE)
        if Plain is not None:
            store_rows(Plain + at, local, out_strides[2], head, inside, i * PIECE, E, PIECE)


@triton.jit
def norm_kernel(Plain, Out, InverseRms, Weight, out_strides, H, T, eps, factor,
                E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Compute factor * RMSNorm(head) * weight, for heads that are too wide to be normalised in the attention kernel."""
    b, h, row = place(T, H, BLOCK_T, False)
    local = tl.arange(0, BLOCK_T)
    inside = row + local < T
    at = wide(b) * out_strides[0] + wide(h) * out_strides[1] + wide(row) * out_strides[2]
    heads = load_rows(Plain + at, local, out_strides[2], inside, E, BLOCK_E).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(heads * heads, 1) / E + eps)
    if InverseRms is not None:
        tl.store(InverseRms + at_rows(b, h, row, T, H) + local, inverse_rms, inside)
    heads = heads * (inverse_rms * factor)[:, None]
    if Weight is not None:
        columns = tl.arange(0, BLOCK_E)
        heads = heads * tl.load(Weight + columns, columns < E, 0.0).to(tl.float32)[None, :]
    store_rows(Out + at, local, out_strides[2], heads, inside, 0, E, BLOCK_E)
