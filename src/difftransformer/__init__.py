"""Differential Transformer: exact and fast differential attention, a language model, training, and fair comparisons.

transformers is imported with the first model. Where a program imports it, before this package or after it, its Auto classes
know the model type "difftransformer". `difftransformer.ops` and `difftransformer.attention` need only torch.
"""

from typing import TYPE_CHECKING

from ._lazy import import_after, lazy_names
from ._version import __version__

if TYPE_CHECKING:
    from .attention import DifferentialAttention, SoftmaxAttention
    from .attention.encoder import DifferentialEncoderLayer
    from .families import accelerate, restore
    from .model import (
        DiffTransformerConfig,
        DiffTransformerForCausalLM,
        DiffTransformerForMaskedLM,
        DiffTransformerForQuestionAnswering,
        DiffTransformerForSequenceClassification,
        DiffTransformerForTokenClassification,
        DiffTransformerModel,
    )
    from .ops import attention_maps, differential_attention, softmax_attention

__getattr__, __dir__, __all__ = lazy_names(__name__)
__all__ += ["__version__"]

import_after("transformers", f"{__name__}.model")
import_after(f"{__name__}.model", f"{__name__}.families.models")
