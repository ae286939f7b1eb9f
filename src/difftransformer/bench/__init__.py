"""Benchmarks: time as interleaved ratios, memory in fresh processes."""

from .._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".attention": ("bench_attention", "bench_memory", "bench_training_step"),
        ".costs": ("measure_costs",),
        ".memory": ("peak_attention_bytes", "peak_training_bytes"),
        ".timing": ("time_interleaved",),
    },
)
