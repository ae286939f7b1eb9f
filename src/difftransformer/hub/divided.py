"""Open a model that several processes hold together: each reads its part of the weights, and FSDP2 gathers layer by layer.

No process ever holds all weights. Every process computes the same rows, so answers are to the bit those of one process.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoModelForCausalLM

from ..errors import CheckpointError, ConfigError
from ..families.checkpoint_io import WeightsReader
from ..model.weights import DTYPES, refuse_adapter
from ..train.lora import BASE
from ..train.parallel import DeferredModel, Processes
from ..typed import WeightsDtype


def deferred(config: Any, weights: WeightsReader, *, dtype: WeightsDtype) -> DeferredModel:
    """Build a causal language model, of which each process is to read its part of the weights.

    Args:
        config: Configuration of the model.
        weights: Its weights, by the names of its parameters; open until the model is filled.
        dtype: Floating-point type of the weights. "auto" keeps the type in which they were saved.

    Raises:
        CheckpointError: Weights are missing, or have other names or shapes than the model's parameters.
        ConfigError: The weights are quantized, or an adapter lies beside them.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{weights.folder}: quantized weights cannot be read in parts; save the model in bf16 or fp32"
        )
    refuse_adapter(weights.folder, "read in parts")
    kind = DTYPES[dtype] if dtype != "auto" else config.dtype or torch.float32
    names: dict[str, str] = {}
    model = DeferredModel(
        lambda: AutoModelForCausalLM.from_config(config, dtype=kind),
        lambda name, index: weights.read_part(names[name.replace(BASE, "")], index),
    )
    names |= _names(model.network, weights)
    return model


def divide(config: Any, weights: WeightsReader, *, dtype: WeightsDtype, processes: Processes) -> Any:
    """Open a causal language model whose matrices are divided among processes, each of which reads its part of them.

    Args:
        config, weights, dtype: See `deferred`.
        processes: This process and the others.

    Raises:
        CheckpointError: See `deferred`.
        ConfigError: There is one process only, or as in `deferred`.
    """
    if processes.count == 1:
        raise ConfigError("--divide-weights: there is one process; add --processes N, or omit it")
    model = deferred(config, weights, dtype=dtype)
    network = model.network
    vectors = {parameter for parameter in network.parameters() if parameter.dim() < 2}
    mesh = init_device_mesh(processes.device, (processes.count,))
    layers = [module for module in network.modules() if type(module).__name__ in (network._no_split_modules or ())]
    for module in [*layers, network]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=vectors)
    model.fill(processes.device)
    return network.eval()


def plain_class(network: nn.Module) -> type[nn.Module]:
    """Return the class of a model, which FSDP2 has replaced where it divides the weights."""
    kinds = (kind for kind in type(network).__mro__ if issubclass(kind, nn.Module))
    return next(kind for kind in kinds if not issubclass(kind, FSDPModule))


def _names(network: Any, weights: WeightsReader) -> dict[str, str]:
    """Return the name in the files of every parameter, read the buffers there, and keep in fp32 those that always are.

    Raises:
        CheckpointError: A parameter is missing or of another shape, or a weight belongs to no parameter.
    """
    tied: dict[str, str] = dict(getattr(network, "all_tied_weights_keys", None) or {})
    names, shapes = {}, {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}
    for name, shape in shapes.items():
        aliases = [name, tied.get(name), *(alias for alias, same in tied.items() if same == name)]
        stored = next((alias for alias in aliases if alias in weights.shapes), None)
        if stored is None or tuple(weights.shapes[stored]) != shape:
            raise CheckpointError(
                f"{weights.folder}: weight {name} of shape {list(shape)} is missing or of another shape; save the model "
                "again. Where transformers renames weights as it opens them, as those of experts, omit --divide-weights, or "
                "in Python call from_pretrained with distributed_config"
            )
        names[name] = stored
    buffers = {name: buffer for name, buffer in network.named_buffers() if name in weights.shapes}
    for name, buffer in buffers.items():
        buffer.copy_(weights.read(name))
    if unknown := sorted(weights.shapes.keys() - set(names.values()) - tied.keys() - buffers.keys()):
        raise CheckpointError(f"{weights.folder}: unexpected weight {unknown[0]}; save the model again")
    exact = getattr(network, "_keep_in_fp32_modules_strict", None) or ()
    for name, parameter in network.named_parameters():
        if any(part in exact for part in name.split(".")):
            parameter.data = parameter.data.float()
    return names
