"""AdamW with weight decay on matrices only, and its learning rate."""

import torch
from torch import nn

from .config import OptimizerConfig, ScheduleConfig
from .parallel.weights import by_mesh


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Build AdamW over the trainable parameters, with weight decay on those of two or more dimensions."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices, vectors = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
    groups = [
        {"params": group, "weight_decay": weight_decay}
        for kind, weight_decay in ((matrices, config.weight_decay), (vectors, 0.0))
        for group in by_mesh(kind)
    ]
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused)


def learning_rate(step: int, *, peak: float, steps: int, schedule: ScheduleConfig) -> float:
    """Return the rate of a step, counted from 0: linear warm-up to `peak`, then linear decay to `floor * peak`."""
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    decay_steps = max(1, steps - 1 - schedule.warmup_steps)
    done = min(1.0, (step - schedule.warmup_steps) / decay_steps)
    return peak * (1.0 - (1.0 - schedule.floor) * done)
