"""Training: one loop for every attention type, with exact resume and atomic checkpoints."""

from .._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".checkpoint": ("checkpoints", "latest_checkpoint", "load_checkpoint", "save_checkpoint", "verify_checkpoint"),
        ".config": ("OptimizerConfig", "ScheduleConfig", "TrainingConfig"),
        ".loop": ("Interrupted", "build_model", "train"),
        ".metrics": ("StepMetrics", "ValidationMetrics", "read_metrics"),
    },
)
