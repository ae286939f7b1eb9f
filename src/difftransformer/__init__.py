"""Differential Transformer: exact and fast differential attention, a language model, training, and fair comparisons.

Importing this package also imports transformers, so that transformers' Auto classes know the model type "difftransformer".
The command `difftransformer` postpones this until it needs a model: it sets DIFFTRANSFORMER_LAZY. Without transformers,
`difftransformer.ops` and `difftransformer.attention` need only torch.
"""

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from ._lazy import lazy_names
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


if "DIFFTRANSFORMER_LAZY" not in os.environ:
    with suppress(ImportError):  # without a suitable transformers; the model then raises this error on first use
        from . import model
        from .families import models
