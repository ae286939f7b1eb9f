"""Rotary position embedding: the tables of cosines and sines that every layer shares."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..errors import ConfigError
from ..ops.problem import LOW_PRECISION
from ..typed import short
from .foreign import FOREIGN_FAULTS, on_one_line


class RotaryEmbedding(LlamaRotaryEmbedding):  # type: ignore[misc]
    """transformers' rotary tables for the width of one map. Frequencies stay in fp32: bf16 cannot tell far positions apart."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        try:
            super().__init__(config, *arguments, **options)
        except FOREIGN_FAULTS as error:
            raise ConfigError(
                f"rope_parameters={short(config.rope_parameters)}: transformers makes no rotary embedding of these "
                f"({type(error).__name__}: {on_one_line(error)})"
            ) from error

    def forward(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, (B, T, D / 2) each: one value for each pair of features, in fp32 whatever hidden's dtype."""
        cos, sin = super().forward(hidden.new_empty(0, dtype=torch.float32), position_ids)
        half = cos.shape[-1] // 2
        return cos[..., :half], sin[..., :half]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, kept in before.items():
            moved = getattr(self, name)
            if moved.dtype in LOW_PRECISION:
                setattr(self, name, kept.to(moved.device, torch.float32))
        return self
