"""What a model's attention looks like from inside: maps, logits, hidden states; and the same model with coarser numbers.

A model's normal path never forms its maps. `written_out` lets it compute attention by the equations of `ops.reference` for
a while, which shows every map's logits to who asks (`ops.reference.observe_logits`); that takes n x n memory. `magnitudes`
needs logits alone and forms them beside the model's own kernels (`ops.observe_inputs`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention

from ..acceleration import IMPLEMENTATION, AcceleratedDiffLlamaAttention, accelerate, restore
from ..acceleration.attention_function import NOT_IN_THE_OP, attention, mask
from ..attention import Attention
from ..errors import ConfigError, EvaluationError
from ..ops import observe_inputs, use_backend
from ..ops.problem import LOW_PRECISION, Restrictions, allowed_keys
from ..ops.quantize import quantize_last, quantize_symmetric
from ..ops.reference import observe_logits, softmax_of
from .magnitudes import Magnitude

UNTOUCHED_BITS = 16
"""From so many bits on logits are left as they are."""

INT4_GROUP = 32
"""Weights of one row that share a step in 4 bits."""

_WRITTEN_OUT = "difftransformer_written_out"

_NEAR_ZERO = 0.1
_LOGITS_AT_ONCE = 1 << 22
_HEADS_DRAWN = 4

SeeLogits = Callable[[int, int, Tensor, Tensor | None], None]
SeeMaps = Callable[[int, Tensor, Tensor | None, Tensor | None, Tensor | None], None]


@contextmanager
def written_out(model: Any) -> Iterator[list[nn.Module]]:
    """Let a model form its maps, with `ops.reference`, until the end; everything is put back then, also after an error.

    Args:
        model: One of this package, a DiffLlama, or any whose attention functions transformers dispatches.

    Yields:
        Its attention layers in the order in which they are called.

    Raises:
        EvaluationError: a layer does not form its maps here, or has attention that the equations do not describe.
    """
    with _on_reference(model):
        yield _probed(model)


def last_row_weights(model: Any, ids: Tensor) -> list[Tensor]:
    """The weights by which the last token's heads add values: A1 - lambda A2 for differential attention.

    All tokens but the last go through the model's own kernels; only one row of each map is formed.

    Args:
        model: A causal language model of transformers' form.
        ids: (B, T).

    Returns:
        (B, H, T) in fp32 for each layer, on the CPU; zero for what lies behind a sliding window.

    Raises:
        EvaluationError: see `written_out`.
    """
    length, past = ids.shape[1], None
    if length > 1:
        past = model(input_ids=ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
    found: list[Tensor] = []

    def see(layer: int, first: Tensor, second: Tensor | None, lam: Tensor | None, allowed: Tensor | None) -> None:
        weights = _combined(first, second, lam)[:, :, -1].float().cpu()
        found.append(F.pad(weights, (length - weights.shape[-1], 0)))

    with written_out(model) as layers, _watching_maps(layers, see):
        model(input_ids=ids[:, -1:], past_key_values=past, use_cache=True)
    return found


def head_maps(model: Any, ids: Tensor, layers: Sequence[int] = (), heads: Sequence[int] = ()) -> dict[str, Any]:
    """Every head's share of negative weight and of weight near zero, and some heads' maps.

    Args:
        model: A causal language model of transformers' form.
        ids: (1, T).
        layers: Whose maps are given, from 0; the first, the middle and the last where none is named.
        heads: Which of a layer, from 0; the first four where none is named.

    Returns:
        `negative`, `near_zero`, `near_zero_first` and `lambda`, each [layer][head] (see `maps`); `lambda` is None without a
        second map. `maps`: of each chosen head `layer`, `head`, `lambda`, and the rows of `first`, `second` and `weights`,
        row t with its t + 1 keys; `second` is None without one.

    Raises:
        EvaluationError: see `written_out`; or no such layer or head.
    """
    found: dict[str, Any] = {"negative": [], "near_zero": [], "near_zero_first": [], "lambda": [], "maps": []}

    def see(layer: int, first: Tensor, second: Tensor | None, lam: Tensor | None, allowed: Tensor | None) -> None:
        weights = _combined(first, second, lam)
        seen = torch.ones_like(first, dtype=torch.bool) if allowed is None else allowed.expand_as(first)
        tenth = _NEAR_ZERO / seen.sum(-1, keepdim=True)
        for name, values in (("near_zero", weights), ("near_zero_first", first)):
            near = (values.abs() < tenth) & seen
            found[name].append((near.sum((0, 2, 3)) / seen.sum((0, 2, 3))).tolist())
        wide = weights.double()
        found["negative"].append((wide.clamp(max=0).abs().sum((0, 2, 3)) / wide.abs().sum((0, 2, 3))).tolist())
        by_head = None if lam is None else lam.expand(first.shape[:3]).mean((0, 2)).tolist()
        found["lambda"].append(by_head)
        if layer not in chosen_layers:
            return
        if heads and max(heads) >= first.shape[1]:
            raise EvaluationError(f"no head {max(heads)}: layer {layer} has {first.shape[1]}, counted from 0")
        for head in heads or range(min(_HEADS_DRAWN, first.shape[1])):
            found["maps"].append(
                {
                    "layer": layer,
                    "head": head,
                    "lambda": None if by_head is None else by_head[head],
                    "first": _rows(first[0, head]),
                    "second": None if second is None else _rows(second[0, head]),
                    "weights": _rows(weights[0, head]),
                }
            )

    with written_out(model) as tapped:
        count = len(tapped)
        if layers and max(layers) >= count:
            raise EvaluationError(f"no layer {max(layers)}: the model has {count} with attention, counted from 0")
        chosen_layers = set(layers) or {0, count // 2, count - 1}
        with _watching_maps(tapped, see):
            model(input_ids=ids, use_cache=False)
    return found


def magnitudes(model: Any, rows: Sequence[Tensor], largest: int) -> dict[str, Any]:
    """How large attention logits and hidden states become (arXiv:2410.05258 section 3.7).

    Logits are the scaled ones of both maps, of keys that a query may attend to, a map that heads share once; hidden states
    are the output of each layer. One row goes through at a time on the model's own kernels, its logits are formed beside them
    some rows of a map at a time, and what is kept does not grow with their number.

    Args:
        model: A causal language model of transformers' form.
        rows: (1, T) each.
        largest: k, how many of the largest are kept.

    Returns:
        `magnitudes.Magnitude.summary` of `logits` and of `hidden`.

    Raises:
        EvaluationError: see `written_out`; or numbers that are not finite.
    """
    logits, hidden = Magnitude("attention logits", largest), Magnitude("hidden states", largest)
    with written_out(model) as tapped:
        pass

    def see(layer: int, maps: Sequence[tuple[Tensor, Tensor]], restrictions: Restrictions, scale: float) -> None:
        for number, (query, key) in enumerate(maps):
            distinct = slice(None, None, _copies(tapped[layer]) if number else 1)
            for scores, allowed in _logits_of_rows(query, key, restrictions, scale, distinct):
                logits.add(scores, allowed)

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        hidden.add(output[0] if isinstance(output, tuple) else output)

    with _on_the_op(model), ExitStack() as hooks, _watching_inputs(tapped, see):
        for block in _blocks(model, tapped[0]):
            hooks.callback(block.register_forward_hook(leave).remove)
        for row in rows:
            model(input_ids=row, use_cache=False, logits_to_keep=1)
    return {"logits": logits.summary(), "hidden": hidden.summary()}


def _logits_of_rows(
    query: Tensor, key: Tensor, restrictions: Restrictions, scale: float, heads: slice
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """One map's logits (B, H, rows, keys) in fp32 and who may attend, some rows of some heads at a time; keys that come later
    than all of them are left out."""
    queries, keys = query.shape[2], key.shape[2]
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)[:, heads]
    query = query[:, heads]
    if query.dtype in LOW_PRECISION:
        query, key = query.float(), key.float()
    step = max(1, _LOGITS_AT_ONCE // (query.shape[0] * query.shape[1] * keys))
    for first in range(0, queries, step):
        last = min(first + step, queries)
        seen = last + keys - queries if restrictions.is_causal and restrictions.kv_lengths is None else keys
        scores = (query[:, :, first:last] * scale) @ key[:, :, :seen].mT
        allowed = allowed_keys(restrictions, queries, keys, query.device, (first, last), (0, seen))
        if allowed is not None and allowed.shape[1] > 1:
            allowed = allowed[:, heads]
        yield scores, allowed


@contextmanager
def quantized_logits(model: Any, bits: int, granularity: str) -> Iterator[None]:
    """Round a model's attention logits to `bits` bits, both maps on their own; from 16 bits on nothing is done.

    See `ops.quantize.quantize_symmetric`: keys that a query may not attend to do not count in the largest.

    Raises:
        EvaluationError: see `written_out`.
    """
    if bits >= UNTOUCHED_BITS:
        yield
        return
    with written_out(model), observe_logits(lambda x, allowed: quantize_symmetric(x, bits, allowed, granularity)):
        yield


@contextmanager
def quantized_linears(model: Any, weights: str, activations: str) -> Iterator[None]:
    """Round the weights and inputs of every Linear but the output layer; the weights are put back at the end.

    Args:
        model: A causal language model of transformers' form.
        weights: "none"; "int8", a step for each output channel; or "int4", a step for each 32 weights of one.
        activations: "none", or "int8" with a step for each token.

    Raises:
        EvaluationError: the model has no such Linear.
    """
    groups: dict[str, tuple[int, int | None]] = {"int8": (8, None), "int4": (4, INT4_GROUP)}
    with ExitStack() as undo:
        if (weights, activations) != ("none", "none"):
            last = model.get_output_embeddings()
            linears = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not last]
            if not linears:
                raise EvaluationError(f"{type(model).__name__}: no Linear layer to quantize; use --weights none")
            for linear in linears:
                if weights != "none":
                    undo.callback(_put_back, linear, linear.weight.data)
                    with torch.inference_mode(False), torch.no_grad():
                        linear.weight.data = quantize_last(linear.weight.data, *groups[weights])
                if activations != "none":
                    undo.callback(linear.register_forward_pre_hook(_int8_input).remove)
        yield


def _put_back(linear: nn.Linear, weight: Tensor) -> None:
    linear.weight.data = weight


def _int8_input(module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return quantize_last(arguments[0], 8), *arguments[1:]


@contextmanager
def _on_reference(model: Any) -> Iterator[None]:
    kinds = {type(module) for module in model.modules()}
    if any(issubclass(kind, Attention) for kind in kinds):
        with _implementation(model, "eager"):
            yield
    elif any(issubclass(kind, DiffLlamaAttention) for kind in kinds):
        with _on_the_op(model), use_backend("reference"):
            yield
    else:
        AttentionInterface.register(_WRITTEN_OUT, _attention)
        AttentionMaskInterface.register(_WRITTEN_OUT, mask)
        with _implementation(model, _WRITTEN_OUT):
            yield


@contextmanager
def _on_the_op(model: Any) -> Iterator[None]:
    """Let a model's attention go through the op, on any backend."""
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
        with _implementation(model, IMPLEMENTATION):
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
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """The op as transformers' attention function, by the equations; refuses what would not go through the op."""
    for name in NOT_IN_THE_OP:
        if options.get(name) is not None:
            raise EvaluationError(
                f"{type(module).__name__}: attention with {name} is not softmax(Q K^T) V and cannot be seen from inside; "
                "choose a model without it"
            )
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise EvaluationError(
            f"{type(module).__name__}: its attention mask is {attention_mask.dtype}, a bias beside Q K^T, and cannot be "
            "seen from inside; choose a model with a bool mask"
        )
    with use_backend("reference"):
        return attention(module, query, key, value, attention_mask, *rest, **options)


@torch.no_grad()
def _probed(model: Any) -> list[nn.Module]:
    """The modules that form maps, found by two tokens; each must do so once a map."""
    inside: list[nn.Module] = []
    formed: dict[nn.Module, int] = {}

    def enter(module: nn.Module, arguments: Any) -> None:
        inside.append(module)

    def leave(module: nn.Module, arguments: Any, output: Any) -> None:
        inside.pop()

    def count(scores: Tensor, allowed: Tensor | None) -> Tensor:
        formed[inside[-1]] = formed.get(inside[-1], 0) + 1
        return scores

    with ExitStack() as hooks, observe_logits(count):
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        model(input_ids=torch.tensor([[0, 1]], device=model.device), use_cache=False)
    expected = _attention_layers(model.config.get_text_config())
    right = [module for module, calls in formed.items() if calls == _maps_of(module)]
    if not right or len(right) != expected or len(formed) != expected:
        raise EvaluationError(
            f"{type(model).__name__}: its attention cannot be seen from inside ({len(right)} of {expected} layers form "
            "their maps when asked); models of this package, DiffLlama, and those whose attention transformers dispatches "
            "(Llama, Mistral, Qwen and others) can"
        )
    return right


def _attention_layers(config: Any) -> int:
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return int(config.num_hidden_layers)
    return sum("attention" in kind and "linear" not in kind for kind in kinds)


def _maps_of(module: nn.Module) -> int:
    if isinstance(module, Attention):
        return module.layout.query_maps
    return 2 if isinstance(module, DiffLlamaAttention) else 1


def _copies(module: nn.Module) -> int:
    """How often the op forms one second map: once for each head that shares it (grouped differential attention)."""
    return module.layout.heads_per_second_map if isinstance(module, Attention) else 1


@contextmanager
def _counting(layers: Sequence[nn.Module]) -> Iterator[list[int]]:
    """The layer that computes at the moment, and 0, which the caller may count on."""
    place = [0, 0]

    def entering(layer: int) -> Callable[..., None]:
        def enter(module: nn.Module, arguments: Any) -> None:
            place[:] = layer, 0

        return enter

    with ExitStack() as hooks:
        for index, module in enumerate(layers):
            hooks.callback(module.register_forward_pre_hook(entering(index)).remove)
        yield place


@contextmanager
def _watching_logits(layers: Sequence[nn.Module], see: SeeLogits) -> Iterator[None]:
    """Call see(layer, map, logits, allowed) for every map."""

    def watch(scores: Tensor, allowed: Tensor | None) -> Tensor:
        see(place[0], place[1], scores, allowed)
        place[1] += 1
        return scores

    with _counting(layers) as place, observe_logits(watch):
        yield


@contextmanager
def _watching_inputs(layers: Sequence[nn.Module], see: Callable[..., None]) -> Iterator[None]:
    """Call see(layer, maps, restrictions, scale) for every layer; see `ops.observe_inputs`."""
    with _counting(layers) as place, observe_inputs(lambda *inputs: see(place[0], *inputs)):
        yield


@contextmanager
def _watching_maps(layers: Sequence[nn.Module], see: SeeMaps) -> Iterator[None]:
    """Call see(layer, first, second, lam, allowed) for every layer: maps (B, H, T, S), lam broadcastable to (B, H, T)."""
    lams: list[Tensor | None] = [None] * len(layers)
    firsts: list[Tensor] = []

    def entering(layer: int) -> Callable[..., None]:
        def enter(module: nn.Module, arguments: Any, options: dict[str, Any]) -> None:
            lams[layer] = _lam_of(module, arguments[0] if arguments else options["hidden_states"])

        return enter

    def logits(layer: int, number: int, scores: Tensor, allowed: Tensor | None) -> None:
        found = softmax_of(scores, allowed)
        if _maps_of(layers[layer]) == 1:
            see(layer, found, None, None, allowed)
        elif number == 0:
            firsts.append(found)
        else:
            see(layer, firsts.pop(), found, lams[layer], allowed)

    with ExitStack() as hooks, _watching_logits(layers, logits):
        for index, module in enumerate(layers):
            if _maps_of(module) == 2:
                hooks.callback(module.register_forward_pre_hook(entering(index), with_kwargs=True).remove)
        yield


def _lam_of(module: nn.Module, hidden: Tensor) -> Tensor:
    """The layer's lambda for these hidden states, three-dimensional."""
    if isinstance(module, AcceleratedDiffLlamaAttention):
        lam: Tensor | float | None = module._lam(hidden.dtype)
    else:
        assert isinstance(module, Attention)
        lam = module.head_lam(hidden)
    assert lam is not None
    lam = torch.as_tensor(lam, device=hidden.device)
    return lam if lam.dim() == 3 else lam.reshape(1, -1, 1)


def _combined(first: Tensor, second: Tensor | None, lam: Tensor | None) -> Tensor:
    return first if second is None or lam is None else first - lam.unsqueeze(-1) * second


def _rows(square: Tensor) -> list[list[float]]:
    """A causal map's rows, without the keys that come later; four digits."""
    return [[float(f"{value:.4g}") for value in row[: index + 1]] for index, row in enumerate(square.tolist())]


def _blocks(model: nn.Module, attention: nn.Module) -> list[nn.Module]:
    """The model's layers: the list that holds the one with this attention."""
    path = next(name for name, module in model.named_modules() if module is attention).split(".")
    while path:
        path.pop()
        holder = model.get_submodule(".".join(path))
        if isinstance(holder, nn.ModuleList):
            return list(holder)
    raise EvaluationError(f"{type(model).__name__}: its layers are in no list, so their output cannot be seen")
