"""Weights and moments of which every process may hold a part."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters that one call of an optimiser can take: those divided over one mesh, and those that are whole."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(mesh, []).append(parameter)
    return list(groups.values())


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor. Every process that holds a part takes part in the call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
