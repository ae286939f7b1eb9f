"""Models with keys that depend on the length of the row, such as the rotary types `longrope` and `dynamic`.

Their tables change once a row becomes long, so earlier keys no longer fit the row, and some models keep the table of a long
row for shorter rows that follow. There is no list of such types: `LengthDependence` tries positions far apart.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_TOKENS = 8
"""Tokens of the beginning of a row."""

_BEGINNINGS = (2, 16, 128)
"""Parts of a long row, the first of which is a beginning: a table may change anywhere, and far tokens show it best."""

_BEYOND = 8
"""Rows that are longer than the model's positions are tried at this many times as many."""

State = dict[tuple[torch.nn.Module, str], Any]


class LengthDependence:
    """What a model computes for the first tokens of a row, alone against with one token far behind them.

    Args:
        model: A causal language model with the interface of transformers.
        context_tokens: Most tokens of a row.

    Attributes:
        found: Whether the two differ, so that rows are computed whole: neither in parts nor from the keys of another row.
    """

    def __init__(self, model: Any, context_tokens: int) -> None:
        self.model, self.found = model, False
        self._changed: State = {}
        settings = model.config.get_text_config()
        positions = getattr(settings, "max_position_embeddings", None)
        if not positions or "position_ids" not in inspect.signature(type(model).forward).parameters:
            return
        lengths = [min(context_tokens, positions)]
        if context_tokens > positions and getattr(settings, "rope_parameters", None):
            lengths.append(_BEYOND * positions)
        for length in lengths:
            for part in _BEGINNINGS:
                if length // part >= _TOKENS and not self.found:
                    self.found = self._differ(length // part, length)

    @contextmanager
    def forgotten(self) -> Iterator[None]:
        """Let each pass begin with the tables of a short row, whatever rows came before."""
        hooks = [self.model.register_forward_pre_hook(self._restore)] if self._changed else []
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def _differ(self, beginning: int, length: int) -> bool:
        places = torch.linspace(0, beginning - 1, _TOKENS, device=self.model.device).long()
        last = places.new_tensor([length - 1])
        try:
            self._logits(places[:1])  # some forget a longer row only now
            before = _state(self.model)
            alone = self._logits(places)
            followed = self._logits(torch.cat([places, last]))[:, :-1]
        except (IndexError, RuntimeError, TypeError, ValueError):
            return True  # refuses positions that are given, and so does not show what it makes of them
        after = _state(self.model)
        self._changed = {key: before.get(key) for key in before | after if not _equal(before.get(key), after.get(key))}
        self._restore()
        bound = torch.finfo(alone.dtype).eps ** 0.5 * alone.abs().max()
        return bool(self._changed) or bool((alone - followed).abs().max() > bound)

    def _logits(self, places: Tensor) -> Tensor:
        """Return the logits (1, T, V) of tokens at these places; the mask says that they are one document."""
        rows = {
            "input_ids": torch.arange(len(places)),
            "attention_mask": torch.ones_like(places),
            "position_ids": places,
        }
        rows = {name: row.to(places).unsqueeze(0) for name, row in rows.items()}
        logits: Tensor = self.model(**rows, use_cache=False).logits
        return logits

    def _restore(self, *_: Any) -> None:
        for (module, name), value in self._changed.items():
            if value is not None:  # tensors are copied, because modules write into them
                setattr(module, name, value.to(self.model.device, copy=True) if isinstance(value, Tensor) else value)
            elif hasattr(module, name):  # a long row brought it
                delattr(module, name)


def _state(model: Any) -> State:
    """Return the state of modules beside their weights: buffers that are not saved, and numbers."""
    return {
        (module, name): value.clone() if isinstance(value, Tensor) else value
        for module in model.modules()
        if module._non_persistent_buffers_set
        for name, value in {**vars(module), **module._buffers}.items()
        if isinstance(value, Tensor) or type(value) in (int, float)
    }


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return bool(a == b)
