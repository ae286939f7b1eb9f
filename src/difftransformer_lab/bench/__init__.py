"""Benchmarks: interleaved timings, reported as ratios, and peak memory, measured in fresh processes."""

from typing import TYPE_CHECKING

from difftransformer._lazy import lazy_names

if TYPE_CHECKING:
    from .attention import time_attention
    from .memory import peak_attention_bytes, peak_training_bytes
    from .models import time_models
    from .settings import Settings
    from .steps import steps_of
    from .timing import time_interleaved

__getattr__, __dir__, __all__ = lazy_names(__name__)
