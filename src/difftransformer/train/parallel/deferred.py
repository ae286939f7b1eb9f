"""Models that are built and divided before their matrices have values. Each process then gets its part of the values alone.

A matrix on the meta device has a shape and no memory. Its values are made when they are due: one whole matrix at a time, drawn
on the CPU from the matrix's own generator, or its part read from files. So the values are to the bit those of a model that is
built whole, and no process holds more than its part and one matrix.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ...errors import ConfigError
from ...model.initialization import Make, local_part

Index: TypeAlias = tuple[slice, ...]
Read: TypeAlias = Callable[[str, Index], Tensor]


class DeferredModel:
    """A model whose matrices have no values yet. Vectors and buffers have theirs.

    Args:
        build: Builds the model, which keeps in `deferred` how its matrices are made (`model.initialization.Start`).
        read: Returns the part of a parameter at an index, by the parameter's name, if the values come from elsewhere.

    Attributes:
        network: The model, with its matrices on the meta device.
    """

    def __init__(self, build: Callable[[], Any], read: Read | None = None) -> None:
        self._read = read
        with _matrices_without_memory():
            self.network: Any = build()
        self._own = {name: name for name, _ in self.network.named_parameters()}
        makes = (getattr(module, "deferred", {}) for module in self.network.modules())
        self._makes: dict[str, Make] = {name: make for made in makes for name, make in made.items()}

    def change(self, change: Callable[[Any], Mapping[str, Make]]) -> None:
        """Change the model in place, such as by adding modules.

        Args:
            change: Returns how new matrices are made that are on the meta device, by name.
        """
        before = {id(parameter): name for name, parameter in self.network.named_parameters()}
        self._makes |= change(self.network)
        after = {name: before.get(id(parameter)) for name, parameter in self.network.named_parameters()}
        self._own = {name: self._own[old] for name, old in after.items() if old is not None}

    @torch.no_grad()
    def fill(self, device: str) -> None:
        """Move the model, which may have been divided since, to a device, and give it its values.

        Names and parameter objects stay what they are.

        Raises:
            ConfigError: A matrix has no values, since neither the model's start nor its variant's `init_own_parameters`
                fills it.
        """
        tensors = [*self.network.named_parameters(), *self.network.named_buffers()]
        there = {name: tensor.detach().to(device) for name, tensor in tensors if not tensor.is_meta}
        with _same_parameters():
            self.network.to_empty(device=device)
        for name, buffer in self.network.named_buffers():
            buffer.copy_(there[name])
        for name, parameter in self.network.named_parameters():
            own, index = local_part(parameter)
            if not own.numel():
                continue
            built_as = self._own.get(name)
            if self._read is not None and built_as is not None:
                own.copy_(self._read(name, index))
            elif name in there:
                parameter.copy_(there[name])
            else:
                own.copy_(self._make(built_as or name)()[index])

    def _make(self, name: str) -> Make:
        prefix = f"{self.network.base_model_prefix}."
        for known in (name, name.removeprefix(prefix)):
            if known in self._makes:
                return self._makes[known]
        raise ConfigError(
            f"{name}: no start fills this matrix; draw it in init_own_parameters(normal_) of its attention"
        )


@contextmanager
def _matrices_without_memory() -> Iterator[None]:
    """Put the matrices of modules on the meta device. Vectors and buffers are as they always are."""

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta or parameter.dim() < 2:
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _same_parameters() -> Iterator[None]:
    """Let modules that move to another device keep their parameter objects, which may be tied."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
