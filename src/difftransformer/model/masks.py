"""Positions and masks of one forward pass, in the form that the attention operator takes.

Padding on either side, a partly filled static cache and packed documents become `kv_start`, `kv_lengths` and `cu_seqlens`.
Kernels skip work with these and need no T x S mask. The other cases (a mask with holes, several packed rows with a cache)
become a bool mask.
"""

import torch
from torch import Tensor
from transformers import Cache

from ..errors import ShapeError
from ..ops.problem import Restrictions, bool_mask


def arrange_rows(
    hidden: Tensor,
    *,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cu_seqlens: Tensor | None,
    cache: Cache | None,
    window: int | None,
    is_causal: bool,
    keep_rows: bool,
) -> tuple[Tensor, Tensor, Restrictions]:
    """Return the rows to compute, their positions, and the keys that each query may attend to.

    Rows of packed documents without cache or padding are laid end to end: as one row they need no T x S mask.

    Args:
        hidden: (B, T, M) embeddings of the new tokens.
        attention_mask: (B, past + T) with 0 for padding; or a mask that broadcasts to (B, H, T, S), bool (True = may
            attend) or additive (0 or -inf), and replaces every other restriction, causality included; or None.
        position_ids: (B, T), or (1, T) for all rows; None counts on from the cache. Packed documents are told by them (see
            `packed_starts`); cached tokens belong to the first document of a row.
        cu_seqlens: Cumulative lengths of the documents in a single row, or None.
        cache: Cache of earlier keys and values, or None.
        window: Sliding window in tokens, or None.
        is_causal: Whether tokens see only themselves and what precedes them.
        keep_rows: Keep packed rows apart, for attention maps and hidden states in the form (B, ...).

    Returns:
        Hidden states (B, T, M) or (1, B T, M), position ids that broadcast to their first two dimensions, and the
        restrictions of every attention layer.

    Raises:
        ShapeError: A mask has neither form, or its width fits neither the cache nor the new tokens; or position_ids are not
            of T tokens.
    """
    batch, length = hidden.shape[:2]
    seen = 0 if cache is None else cache.get_seq_length()
    places = torch.arange(length, device=hidden.device) + seen
    starts = None
    if position_ids is not None and position_ids.shape not in ((batch, length), (1, length)):
        raise ShapeError(
            f"position_ids has shape {tuple(position_ids.shape)}, expected ({batch}, {length}) or (1, {length})"
        )
    if position_ids is None:
        position_ids = places.unsqueeze(0)
    elif length > 1 and cu_seqlens is None:
        mask = None
        if attention_mask is not None and attention_mask.dim() == 2 and attention_mask.shape[0] == batch:
            # Not the last columns: beside a static cache, the mask is as wide as the cache. `_key_padding` refuses a mask
            # that is too narrow.
            mask = attention_mask[:, places.clamp(max=attention_mask.shape[1] - 1)]
        starts = packed_starts(position_ids.expand(batch, length), mask)
        if not torch.compiler.is_compiling() and not bool(starts.any()):
            starts = None
    flatten = starts is not None and cache is None and attention_mask is None and not keep_rows
    if starts is not None and flatten and not torch.compiler.is_compiling():
        starts[:, 0] = True
        hidden, starts = hidden.reshape(1, batch * length, -1), starts.reshape(1, -1)
        position_ids = position_ids.expand(batch, length).reshape(1, -1)
    beginning = Restrictions(is_causal=is_causal, window=window)
    return hidden, position_ids, attention_restrictions(hidden, attention_mask, starts, cu_seqlens, cache, beginning)


def packed_starts(position_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return True where a packed document starts: where positions fall, or 0 follows 0, after a document of one token.

    Positions that jump forward, as in PoSE (arXiv:2309.10400) or beside evicted tokens, stay in their document. Padding belongs
    to no document: each token is compared with the last one before it that is real.

    Args:
        position_ids: (B, T).
        attention_mask: (B, T) with 0 for padding, or None.

    Returns:
        (B, T) bool. The first column is False: the start of a row is implied.
    """
    before = position_ids
    if attention_mask is not None:
        real = attention_mask.bool()
        places = torch.arange(real.shape[1], device=real.device)
        before = position_ids.where(real, -1).gather(1, places.where(real, 0).cummax(1)[0])
    starts = torch.zeros_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = (position_ids[:, 1:] < before[:, :-1]) | ((position_ids[:, 1:] == 0) & (before[:, :-1] == 0))
    return starts if attention_mask is None else starts & real


def row_lengths(starts: Tensor) -> Tensor:
    """Return the cumulative document lengths, (N + 1,) in int32, of rows laid end to end (see `packed_starts`)."""
    starts = starts.clone()
    starts[:, 0] = True
    bounds = starts.flatten().nonzero().flatten()
    return torch.cat((bounds, bounds.new_tensor([starts.numel()]))).to(torch.int32)


def attention_restrictions(
    hidden: Tensor,
    attention_mask: Tensor | None,
    starts: Tensor | None,
    cu_seqlens: Tensor | None,
    cache: Cache | None,
    restrictions: Restrictions,
) -> Restrictions:
    """Return the restrictions of T = length new tokens in each of B = batch rows, beside those given.

    `starts` is True where a packed document starts inside a row (see `packed_starts`). See `arrange_rows` for the rest.
    """
    if attention_mask is not None and attention_mask.dim() == 4:
        return Restrictions(attn_mask=bool_mask(attention_mask, "attention_mask"))

    (batch, length), device = hidden.shape[:2], hidden.device
    keys, offset = (length, 0) if cache is None else cache.get_mask_sizes(length, 0)
    seen = 0 if cache is None else cache.get_seq_length()
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
    unpadded = restrictions.attn_mask is restrictions.kv_start is restrictions.kv_lengths is None
    if not torch.compiler.is_compiling() and batch == 1 and keys == length and seen == 0 and unpadded:
        return restrictions._replace(cu_seqlens=row_lengths(starts))
    document = starts.cumsum(1)
    keys_of_past = keys - length if isinstance(seen, Tensor) else seen - offset
    # Cached tokens belong to the first document of the row; kv_lengths excludes slots that are not filled yet.
    key_document = torch.nn.functional.pad(document, (keys_of_past, keys - length - keys_of_past))
    if isinstance(seen, Tensor):
        key_document = torch.zeros(batch, keys, dtype=document.dtype, device=device)
        place = seen + torch.arange(length, device=device)
        key_document = key_document.index_copy(1, place, document)
    same = document[:, None, :, None] == key_document[:, None, None, :]
    mask = restrictions.attn_mask
    return restrictions._replace(attn_mask=same if mask is None else same & mask)


def _key_padding(attention_mask: Tensor, batch: int, length: int, seen: int | Tensor, keys: int, offset: int) -> Tensor:
    """Return the (B, S) part of a 2-D mask for the keys of this pass. Slots that are not filled yet count as real."""
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
    """Add nothing if there is no padding, `kv_start` if all of it is on the left, and a bool mask otherwise.

    Without causality, padding on both sides becomes `kv_start` and `kv_lengths`. Reading the values makes the device wait, so
    a compiled model always takes the mask.
    """
    if not torch.compiler.is_compiling():
        if bool(real.all()):
            return restrictions
        if bool((real == (real.cumsum(1) > 0)).all()):
            return restrictions._replace(kv_start=(~real).sum(1).to(torch.int32))
        blocks = real[:, 0] + (real[:, 1:] & ~real[:, :-1]).sum(1)
        if not restrictions.is_causal and bool((blocks <= 1).all()):
            start = real.int().argmax(1).to(torch.int32)
            return restrictions._replace(kv_start=start, kv_lengths=start + real.sum(1).to(torch.int32))
    return restrictions._replace(attn_mask=real[:, None, None, :])
