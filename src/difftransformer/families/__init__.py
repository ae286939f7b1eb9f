"""Models of other families made differential: transformers' own classes, whose attention layers form two maps.

A model of this package has Llama's layout. A model with more than that (biases, norms on queries and keys, fused
projections, norms after a layer, layers without rotation) keeps its own class, and only its attention changes.
"""

from .config import DifferentialFields, attention_fields
from .counts import count_family
from .models import FAMILIES, DifferentialFamilyConfig, attention_layers, family_config, refused_features

__all__ = [
    "FAMILIES",
    "DifferentialFamilyConfig",
    "DifferentialFields",
    "attention_fields",
    "attention_layers",
    "count_family",
    "family_config",
    "refused_features",
]
