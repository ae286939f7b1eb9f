"""Rotary position embedding: the tables of cosines and sines that every layer shares."""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from ..ops.problem import LOW_PRECISION


class RotaryEmbedding(LlamaRotaryEmbedding):  # type: ignore[misc]
    """transformers' rotary tables for the width of one map. Frequencies stay in fp32: bf16 cannot tell far positions apart."""

    def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, (B, T, D / 2) each in fp32: one value for each pair of features."""
        fp32 = torch.empty(0, device=position_ids.device, dtype=torch.float32)
        cos, sin = super().forward(fp32, position_ids)
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
