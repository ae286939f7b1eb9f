"""Weights and moments of which every process may hold a part: whole ones from parts, and parts from whole ones."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor


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


def part_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return of a whole tensor, which every process has, the part that this process holds of `like`, on its device.

    A single number, such as the step count of a parameter, is not divided.
    """
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor) or tensor.dim() == 0:
        return tensor
    mesh = like.device_mesh
    everywhere = distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim, src_data_rank=None)
    return everywhere.redistribute(mesh, like.placements)
