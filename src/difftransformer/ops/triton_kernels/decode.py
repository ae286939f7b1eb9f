"""Attention of few queries to many keys: the keys are split among programs, and each reads its share of K1, K2 and V once.

The queries of all heads of a group are the rows of one tile. A program writes, for both maps, the sums of its share and the
largest powers that they are relative to. `combine_kernel` combines the shares of a row, subtracts and normalises.
"""

import triton
import triton.language as tl

from .tiles import dot, dot_add, inverse, keys_seen, load_rows, softmax_step, store_rows, stored_keys, wide


@triton.jit
def decode_kernel(Q, K, V, Top, Total, Sum, q_strides, k_strides, v_strides, seen, B, H, G, T, S, c, splits,
                  DIFF: tl.constexpr, CAUSAL: tl.constexpr, KEY_2: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
                  BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_S: tl.constexpr):  # fmt: skip
    """Attend to share `split` of the keys, for the H // G * T rows of one group.

    Top and Total are (maps, splits, B H T), Sum is (maps, splits, B H T, E).
    """
    split = tl.program_id(0) % splits
    group = tl.program_id(0) // splits
    b, g = group // G, group % G
    rows = tl.arange(0, BLOCK_R)
    inside = rows < H // G * T
    h, t = g * (H // G) + rows // T, rows % T
    first, last = stored_keys(b, S, seen)
    row_first, row_last = keys_seen(t, first, last, T, seen, CAUSAL)
    begin, _ = keys_seen(0, first, last, T, seen, CAUSAL)
    _, end = keys_seen(T - 1, first, last, T, seen, CAUSAL)
    # Shares of the keys in use, not of S, so that a partly filled cache keeps all programs busy.
    begin = tl.maximum(begin, 0) // BLOCK_S * BLOCK_S
    share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BLOCK_S), splits) * BLOCK_S
    begin += split * share
    end = tl.minimum(begin + share, end)

    columns = tl.arange(0, BLOCK_D)
    q = Q + wide(b) * q_strides[0] + wide(h)[:, None] * q_strides[1] + t[:, None] * q_strides[2] + columns[None, :]
    wanted = inside[:, None] & (columns[None, :] < D)
    q1 = tl.load(q, wanted, 0.0)
    K += wide(b) * k_strides[0] + wide(g) * k_strides[1]
    V += wide(b) * v_strides[0] + wide(g) * v_strides[1]
    top1 = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total1 = tl.zeros([BLOCK_R], tl.float32)
    sum1 = tl.zeros([BLOCK_R, BLOCK_E], tl.float32)
    if DIFF:
        q2 = tl.load(q + D, wanted, 0.0)
        top2, total2, sum2 = top1, total1, sum1
    keys = tl.arange(0, BLOCK_S)
    for j in tl.range(begin, end, BLOCK_S):
        stored = (j + keys >= first) & (j + keys < last)
        allowed = (j + keys[None, :] >= row_first[:, None]) & (j + keys[None, :] < row_last[:, None])
        if seen.attn_mask is not None:
            base = seen.attn_mask + wide(b) * seen.mask_b + wide(h)[:, None] * seen.mask_h + t[:, None] * seen.mask_t
            readable = inside[:, None] & stored[None, :]
            allowed = allowed & (tl.load(base + wide(j + keys)[None, :] * seen.mask_s, readable, 0) != 0)
        k1 = load_rows(K + wide(j) * k_strides[2], keys, k_strides[2], stored, D, BLOCK_D)
        v = load_rows(V + wide(j) * v_strides[2], keys, v_strides[2], stored, E, BLOCK_E)
        scores = tl.where(allowed, dot(q1, tl.trans(k1)), float("-inf"))
        weights, decay, top1, total1 = softmax_step(scores, top1, total1, c, True)
        sum1 = dot_add(weights, v, sum1 * decay[:, None])
        if DIFF:
            k2 = k1
            if KEY_2 > 0:
                k2 = load_rows(K + wide(j) * k_strides[2] + KEY_2, keys, k_strides[2], stored, D, BLOCK_D)
            scores = tl.where(allowed, dot(q2, tl.trans(k2)), float("-inf"))
            weights, decay, top2, total2 = softmax_step(scores, top2, total2, c, True)
            sum2 = dot_add(weights, v, sum2 * decay[:, None])

    flat = split * (B * H * T) + (b * H + h) * T + t
    tl.store(Top + flat, top1, inside)
    tl.store(Total + flat, total1, inside)
    store_rows(Sum, wide(flat), E, sum1, inside, 0, E, BLOCK_E)
    if DIFF:
        flat += splits * (B * H * T)
        tl.store(Top + flat, top2, inside)
        tl.store(Total + flat, total2, inside)
        store_rows(Sum, wide(flat), E, sum2, inside, 0, E, BLOCK_E)


@triton.jit
def combined(Top, Total, Sum, rows, flat, splits, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_SPLITS: tl.constexpr):
    """Combine the shares of one row of one map."""
    shares, columns = tl.arange(0, BLOCK_SPLITS), tl.arange(0, BLOCK_E)
    at = flat + shares * rows
    tops = tl.load(Top + at, shares < splits, float("-inf"))
    top = tl.max(tops, 0)
    factors = tl.exp2(tops - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(factors * tl.load(Total + at, shares < splits, 0.0), 0)
    wanted = (shares < splits)[:, None] & (columns < E)[None, :]
    sums = tl.load(Sum + wide(at)[:, None] * E + columns[None, :], wanted, 0.0)
    return tl.sum(factors[:, None] * sums, 0) * inverse(total)


@triton.jit
def combine_kernel(Top, Total, Sum, Lam, Out, Weight, lam_strides, out_strides, B, H, T, splits, eps, factor,
                   DIFF: tl.constexpr, NORM: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr,
                   BLOCK_SPLITS: tl.constexpr):  # fmt: skip
    """Write one row of the output, O1 - lam O2, normalised with NORM."""
    flat = tl.program_id(0)
    b, h, t = flat // (H * T), flat // T % H, flat % T
    columns = tl.arange(0, BLOCK_E)
    rows = B * H * T
    head = combined(Top, Total, Sum, rows, flat, splits, E, BLOCK_E, BLOCK_SPLITS)
    if DIFF:
        lam = tl.load(Lam + wide(b) * lam_strides[0] + h * lam_strides[1] + t * lam_strides[2])
        head -= lam * combined(Top, Total, Sum, rows, flat + splits * rows, splits, E, BLOCK_E, BLOCK_SPLITS)
    if NORM:
        head = head * (tl.rsqrt(tl.sum(head * head, 0) / E + eps) * factor)
        if Weight is not None:
            head = head * tl.load(Weight + columns, columns < E, 0.0).to(tl.float32)
    at = wide(b) * out_strides[0] + wide(h) * out_strides[1] + wide(t) * out_strides[2]
    tl.store(Out + at + columns, head.to(Out.dtype.element_ty), columns < E)
