"""Attention with a sigmoid gate of the heads before the output projection."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .base import Attention, AttentionConfig, PlainLayer


class OutputGate(Attention):
    """Mixin of the variants with an output gate; it comes first among their bases.

    output = (sigmoid(X W_G) * concat(head)) W_O, one factor for every number of every head (arXiv:2505.06708, its gate after
    the attention, elementwise and of each head's own). X are the hidden states of the queries. A headwise norm comes before it.

    Args:
        output_gate: Whether there is a gate. Variants with a choice have this field in their configuration.
    """

    def __init__(self, *arguments: Any, output_gate: bool = True, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.layout = layout = replace(self.layout, output_gate=output_gate)
        rows = layout.num_heads * layout.value_head_dim
        self.gate_proj = nn.Linear(self.embed_dim, rows, bias=False) if output_gate else None

    @classmethod
    def has_gate(cls, config: AttentionConfig) -> bool:
        """Return whether a configuration has the gate."""
        return "output_gate" not in cls.config_options or bool(cls.option(config, "output_gate"))

    @classmethod
    def layout_of(cls, config: AttentionConfig) -> Any:
        """Return the heads of the class that follows, with or without a gate."""
        return replace(super().layout_of(config), output_gate=cls.has_gate(config))

    @classmethod
    def arguments_of(cls, config: AttentionConfig, layer_index: int) -> dict[str, Any]:
        """Pass whether there is a gate."""
        return super().arguments_of(config, layer_index) | {"output_gate": cls.has_gate(config)}

    @classmethod
    def tensor_parallel(cls, config: AttentionConfig) -> dict[str, str]:
        """Split the gate's projection too."""
        plan = super().tensor_parallel(config)
        return plan | {"gate_proj": "colwise"} if cls.has_gate(config) else plan

    @classmethod
    def upcycled(cls, name: str, shape: tuple[int, ...], plain: PlainLayer) -> Tensor:
        """Start the gate at sigmoid(0) = 1/2, and double W_O."""
        if name == "gate_proj.weight":
            return plain.zeros(shape)
        made = super().upcycled(name, shape, plain)
        return 2 * made if name == "o_proj.weight" and cls.has_gate(plain.config) else made

    def head_gate(self, hidden: Tensor) -> Tensor | None:
        """Return sigmoid(X W_G), (B, T, H E), or None without a gate."""
        return None if self.gate_proj is None else torch.sigmoid(self.gate_proj(hidden))
