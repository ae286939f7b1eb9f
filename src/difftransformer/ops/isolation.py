"""Keep NaN and infinity in keys and values away from the queries that may not attend to them.

A weight of zero does not keep them out of a product: 0 * NaN is NaN, in P V and, with gradients, in dO V^T and dS K. So they
are replaced by zeros before the products, and the outputs of the queries that may attend to them become NaN afterwards.

Dimensions: B batch, H differential heads, G key/value groups, T query positions, S key positions.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .problem import Call, allowed_keys, is_readable, seen_keys

PAIRS_AT_ONCE = 1 << 24  # queries and keys of all heads, 64 MiB in fp32


def isolated(run: Callable[[Call], Tensor], call: Call) -> Tensor:
    """Run a call so that NaN and infinity in a key or value reach only the queries that may attend to it."""
    queries, keys, device = call.query.shape[2], call.key.shape[2], call.query.device
    seen = seen_keys(call.restrictions, queries, keys, device)
    if (seen is None and call.restrictions.attn_mask is None) or _are_finite(call.key, call.value):
        return run(call)
    key, value = (x.nan_to_num(0.0, 0.0, 0.0) for x in (call.key, call.value))
    spoiled_BGS = (key != call.key).any(-1) | (value != call.value).any(-1)
    reached_BHT = _reached(spoiled_BGS.repeat_interleave(call.query.shape[1] // key.shape[1], 1), call, seen)
    # Added, not filled in: a NaN that comes back as the gradient of such an output goes on to the inputs.
    return run(call._replace(key=key, value=value)) + torch.where(reached_BHT, torch.nan, 0.0).to(
        value.dtype
    ).unsqueeze(-1)


def _are_finite(*tensors: Tensor) -> bool:
    """Whether all numbers are known to be finite, without waiting for a device and without breaking a traced graph."""
    return all(
        is_readable(x) and bool(x.detach().sum(dtype=torch.promote_types(x.dtype, torch.float32)).isfinite())
        for x in tensors
    )


def _reached(spoiled_BHS: Tensor, call: Call, seen: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return which queries may attend to a spoiled key; bool, broadcastable to (B, H, T)."""
    mask, keys = call.restrictions.attn_mask, call.key.shape[2]
    mask_BHTS = None if mask is None else mask[(None,) * (4 - mask.dim())]
    if mask_BHTS is not None and 1 not in mask_BHTS.shape[2:]:
        return _reached_by_mask(spoiled_BHS, call)
    if mask_BHTS is not None and mask_BHTS.shape[2] == 1:
        spoiled_BHS = spoiled_BHS & mask_BHTS[:, :, 0]
    if seen is None:
        reached_BHT = spoiled_BHS.any(-1, keepdim=True)
    else:
        # An interval has a spoiled key if their running count differs between its ends.
        count_BHS = F.pad(spoiled_BHS.cumsum(-1), (1, 0))
        first, last = (end.clamp(0, keys).long().unsqueeze(1).expand(*spoiled_BHS.shape[:2], -1) for end in seen)
        reached_BHT = count_BHS.gather(-1, last) > count_BHS.gather(-1, first)
    return reached_BHT if mask_BHTS is None or mask_BHTS.shape[2] == 1 else reached_BHT & mask_BHTS[..., 0]


def _reached_by_mask(spoiled_BHS: Tensor, call: Call) -> Tensor:
    """`_reached` for a mask of queries and keys, some rows at a time."""
    queries, keys, dtype = call.query.shape[2], call.key.shape[2], call.value.dtype

    def of_rows(rows: tuple[int, int] | None) -> Tensor:
        allowed_BHTS = allowed_keys(call.restrictions, queries, keys, spoiled_BHS.device, rows)
        assert allowed_BHTS is not None
        if allowed_BHTS.shape[1] == 1:  # without one mask for each head in memory
            return (spoiled_BHS.to(dtype) @ allowed_BHTS[:, 0].to(dtype).mT) > 0
        return (allowed_BHTS & spoiled_BHS.unsqueeze(2)).any(-1)

    if torch.compiler.is_compiling() or spoiled_BHS.numel() * queries <= PAIRS_AT_ONCE:  # a traced length may be free
        return of_rows(None)
    step = max(1, PAIRS_AT_ONCE // spoiled_BHS.numel())
    return torch.cat([of_rows((first, min(first + step, queries))) for first in range(0, queries, step)], -1)
