"""Benchmarks: time as interleaved ratios, memory in fresh processes."""

from .._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".accelerate": ("time_diffllama",),
        ".attention": ("geometric_means", "time_attention"),
        ".costs": ("measure_costs",),
        ".memory": ("peak_attention_bytes", "peak_training_bytes"),
        ".models": ("time_models",),
        ".steps": ("Settings", "plan", "sort_rows"),
        ".timing": ("time_interleaved",),
        ".training": ("time_training",),
    },
)
