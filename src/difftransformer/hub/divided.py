"""Open a model that several processes hold together: each reads its part of the weights, and FSDP2 gathers layer by layer.

No process ever holds all weights. Every process computes the same rows, so answers are to the bit those of one process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM

from ..convert.checkpoint_io import WeightsReader
from ..errors import CheckpointError, ConfigError
from ..model.dtypes import DTYPES, WeightsDtype
from ..train.parallel import Processes


def divide(config: Any, weights: WeightsReader, *, dtype: WeightsDtype, processes: Processes) -> Any:
    """Build a causal language model whose matrices are divided among processes, and read each process's part of them.

    Args:
        config: Configuration of the model.
        weights: Its weights, by the names of its parameters.
        dtype: Floating-point type of the weights. "auto" keeps the type in which they were saved.
        processes: This process and the others.

    Raises:
        CheckpointError: Weights are missing, or have other names or shapes than the model's parameters.
        ConfigError: There is one process only, or the weights are quantized.
    """
    if processes.count == 1:
        raise ConfigError("--divide_weights true: there is one process; add --processes N, or omit it")
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{weights.folder}: quantized weights cannot be divided; omit --divide_weights")
    kind = DTYPES[dtype] if dtype != "auto" else config.dtype or torch.float32
    with _without_storage():
        network = AutoModelForCausalLM.from_config(config, dtype=kind)
    names = _names(network, weights)
    vectors = {parameter for parameter in network.parameters() if parameter.dim() < 2}
    mesh = init_device_mesh(processes.device, (processes.count,))
    layers = [module for module in network.modules() if type(module).__name__ in (network._no_split_modules or ())]
    for module in [*layers, network]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=vectors)
    buffers = {name: buffer.to(processes.device) for name, buffer in network.named_buffers()}
    network.to_empty(device=processes.device)
    with torch.no_grad():
        for name, buffer in network.named_buffers():
            buffer.copy_(buffers[name])
        for name, parameter in network.named_parameters():
            own, begin = parameter, 0
            if isinstance(parameter, DTensor):
                own = parameter.to_local()
                _, offsets = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
                begin = offsets[0]
            if own.numel():
                own.copy_(
                    weights.read_rows(names[name], begin, begin + own.shape[0]) if own.dim() else weights.read(name)
                )
    return network.eval()


def plain_class(network: nn.Module) -> type[nn.Module]:
    """Return the class of a model, which FSDP2 has replaced where it divides the weights."""
    kinds = (kind for kind in type(network).__mro__ if issubclass(kind, nn.Module))
    return next(kind for kind in kinds if not issubclass(kind, FSDPModule))


@contextmanager
def _without_storage() -> Iterator[None]:
    """Put every parameter of the modules that are built on the meta device. Buffers are as they always are."""

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if parameter is None or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(move)
    try:
        yield
    finally:
        hook.remove()


def _names(network: Any, weights: WeightsReader) -> dict[str, str]:
    """Return the name in the files of every parameter, and keep in fp32 those that always are.

    Raises:
        CheckpointError: A parameter is missing or of another shape, or a weight belongs to no parameter.
    """
    tied: dict[str, str] = dict(getattr(network, "all_tied_weights_keys", None) or {})
    names, shapes = {}, {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    for name, shape in shapes.items():
        aliases = [name, tied.get(name), *(alias for alias, same in tied.items() if same == name)]
        found = next((alias for alias in aliases if alias in weights.shapes), None)
        if found is None or tuple(weights.shapes[found]) != shape:
            raise CheckpointError(
                f"{weights.folder}: weight {name} of shape {list(shape)} is missing or of another shape; where transformers "
                "renames weights as it opens them, they cannot be divided: omit --divide_weights"
            )
        names[name] = found
    if unknown := sorted(weights.shapes.keys() - set(names.values()) - tied.keys()):
        raise CheckpointError(f"{weights.folder}: unexpected weight {unknown[0]}; save the model again")
    exact = getattr(network, "_keep_in_fp32_modules_strict", None) or ()
    for name, parameter in network.named_parameters():
        if any(part in exact for part in name.split(".")):
            parameter.data = parameter.data.float()
    return names
