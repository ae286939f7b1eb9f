"""Differential attention as two calls of PyTorch's FlexAttention, one for each map, with a value of any width.

Every restriction except a bool mask lets a query attend to one interval of keys. The two ends of each query's interval are
two integers, which the kernel compares with a key's position. The blocks to skip are computed from them without a T x S
tensor. A bool mask is looked up for each key inside those blocks and skips none.

On CUDA the call is compiled, once for each dtype, number of heads and width. On the CPU there is no gradient, and the call
materialises the map outside torch.compile. The two outputs are rounded to the input dtype before they are subtracted, as in
`sdpa`.

Dimensions: B batch (or 1, for all rows alike), H differential heads, G key/value groups, T query positions, S key
positions, D width of one map's queries and keys, E value width, M blocks of queries, N blocks of keys.
"""

import functools
import importlib.util
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .problem import Call, Problem, Restrictions, seen_keys

DESCRIPTION = "two FlexAttention calls, one a map, compiled on CUDA; subtracts outputs that are already rounded"

BLOCK = 128  # FlexAttention's own default
MIN_CUDA_WIDTH = 16  # the smallest factor in Triton's matrix product
# Number of compiled versions kept, by dtype, width, number of heads, with and without gradients. Beyond it the call raises an
# error. A handful of shapes already exceeds PyTorch's default of 8.
MAX_COMPILED = 64

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def supports(problem: Problem) -> str | None:
    """Return why this backend cannot run the problem, or None."""
    if problem.device_type not in ("cpu", "cuda"):
        return f"runs on the CPU and on CUDA, not on {problem.device_type}"
    if problem.keys == 0 or problem.queries == 0 or problem.batch == 0:
        return "no queries or no keys, which FlexAttention does not take"
    if problem.needs_grad and not _has_kernel(problem.device_type):
        return f"FlexAttention has no gradient on {problem.device_type}"
    if problem.device_type == "cuda":
        if problem.dtype == torch.float64:
            return "takes float32, bfloat16 and float16 on CUDA, not float64"
        if min(problem.width, problem.value_width) < MIN_CUDA_WIDTH:
            return f"widths {problem.width} and {problem.value_width}; on CUDA both must be at least {MIN_CUDA_WIDTH}"
        return _missing()
    return None


def has_quadratic_memory(problem: Problem) -> bool:
    """Return whether the call materialises the maps, as it does on the CPU outside torch.compile."""
    return not _has_kernel(problem.device_type)


def run(call: Call) -> Tensor:
    """Attend as `reference.run` does; the two rounded outputs are subtracted in fp32, and the result is rounded again."""
    if not _has_kernel(call.query.device.type):
        # FlexAttention refuses inputs that require a gradient even where none is recorded.
        call = call._replace(query=call.query.detach(), key=call.key.detach(), value=call.value.detach())
    query, key, value = call[:3]
    mask = _block_mask(call.restrictions, query.shape[0], query.shape[2], key.shape[2], query.device)
    out_BHTE, *second_BHTE = (_attend(*inputs, value, mask, call.scale) for inputs in call.maps())
    if call.lam is None:
        return out_BHTE
    # lam stays fp32: the product and the difference are formed there and rounded once.
    return (out_BHTE - call.lam.unsqueeze(-1) * second_BHTE[0]).to(value.dtype)


def _has_kernel(device_type: str) -> bool:
    """Whether there is a kernel with a backward pass."""
    return device_type == "cuda"


@torch.compiler.assume_constant_result
def _missing() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs Triton on CUDA: pip install 'difftransformer[gpu]'"
    return None


@functools.cache
def _compiled() -> Callable[..., Tensor]:
    # fullgraph: outside a graph the call would materialise T x S maps.
    return torch.compile(flex_attention, fullgraph=True)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask | None, scale: float) -> Tensor:
    """softmax(s Q K^T) V of one map, (B, H, T, E); zeros for a query that may attend to nothing."""
    grouped = query.shape[1] != key.shape[1]
    if torch.compiler.is_compiling():
        out = flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    elif _has_kernel(query.device.type):
        with torch._dynamo.config.patch(recompile_limit=MAX_COMPILED):
            out = _compiled()(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    else:
        with warnings.catch_warnings():
            # `has_quadratic_memory` already tells that the map is materialised.
            warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
            out = flex_attention(query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped)
    return out


def _block_mask(
    restrictions: Restrictions, batch: int, queries: int, keys: int, device: torch.device
) -> BlockMask | None:
    """Build the blocks to skip and the mask without a T x S tensor; return None where nothing is restricted."""
    attn_mask = restrictions.attn_mask
    seen = seen_keys(restrictions, queries, keys, device)
    if seen is None:
        if attn_mask is None:
            return None
        first = torch.zeros(1, queries, dtype=torch.int32, device=device)
        seen = first, torch.full_like(first, keys)
    some, whole = _blocks(*seen, keys)
    if attn_mask is not None:
        some, whole = some | whole, torch.zeros_like(whole)
    first_BT, last_BT = (x.expand(batch, queries).contiguous() for x in seen)
    return BlockMask.from_kv_blocks(
        *_in_order(some),
        *_in_order(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=_mask_mod(first_BT, last_BT, attn_mask),
        seq_lengths=(queries, keys),
    )


def _blocks(first: Tensor, last: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Return which blocks need a mask, and which every query sees in full; bool, (B, M, N) or (1, M, N)."""
    # A query that may attend to nothing, or one that pads the last block, must not widen a block's interval.
    sees = first < last
    pad = (0, -first.shape[-1] % BLOCK)
    first_BMQ = F.pad(first.where(sees, keys), pad, value=keys).unflatten(-1, (-1, BLOCK))
    last_BMQ = F.pad(last.where(sees, 0), pad).unflatten(-1, (-1, BLOCK))
    begin_N = torch.arange(0, keys, BLOCK, dtype=torch.int32, device=first.device)
    end_N = begin_N + BLOCK
    touched = (first_BMQ.amin(-1, keepdim=True) < end_N) & (last_BMQ.amax(-1, keepdim=True) > begin_N)
    whole = (first_BMQ.amax(-1, keepdim=True) <= begin_N) & (last_BMQ.amin(-1, keepdim=True) >= end_N)
    return touched & ~whole, whole


def _in_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of blocks in each row and their columns, followed by the rest; int32, with a dimension for heads."""
    blocks = blocks.unsqueeze(1).to(torch.int32)
    columns = blocks.argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), columns.to(torch.int32)


def _mask_mod(first_BT: Tensor, last_BT: Tensor, attn_mask: Tensor | None) -> MaskMod:
    """Return the function that tells whether query q of head h of row b may attend to key k."""
    if attn_mask is None:

        def within(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (k >= first_BT[b, q]) & (k < last_BT[b, q])

        return within

    mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    # Dimensions of size 1 are read at index 0, so that a mask of keys is never expanded.
    by_row, by_head, by_query, by_key = (0 if size == 1 else 1 for size in mask.shape)

    def within_and_allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        allowed = mask[b * by_row, h * by_head, q * by_query, k * by_key]
        return (k >= first_BT[b, q]) & (k < last_BT[b, q]) & allowed

    return within_and_allowed
