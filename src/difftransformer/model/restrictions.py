"""The keys that each query may attend to: transformers' masks, caches and packed rows as the op's `Restrictions`.

Padding on either side, a partly filled static cache and packed documents become `kv_start`, `kv_lengths` and `cu_seqlens`,
which kernels use to skip work and which need no T x S mask. Everything else (a mask with holes, several packed rows beside
a cache) becomes a bool mask.
"""

import torch
from torch import Tensor
from transformers import Cache

from ..errors import ShapeError
from ..ops import Restrictions


def packed_starts(position_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """True where a packed document starts: position ids do not go on by one. Padding starts nothing.

    Args:
        position_ids: (B, T).
        attention_mask: (B, T) or None; 0 marks padding.

    Returns:
        (B, T) bool; the first column is False, since a row's start needs no saying.
    """
    restarts = torch.zeros_like(position_ids, dtype=torch.bool)
    restarts[:, 1:] = position_ids[:, 1:] != position_ids[:, :-1] + 1
    if attention_mask is not None:
        real = attention_mask.bool()
        restarts[:, 1:] &= real[:, 1:] & real[:, :-1]
    return restarts


def row_lengths(starts: Tensor) -> Tensor:
    """Cumulative document lengths (N + 1,) in int32 of the rows laid end to end, given where documents start inside them."""
    starts = starts.clone()
    starts[:, 0] = True
    bounds = starts.flatten().nonzero().flatten()
    return torch.cat((bounds, bounds.new_tensor([starts.numel()]))).to(torch.int32)


def attention_restrictions(
    *,
    batch: int,
    length: int,
    device: torch.device,
    attention_mask: Tensor | None,
    starts: Tensor | None,
    cu_seqlens: Tensor | None,
    cache: Cache | None,
    window: int | None,
) -> Restrictions:
    """Return the restrictions of one forward pass.

    Args:
        batch: B.
        length: T, new tokens of a row.
        device: Where the model runs.
        attention_mask: (B, past + T) with 0 for padding; or a bool mask that broadcasts to (B, H, T, S) and then
            stands for every restriction, causality included; or None.
        starts: Where packed documents start in the new tokens (`packed_starts`), or None.
        cu_seqlens: Cumulative lengths of the documents of a single row, or None.
        cache: Keys and values seen before, or None.
        window: Sliding window, or None.

    Returns:
        The restrictions for every attention layer.

    Raises:
        ShapeError: a mask that is neither, or whose width fits neither the cache nor the new tokens.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        if attention_mask.dtype != torch.bool:
            raise ShapeError(
                f"a 4-D attention_mask has dtype {attention_mask.dtype}, expected bool (True = may attend); "
                "pass `mask == 0` for an additive mask, or a (batch, length) mask"
            )
        return Restrictions(attn_mask=attention_mask)

    keys, offset = (length, 0) if cache is None else cache.get_mask_sizes(length, 0)
    seen = 0 if cache is None else cache.get_seq_length()
    restrictions = Restrictions(is_causal=True, window=window)
    if isinstance(seen, Tensor) or keys != seen + length - offset:
        filled = torch.as_tensor(seen, device=device) + (length - offset)
        restrictions = restrictions._replace(kv_lengths=filled.to(torch.int32).expand(batch))
    if attention_mask is not None:
        padding = _key_padding(attention_mask, batch, length, seen, keys, offset)
        restrictions = _with_padding(restrictions, padding)

    if cu_seqlens is not None:
        if batch != 1 or (cache is not None and not (isinstance(seen, int) and seen == 0 and keys == length)):
            raise ShapeError(
                f"cu_seq_lens_q with a batch of {batch} and {seen} cached tokens: cumulative lengths describe one row "
                "without a past; use restarting position_ids for several rows"
            )
        return restrictions._replace(cu_seqlens=cu_seqlens.to(torch.int32))
    if starts is None:
        return restrictions
    only_causal = all(restriction is None or restriction is True for restriction in restrictions)
    if not torch.compiler.is_compiling() and batch == 1 and keys == length and seen == 0 and only_causal:
        return restrictions._replace(cu_seqlens=row_lengths(starts))
    document = starts.cumsum(1)
    keys_of_past = keys - length if isinstance(seen, Tensor) else seen - offset
    # Cached tokens belong to the first document of the row; unfilled slots are excluded by kv_lengths.
    key_document = torch.nn.functional.pad(document, (keys_of_past, keys - length - keys_of_past))
    if isinstance(seen, Tensor):
        key_document = torch.zeros(batch, keys, dtype=document.dtype, device=device)
        place = seen + torch.arange(length, device=device)
        key_document = key_document.index_copy(1, place, document)
    same = document[:, None, :, None] == key_document[:, None, None, :]
    mask = restrictions.attn_mask
    return restrictions._replace(attn_mask=same if mask is None else same & mask)


def _key_padding(attention_mask: Tensor, batch: int, length: int, seen: int | Tensor, keys: int, offset: int) -> Tensor:
    """The (B, S) part of a 2-D mask that covers the keys of this pass; slots that are not filled yet count as real."""
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch:
        raise ShapeError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, expected ({batch}, past + new tokens) with 0 for padding"
        )
    width = attention_mask.shape[1]
    if isinstance(seen, int) and width < seen + length:
        raise ShapeError(
            f"attention_mask covers {width} tokens, but {seen} are cached and {length} are new; "
            f"pass a mask of width {seen + length}"
        )
    return torch.nn.functional.pad(
        attention_mask.bool()[:, offset : offset + keys], (0, max(0, keys + offset - width)), value=True
    )


def _with_padding(restrictions: Restrictions, real: Tensor) -> Restrictions:
    """Add padding as `kv_start` where it is all on the left, and as a bool mask elsewhere.

    Reading the values waits for the device, so a compiled model always takes the mask.
    """
    if not torch.compiler.is_compiling():
        if bool(real.all()):
            return restrictions
        if bool((real == (real.cumsum(1) > 0)).all()):
            return restrictions._replace(kv_start=(~real).sum(1).to(torch.int32))
    return restrictions._replace(attn_mask=real[:, None, None, :])
