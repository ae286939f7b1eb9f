"""Switch a model of transformers to this package's attention operator, and back."""

from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

from ..errors import ConfigError
from ..model import DiffTransformerPreTrainedModel
from .attention_function import IMPLEMENTATION
from .diffllama import ATTN_IMPLEMENTATIONS, AcceleratedDiffLlamaAttention

Module = TypeVar("Module", bound=nn.Module)


def accelerate(model: Module) -> Module:
    """Compute the attention of a model of transformers with this package's operator, until `restore(model)`.

    Outputs, gradients, state dict and caches stay the same: up to rounding in fp32, and closer to fp32 in low precision.
    Generation, training, `save_pretrained`, copies and `torch.compile` work as before. Calls that the operator does not
    support run the model's own code: attention maps (`output_attentions`), masks that add a bias, dropout of attention
    weights, and any attn_implementation that is set later. Positions that may attend to nothing, such as left padding, give
    zeros, as with "sdpa"; DiffLlama's "eager" gives them a mean over all keys.

    Args:
        model: Model of transformers, or a module that contains one: a DiffLlama, or a model with softmax attention and
            attn_implementation="sdpa" that takes its attention function from transformers' table (Llama, Mistral, Qwen and
            others). It is changed in place; a model that is accelerated already stays so.

    Returns:
        The model.

    Raises:
        ConfigError: The module contains no such model, or one whose attention layers or attn_implementation are not
            supported. The model is left unchanged.
    """
    layers = [(name, m) for name, m in _modules_of(model) if isinstance(m, DiffLlamaAttention)]
    networks = [] if layers else _outermost(model)
    if not layers and not networks:
        raise ConfigError(
            f"accelerate: {type(model).__name__} holds no model of transformers; pass one, such as a DiffLlamaForCausalLM or a "
            "LlamaForCausalLM (a DiffTransformer model uses the attention operator already)"
        )
    for name, layer in layers:
        _check_layer(name, layer)
    for network in networks:
        _check_network(network)
    for _, layer in layers:
        layer.__class__ = AcceleratedDiffLlamaAttention
    for network in networks:
        network.set_attn_implementation(IMPLEMENTATION)
    return model


def restore(model: Module) -> Module:
    """Undo `accelerate`. A model that was not accelerated stays unchanged.

    Args:
        model: The accelerated model, or a copy of it.

    Returns:
        The model.
    """
    for _, module in _modules_of(model):
        if type(module) is AcceleratedDiffLlamaAttention:
            module.__class__ = DiffLlamaAttention
    for network in _outermost(model):
        if network.config._attn_implementation == IMPLEMENTATION:
            network.set_attn_implementation("sdpa")
    return model


def _check_layer(name: str, layer: DiffLlamaAttention) -> None:
    if type(layer) not in (DiffLlamaAttention, AcceleratedDiffLlamaAttention) or "forward" in vars(layer):
        raise ConfigError(
            f"accelerate: layer {name} is a {type(layer).__name__} whose forward was replaced; accelerate the model before "
            "adding hooks, sharding or other changes to its attention layers"
        )
    implementation = layer.config._attn_implementation
    if implementation not in ATTN_IMPLEMENTATIONS:
        raise ConfigError(
            f"accelerate: layer {name} has attn_implementation={implementation!r}, whose masks only its own kernels can read; "
            "call model.set_attn_implementation('sdpa') first"
        )


def _check_network(network: PreTrainedModel) -> None:
    kind, implementation = type(network).__name__, network.config._attn_implementation
    if implementation not in ("sdpa", IMPLEMENTATION):
        raise ConfigError(
            f"accelerate: {kind} has attn_implementation={implementation!r}, which may compute more than softmax attention; "
            "call model.set_attn_implementation('sdpa') first, if the model allows it"
        )
    if not network._can_set_attn_implementation():
        raise ConfigError(
            f"accelerate: {kind} does not take its attention functions from transformers' table; only models that do can be "
            "accelerated"
        )


def _modules_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(model.named_modules()) if isinstance(model, nn.Module) else []


def _outermost(model: nn.Module) -> list[PreTrainedModel]:
    """Return the models of transformers in a module, except those inside another one and those of this package."""
    found: dict[str, PreTrainedModel] = {}
    for name, module in _modules_of(model):
        if isinstance(module, PreTrainedModel) and not any(
            name.startswith(f"{outer}." if outer else "") for outer in found
        ):
            found[name] = module
    return [m for m in found.values() if not isinstance(m, DiffTransformerPreTrainedModel)]
