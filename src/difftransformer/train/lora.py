"""Low-rank adapters (arXiv:2106.09685) by PEFT: adding them to a model, saving them and merging them."""

from functools import partial

import torch
from torch import Tensor, nn

from ..attention import Attention
from ..errors import ConfigError
from ..model import DiffTransformerForCausalLM
from ..model.initialization import Make, fan_in
from .config import LoraConfig

BASE, ADAPTER, ADAPTER_PART = ".base_layer", "default", "lora_"  # PEFT's names


@torch.no_grad()
def add_lora(model: DiffTransformerForCausalLM, config: LoraConfig, *, seed: int) -> dict[str, Make]:
    """Freeze a model except for the parameters that `config` names, and add adapters to its projections.

    The model computes the same function as before: A is drawn as a linear layer is by default, and B is 0.

    Returns:
        How the adapters are made whose values are not there, since the model is on the meta device; by name.

    Raises:
        ConfigError: PEFT is missing, a name matches nothing in the model, a target's weight is tied, or `also` names no
            other layers than targets.
    """
    try:
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
    except ImportError:
        raise ConfigError("training.lora needs the package peft; pip install 'difftransformer[tools]'") from None
    linear = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if unknown := [name for name in config.targets if name not in linear]:
        raise ConfigError(f"training.lora.targets: no layer {unknown[0]!r}; choose from {', '.join(sorted(linear))}")
    if tied := [name for name in config.targets if any(name in key.split(".") for key in model.all_tied_weights_keys)]:
        raise ConfigError(
            f"training.lora.targets: the weight of {tied[0]!r} is the embedding too, which has no adapter; leave it out"
        )
    own = [name for name, _ in model.named_parameters()]
    if unused := [part for part in config.also if not any(part in name for name in own)]:
        raise ConfigError(f"training.lora.also: no parameter's name contains {unused[0]!r}; print(model) shows them")
    others = [name for name in own if set(config.targets).isdisjoint(name.split("."))]
    if adapted := [part for part in config.also if not any(part in name for name in others)]:
        raise ConfigError(
            f"training.lora.also: all parameters whose name contains {adapted[0]!r} belong to targets, which are frozen; "
            "leave it out, or leave the target out"
        )
    # The few parameters that attention has besides its projections are always trained: an upcycled model has to learn them.
    whole = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, Attention)
        for name in module.own_parameter_names()
    }
    adapters = PeftConfig(r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets))
    with torch.random.fork_rng():
        inject_adapter_in_model(adapters, model)
    deferred: dict[str, Make] = {}
    for name, parameter in model.named_parameters():
        asked = any(part in name for part in config.also) and BASE not in name
        parameter.requires_grad_(name in whole or asked or ADAPTER_PART in name)
        if ADAPTER_PART in name:
            make = fan_in(parameter, seed, name) if "lora_A" in name else partial(torch.zeros, parameter.shape)
            if parameter.is_meta:
                deferred[name] = make
            else:
                parameter.copy_(make())
    return deferred


def has_lora(model: nn.Module) -> bool:
    """Whether a model has adapters."""
    return any(BASE in name for name, _ in model.named_parameters())


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the trained parameters by their names in the model with adapters."""
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the plain model with the adapters merged: W + (alpha / rank) B A."""
    state = {}
    for name, tensor in model.state_dict().items():
        if ADAPTER_PART in name:
            continue
        if BASE in name:
            layer = model.get_submodule(name.partition(BASE)[0])
            tensor = tensor + layer.get_delta_weight(ADAPTER).to(tensor.dtype)  # type: ignore[operator]
        state[name.replace(BASE, "")] = tensor
    return state
