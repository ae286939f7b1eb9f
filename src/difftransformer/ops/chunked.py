"""Attention in blocks of rows, plain PyTorch, with a hand-written backward: O(n) memory, only the inputs are saved.

A block of queries sees whole rows of both maps, so A = P1 - lam P2 is formed in fp32 before one product with V, and the
backward needs no log-sum-exp. With P_m = softmax(s Q_m K_m^T), O = (P1 - lam P2) V and dO given:

    dP = dO V^T            one for both maps: dL/dP1 = dP, dL/dP2 = -lam dP
    d_m = rowsum(P_m * dP)                         dlam = -d_2
    U_m = P_m * (dP - d_m)                         dS_1 = U_1, dS_2 = -lam U_2
    dV = (P1 - lam P2)^T dO
    dQ_m = s dS_m K_m      dK_m = s dS_m^T Q_m     (-lam is applied to the rows of Q_2 and dQ_2, never to a map)

Keys that no query of a block can see (causal, window; on the CPU also padding and other documents) are not computed.
Lengths and boundaries are never read from another device, which would mean waiting for it: there they become masks.

Dimensions: B batch, H differential heads, G key/value groups, R = H // G heads of a group, N = B * G, T query
positions, S key positions, D width of one map's queries and keys, C = 2D (D without a second map), E value width. In a
tile: Q = R * (positions of the tile) rows, K keys. A name that ends in `_NQK`, say, is a tensor of those dimensions.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from . import fused
from .problem import LOW_PRECISION, Call, Problem, Restrictions, allowed_keys, without_autocast

DESCRIPTION = "row blocks in plain PyTorch, O(n) memory, hand-written backward; subtracts in fp32, once"

# Rows of a block (heads of a group times positions): 128, and 64 past 4096 keys, so that two fp32 maps and dP stay near
# the L2 cache. The speed hardly changes between 64 and 256 (fp32, n = 512 to 8192, one thread).
BLOCK_ROWS = 128
BLOCK_ROWS_LONG = 64
LONG_KEYS = 4096
MIN_BLOCK_POSITIONS = 16
# Elements of one map in a tile on the CPU, 1 MiB in fp32. Other devices are faster with few and large calls.
CPU_TILE_ELEMENTS = 1 << 18
TILE_ELEMENTS = 1 << 26


class Tile(NamedTuple):
    """One step of the computation: rows of some groups, and the keys that they may see, key j <= t + offset where causal."""

    groups: slice
    rows: slice
    keys: slice
    offset: int


def supports(problem: Problem) -> str | None:
    """Return why this backend cannot run the problem, or None: it runs all outside of traced transforms."""
    return fused.untraceable()


def _is_host(device: torch.device) -> bool:
    """Whether values can be read without waiting for a device."""
    return device.type == "cpu"


def _host_values(tensor: Tensor | None) -> list[int] | None:
    """Return the values of a tensor if they can be read, else None."""
    if tensor is None or not _is_host(tensor.device):
        return None
    return cast(list[int], tensor.tolist())


class Tiling:
    """How a problem is cut into tiles, and the masks of a tile."""

    def __init__(self, query: Tensor, value: Tensor, restrictions: Restrictions) -> None:
        self.batch, self.heads, self.queries = query.shape[:3]
        self.groups, self.keys = value.shape[1:3]
        self.per_group = self.heads // self.groups
        self.restrictions = restrictions
        self.device = query.device
        is_host = _is_host(self.device)
        ranged = restrictions.kv_start is not None or restrictions.kv_lengths is not None
        # Causal and window alone are masked at the edges of a tile; anything else by a mask of the whole tile.
        self.masks_whole_tile = restrictions.attn_mask is not None or (
            not is_host and (ranged or restrictions.cu_seqlens is not None)
        )
        # A row's own kv_lengths may be smaller than the span's, and its window then lies further left.
        self.knows_windows = is_host or restrictions.kv_lengths is None
        rows = BLOCK_ROWS if self.keys <= LONG_KEYS else BLOCK_ROWS_LONG
        self.block = max(MIN_BLOCK_POSITIONS, rows // max(1, self.per_group))
        self.tile_elements = CPU_TILE_ELEMENTS if is_host else TILE_ELEMENTS
        self.tiles = [tile for span in self._spans() for tile in self._cut(span)] if self.heads else []
        self._corners: dict[tuple[int, int, int, bool], Tensor] = {}

    def _spans(self) -> Iterator[Tile]:
        groups, queries = slice(0, self.batch * self.groups), slice(0, self.queries)
        restrictions = self.restrictions
        boundaries = _host_values(restrictions.cu_seqlens)
        if boundaries is not None:
            for first, last in itertools.pairwise(boundaries):
                yield Tile(groups, slice(first, last), slice(first, last), 0)
            return
        starts, lengths = _host_values(restrictions.kv_start), _host_values(restrictions.kv_lengths)
        if starts is None and lengths is None:
            yield Tile(groups, queries, slice(0, self.keys), self.keys - self.queries)
            return
        starts = [0] * self.batch if starts is None else starts
        lengths = [self.keys] * self.batch if lengths is None else lengths
        row = 0
        while row < self.batch:
            same = row + 1
            while same < self.batch and (starts[same], lengths[same]) == (starts[row], lengths[row]):
                same += 1
            groups = slice(row * self.groups, same * self.groups)
            yield Tile(groups, queries, slice(starts[row], lengths[row]), lengths[row] - self.queries)
            row = same

    def _cut(self, span: Tile) -> Iterator[Tile]:
        causal, window, offset = self.restrictions.is_causal, self.restrictions.window, span.offset
        row_first, row_last, key_first, key_last = span.rows.start, span.rows.stop, span.keys.start, span.keys.stop
        if key_last <= key_first:
            return
        if causal:
            row_first = max(row_first, key_first - offset)
        widest = min(self.block, row_last - row_first) * self.per_group * (key_last - key_first)
        step = max(1, self.tile_elements // max(1, widest))
        for group in range(span.groups.start, span.groups.stop, step):
            groups = slice(group, min(group + step, span.groups.stop))
            for row in range(row_first, row_last, self.block):
                end = min(row + self.block, row_last)
                first, last = key_first, key_last
                if causal:
                    last = min(last, end + offset)
                    if window is not None and self.knows_windows:
                        first = max(first, row + offset - window + 1)
                yield Tile(groups, slice(row, end), slice(first, last), offset)

    @property
    def covers_all(self) -> bool:
        """Whether every query is in a tile. A query outside may attend to nothing, and its output is zero."""
        positions = sum(
            (tile.groups.stop - tile.groups.start) * (tile.rows.stop - tile.rows.start) for tile in self.tiles
        )
        return positions == self.batch * self.groups * self.queries

    def shape(self, tile: Tile) -> tuple[int, int, int]:
        """(n, Q, K) of a tile."""
        groups, rows, keys, _ = tile
        return groups.stop - groups.start, self.per_group * (rows.stop - rows.start), keys.stop - keys.start

    def largest_tile(self) -> int:
        """Number of elements of the largest tile's map."""
        return max((math.prod(self.shape(tile)) for tile in self.tiles), default=0)

    def blocked(self, tile: Tile) -> Tensor | None:
        """Return a tile's mask, True = may not attend, (n, R or 1, t, K); None where masking its edges is enough."""
        if not self.masks_whole_tile:
            return None
        first, last = tile.groups.start // self.groups, -(-tile.groups.stop // self.groups)
        allowed = allowed_keys(
            self._of_rows(first, last),
            self.queries,
            self.keys,
            self.device,
            (tile.rows.start, tile.rows.stop),
            (tile.keys.start, tile.keys.stop),
        )
        assert allowed is not None
        heads_of_group = (1, 1) if allowed.shape[1] == 1 else (self.groups, self.per_group)
        by_group = allowed.unflatten(1, heads_of_group).expand(last - first, self.groups, -1, -1, -1)
        skipped = first * self.groups
        return ~by_group.flatten(0, 1)[tile.groups.start - skipped : tile.groups.stop - skipped]

    def _of_rows(self, first: int, last: int) -> Restrictions:
        """Return the restrictions of rows first <= b < last of the batch."""
        attn_mask, _, _, kv_start, kv_lengths, _ = self.restrictions
        if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[0] != 1:
            attn_mask = attn_mask[first:last]
        return self.restrictions._replace(
            attn_mask=attn_mask,
            kv_start=None if kv_start is None else kv_start[first:last],
            kv_lengths=None if kv_lengths is None else kv_lengths[first:last],
        )

    def mask_scores(self, scores_NQK: Tensor, tile: Tile, blocked: Tensor | None) -> None:
        """Add a large negative number to the scores of keys that are not allowed; 7 times faster than filling them."""
        groups, rows, keys = self.shape(tile)
        positions = rows // self.per_group
        scores_NRTK = scores_NQK.view(groups, self.per_group, positions, keys)
        if blocked is not None:
            # Finite, so that a row without an allowed key is free of NaN. The caller zeroes it.
            scores_NRTK.add_(blocked.to(scores_NQK.dtype).mul_(torch.finfo(scores_NQK.dtype).min))
            return
        if not self.restrictions.is_causal:
            return
        # Row r of the tile is position r + rows.start and sees columns r + newest - window + 1 to r + newest.
        newest = tile.rows.start + tile.offset - tile.keys.start
        first = max(0, newest + 1)
        if first < keys:
            scores_NRTK[..., first:].add_(self._corner(positions, keys - first, newest + 1 - first, scores_NQK))
        window = self.restrictions.window
        if window is not None:
            last = min(keys, newest + positions - window)
            if last > 0:
                scores_NRTK[..., :last].add_(self._corner(positions, last, newest - window, scores_NQK, below=True))

    def _corner(self, rows: int, columns: int, diagonal: int, like: Tensor, below: bool = False) -> Tensor:
        """Return (rows, columns), -inf where column >= row + diagonal (`below`: <=), else 0. Inner tiles share one."""
        key = (rows, columns, diagonal, below)
        corner = self._corners.get(key)
        if corner is None:
            full = torch.full((rows, columns), -torch.inf, dtype=like.dtype, device=like.device)
            corner = full.tril_(diagonal) if below else full.triu_(diagonal)
            self._corners[key] = corner
        return corner


class Maps:
    """The tensors of one call, addressed by tile, and buffers that the tiles share."""

    def __init__(self, call: Call, num_buffers: int) -> None:
        query, key, value, lam, restrictions, self.scale, _ = call
        self.tiling = tiling = Tiling(query, value, restrictions)
        flat, per_group = tiling.batch * tiling.groups, tiling.per_group
        self.low = query.dtype in LOW_PRECISION
        self.map_dtype = torch.float32 if self.low else query.dtype
        self.width = call.width
        self.q_NRTC = query.reshape(flat, per_group, tiling.queries, query.shape[-1])
        self.k_NSC = key.reshape(flat, tiling.keys, key.shape[-1])
        self.v_NSE = value.reshape(flat, tiling.keys, value.shape[-1])
        self.neg_lam_NRT: Tensor | None = None
        if lam is not None:
            lam_BHT = lam.expand(tiling.batch, tiling.heads, tiling.queries)
            self.neg_lam_NRT = lam_BHT.neg().reshape(flat, per_group, tiling.queries)
        largest = tiling.largest_tile()
        self._buffers = [torch.empty(largest, dtype=self.map_dtype, device=query.device) for _ in range(num_buffers)]

    def buffer(self, index: int, tile: Tile) -> Tensor:
        """Return a shared buffer as (n, Q, K)."""
        groups, rows, keys = self.tiling.shape(tile)
        return self._buffers[index][: groups * rows * keys].view(groups, rows, keys)

    def rows(self, x_NRTC: Tensor, tile: Tile) -> Tensor:
        """Return the rows of a tile as (n, Q, C); a view where a group has one head."""
        return x_NRTC[tile.groups, :, tile.rows].flatten(1, 2)

    def query(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Return both maps' queries (n, Q, D); the same one twice without a second map."""
        q_NQC = self.rows(self.q_NRTC, tile)
        return q_NQC[..., : self.width], q_NQC[..., -self.width :]

    def key(self, tile: Tile) -> tuple[Tensor, Tensor]:
        """Return both maps' keys (n, K, D); the same one twice where it is shared."""
        k_NKC = self.k_NSC[tile.groups, tile.keys]
        return k_NKC[..., : self.width], k_NKC[..., -self.width :]

    def probabilities(
        self, q_NQD: Tensor, k_NKD: Tensor, tile: Tile, blocked: Tensor | None, scratch: Tensor, out: Tensor
    ) -> Tensor:
        """Write softmax(s Q K^T) of a tile to `out`, in fp32 or float64."""
        _multiply(q_NQD, k_NKD.mT, out=scratch).mul_(self.scale)
        self.tiling.mask_scores(scratch, tile, blocked)
        return torch.softmax(scratch, -1, out=out)

    def rounded(self, x: Tensor) -> Tensor:
        """Round a map to the dtype of the inputs for the next matrix product."""
        return x.to(self.q_NRTC.dtype) if self.low else x


def _multiply(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    """Write left @ right to `out`, which is fp32 for low-precision factors.

    A score must not be rounded to their dtype: in bf16, one of 100 would be wrong by up to 0.25, and its weight by 28 %.
    """
    if left.dtype == out.dtype:
        return torch.bmm(left, right, out=out)
    if left.is_cuda:
        return torch.bmm(left, right, out.dtype, out=out)
    return torch.bmm(left.to(out.dtype), right.to(out.dtype), out=out)


def _accumulate(total: Tensor, left: Tensor, right: Tensor, alpha: float = 1.0) -> None:
    """Add alpha * left @ right to `total`, in its dtype: fp32 for low-precision factors."""
    if total.dtype == left.dtype:
        total.baddbmm_(left, right, alpha=alpha)
    else:
        total.add_(torch.bmm(left, right), alpha=alpha)


def _forward(call: Call) -> Tensor:
    maps = Maps(call, num_buffers=2 if call.lam is None else 3)
    tiling, width_E = maps.tiling, call.value.shape[-1]
    new = call.value.new_empty if tiling.covers_all else call.value.new_zeros
    out_NRTE = new(tiling.batch * tiling.groups, tiling.per_group, tiling.queries, width_E)
    for tile in tiling.tiles:
        blocked = tiling.blocked(tile)
        q1_NQD, q2_NQD = maps.query(tile)
        k1_NKD, k2_NKD = maps.key(tile)
        scratch = maps.buffer(0, tile)
        a_NQK = maps.probabilities(q1_NQD, k1_NKD, tile, blocked, scratch, maps.buffer(1, tile))
        if maps.neg_lam_NRT is not None:
            p2_NQK = maps.probabilities(q2_NQD, k2_NKD, tile, blocked, scratch, maps.buffer(2, tile))
            a_NQK.addcmul_(p2_NQK, maps.rows(maps.neg_lam_NRT, tile).unsqueeze(-1))
        o_NRTE = torch.bmm(maps.rounded(a_NQK), maps.v_NSE[tile.groups, tile.keys]).unflatten(1, (tiling.per_group, -1))
        if blocked is not None:
            o_NRTE.masked_fill_(blocked.all(-1, keepdim=True), 0.0)
        out_NRTE[tile.groups, :, tile.rows] = o_NRTE
    return out_NRTE.view(tiling.batch, tiling.heads, tiling.queries, width_E)


def _backward(grad: Tensor, call: Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    query, key, value, lam, _, scale, _ = call
    maps = Maps(call, num_buffers=3 if lam is None else 4)
    tiling, width = maps.tiling, maps.width
    dtype, map_dtype = query.dtype, maps.map_dtype
    new_like = torch.empty_like if tiling.covers_all else torch.zeros_like
    do_NRTE = grad.reshape(tiling.batch * tiling.groups, tiling.per_group, tiling.queries, value.shape[-1])
    dq_NRTC = new_like(maps.q_NRTC, memory_format=torch.contiguous_format)
    dk_NSC = torch.zeros(maps.k_NSC.shape, dtype=map_dtype, device=query.device)
    dv_NSE = torch.zeros(maps.v_NSE.shape, dtype=map_dtype, device=query.device)
    neg_lam_NRT = maps.neg_lam_NRT
    d2_NRT = None if neg_lam_NRT is None else torch.zeros_like(neg_lam_NRT)
    softmax_backward = torch.ops.aten._softmax_backward_data.out
    for tile in tiling.tiles:
        blocked = tiling.blocked(tile)
        q1_NQD, q2_NQD = maps.query(tile)
        k1_NKD, k2_NKD = maps.key(tile)
        v_NKE = maps.v_NSE[tile.groups, tile.keys]
        do_NQE = maps.rows(do_NRTE, tile)
        if blocked is not None:
            # A query that may attend to nothing passes no gradient on.
            do_NQE = (
                do_NQE.unflatten(1, (tiling.per_group, -1))
                .masked_fill(blocked.all(-1, keepdim=True), 0.0)
                .flatten(1, 2)
            )
        scratch, p1_NQK, a_NQK = maps.buffer(0, tile), maps.buffer(1, tile), maps.buffer(2, tile)
        maps.probabilities(q1_NQD, k1_NKD, tile, blocked, scratch, p1_NQK)
        if neg_lam_NRT is None:
            p2_NQK, neg_lam_NQ1, a_NQK = None, None, p1_NQK
        else:
            neg_lam_NQ1 = maps.rows(neg_lam_NRT, tile).unsqueeze(-1)
            p2_NQK = maps.probabilities(q2_NQD, k2_NKD, tile, blocked, scratch, maps.buffer(3, tile))
            torch.addcmul(p1_NQK, p2_NQK, neg_lam_NQ1, out=a_NQK)
        _accumulate(dv_NSE[tile.groups, tile.keys], maps.rounded(a_NQK).mT, do_NQE)
        # From here on `scratch` is dP and the buffer of A is U.
        dp_NQK, u_NQK = scratch, maps.buffer(2, tile)
        _multiply(do_NQE, v_NKE.mT, out=dp_NQK)
        softmax_backward(dp_NQK, p1_NQK, -1, map_dtype, grad_input=u_NQK)
        u_rounded = maps.rounded(u_NQK)
        dq1_NQD = torch.bmm(u_rounded, k1_NKD).mul_(scale)
        dq_tile = dq_NRTC[tile.groups, :, tile.rows]
        dq_tile[..., :width] = dq1_NQD.unflatten(1, (tiling.per_group, -1))
        dk_tile = dk_NSC[tile.groups, tile.keys]
        _accumulate(dk_tile[..., :width], u_rounded.mT, q1_NQD, alpha=scale)
        if p2_NQK is None or neg_lam_NQ1 is None or d2_NRT is None:
            continue
        softmax_backward(dp_NQK, p2_NQK, -1, map_dtype, grad_input=u_NQK)
        d2_NQ = p2_NQK.mul_(dp_NQK).sum(-1)
        d2_NRT[tile.groups, :, tile.rows] = d2_NQ.unflatten(1, (tiling.per_group, -1))
        u_rounded = maps.rounded(u_NQK)
        dq2_NQD = torch.bmm(u_rounded, k2_NKD) * (neg_lam_NQ1 * scale)
        dq_tile[..., width:] = dq2_NQD.unflatten(1, (tiling.per_group, -1))
        _accumulate(dk_tile[..., -width:], u_rounded.mT, (q2_NQD * neg_lam_NQ1).to(dtype), alpha=scale)
    if lam is None or d2_NRT is None:
        dlam = torch.empty(0, dtype=map_dtype, device=query.device)
    else:
        dlam = d2_NRT.view(tiling.batch, tiling.heads, tiling.queries).neg_().sum_to_size(lam.shape)
    return dq_NRTC.view(query.shape), dk_NSC.view(key.shape).to(dtype), dv_NSE.view(value.shape).to(dtype), dlam


_library, _attend = fused.define("chunked", normed=False)


@torch.library.impl(_library, "chunked_attention", "CompositeExplicitAutograd")
def _(query: Tensor, *rest: Any) -> Tensor:
    with without_autocast(query.device.type):
        return _forward(fused.call_of(query, *rest))


@torch.library.impl(_library, "chunked_attention_backward", "CompositeExplicitAutograd")
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with without_autocast(grad.device.type):
        return _backward(grad, fused.call_of(*arguments))


@torch.library.register_fake("difftransformer::chunked_attention")
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return value.new_empty(*query.shape[:3], value.shape[-1])


@torch.library.register_fake("difftransformer::chunked_attention_backward")
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, lam: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    map_dtype = torch.float32 if query.dtype in LOW_PRECISION else query.dtype
    dlam = query.new_empty(0, dtype=map_dtype) if lam is None else lam.new_empty(lam.shape, dtype=map_dtype)
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape), dlam


def run(call: Call) -> Tensor:
    """Attend as `reference.run` does."""
    out: Tensor = _attend(*call[:4], *call.restrictions, call.scale)
    return out
