"""Differential attention, and ordinary attention with the same arguments, on any backend of the table in `backends.py`.

The public functions take their restrictions as keywords. Layers call `attend` and `maps`, which take them as one
`Restrictions`.

Dimensions: B batch, H differential heads (for softmax: heads), G key/value groups, T query positions, S key positions,
D width of one map's queries and keys, E value width.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Unpack

import torch
from torch import Tensor

from ..errors import ConfigError, ShapeError
from .backends import select_backend
from .isolation import isolated
from .logits import largest_logits
from .norms import rms_norm, with_plain_factor
from .problem import (
    Call,
    Norm,
    Problem,
    RestrictionKeywords,
    Restrictions,
    allowed_keys,
    check_restrictions,
    check_tensor,
    inputs_of_maps,
    is_number,
    shown,
    without_autocast,
)
from .reference import softmax_map

_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

InputsObserver = Callable[[tuple[tuple[Tensor, Tensor], ...], Restrictions, float], None]
_inputs_observer: ContextVar[InputsObserver | None] = ContextVar("difftransformer_inputs_observer", default=None)


@contextmanager
def observe_inputs(observer: InputsObserver) -> Iterator[None]:
    """Call `observer` with the inputs of every attention call inside the block, on any backend. No map is formed for it.

    The observer gets a query (B, H, T, D) and a key (B, G, S, D) for each map, the first map first, then the restrictions
    and the scale of the logits. Observers nest: the outer one is called first. `torch.compile` looks for an observer once, when
    it compiles: enter the block before that.
    """
    outer = _inputs_observer.get()

    def both(*inputs: Any) -> None:
        if outer is not None:
            outer(*inputs)
        observer(*inputs)

    token = _inputs_observer.set(both)
    try:
        yield
    finally:
        _inputs_observer.reset(token)


@contextmanager
def observe_max_logits() -> Iterator[list[Tensor]]:
    """Collect the largest logits of every attention call inside the block, (maps, H) each, as `max_logits` returns them.

    Backends do not return logits, so each call computes them once more, some rows at a time. As with `observe_inputs`, enter
    the block before `torch.compile` traces the model.
    """
    largest: list[Tensor] = []
    with observe_inputs(
        lambda inputs, restrictions, scale: largest.append(largest_logits(inputs, restrictions, scale))
    ):
        yield largest


@torch.compiler.assume_constant_result
def _observer() -> InputsObserver | None:
    return _inputs_observer.get()


def differential_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lam: Tensor | float,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    kv_start: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Difference of two softmax maps applied to one value (arXiv:2410.05258 eq. 1).

    With [Q1; Q2] = query and [K1; K2] = key, halves of the last dimension, and s = 1/sqrt(D) unless given:

        (softmax(s Q1 K1^T) - lam softmax(s Q2 K2^T)) V

    All restrictions hold at once. A query that may attend to nothing gives zeros, with zero gradients. In grouped-query
    attention each map keeps its own key: head h reads both halves of group h // (H // G).

    Args:
        query: (B, H, T, 2D), of one floating dtype with key and value.
        key: (B, G, S, 2D), own keys for each map; or (B, G, S, D), one key shared by both (DIFF V2). H % G == 0.
        value: (B, G, S, E), any width E.
        lam: Weight of the second map: a float, a scalar tensor, (H,), or (B, H, T). Used in fp32 (float64 for float64
            inputs); gradients flow to it.
        attn_mask: bool, broadcastable to (B, H, T, S), True = may attend.
        is_causal: Causal, bottom-right aligned: the last query sees the last key, so T < S is decoding.
            (F.scaled_dot_product_attention aligns top-left.)
        scale: Multiplies the logits; 1/sqrt(D) if None.
        window: With is_causal, a query attends only to the last `window` positions, itself included.
        kv_start: (B,) int32 or int64; row b attends only to keys j >= kv_start[b] (left padding).
        kv_lengths: (B,) int32 or int64; row b attends only to keys j < kv_lengths[b] (partly filled caches, right
            padding). Causal masks and windows then align to it: row b's last query sees key kv_lengths[b] - 1. A causal
            call over whole right-padded sequences (T == S) needs no kv_lengths: no real query sees the padding.
        cu_seqlens: (N + 1,) int32 or int64, rising from 0 to T: packed documents (B = 1, T = S); each attends only to
            itself.
        backend: "auto" or a name of `backend_names()`. A named backend is used, or the call raises an error.

    Returns:
        (B, H, T, E) in the value's dtype.

    Raises:
        ShapeError: a tensor's shape, dtype or device breaks a rule above, or there is no tensor where one must be.
        ConfigError: restrictions that exclude each other, or a number outside its range.
        BackendUnavailable: the backend does not exist or cannot run this call; the message gives every backend's reason.
    """
    restrictions = Restrictions(attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens)
    _refuse_none(lam)
    return attend(query, key, value, lam, restrictions, scale=scale, backend=backend)


def normed_differential_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lam: Tensor | float,
    weight: Tensor | None,
    *,
    eps: float,
    factor: float | Tensor = 1.0,
    scale: float | None = None,
    backend: str = "auto",
    **which: Unpack[RestrictionKeywords],
) -> Tensor:
    r"""Differential attention with a norm of each head's output (arXiv:2410.05258 eq. 3), in one pass where a backend can.

        factor * RMSNorm((softmax(s Q1 K1^T) - lam softmax(s Q2 K2^T)) V) * weight

    The fused pass normalises each head before it is rounded to the value's dtype. Other arguments, the result and the errors
    are as in `differential_attention`.

    Args:
        weight: (E,), the gain of the norm, shared by the heads; None for 1.
        eps: Added to the mean square.
        factor: (1 - lambda_init) in the paper; a float or a 0-dim tensor. No gradient flows to it.
    """
    _refuse_none(lam)
    norm = (weight, eps, factor)
    return attend(query, key, value, lam, Restrictions(**which), norm=norm, scale=scale, backend=backend)


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    backend: str = "auto",
    **which: Unpack[RestrictionKeywords],
) -> Tensor:
    """Ordinary attention, softmax(s Q K^T) V (arXiv:1706.03762 eq. 1).

    Query is (B, H, T, D) and key (B, G, S, D). Everything else is as in `differential_attention`.
    """
    return attend(query, key, value, None, Restrictions(**which), scale=scale, backend=backend)


def attention_maps(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None = None,
    **which: Unpack[RestrictionKeywords],
) -> tuple[Tensor, Tensor]:
    """Both maps of differential attention, for analysis: A1 = softmax(s Q1 K1^T) and A2 = softmax(s Q2 K2^T).

    `differential_attention` returns (A1 - lam A2) V for the same arguments (arXiv:2410.05258 eq. 1). The maps take O(n^2)
    memory.

    Returns:
        A1 and A2, (B, H, T, S) each, in fp32 (float64 for float64 inputs). Rows sum to 1, or to 0 where a query may
        attend to nothing.
    """
    first, second = maps(query, key, Restrictions(**which), count=2, scale=scale)
    return first, second


def softmax_maps(
    query: Tensor,
    key: Tensor,
    *,
    scale: float | None = None,
    **which: Unpack[RestrictionKeywords],
) -> Tensor:
    """The map of ordinary attention, softmax(s Q K^T) (arXiv:1706.03762 eq. 1), for analysis. It takes O(n^2) memory.

    Query is (B, H, T, D) and key (B, G, S, D). Everything else is as in `attention_maps`.

    Returns:
        (B, H, T, S) in fp32 (float64 for float64 inputs).
    """
    return maps(query, key, Restrictions(**which), count=1, scale=scale)[0]


def max_logits(
    query: Tensor,
    key: Tensor,
    *,
    num_maps: int = 2,
    scale: float | None = None,
    **which: Unpack[RestrictionKeywords],
) -> Tensor:
    """The largest logit s q k of each map and head, over the batch and all allowed pairs, as QK-Clip needs it.

    It takes one product of queries and keys and O(n) memory, on no particular backend and without gradients. Other arguments
    are as in `attention_maps`.

    Args:
        query: (B, H, T, 2D); (B, H, T, D) for one map.
        key: (B, G, S, 2D) or (B, G, S, D).
        num_maps: 2 for differential attention, 1 for ordinary attention.
        scale: Multiplies the logits; 1/sqrt(D) if None.

    Returns:
        (num_maps, H) in fp32 (float64 for float64 inputs), -inf for a head where no query may attend to a key.

    Raises:
        ConfigError: num_maps is neither 1 nor 2, or restrictions that exclude each other.
        ShapeError: A shape contradicts another.
    """
    if num_maps not in (1, 2):
        raise ConfigError(
            f"num_maps: {shown(num_maps)}; it must be 1 (ordinary attention) or 2 (differential attention)"
        )
    restrictions = Restrictions(**which)
    scale = _check({"query": query, "key": key}, restrictions, num_maps, scale)
    inputs = ((query, key),) if num_maps == 1 else inputs_of_maps(query, key)
    with without_autocast(query.device.type):
        return largest_logits(inputs, restrictions, scale)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lam: Tensor | float | None,
    restrictions: Restrictions,
    *,
    norm: Norm | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Differential attention, or ordinary attention where `lam` is None; see `differential_attention`.

    Args:
        query: (B, H, T, 2D); (B, H, T, D) without `lam`.
        key: (B, G, S, 2D) or (B, G, S, D).
        value: (B, G, S, E).
        lam: Weight of the second map, or None.
        restrictions: The keys that each query may attend to.
        norm: Weight, eps and factor of a norm of each head's output; see `normed_differential_attention`. No gradient flows
            to a factor that is a tensor.
        scale: Multiplies the logits; 1/sqrt(D) if None.
        backend: "auto" or a name of `backend_names()`.
    """
    tensors = {"query": query, "key": key, "value": value}
    scale = _check(tensors, restrictions, 1 if lam is None else 2, scale)
    if norm is not None:
        _check_norm(norm, value)
        norm = with_plain_factor(norm, value.shape[-1])
    call = Call(query, key, value, None if lam is None else _lam_BHT(lam, query), restrictions, scale, norm)
    chosen = select_backend(Problem.of(call), backend, query.device)
    observer = _observer()
    if observer is not None:
        with without_autocast(query.device.type):
            observer(call.maps(), restrictions, scale)
    # The caller chooses the dtypes: autocast acts on the layers above, not in here.
    with without_autocast(query.device.type):
        heads_BHTE = isolated(chosen.run, call) if chosen.multiplies_all else chosen.run(call)
        if norm is None or chosen.norms:
            return heads_BHTE
        weight, eps, factor = norm
        return rms_norm(heads_BHTE, weight, eps) * factor


def maps(
    query: Tensor, key: Tensor, restrictions: Restrictions, *, count: int, scale: float | None = None
) -> tuple[Tensor, ...]:
    """The `count` softmax maps (1 or 2) of a query and a key, (B, H, T, S) each; see `attention_maps`."""
    scale = _check({"query": query, "key": key}, restrictions, count, scale)
    allowed_BHTS = allowed_keys(restrictions, query.shape[2], key.shape[2], query.device)
    pairs = ((query, key),) if count == 1 else inputs_of_maps(query, key)
    with without_autocast(query.device.type):
        return tuple(softmax_map(*pair, scale, allowed_BHTS) for pair in pairs)


def _lam_BHT(lam: Tensor | float, query: Tensor) -> Tensor:
    """Return `lam` with three dimensions that broadcast to (B, H, T), in the dtype of the maps."""
    batch, heads, queries = query.shape[:3]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    if not isinstance(lam, Tensor):
        if not is_number(lam):
            raise ShapeError(f"lam: {shown(lam)}; it must be a float or a tensor")
        return torch.full((1, 1, 1), lam, dtype=dtype, device=query.device)
    if lam.dim() > 0 or lam.device.type != "cpu" or lam.layout != torch.strided:
        check_tensor("lam", lam, query)  # but a number in CPU memory serves every device, as in PyTorch
    if not lam.is_floating_point():
        raise ShapeError(f"lam: dtype {lam.dtype}; it must be floating: pass a float or a floating tensor")
    shape = lam.shape
    lam = lam.to(query.device, dtype)
    if shape == (batch, heads, queries):
        return lam
    if shape in ((), (1,)):
        return lam.view(1, 1, 1)
    if shape == (heads,):
        return lam.view(1, heads, 1)
    raise ShapeError(
        f"lam: shape {tuple(shape)}; it must be a scalar, (H,) = ({heads},) or "
        f"(B, H, T) = ({batch}, {heads}, {queries}): reshape it"
    )


def _refuse_none(lam: Tensor | float | None) -> None:
    if lam is None:
        raise ShapeError("lam: None; it must be a float or a tensor: softmax_attention has no second map")


def _check_norm(norm: Norm, value: Tensor) -> None:
    weight, eps, factor = norm
    if weight is not None:
        check_tensor("weight", weight, value, "value")
        if not weight.is_floating_point():
            raise ShapeError(f"weight: dtype {weight.dtype}; it must be floating: convert it with .float()")
        if weight.shape != value.shape[-1:]:
            raise ShapeError(
                f"weight: shape {tuple(weight.shape)}; it must be (E,) = ({value.shape[-1]},), the value's width"
            )
    if not (is_number(eps) and 0 <= eps < math.inf):
        raise ConfigError(f"eps: {shown(eps)}; it must be a finite number of at least 0")
    if isinstance(factor, Tensor):
        if factor.dim() or factor.requires_grad:
            raise ShapeError(
                f"factor: shape {tuple(factor.shape)}, requires_grad={factor.requires_grad}; as a tensor it must be one number "
                "without a gradient: multiply the weight by a learned factor"
            )
    elif not (is_number(factor) and -math.inf < factor < math.inf):
        raise ConfigError(f"factor: {shown(factor)}; it must be a finite number")


def _check(tensors: dict[str, Tensor], restrictions: Restrictions, count: int, scale: float | None) -> float:
    """Raise an error where an argument breaks a rule, without waiting for a device; return the scale of the logits.

    Args:
        tensors: Query, key and, except for maps, value.
        restrictions: The restrictions of the call.
        count: Number of maps.
        scale: As the caller gave it.
    """
    query, key, value = tensors["query"], tensors["key"], tensors.get("value")
    for name, tensor in tensors.items():
        check_tensor(name, tensor, query)
    if query.dim() == 4 and query.shape[-1] % count:
        raise ShapeError(
            f"query: last dimension is {query.shape[-1]}; it must be even, (B, H, T, 2D): it holds both maps' queries"
        )
    for name, tensor in tensors.items():
        if tensor.dim() != 4:
            raise ShapeError(
                f"{name}: shape {tuple(tensor.shape)} has {tensor.dim()} dimensions; it must have 4, "
                "(batch, heads, positions, width)"
            )
        if tensor.dtype != query.dtype or tensor.dtype not in _FLOATING:
            raise ShapeError(
                f"{name}: dtype {tensor.dtype}, query is {query.dtype}; query, key and value must have one of "
                "float32, float64, bfloat16, float16 and all the same: cast them before the call"
            )
    width = query.shape[-1] // count
    key_widths = (width,) if count == 1 else (2 * width, width)
    batch, heads = query.shape[:2]
    groups, keys = key.shape[1:3]
    if width < 1:
        raise ShapeError(f"query: shape {tuple(query.shape)} has no width; its last dimension must be at least 1 a map")
    if key.shape[0] != batch or key.shape[3] not in key_widths:
        widths = " or ".join(map(str, key_widths))
        raise ShapeError(
            f"key: shape {tuple(key.shape)} does not fit query {tuple(query.shape)}; "
            f"it must be (B, G, S, width) with B = {batch} and width = {widths}"
        )
    if groups == 0 or heads % groups:
        raise ShapeError(
            f"query has H = {heads} heads and key G = {groups} groups; H must be a multiple of G: "
            "give key and value a number of heads that divides the query's"
        )
    if value is not None and (value.shape[:3] != key.shape[:3] or value.shape[3] == 0):
        raise ShapeError(
            f"value: shape {tuple(value.shape)} does not fit key {tuple(key.shape)}; "
            f"it must be (B, G, S, E) = ({batch}, {groups}, {keys}, E) with E >= 1"
        )
    check_restrictions(restrictions, query, keys)
    if scale is None:
        return width**-0.5
    if not (is_number(scale) and -math.inf < scale < math.inf):
        raise ConfigError(f"scale: {shown(scale)}; it must be a finite number, or None for 1/sqrt(D)")
    return scale
