"""Attention logits beside any backend, some rows at a time, so that memory does not grow with a map.

Dimensions: B batch, H heads, G key/value groups, T query positions, S key positions, D width of one map.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .problem import LOW_PRECISION, Restrictions, allowed_keys

# On the CPU, 1 MiB in fp32: of one map with T = 1024, twice as fast as 16 MiB. Other devices want few and large calls.
LOGITS_AT_ONCE = 1 << 18
FACTOR_ELSEWHERE = 64


def logits_of_rows(
    query: Tensor, key: Tensor, restrictions: Restrictions, scale: float, heads: slice = slice(None)
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the logits (B, H, rows, keys) of one map with their bool mask, some rows at a time.

    They are in fp32, or float64 where the inputs are. Keys that are later than all of these rows are left out.

    Args:
        query: (B, H, T, D).
        key: (B, G, S, D).
        restrictions: The keys that each query may attend to.
        scale: Multiplies the logits.
        heads: The heads to compute.
    """
    queries, keys = query.shape[2], key.shape[2]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)[:, heads]
    query = query[:, heads]
    if query.dtype in LOW_PRECISION:
        query, key = query.float(), key.float()
    at_once = LOGITS_AT_ONCE * (1 if query.device.type == "cpu" else FACTOR_ELSEWHERE)
    step = max(1, at_once // max(1, query.shape[0] * query.shape[1] * keys))
    for first in range(0, queries, step):
        last = min(first + step, queries)
        seen = last + keys - queries if restrictions.is_causal and restrictions.kv_lengths is None else keys
        seen = max(0, seen)
        scores = (query[:, :, first:last] * scale) @ key[:, :, :seen].mT
        allowed = allowed_keys(restrictions, queries, keys, query.device, (first, last), (0, seen))
        if allowed is not None and allowed.shape[1] > 1:
            allowed = allowed[:, heads]
        yield scores, allowed


@torch.no_grad()
def largest_logits(inputs: Sequence[tuple[Tensor, Tensor]], restrictions: Restrictions, scale: float) -> Tensor:
    """Return the largest logit of every map and head, (maps, H); -inf for a head that may attend to nothing.

    Args:
        inputs: The query (B, H, T, D) and key (B, G, S, D) of each map.
        restrictions: The keys that each query may attend to.
        scale: Multiplies the logits.
    """
    # Of causal blocks, only the last columns, as many as rows, hold pairs that may not attend.
    only_causal = restrictions == Restrictions(is_causal=True)
    largest = []
    for query, key in inputs:
        dtype = torch.float32 if query.dtype in LOW_PRECISION else query.dtype
        maximum = query.new_full((query.shape[1],), -torch.inf, dtype=dtype)
        for scores, allowed in logits_of_rows(query, key, restrictions, scale):
            if not scores.numel():
                continue
            if allowed is not None:
                edge = slice(-scores.shape[2] if only_causal else None, None)
                scores[..., edge].masked_fill_(~allowed[..., edge], -torch.inf)
            maximum = torch.maximum(maximum, scores.flatten(2).amax(-1).amax(0))
        largest.append(maximum)
    return torch.stack(largest)
