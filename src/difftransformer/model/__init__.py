"""The language model, its configuration, presets and counts. Importing it registers the model with transformers."""

from transformers import AutoConfig

from .config import DiffTransformerConfig
from .counts import Counts, count, matching_width, weights_and_kv_bytes
from .heads import (
    MODELS,
    DiffTransformerForMaskedLM,
    DiffTransformerForQuestionAnswering,
    DiffTransformerForSequenceClassification,
    DiffTransformerForTokenClassification,
)
from .modeling import DiffTransformerForCausalLM, DiffTransformerModel
from .presets import PRESETS, Preset, preset
from .pretrained import DiffTransformerPreTrainedModel
from .registration import register_models

AutoConfig.register(DiffTransformerConfig.model_type, DiffTransformerConfig, exist_ok=True)
register_models(DiffTransformerConfig, MODELS, key=DiffTransformerConfig.model_type)
