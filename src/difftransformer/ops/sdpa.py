"""Differential attention as one call of `F.scaled_dot_product_attention` over 2H heads of width max(D, E).

The one call is zero-padded to equal widths. With a value wider than the query, PyTorch's CPU attention silently leaves its
fast path and materialises the maps (1.4 to 33 times slower than the flash path), so there are never two calls with a value
of 2D.

The two outputs are rounded to the input dtype before they are subtracted: in bf16 the error is about 1.4 times as
large as in backends that subtract the maps in fp32. PyTorch differentiates its own call, so no operator is registered here.

Dimensions: B batch, H differential heads (in the call: of both maps, one after the other), G key/value groups
(likewise), T query positions, S key positions, D width of one map's queries and keys, E value width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .fused import positive_scale
from .problem import Call, Problem, Restrictions, allowed_keys

DESCRIPTION = "one padded F.scaled_dot_product_attention over 2H heads; subtracts outputs that are already rounded"


def supports(problem: Problem) -> str | None:
    """Return why this backend cannot run the problem, or None."""
    if problem.keys == 0 or problem.queries == 0 or problem.batch == 0:
        return "no queries or no keys, which F.scaled_dot_product_attention does not take"
    return None


def has_quadratic_memory(problem: Problem) -> bool:
    """Return whether the call needs a T x S mask: PyTorch's own causal mask takes no memory."""
    return problem.needs_mask


def run(call: Call) -> Tensor:
    """Attend as `reference.run` does; the two rounded outputs are subtracted in fp32, and the result is rounded again."""
    query, key, value, lam, restrictions, scale, _ = call
    # PyTorch's GPU kernels mask with -inf before they scale, and -inf times zero or less is NaN or +inf.
    query, scale = positive_scale(query, scale)
    batch, heads, queries = query.shape[:3]
    groups, keys, value_width = value.shape[1:]
    width = call.width

    # Heads in the order (map, group, head of the group), so that torch's own grouped queries read the right group.
    if lam is None:
        q_BHTD, k_BGSD, v_BGSE = query, key, value
    else:
        q_BHTD = torch.cat(query.split(width, -1), 1)
        k_BGSD = torch.cat((key, key) if key.shape[-1] == width else key.split(width, -1), 1)
        v_BGSE = torch.cat((value, value), 1)
    if width < value_width:
        q_BHTD, k_BGSD = F.pad(q_BHTD, (0, value_width - width)), F.pad(k_BGSD, (0, value_width - width))
    elif value_width < width:
        v_BGSE = F.pad(v_BGSE, (0, width - value_width))

    allowed_BHTS, empty_BHT1, is_causal = _mask(restrictions, batch, heads, queries, keys, query.device)
    if allowed_BHTS is not None and lam is not None and allowed_BHTS.shape[1] != 1:
        allowed_BHTS = torch.cat((allowed_BHTS, allowed_BHTS), 1)
    shared = {"enable_gqa": True} if heads != groups else {}  # a comparison of symbolic numbers is no bool
    out_BHTE = F.scaled_dot_product_attention(
        q_BHTD, k_BGSD, v_BGSE, attn_mask=allowed_BHTS, is_causal=is_causal, scale=scale, **shared
    )[..., :value_width]
    if lam is not None:
        out_1_BHTE, out_2_BHTE = out_BHTE.chunk(2, 1)
        # lam stays fp32: the product and the difference are formed there and rounded once.
        out_BHTE = (out_1_BHTE - lam.unsqueeze(-1) * out_2_BHTE).to(value.dtype)
    return out_BHTE if empty_BHT1 is None else out_BHTE.masked_fill(empty_BHT1, 0.0)


def _mask(
    restrictions: Restrictions, batch: int, heads: int, queries: int, keys: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None, bool]:
    """Return the mask for torch, the queries that may attend to nothing, and whether to use torch's own causal mask.

    Queries that may attend to nothing attend to everything, so that no NaN arises, and the caller zeroes their outputs.
    """
    attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens = restrictions
    if window is not None and window >= keys:
        window = None
    if attn_mask is None and kv_start is None and kv_lengths is None and cu_seqlens is None and window is None:
        if not is_causal or queries == 1:
            return None, None, False
        if queries == keys:
            return None, None, True
    allowed_BHTS = allowed_keys(restrictions, queries, keys, device)
    assert allowed_BHTS is not None
    empty_BHT1 = ~allowed_BHTS.any(-1, keepdim=True)
    return allowed_BHTS | empty_BHT1, empty_BHT1, False
