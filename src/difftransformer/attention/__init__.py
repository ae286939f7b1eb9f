"""The seam: attention variants behind one contract. A variant is one file here and one line of `VARIANTS`."""

from ..errors import ConfigError
from .base import Attention, AttentionConfig, HeadLayout, KeyValueCache, RMSNorm
from .dex import DifferentialExtension
from .diff import DifferentialAttention
from .diff_v2 import DifferentialAttentionV2
from .differential import DifferentialOptions
from .grouped_diff import GroupedDifferentialAttention
from .softmax import SoftmaxAttention

VARIANTS: dict[str, type[Attention]] = {
    "softmax": SoftmaxAttention,
    "diff": DifferentialAttention,
    "diff_v2": DifferentialAttentionV2,
    "grouped_diff": GroupedDifferentialAttention,
    "dex": DifferentialExtension,
}


def variant(attention_type: str) -> type[Attention]:
    """The class of an attention type.

    Raises:
        ConfigError: there is no such variant.
    """
    if attention_type not in VARIANTS:
        raise ConfigError(f"attention_type={attention_type!r} is unknown; choose one of {', '.join(VARIANTS)}")
    return VARIANTS[attention_type]
