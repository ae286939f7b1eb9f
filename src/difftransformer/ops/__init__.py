"""Pure functions on tensors. Needs torch alone."""

from .attention import (
    attention_maps,
    differential_attention,
    max_logits,
    normed_differential_attention,
    observe_inputs,
    observe_max_logits,
    softmax_attention,
    softmax_maps,
)
from .backends import BACKENDS, Backend, backend_names, explain, select_backend, use_backend
from .norms import rms_norm
from .problem import Problem, Restrictions
from .rotary import apply_rotary, inverse_frequencies, rotary_tables
