"""Numbers that differ from layer to layer, as tensors, so that compiled layers share one graph."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

Number = float | tuple[int, ...]


class Constants(nn.Module):
    """A module that holds numbers as buffers: in fp32 (float64 in a float64 module), whole numbers in int64.

    torch.compile treats Python numbers of a module as constants: it would compile every layer anew, and none after the eighth.
    State dicts do not hold the buffers. Casts and fills (`.to(torch.bfloat16)`, `to_empty`, `from_pretrained`) leave their
    values exact. To change one, assign a number to it.
    """

    _numbers: dict[str, Number]

    def add_constants(self, like: Tensor | None = None, **numbers: Number | None) -> None:
        """Register a buffer for each number, or None for None, with the device and dtype of `like` if it is given."""
        known = self.__dict__.setdefault("_numbers", {})
        like = torch.empty(0) if like is None else like
        if like.is_meta:  # there are no values; a number in CPU memory serves every device
            like = torch.empty(0, dtype=like.dtype, device="cpu")
        for name, number in numbers.items():
            if number is not None:
                known[name] = number
            self.register_buffer(name, None if number is None else _exact(number, like), persistent=False)

    def constant(self, name: str, like: Tensor) -> Tensor:
        """Return the buffer, or the exact number anew if FSDP1 has cast the buffer in place or `like` alone is float64."""
        buffer: Tensor = getattr(self, name)
        is_exact = buffer.dtype == torch.float64 or (buffer.dtype == torch.float32 and like.dtype != torch.float64)
        return buffer if is_exact else _exact(self._numbers[name], like)

    def _restored(self, name: str, buffer: Tensor) -> Tensor:
        return _exact(self._numbers[name], buffer)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_numbers", ()):
            if not isinstance(value, Tensor):
                self._numbers[name], value = value, getattr(self, name)
            value = self._restored(name, value)  # transformers assigns memory without values
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        for name in self.__dict__.get("_numbers", ()):
            self._buffers[name] = self._restored(name, getattr(self, name))
        return self


def _exact(number: Number, like: Tensor) -> Tensor:
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.tensor(number, dtype=torch.int64 if isinstance(number, tuple) else wide, device=like.device)
