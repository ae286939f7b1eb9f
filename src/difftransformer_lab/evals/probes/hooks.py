"""Observe what a model's attention computes: the logits of its maps, the maps, and the operator's inputs.

A model's normal path never forms its maps. Inside `written_out` a model computes attention by the equations of `ops.reference`,
which pass the logits of every map to an observer (`ops.reference.observe_logits`); this takes n x n memory. Inside
`on_the_op` a model runs its usual kernels, and an observer gets the inputs of each attention call (`ops.observe_inputs`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

from difftransformer.attention import Attention
from difftransformer.errors import ConfigError, EvaluationError
from difftransformer.families import AcceleratedDiffLlamaAttention, accelerate, restore
from difftransformer.families.acceleration import NOT_IN_THE_OP
from difftransformer.ops import observe_inputs, softmax_attention, use_backend
from difftransformer.ops.reference import observe_logits, softmax_of

_ON_THE_OP = "difftransformer_op"  # an attn_implementation

ObserveMaps = Callable[[int, Tensor, Tensor | None, Tensor | None, Tensor | None], None]


@contextmanager
def written_out(model: Any) -> Iterator[list[nn.Module]]:
    """Let a model form its maps with `ops.reference` inside the context; the model is restored at its end.

    Args:
        model: A model of this package, a DiffLlama, or any model whose attention functions transformers dispatches.

    Yields:
        Its attention layers in the order in which they are called.

    Raises:
        EvaluationError: A layer does not form its maps here, or has attention that the equations do not describe.
    """
    with ExitStack() as changes:
        if any(isinstance(module, Attention) for module in model.modules()):
            changes.enter_context(_implementation(model, "eager"))
        else:
            changes.enter_context(on_the_op(model))
            changes.enter_context(use_backend("reference"))
        yield _probed(model)


@contextmanager
def on_the_op(model: Any) -> Iterator[None]:
    """Let a model compute attention with this package's operator, on any backend.

    Raises:
        EvaluationError: See `written_out`.
    """
    kinds = {type(module) for module in model.modules()}
    if any(issubclass(kind, Attention) for kind in kinds):
        yield
    elif any(issubclass(kind, DiffLlamaAttention) for kind in kinds):
        try:
            accelerate(model)
        except ConfigError as error:
            raise EvaluationError(str(error)) from None
        try:
            yield
        finally:
            if AcceleratedDiffLlamaAttention not in kinds:
                restore(model)
    else:
        AttentionInterface.register(_ON_THE_OP, _attention)
        AttentionMaskInterface.register(_ON_THE_OP, sdpa_mask)
        with _implementation(model, _ON_THE_OP):
            yield


@contextmanager
def _implementation(model: Any, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The operator as transformers' attention function; refuses arguments that the operator does not have."""
    if added := [name for name in NOT_IN_THE_OP if options.get(name) is not None]:
        raise EvaluationError(
            f"{type(module).__name__}: attention with {added[0]} is not softmax(Q K^T) V and cannot be seen from inside; "
            "choose a model without it"
        )
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise EvaluationError(
            f"{type(module).__name__}: its attention mask is {attention_mask.dtype}, a bias beside Q K^T, and cannot be "
            "seen from inside; choose a model with a bool mask"
        )
    heads_BHTE = softmax_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        is_causal=attention_mask is None
        and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        scale=scaling,
    )
    return heads_BHTE.transpose(1, 2).contiguous(), None


@torch.no_grad()
def _probed(model: Any) -> list[nn.Module]:
    """Find the modules that form maps by a pass over two tokens; each must form every map once."""
    inside: list[nn.Module] = []
    formed: dict[nn.Module, int] = {}

    def enter(module: nn.Module, arguments: Any) -> None:
        inside.append(module)

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        inside.pop()

    def count(scores: Tensor, allowed: Tensor | None) -> Tensor:
        # A layer's norm may call what forms the maps.
        layers = [module for module in inside if isinstance(module, Attention)] or inside
        formed[layers[-1]] = formed.get(layers[-1], 0) + 1
        return scores

    with ExitStack() as hooks, observe_logits(count):
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        model(input_ids=torch.tensor([[0, 1]], device=model.device), use_cache=False)
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    expected = sum("attention" in kind and "linear" not in kind for kind in kinds)
    right = [module for module, calls in formed.items() if calls == _maps_of(module)]
    if not right or len(right) != expected or len(formed) != expected:
        raise EvaluationError(
            f"{type(model).__name__}: its attention cannot be seen from inside ({len(right)} of {expected} layers form "
            "their maps when asked); models of this package, DiffLlama, and those whose attention transformers dispatches "
            "(Llama, Mistral, Qwen and others) can"
        )
    return right


def _maps_of(module: nn.Module) -> int:
    if isinstance(module, Attention):
        return module.layout.query_maps
    return 2 if isinstance(module, DiffLlamaAttention) else 1


@contextmanager
def _counting(layers: Sequence[nn.Module]) -> Iterator[list[int]]:
    """Yield `[current_layer, counter]`; the counter restarts at 0 in every layer."""
    place = [0, 0]

    def enter(layer: int, module: nn.Module, arguments: Any) -> None:
        place[:] = layer, 0

    with ExitStack() as hooks:
        for index, module in enumerate(layers):
            hooks.callback(module.register_forward_pre_hook(partial(enter, index)).remove)
        yield place


@contextmanager
def observing_inputs(layers: Sequence[nn.Module], observe: Callable[..., None]) -> Iterator[None]:
    """Call observe(layer, maps, restrictions, scale) for every layer; see `ops.observe_inputs`."""
    with _counting(layers) as place, observe_inputs(lambda *inputs: observe(place[0], *inputs)):
        yield


@contextmanager
def observing_maps(layers: Sequence[nn.Module], observe: ObserveMaps) -> Iterator[None]:
    """Call observe(layer, first, second, lam, allowed) for every layer.

    The maps are (B, H, T, S), lam can be broadcast to (B, H, T); second and lam are None for a layer with one map.
    """
    lams: list[Tensor | None] = [None] * len(layers)
    firsts: list[Tensor] = []

    def enter(layer: int, module: nn.Module, arguments: Any, options: dict[str, Any]) -> None:
        lams[layer] = _lam_of(module, arguments[0] if arguments else options["hidden_states"])

    def logits(scores: Tensor, allowed: Tensor | None) -> Tensor:
        layer, number = place
        place[1] += 1
        attention_map = softmax_of(scores, allowed)
        if _maps_of(layers[layer]) == 1:
            observe(layer, attention_map, None, None, allowed)
        elif number == 0:
            firsts.append(attention_map)
        else:
            observe(layer, firsts.pop(), attention_map, lams[layer], allowed)
        return scores

    with ExitStack() as hooks, _counting(layers) as place, observe_logits(logits):
        for index, module in enumerate(layers):
            if _maps_of(module) == 2:
                hooks.callback(module.register_forward_pre_hook(partial(enter, index), with_kwargs=True).remove)
        yield


def combined(first: Tensor, second: Tensor | None, lam: Tensor | None) -> Tensor:
    """Return the weights by which a layer adds values: the first map, minus lambda times the second if there is one."""
    return first if second is None or lam is None else first - lam.unsqueeze(-1) * second


def _lam_of(module: nn.Module, hidden: Tensor) -> Tensor:
    """Return a layer's lambda for these hidden states, with three dimensions."""
    if isinstance(module, AcceleratedDiffLlamaAttention):
        lam: Tensor | float | None = module._lam(hidden.dtype)
    else:
        assert isinstance(module, Attention)
        lam = module.head_lam(hidden)
    assert lam is not None
    lam = torch.as_tensor(lam, device=hidden.device)
    return lam if lam.dim() == 3 else lam.reshape(1, -1, 1)
