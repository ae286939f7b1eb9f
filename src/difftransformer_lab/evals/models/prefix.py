"""Keys and values of one row of tokens, kept for the next prompt with the same prefix.

Many-shot prompts share their demonstrations, and needle documents share their haystack. When prompts are processed in the
order of their tokens, a common token is computed once: the cache holds the last prompt and is cropped to the prefix that the
next prompt shares with it.
"""

import inspect
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

CHUNK_TOKENS = 2048
"""Tokens of one forward pass over a long row, to bound the memory of its scores and logits."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of a layer in a larger buffer: a step writes its own token, where `DynamicLayer` copies all tokens."""

    keys: Tensor
    values: Tensor
    _room: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys (B, G, T, D) and values (B, G, T, E), and return all keys and values so far as views."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        seen = self.get_seq_length()
        end = seen + key_states.shape[-2]
        if self._room is None or end > self._room[0].shape[-2]:
            self._room = tuple(  # type: ignore[assignment]
                new.new_empty(*new.shape[:-2], max(end, seen * 3 // 2), new.shape[-1])
                for new in (key_states, value_states)
            )
            if seen:
                self._write((self.keys, self.values), 0)
        self._write((key_states, value_states), seen)
        assert self._room is not None
        self.keys, self.values = (room[..., :end, :] for room in self._room)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._room = None

    def _write(self, states: tuple[Tensor, Tensor], begin: int) -> None:
        assert self._room is not None
        for room, new in zip(self._room, states, strict=True):
            room[..., begin : begin + new.shape[-2], :] = new


def growing_cache(model: Any) -> DynamicCache:
    """Return an empty cache for a model, with `GrowingLayer` wherever a layer keeps all tokens; for inference only."""
    cache = DynamicCache(config=model.config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


class PrefixCache:
    """Computes a causal model's next-token logits for one row after another.

    Models that cannot continue from part of a row (`goes_on`) compute each row anew.

    Args:
        enabled: Whether to keep anything from one prompt to the next; within a prompt tokens are always kept.
        whole: Whether to compute each row anew, whatever the model can.
    """

    def __init__(self, model: Any, *, enabled: bool = True, whole: bool = False) -> None:
        self.model, self._goes_on = model, goes_on(model) and not whole
        self.enabled = enabled and can_be_cut(model)
        self._ids = np.empty(0, np.int64)
        self._cache: DynamicCache | None = None
        self.computed_tokens = 0

    def start(self) -> None:
        """Begin a new prompt; if the cache is not enabled, forget the last one."""
        if not self.enabled:
            self._cache, self._ids = None, self._ids[:0]

    def next_logits(self, row: Sequence[int]) -> Tensor:
        """Return the logits (V,) of the token after `row`, in fp32."""
        return self.continued_logits(row, ())[0]

    def continued_logits(self, row: Sequence[int], more: Sequence[int]) -> Tensor:
        """Return the logits (1 + len(more), V) of the token after `row` and after each token of `more` behind it, in fp32."""
        ids = np.asarray([*row, *more], np.int64)
        if not self._goes_on:
            return self._logits(ids, 1 + len(more))[0].float()
        # The row's last token always goes through the model, because its logits are part of the result.
        keep = 0 if self._cache is None else min(common_prefix(self._ids, ids), len(row) - 1)
        self._cut(keep)
        logits: list[Tensor] = []
        for begin in range(keep, len(row), CHUNK_TOKENS):
            logits = [self._logits(ids[begin : min(begin + CHUNK_TOKENS, len(row))], 1)]
        if len(more):
            logits.append(self._logits(ids[len(row) :], len(more)))
        self._ids = ids
        return torch.cat(logits, 1)[0].float()

    def _logits(self, ids: np.ndarray, keep: int) -> Tensor:
        """Return the logits (1, keep, V) after the last `keep` of some tokens, which are appended to the cache."""
        part = torch.from_numpy(ids).to(self.model.device).unsqueeze(0)
        options: dict[str, Any] = {"use_cache": self._goes_on}
        if self._goes_on:
            options |= {"past_key_values": self._cache, "logits_to_keep": keep}
        outputs = self.model(input_ids=part, **options)
        self._cache = outputs.get("past_key_values")
        self.computed_tokens += part.shape[1]
        logits: Tensor = outputs.logits[:, -keep:]
        return logits

    def _cut(self, keep: int) -> None:
        if keep == 0 or self._cache is None:
            self._cache, keep = growing_cache(self.model), 0
        elif keep < len(self._ids):
            self._cache.crop(keep - len(self._ids))
        self._ids = self._ids[:keep]


def goes_on(model: Any) -> bool:
    """Whether a row can be computed in parts of several tokens.

    Only attention can: of the models with a recurrent state, some take a cache and begin the state anew in every such part.
    """
    layers = DynamicCache(config=model.config).layers
    keeps_keys = all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)
    return keeps_keys and "past_key_values" in inspect.signature(type(model).forward).parameters


def can_be_cut(model: Any) -> bool:
    """Whether a model's cache can be cropped; a sliding window or a recurrent state has lost the earlier tokens."""
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def common_prefixes(rows: Iterable[Sequence[int]]) -> list[int]:
    """Return the number of tokens that each row shares with the one before it."""
    ordered = [np.asarray(row, np.int64) for row in rows]
    return [0, *(common_prefix(a, b) for a, b in pairwise(ordered))][: len(ordered)]
