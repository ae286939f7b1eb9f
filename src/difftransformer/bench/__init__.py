"""Benchmarks: interleaved timings, reported as ratios, and peak memory, measured in fresh processes."""

from .._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".accelerate": ("time_diffllama",),
        ".attention": ("geometric_means", "time_attention"),
        ".costs": ("measure_costs",),
        ".memory": ("peak_attention_bytes", "peak_training_bytes"),
        ".models": ("time_models",),
        ".steps": ("Settings", "sort_rows", "steps_of"),
        ".timing": ("time_interleaved",),
        ".training": ("time_training",),
    },
)
