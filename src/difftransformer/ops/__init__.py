"""Pure functions on tensors. Needs torch alone."""

from .attention import (
    attention_maps,
    differential_attention,
    normed_differential_attention,
    observe_inputs,
    softmax_attention,
    softmax_maps,
)
from .backends import BACKENDS, Backend, backend_names, explain, select_backend, use_backend
from .norms import rms_norm
from .problem import Problem, Restrictions
from .rotary import apply_rotary, inverse_frequencies, rotary_tables

__all__ = [
    "BACKENDS",
    "Backend",
    "Problem",
    "Restrictions",
    "apply_rotary",
    "attention_maps",
    "backend_names",
    "differential_attention",
    "explain",
    "inverse_frequencies",
    "normed_differential_attention",
    "observe_inputs",
    "rms_norm",
    "rotary_tables",
    "select_backend",
    "softmax_attention",
    "softmax_maps",
    "use_backend",
]
