"""The optimizer, with weight decay on matrices only, and its learning rate."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..attention import Attention
from ..errors import ConfigError
from ..model.initialization import local_part
from .checkpoint import AVERAGE
from .config import OptimizerConfig, ScheduleConfig
from .parallel.mesh import by_mesh


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some matrices and AdamW for the other parameters, with one state and one list of groups.

    Args:
        muon: Optimizer of the matrices.
        adamw: Optimizer of the others.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self._parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Make one step of both."""
        if closure is not None:
            closure()
        for part in self._parts:
            part.step()


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer of the trainable parameters, with weight decay on matrices (see `_vectors`).

    Groups have a `rate_factor`, by which their learning rate is multiplied.

    Raises:
        ConfigError: `base_width` is given, and one matrix is both embedding and output layer.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = _vectors(model)
    hidden = set(_hidden_matrices(model, own)) if config.method == "muon" else set()
    others = [parameter for parameter in parameters if parameter not in hidden]
    matrices, vectors = [p for p in others if p not in own], [p for p in others if p in own]
    factors = _rate_factors(model, matrices, config.base_width)
    groups = [
        {"params": group, "weight_decay": weight_decay / factor, "rate_factor": factor}
        for kind, weight_decay, factor in (
            *((same, config.weight_decay, factor) for factor, same in factors.items()),
            (vectors, 0.0, 1.0),
        )
        for group in by_mesh(kind)
    ]
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in parameters)
    adamw = partial(torch.optim.AdamW, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused)
    if not hidden:
        return adamw(groups)
    muon = torch.optim.Muon(
        [{"params": group, "rate_factor": 1.0} for group in by_mesh(p for p in parameters if p in hidden)],
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return MuonWithAdamW(muon, adamw(groups)) if groups else muon  # LoRA may train matrices alone


@torch.no_grad()
def update_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Move the average of each parameter, which is part of the optimizer's state, towards the parameter."""
    for parameter, state in optimizer.state.items():
        own = local_part(parameter)[0]
        if AVERAGE not in state:
            state[AVERAGE] = parameter.detach().clone()
        else:
            local_part(state[AVERAGE])[0].lerp_(own, 1 - decay)


def _rate_factors(
    model: nn.Module, matrices: list[nn.Parameter], base_width: int | None
) -> dict[float, list[nn.Parameter]]:
    """Return the matrices by the factor of their learning rate."""
    if base_width is None:
        return {1.0: matrices}
    ends: Any = model
    embedding, head = ends.get_input_embeddings().weight, ends.get_output_embeddings().weight
    if embedding is head:
        raise ConfigError(
            "training.optimizer.base_width: the embedding is the output layer too, and the two take other rates; set "
            "model.tie_word_embeddings to false"
        )
    factor = base_width / embedding.shape[-1]
    others = [matrix for matrix in matrices if matrix is not embedding]
    first = [matrix for matrix in matrices if matrix is embedding]
    return {factor: others, math.sqrt(factor): first} if factor != 1 else {1.0: matrices}


def _vectors(model: nn.Module) -> set[nn.Parameter]:
    """Return biases, gains of norms and lambdas. Where each head has its own, a gain or a lambda has two dimensions."""
    found = {parameter for parameter in model.parameters() if parameter.dim() < 2}
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if type(module).__name__.endswith("Norm"):
            found |= set(own.values())
        elif isinstance(module, Attention):
            found |= {own[name] for name in module.fp32_parameters if name in own}
    return found


def _hidden_matrices(model: nn.Module, vectors: set[nn.Parameter]) -> list[nn.Parameter]:
    """Return the trainable matrices of at least two rows and columns, without embedding and output layer."""
    ends: Any = model
    outer = {id(end.weight) for end in (ends.get_input_embeddings(), ends.get_output_embeddings())}
    return [
        parameter
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.dim() == 2 and parameter not in vectors
        if min(parameter.shape) > 1 and id(parameter) not in outer
    ]


def stable_steps(steps: int, schedule: ScheduleConfig) -> int:
    """Return the number of steps before "wsd" decays, which are the same for every number of steps."""
    return steps - (schedule.decay_steps or max(1, steps // 10))


def learning_rate(step: int, *, peak: float, steps: int, schedule: ScheduleConfig) -> float:
    """Return the rate of a step, counted from 0: linear warm-up to `peak`, then the schedule's decay to `floor * peak`."""
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    if schedule.shape == "wsd":
        stable = stable_steps(steps, schedule)
        done = min(1.0, max(0.0, (step + 1 - stable) / (steps - stable)))
    else:
        decay_steps = max(1, steps - 1 - schedule.warmup_steps)
        done = min(1.0, (step - schedule.warmup_steps) / decay_steps)
    if schedule.shape == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return peak * (1.0 - (1.0 - schedule.floor) * done)
