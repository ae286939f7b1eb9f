"""The backward pass, from the log-sum-exps L_m, O2, and O (before the norm, if there is one) that the forward kept.

With P_m = exp(S_m - L_m), one dP for both maps and one product for dV, it takes 10 units of 2 n n D, as many as the
Transformer's 2H heads (two calls of ordinary attention take 14):

    dP = dO V^T         d_2 = rowsum(dO * O2)       d_1 = rowsum(dO * O) + lam d_2        dlam = -d_2
    dS_1 = P_1 * (dP - d_1)                         dS_2 = -lam P_2 * (dP - d_2)
    dV = (P_1 - lam P_2)^T dO                       dQ_m = s dS_m K_m                     dK_m = s dS_m^T Q_m

`rows_kernel` computes the sums by row, and the gradient through the headwise norm. `keys_kernel` computes a block of keys in a
loop over the queries that attend to it, of all heads of the group, so that dK and dV are summed in a fixed order. Wide heads
compute dV in a launch of its own. dQ is either added in the same loop, in fp32 and in no fixed order (10 units), or computed by
`queries_kernel`, which computes the scores again (14 units, as the Transformer's split backward) and gives the same bits every
time.
"""

import triton
import triton.language as tl

from .forward import masked_scores, place
from .tiles import (
    PIECE,
    at_rows,
    dot,
    dot_add,
    keys_seen,
    load_rows,
    loop_bounds,
    mask_tile,
    pieces,
    queries_seeing,
    store_rows,
    stored_keys,
    wide,
)


@triton.jit
def rows_kernel(Grad, Heads, Second, Lam, Lse, InverseRms, Weight, HeadsGrad, WeightGrad, Delta,
                grad_strides, heads_strides, second_strides, lam_strides, heads_grad_strides, H, T, factor,
                NORM: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Compute d_1, d_2 by row in Delta (B, H, T, maps); with NORM also HeadsGrad and partial sums WeightGrad (programs, E)."""
    b, h, row = place(T, H, BLOCK_T, False)
    local = tl.arange(0, BLOCK_T)
    inside = row + local < T
    columns = tl.arange(0, BLOCK_E)
    MAPS: tl.constexpr = 1 if Second is None else 2
    flat = at_rows(b, h, row, T, H) + local
    at = wide(b) * grad_strides[0] + wide(h) * grad_strides[1] + wide(row) * grad_strides[2]
    grad = load_rows(Grad + at, local, grad_strides[2], inside, E, BLOCK_E).to(tl.float32)
    at = wide(b) * heads_strides[0] + wide(h) * heads_strides[1] + wide(row) * heads_strides[2]
    heads = load_rows(Heads + at, local, heads_strides[2], inside, E, BLOCK_E).to(tl.float32)
    if NORM:
        inverse_rms = tl.load(InverseRms + flat, inside, 0.0)
        normed = heads * inverse_rms[:, None]
        if WeightGrad is not None:
            total = tl.sum(grad * normed, 0) * factor
            tl.store(WeightGrad + wide(tl.program_id(0)) * E + columns, total, columns < E)
        grad = grad * factor
        if Weight is not None:
            grad = grad * tl.load(Weight + columns, columns < E, 0.0).to(tl.float32)[None, :]
        grad = (grad - normed * (tl.sum(grad * normed, 1) / E)[:, None]) * inverse_rms[:, None]
        # A query that may attend to nothing passes on no gradient, however large 1 / sqrt(eps) is.
        grad = tl.where(tl.load(Lse + flat * MAPS, inside, 0.0)[:, None] == float("inf"), 0.0, grad)
        at = wide(b) * heads_grad_strides[0] + wide(h) * heads_grad_strides[1] + wide(row) * heads_grad_strides[2]
        store_rows(HeadsGrad + at, local, heads_grad_strides[2], grad, inside, 0, E, BLOCK_E)
        grad = grad.to(HeadsGrad.dtype.element_ty).to(tl.float32)  # rounded as the next kernels read it
    delta = tl.sum(grad * heads, 1)
    if Second is not None:
        at = wide(b) * second_strides[0] + wide(h) * second_strides[1] + wide(row) * second_strides[2]
        second = load_rows(Second + at, local, second_strides[2], inside, E, BLOCK_E).to(tl.float32)
        delta2 = tl.sum(grad * second, 1)
        lam = tl.load(Lam + wide(b) * lam_strides[0] + h * lam_strides[1] + (row + local) * lam_strides[2], inside, 0.0)
        delta += lam * delta2
        tl.store(Delta + flat * MAPS + 1, delta2, inside)
    tl.store(Delta + flat * MAPS, delta, inside)


@triton.jit
def both(base, flat, valid, other, DIFF: tl.constexpr):
    """Load one number per row for both maps from (rows, maps); the same vector twice without a second map.

    One load gives two vectors: with more loads in the loop the assembler serialises the products.
    """
    if DIFF:
        pair = tl.load(base + flat[:, None] * 2 + tl.arange(0, 2)[None, :], valid[:, None], other)
        first, second = tl.split(pair)
    else:
        first = tl.load(base + flat, valid, other)
        second = first
    return first, second


@triton.jit
def column_weights(k, q, lse, c, allowed, CAPPED: tl.constexpr):
    """Compute a tile of a map from its log-sum-exps, transposed: [keys, queries].

    CAPPED keeps the weight of a missing key finite: its score is 0, which may be far above the real scores.
    """
    powers = dot(k, tl.trans(q)) * c - lse[None, :]
    if CAPPED:
        powers = tl.minimum(powers, 0.0)
    weights = tl.exp2(powers)
    if allowed is not None:
        weights = tl.where(allowed, weights, 0.0)
    return weights


@triton.jit
def store_keys(
    base, tile, stride, factor, column, S, valid, WIDTH: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the gradient of a block of keys or values, zero for those that are not stored."""
    keys = tl.arange(0, BLOCK_S)
    parts = pieces(tl.where(valid[:, None], tile * factor, 0.0), BLOCK_S, BLOCK)
    for i in tl.static_range(len(parts)):
        store_rows(base, keys, stride, parts[i], column + keys < S, i * PIECE, WIDTH, min(BLOCK, PIECE))


@triton.jit
def add_transposed(base, tile, valid, stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Add a tile [BLOCK, rows] to rows of a tensor: the transposed shape fits the widest matrix instructions."""
    rows, width = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    pointers = base + rows[None, :] * stride + width[:, None]
    tl.atomic_add(pointers, tile, valid[None, :] & (width[:, None] < WIDTH), sem="relaxed")


@triton.jit
def keys_kernel(Q, K, V, Grad, Lam, Lse, Delta, KeyGrad, ValueGrad, QueryGrad,
                q_strides, k_strides, v_strides, grad_strides, lam_strides, key_grad_strides, value_grad_strides,
                query_grad_strides, seen, H, G, T, S, c, s,
                DIFF: tl.constexpr, LAM_BY_QUERY: tl.constexpr, CAUSAL: tl.constexpr, KEY_2: tl.constexpr,
                D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
                BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):  # fmt: skip
    """Compute dK, dV or both of a block of keys, those that are not None; QueryGrad, fp32 and initially zero, collects dQ.

    There is one loop over the queries of all heads, with masks throughout: separate loops with and without masks would take
    registers that cost more than the comparisons. Keys that are not stored need no mask: their gradients are not written, and
    they add zeros to dQ.
    """
    OWN: tl.constexpr = DIFF and KEY_2 > 0
    CAPPED: tl.constexpr = QueryGrad is not None
    blocks = tl.cdiv(S, BLOCK_S)
    column = tl.program_id(0) % blocks * BLOCK_S
    group = tl.program_id(0) // blocks
    b, g = group // G, group % G
    first, last = stored_keys(b, S, seen)
    keys = tl.arange(0, BLOCK_S)
    valid = (column + keys >= first) & (column + keys < last)
    K += wide(b) * k_strides[0] + wide(g) * k_strides[1] + wide(column) * k_strides[2]
    V += wide(b) * v_strides[0] + wide(g) * v_strides[1] + wide(column) * v_strides[2]
    k1 = load_rows(K, keys, k_strides[2], valid, D, BLOCK_D)
    if OWN:
        k2 = load_rows(K + KEY_2, keys, k_strides[2], valid, D, BLOCK_D)
    if ValueGrad is not None:
        dv = tl.zeros([BLOCK_S, BLOCK_E], tl.float32)
    if KeyGrad is not None:
        v = load_rows(V, keys, v_strides[2], valid, E, BLOCK_E)
        dk1 = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
        if OWN:
            dk2 = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)

    low, high = tl.maximum(column, first), tl.minimum(column + BLOCK_S, last) - 1
    begin, _ = queries_seeing(low, last, T, S, seen, CAUSAL)
    _, end = queries_seeing(high, last, T, S, seen, CAUSAL)
    begin = begin // BLOCK_T * BLOCK_T
    steps = tl.where(high < low, 0, tl.cdiv(tl.maximum(end - begin, 0), BLOCK_T))
    local = tl.arange(0, BLOCK_T)
    for step in tl.range(0, steps * (H // G)):
        h = g * (H // G) + step // steps
        i = begin + step % steps * BLOCK_T
        rows = i + local
        inside = rows < T
        # Computed again in each step: vectors that live across the loop would take registers from the sums.
        columns = column + tl.arange(0, BLOCK_S)
        allowed = None
        if CAUSAL or seen.document_first is not None:
            from_query, to_query = queries_seeing(columns, last, T, S, seen, CAUSAL)
            allowed = rows[None, :] >= from_query[:, None]
            if seen.window is not None or seen.document_first is not None:
                allowed = allowed & (rows[None, :] < to_query[:, None])
        if seen.attn_mask is not None:
            in_mask = tl.trans(mask_tile(b, h, rows, columns, T, S, seen))
            if allowed is None:
                allowed = in_mask
            else:
                allowed = allowed & in_mask
        query = Q + wide(b) * q_strides[0] + wide(h) * q_strides[1] + wide(i) * q_strides[2]
        at = wide(b) * grad_strides[0] + wide(h) * grad_strides[1] + wide(i) * grad_strides[2]
        flat = at_rows(b, h, i, T, H) + local
        q1 = load_rows(query, local, q_strides[2], inside, D, BLOCK_D)
        grad = load_rows(Grad + at, local, grad_strides[2], inside, E, BLOCK_E)
        if QueryGrad is not None:
            at = wide(b) * query_grad_strides[0] + wide(h) * query_grad_strides[1] + wide(i) * query_grad_strides[2]
            query_grad = QueryGrad + at
        lse1, lse2 = both(Lse, flat, inside, float("inf"), DIFF)
        p1 = column_weights(k1, q1, lse1, c, allowed, CAPPED)
        if KeyGrad is not None:
            dp = dot(v, tl.trans(grad))
        if DIFF:
            q2 = load_rows(query + D, local, q_strides[2], inside, D, BLOCK_D)
            lam = Lam + wide(b) * lam_strides[0] + h * lam_strides[1]
            if OWN:
                p2 = column_weights(k2, q2, lse2, c, allowed, CAPPED)
            else:
                p2 = column_weights(k1, q2, lse2, c, allowed, CAPPED)
            if LAM_BY_QUERY:
                p2 = p2 * tl.load(lam + rows * lam_strides[2], inside, 0.0)[None, :]
            else:
                p2 = p2 * tl.load(lam)
            if ValueGrad is not None:
                dv = dot_add(p1 - p2, grad, dv)
            if KeyGrad is not None:
                delta1, delta2 = both(Delta, flat, inside, 0.0, DIFF)
                ds2 = (p2 * (delta2[None, :] - dp)).to(q2.dtype)
                if OWN:
                    dk2 = dot_add(ds2, q2, dk2)
                    other = k2
                else:
                    dk1 = dot_add(ds2, q2, dk1)
                    other = k1
                if QueryGrad is not None:
                    dq2 = dot(tl.trans(other), ds2) * s
                    add_transposed(query_grad + D, dq2, inside, query_grad_strides[2], D, BLOCK_T, BLOCK_D)
        elif ValueGrad is not None:
            dv = dot_add(p1, grad, dv)
        if KeyGrad is not None:
            if not DIFF:
                delta1, delta2 = both(Delta, flat, inside, 0.0, DIFF)
            ds1 = (p1 * (dp - delta1[None, :])).to(q1.dtype)
            dk1 = dot_add(ds1, q1, dk1)
            if QueryGrad is not None:
                dq1 = dot(tl.trans(k1), ds1) * s
                add_transposed(query_grad, dq1, inside, query_grad_strides[2], D, BLOCK_T, BLOCK_D)

    if ValueGrad is not None:
        at = wide(b) * value_grad_strides[0] + wide(g) * value_grad_strides[1] + wide(column) * value_grad_strides[2]
        store_keys(ValueGrad + at, dv, value_grad_strides[2], 1.0, column, S, valid, E, BLOCK_S, BLOCK_E)
    if KeyGrad is not None:
        at = wide(b) * key_grad_strides[0] + wide(g) * key_grad_strides[1] + wide(column) * key_grad_strides[2]
        store_keys(KeyGrad + at, dk1, key_grad_strides[2], s, column, S, valid, D, BLOCK_S, BLOCK_D)
        if OWN:
            store_keys(KeyGrad + at + KEY_2, dk2, key_grad_strides[2], s, column, S, valid, D, BLOCK_S, BLOCK_D)


@triton.jit
def walk_keys(q1, q2, grad, lse1, lse2, delta1, delta2, K, V, k_t, v_t, state, begin, end, where, T, S, seen, c,
              MASKED: tl.constexpr, CAUSAL: tl.constexpr, DIFF: tl.constexpr, KEY_2: tl.constexpr,
              D: tl.constexpr, E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
              BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """Accumulate dQ of a block of queries over the keys begin <= j < end, before the factors s and -lam."""
    dq1, dq2 = state
    _, _, _, first, last = where
    columns = tl.arange(0, BLOCK_S)
    for j in tl.range(begin, end, BLOCK_S):
        valid = None
        if MASKED:
            valid = (j + columns >= first) & (j + columns < last)
        k1 = load_rows(K + wide(j) * k_t, columns, k_t, valid, D, BLOCK_D)
        v = load_rows(V + wide(j) * v_t, columns, v_t, valid, E, BLOCK_E)
        scores = dot(q1, tl.trans(k1)) * c - lse1[:, None]
        if MASKED:
            scores = masked_scores(scores, j + columns, where, T, S, seen, CAUSAL, BLOCK_T)
        dp = dot(grad, tl.trans(v))
        dq1 = dot_add(tl.exp2(scores) * (dp - delta1[:, None]), k1, dq1)
        if DIFF:
            k2 = k1
            if KEY_2 > 0:
                k2 = load_rows(K + wide(j) * k_t + KEY_2, columns, k_t, valid, D, BLOCK_D)
            scores = dot(q2, tl.trans(k2)) * c - lse2[:, None]
            if MASKED:
                scores = masked_scores(scores, j + columns, where, T, S, seen, CAUSAL, BLOCK_T)
            dq2 = dot_add(tl.exp2(scores) * (dp - delta2[:, None]), k2, dq2)
    return dq1, dq2


@triton.jit
def queries_kernel(Q, K, V, Grad, Lam, Lse, Delta, QueryGrad,
                   q_strides, k_strides, v_strides, grad_strides, lam_strides, query_grad_strides, seen, H, G, T, S, c, s,
                   DIFF: tl.constexpr, CAUSAL: tl.constexpr, KEY_2: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
                   BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr):  # fmt: skip
    """Compute dQ of a block of queries."""
    b, h, row = place(T, H, BLOCK_T, CAUSAL)
    g = h // (H // G)
    local = tl.arange(0, BLOCK_T)
    inside = row + local < T
    Q += wide(b) * q_strides[0] + wide(h) * q_strides[1] + wide(row) * q_strides[2]
    K += wide(b) * k_strides[0] + wide(g) * k_strides[1]
    V += wide(b) * v_strides[0] + wide(g) * v_strides[1]
    Grad += wide(b) * grad_strides[0] + wide(h) * grad_strides[1] + wide(row) * grad_strides[2]
    flat = at_rows(b, h, row, T, H) + local
    q1 = load_rows(Q, local, q_strides[2], inside, D, BLOCK_D)
    grad = load_rows(Grad, local, grad_strides[2], inside, E, BLOCK_E)
    lse1, lse2 = both(Lse, flat, inside, float("inf"), DIFF)
    delta1, delta2 = both(Delta, flat, inside, 0.0, DIFF)
    dq1 = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    q2, dq2 = q1, 0
    if DIFF:
        q2 = load_rows(Q + D, local, q_strides[2], inside, D, BLOCK_D)
        dq2 = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    first, last = stored_keys(b, S, seen)
    where = (b, h, row, first, last)
    outer_first, inner_last = keys_seen(row, first, last, T, seen, CAUSAL)
    inner_first, outer_last = keys_seen(tl.minimum(row + BLOCK_T, T) - 1, first, last, T, seen, CAUSAL)
    begin, free_begin, free_end, end = loop_bounds(outer_first, outer_last, inner_first, inner_last, BLOCK_S)
    k_t, v_t, state = k_strides[2], v_strides[2], (dq1, dq2)
    if seen.attn_mask is not None:
        state = walk_keys(q1, q2, grad, lse1, lse2, delta1, delta2, K, V, k_t, v_t, state, begin, end, where, T, S, seen,
                          c, True, CAUSAL, DIFF, KEY_2, D, E, BLOCK_T, BLOCK_S, BLOCK_D, BLOCK_E)  # fmt: skip
    else:
        if (seen.kv_start is not None) or (seen.window is not None) or (seen.document_first is not None):
            state = walk_keys(q1, q2, grad, lse1, lse2, delta1, delta2, K, V, k_t, v_t, state, begin, free_begin, where, T, S,
                              seen, c, True, CAUSAL, DIFF, KEY_2, D, E, BLOCK_T, BLOCK_S, BLOCK_D, BLOCK_E)  # fmt: skip
        state = walk_keys(q1, q2, grad, lse1, lse2, delta1, delta2, K, V, k_t, v_t, state, free_begin, free_end, where, T, S,
                          seen, c, False, CAUSAL, DIFF, KEY_2, D, E, BLOCK_T, BLOCK_S, BLOCK_D, BLOCK_E)  # fmt: skip
        state = walk_keys(q1, q2, grad, lse1, lse2, delta1, delta2, K, V, k_t, v_t, state, free_end, end, where, T, S,
                          seen, c, True, CAUSAL, DIFF, KEY_2, D, E, BLOCK_T, BLOCK_S, BLOCK_D, BLOCK_E)  # fmt: skip
    dq1, dq2 = state
    QueryGrad += wide(b) * query_grad_strides[0] + wide(h) * query_grad_strides[1] + wide(row) * query_grad_strides[2]
    store_rows(QueryGrad, local, query_grad_strides[2], dq1 * s, inside, 0, D, BLOCK_D)
    if DIFF:
        lam = tl.load(Lam + wide(b) * lam_strides[0] + h * lam_strides[1] + (row + local) * lam_strides[2], inside, 0.0)
        store_rows(QueryGrad + D, local, query_grad_strides[2], dq2 * (-s * lam)[:, None], inside, 0, D, BLOCK_D)
