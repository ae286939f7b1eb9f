"""The language model, its configuration, presets and counts. Importing it registers the model with transformers."""

from . import exporting
from .config import DiffTransformerConfig
from .counts import Counts, count, matching_width, weights_and_kv_bytes
from .heads import (
    DiffTransformerForMaskedLM,
    DiffTransformerForQuestionAnswering,
    DiffTransformerForSequenceClassification,
    DiffTransformerForTokenClassification,
)
from .modeling import DiffTransformerForCausalLM, DiffTransformerModel
from .presets import PRESETS, Preset, preset
from .pretrained import DiffTransformerPreTrainedModel
