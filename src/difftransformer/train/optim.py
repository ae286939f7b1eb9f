"""The optimizer, with weight decay on matrices only, and its learning rate."""

import math
from collections.abc import Callable, Iterable
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
    """Muon (`torch.optim.Muon`) for groups with `use_muon`, which hold matrices, and AdamW for the others.

    It is one optimizer to schedulers, `GradScaler` and checkpoints: its groups and its state are all there is. Steps of Muon
    are scaled to the size of AdamW's (arXiv:2502.16982 eq. 4), so both take the same learning rate.

    Args:
        params: Groups; groups with `use_muon: True` hold matrices (see `muon_parameter_groups`). A group may set each
            of the following, and what the two optimizers take beside them.
        lr: Learning rate.
        weight_decay: Decoupled weight decay.
        momentum: Muon's momentum.
        betas: Decay rates of AdamW's moments.
        eps: AdamW's epsilon.
        fused: See `torch.optim.AdamW`.

    Raises:
        ConfigError: A group with `use_muon` holds a parameter that is not a matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool | None = None,
    ) -> None:
        self._make_parts()
        muon, adamw = (part.defaults for part in self._parts)
        own = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps, "fused": fused}
        super().__init__(params, muon | {"adjust_lr_fn": "match_rms_adamw"} | adamw | own | {"use_muon": False})

    def _make_parts(self) -> None:
        # They compute steps, but keep no group and no state.
        self._parts = (torch.optim.Muon([{"params": []}]), torch.optim.AdamW([{"params": []}]))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_parts()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; AdamW takes it unless `use_muon` is True."""
        if param_group.get("use_muon"):
            param_group.setdefault("eps", self._parts[0].defaults["eps"])  # the other means the denominator of AdamW
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        if wrong := [tuple(one.shape) for one in added["params"] if added["use_muon"] and one.dim() != 2]:
            del self.param_groups[-1]
            raise ConfigError(
                f"a group with use_muon has a parameter of shape {wrong[0]}; leave it to AdamW: use_muon=False"
            )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make one step of both, and return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, use_muon in zip(self._parts, (True, False), strict=True):
            part.state, part.param_groups = (
                self.state,
                [one for one in self.param_groups if one["use_muon"] == use_muon],
            )
            part.step()
        return loss


def muon_parameter_groups(model: nn.Module, *, adamw: Iterable[nn.Module] = ()) -> list[dict[str, Any]]:
    """Group the trainable parameters of any model for `MuonWithAdamW`.

    Muon takes the weights of layers that are matrices. AdamW takes embeddings; the output layer, which is known by
    `get_output_embeddings` or else by the shape of an embedding; other parameters, such as tables of positions; and, without
    weight decay, biases, gains of norms and lambda.

    Args:
        model: The model, which may have layers of this package among its own.
        adamw: Further modules for AdamW, such as a classifier.

    Returns:
        Groups with `use_muon`, without those that are empty.
    """
    hidden, outer, vectors = _kinds(model, adamw)
    groups: list[dict[str, Any]] = [
        {"params": hidden, "use_muon": True},
        {"params": outer, "use_muon": False},
        {"params": vectors, "use_muon": False, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer of the trainable parameters, with weight decay on matrices.

    Groups have a `rate_factor`, by which their learning rate is multiplied.

    Raises:
        ConfigError: `base_width` is given, and one matrix is both embedding and output layer.
    """
    hidden, outer, vectors = _kinds(model)
    uses_muon = config.method == "muon" and bool(hidden)
    matrices = outer if uses_muon else [*hidden, *outer]
    factors = _rate_factors(model, matrices, config.base_width)
    groups = [
        {"params": group, "weight_decay": weight_decay / factor, "rate_factor": factor}
        for kind, weight_decay, factor in (
            *((same, config.weight_decay, factor) for factor, same in factors.items()),
            (vectors, 0.0, 1.0),
        )
        for group in by_mesh(kind)
    ]
    fused = all(parameter.device.type in ("cpu", "cuda") for parameter in (*hidden, *outer, *vectors))
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": config.betas, "eps": config.eps, "fused": fused}
    if not uses_muon:
        return torch.optim.AdamW(groups, **settings)
    muon = [{"params": group, "rate_factor": 1.0, "use_muon": True} for group in by_mesh(hidden)]
    settings |= {"weight_decay": config.weight_decay, "momentum": config.momentum}
    return MuonWithAdamW([*muon, *groups], **settings)


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


def _kinds(model: nn.Module, outside: Iterable[nn.Module] = ()) -> tuple[list[nn.Parameter], ...]:
    """Return the trainable parameters: weights of layers that are matrices, other matrices, and vectors.

    Where each head has its own, a gain or a lambda has two dimensions and is a vector all the same. A matrix of one row or
    column is among the others, as are embeddings, the output layer and parameters of the modules `outside`.
    """
    outer = {one for module in outside for one in module.parameters()}
    vectors: set[nn.Parameter] = set()
    modules = list(model.modules())
    tables: list[Any] = [module.weight for module in modules if isinstance(module, nn.Embedding)]
    head, shapes = getattr(model, "get_output_embeddings", lambda: None)(), {table.shape for table in tables}
    heads = [module for module in modules if isinstance(module, nn.Linear) and module.weight.shape in shapes]
    outer |= {*tables, *(one for module in (heads if head is None else [head]) for one in module.parameters())}
    for module in modules:
        own = dict(module.named_parameters(recurse=False))
        if type(module).__name__.endswith("Norm"):
            vectors |= set(own.values())
        elif isinstance(module, Attention):
            vectors |= {own[name] for name in module.fp32_parameters if name in own}
    kinds: tuple[list[nn.Parameter], ...] = ([], [], [])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_hidden = parameter.dim() == 2 and min(parameter.shape) > 1 and name.endswith("weight")
            is_vector = parameter.dim() < 2 or parameter in vectors
            kinds[2 if is_vector else int(not is_hidden or parameter in outer)].append(parameter)
    return kinds


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
