"""Open a model in parts: each process reads its share of the weights, and none ever holds all of them."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..errors import CheckpointError, ConfigError
from ..families.checkpoint_io import WeightsReader
from ..model.weights import refuse_adapter
from ..train.lora import BASE
from ..train.parallel import DeferredModel


def deferred(config: Any, weights: WeightsReader) -> DeferredModel:
    """Build a causal language model in fp32 without weights; each process then reads its share.

    Args:
        config: Configuration of the model.
        weights: Its weights, by the names of its parameters; open until the model is filled.

    Raises:
        CheckpointError: Weights are missing, or have other names or shapes than the model's parameters.
        ConfigError: The weights are quantized, or an adapter lies beside them.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{weights.folder}: quantized weights cannot be read in parts; save the model in bf16 or fp32"
        )
    refuse_adapter(weights.folder, "read in parts")
    names: dict[str, str] = {}
    model = DeferredModel(
        lambda: AutoModelForCausalLM.from_config(config, dtype=torch.float32),
        lambda name, index: weights.read_part(names[name.replace(BASE, "")], index),
    )
    names |= _names(model.network, weights)
    return model


def _names(network: Any, weights: WeightsReader) -> dict[str, str]:
    """Return the name in the files of every parameter, and read the buffers there.

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
                "again; where transformers renames weights as it opens them, as those of experts, they cannot be read in parts"
            )
        names[name] = stored
    buffers = {name: buffer for name, buffer in network.named_buffers() if name in weights.shapes}
    for name, buffer in buffers.items():
        buffer.copy_(weights.read(name))
    if unknown := sorted(weights.shapes.keys() - set(names.values()) - tied.keys() - buffers.keys()):
        raise CheckpointError(f"{weights.folder}: unexpected weight {unknown[0]}; save the model again")
    return names
