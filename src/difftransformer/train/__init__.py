"""Training: one trainer for every attention type, with exact resume and atomic checkpoints."""

from .checkpoint import checkpoints, latest_checkpoint, load_checkpoint, verify_checkpoint
from .config import LogsConfig, OptimizerConfig, ParallelConfig, ScheduleConfig, TrainingConfig
from .loop import train
from .metrics import StepMetrics, ValidationMetrics, read_metrics
from .optim import MuonWithAdamW, muon_parameter_groups
from .saving import Saver
from .trainer import Callback, Interrupted, Trainer, Update, build_model
