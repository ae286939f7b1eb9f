"""Training: one loop for every attention type, exact resume, atomic checkpoints."""

from .checkpoint import checkpoints, latest_checkpoint, load_checkpoint, save_checkpoint, verify_checkpoint
from .config import OptimizerConfig, ScheduleConfig, TrainingConfig
from .loop import Interrupted, build_model, train
from .metrics import StepMetrics, ValidationMetrics, read_metrics

__all__ = [
    "Interrupted",
    "OptimizerConfig",
    "ScheduleConfig",
    "StepMetrics",
    "TrainingConfig",
    "ValidationMetrics",
    "build_model",
    "checkpoints",
    "latest_checkpoint",
    "load_checkpoint",
    "read_metrics",
    "save_checkpoint",
    "train",
    "verify_checkpoint",
]
