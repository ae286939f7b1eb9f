"""DIFF V1 with exclusive self-attention: its normalised heads without their part along their own value."""

from typing import ClassVar

from .differential import V1, Differential, DifferentialOptions
from .own_value import WithoutOwnValue


class ExclusiveDifferentialAttention(WithoutOwnValue, Differential):
    """`DifferentialAttention` with heads that lose their part along their own value after the norm (arXiv:2603.09078).

    Takes the arguments of `DifferentialAttention`.
    """

    name: ClassVar[str] = "diff_xsa"
    label: ClassVar[str] = "DIFF with XSA"
    tags: ClassVar[tuple[str, ...]] = (*Differential.tags, "arxiv:2603.09078")
    twin_heads: ClassVar[int] = 2
    defaults: ClassVar[DifferentialOptions] = V1
