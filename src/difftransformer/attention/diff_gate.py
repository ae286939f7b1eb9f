"""DIFF V1 with an output gate: the normalised heads are scaled by a sigmoid of the hidden states."""

from typing import ClassVar

from .differential import V1, Differential, DifferentialOptions
from .output_gate import OutputGate


class GatedDifferentialAttention(OutputGate, Differential):
    """`DifferentialAttention` with heads multiplied by sigmoid(X W_G) after the norm (arXiv:2505.06708).

    Takes the arguments of `DifferentialAttention`.
    """

    name: ClassVar[str] = "diff_gate"
    label: ClassVar[str] = "gated DIFF"
    tags: ClassVar[tuple[str, ...]] = (*Differential.tags, "arxiv:2505.06708")
    can_upcycle: ClassVar[bool] = True
    twin_heads: ClassVar[int] = 2
    defaults: ClassVar[DifferentialOptions] = V1
