"""DIFF V2 with added maps, a control: a second map and lambda without subtraction."""

from typing import Any, ClassVar

from torch import Tensor

from ..errors import ConfigError
from .base import HeadLayout
from .differential import V2, Differential, DifferentialOptions


class AddedDifferentialAttentionV2(Differential):
    """`DifferentialAttentionV2` with lambda negated, causal unless forward gets is_causal=False.

    head = (softmax(Q1 K^T / sqrt(D)) + sigmoid(X w) softmax(Q2 K^T / sqrt(D))) V

    Everything else is as in `DifferentialAttentionV2`. Other forms of lambda are refused: they add with a negative
    lambda_value.

    Raises:
        ConfigError: lambda_form is not "token".
    """

    name: ClassVar[str] = "diff_v2_added"
    label: ClassVar[str] = "DIFF V2, maps added"
    description: ClassVar[str] = "attention with two added maps, a control of differential attention"
    twin_heads: ClassVar[int] = 1
    defaults: ClassVar[DifferentialOptions] = V2

    @classmethod
    def heads(cls, options: DifferentialOptions, *arguments: Any, **widths: Any) -> HeadLayout:
        """Return V2's layout."""
        if options.lambda_form != "token":
            raise ConfigError(
                f"lambda_form={options.lambda_form!r}: attention_type={cls.name!r} adds by token; leave it out, or use "
                "'diff_v2' with a negative lambda_value"
            )
        return super().heads(options, *arguments, **widths)

    def head_lam(self, hidden: Tensor) -> Tensor:
        """Return -sigmoid(X w), (B, H, T)."""
        return -super().head_lam(hidden)
