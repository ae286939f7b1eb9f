"""Differential Transformer: exact and fast differential attention, a language model, training, and fair comparisons.

Importing this package also imports transformers, so that transformers' Auto classes know the model type "difftransformer".
Only the command `difftransformer` postpones this until it needs a model. Without transformers, `difftransformer.ops` and
`difftransformer.attention` need only torch, and `difftransformer.report` needs neither.
"""

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ._lazy import lazy_names
from ._version import __version__

if TYPE_CHECKING:
    from .acceleration import accelerate, restore
    from .attention import DifferentialAttention, SoftmaxAttention
    from .attention.encoder import DifferentialEncoderLayer
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


def _is_command() -> bool:
    """Whether this process is `difftransformer ...` or `python -m difftransformer ...`, or a child of one."""
    program = sys.argv[0] if getattr(sys, "argv", None) else ""
    if program == "-m":  # Python imports the package before it sets the path of the module to run
        return not {"difftransformer", "difftransformer.child", "difftransformer.data.encoding"}.isdisjoint(
            sys.orig_argv
        )
    return Path(program).stem == "difftransformer"


if not _is_command():
    with suppress(ImportError):  # without a suitable transformers; the model then raises this error on first use
        from . import families, model
