"""Benchmarks: interleaved timings, reported as ratios, and peak memory, measured in fresh processes."""

from typing import TYPE_CHECKING

from difftransformer._lazy import lazy_names

if TYPE_CHECKING:
    from .accelerate import time_diffllama
    from .attention import geometric_means, time_attention
    from .costs import measure_costs
    from .memory import peak_attention_bytes, peak_training_bytes
    from .models import time_models, time_variants
    from .steps import Settings, sort_rows, steps_of
    from .timing import time_interleaved
    from .training import time_training

__getattr__, __dir__, __all__ = lazy_names(__name__)
