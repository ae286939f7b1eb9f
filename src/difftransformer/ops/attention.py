"""Differential attention, and ordinary attention with the same arguments, on any backend of the table in `backends.py`.

Dimensions: B batch, H differential heads (for softmax: heads), G key/value groups, T query positions, S key positions,
D width of one map's queries and keys, E value width.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from ..errors import ConfigError, ShapeError
from . import reference
from .backends import select_backend
from .norms import rms_norm
from .problem import Problem, Restrictions, allowed_keys, without_autocast

_FLOATING = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int32, torch.int64)

Norm = tuple[Tensor | None, float, float]  # gain, eps, factor

SeeInputs = Callable[[tuple[tuple[Tensor, Tensor], ...], Restrictions, float], None]
_see_inputs: ContextVar[SeeInputs | None] = ContextVar("difftransformer_watch_inputs", default=None)


@contextmanager
def watching_inputs(see: SeeInputs) -> Iterator[None]:
    """Show what every call gets to a function, on whatever backend it runs: no map is formed for that.

    It is called with the query (B, H, T, D) and key (B, G, S, D) of each map, the first one first, with the restrictions, and
    with what multiplies the logits. `torch.compile` reads it once, when it compiles: enter before that."""
    token = _see_inputs.set(see)
    try:
        yield
    finally:
        _see_inputs.reset(token)


@torch.compiler.assume_constant_result
def _watched() -> SeeInputs | None:
    return _see_inputs.get()


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
        window: With is_causal, a query sees only the last `window` positions, itself included.
        kv_start: (B,) int32 or int64; row b attends only to keys j >= kv_start[b] (left padding).
        kv_lengths: (B,) int32 or int64; row b attends only to keys j < kv_lengths[b] (partly filled caches, right
            padding). Causal and window then align to it: row b's last query sees key kv_lengths[b] - 1. So a causal
            call over whole right-padded sequences (T == S) needs none: no real query sees the padding there.
        cu_seqlens: (N + 1,) int32 or int64, rising from 0 to T: packed documents (B = 1, T = S), each of which attends
            only to itself.
        backend: "auto" or a name of `backend_names()`. A named backend is used or the call raises.

    Returns:
        (B, H, T, E) in the value's dtype.

    Raises:
        ShapeError: a tensor's shape or dtype breaks a rule above.
        ConfigError: restrictions that exclude each other, or a window below 1.
        BackendUnavailable: the backend does not exist or cannot run this problem; says why for each.
    """
    restrictions = Restrictions(attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens)
    return _differential(query, key, value, lam, restrictions, scale, backend, None)


def normed_differential_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lam: Tensor | float,
    weight: Tensor | None,
    *,
    eps: float,
    factor: float = 1.0,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    kv_start: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""Differential attention with the norm of each head's output (arXiv:2410.05258 eq. 3), in one pass where a backend can.

        factor * RMSNorm((softmax(s Q1 K1^T) - lam softmax(s Q2 K2^T)) V) * weight

    The fused pass normalises the head before it is rounded to the value's dtype.

    Args:
        query: As in `differential_attention`, and so are the others not named here.
        key: (B, G, S, 2D) or (B, G, S, D).
        value: (B, G, S, E).
        lam: Weight of the second map.
        weight: (E,), gain of the norm, shared by the heads; None for 1.
        eps: Added to the mean square.
        factor: (1 - lambda_init) in the paper.
        attn_mask: bool.
        is_causal: Bottom-right aligned.
        scale: s, 1/sqrt(D) if None.
        window: In positions; needs is_causal.
        kv_start: (B,).
        kv_lengths: (B,).
        cu_seqlens: (N + 1,).
        backend: "auto" or a name of `backend_names()`.

    Returns:
        (B, H, T, E) in the value's dtype.

    Raises:
        ShapeError: a tensor's shape or dtype breaks a rule.
        ConfigError: restrictions that exclude each other, or a window below 1.
        BackendUnavailable: the backend does not exist or cannot run this problem; says why for each.
    """
    restrictions = Restrictions(attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens)
    if weight is not None and weight.shape != value.shape[-1:]:
        raise ShapeError(
            f"weight: shape {tuple(weight.shape)}; it must be (E,) = ({value.shape[-1]},), the value's width"
        )
    return _differential(query, key, value, lam, restrictions, scale, backend, (weight, eps, factor))


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    """Ordinary attention, softmax(s Q K^T) V (arXiv:1706.03762 eq. 1), with the arguments of `differential_attention`.

    Args:
        query: (B, H, T, D), of one floating dtype with key and value.
        key: (B, G, S, D); H % G == 0, head h reads group h // (H // G).
        value: (B, G, S, E), any width E.
        attn_mask: As in `differential_attention`, and so are the others.
        is_causal: Bottom-right aligned.
        scale: s, 1/sqrt(D) if None.
        window: In positions; needs is_causal.
        kv_start: (B,).
        kv_lengths: (B,).
        cu_seqlens: (N + 1,).
        backend: "auto" or a name of `backend_names()`.

    Returns:
        (B, H, T, E) in the value's dtype.

    Raises:
        ShapeError: a tensor's shape or dtype breaks a rule.
        ConfigError: restrictions that exclude each other, or a window below 1.
        BackendUnavailable: the backend does not exist or cannot run this problem; says why for each.
    """
    restrictions = Restrictions(attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens)
    width = query.shape[-1]
    _check(query, key, value, restrictions, width, (width,))
    batch, heads, queries = query.shape[:3]
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    problem = Problem(
        "softmax",
        query.device.type,
        query.dtype,
        batch,
        heads,
        key.shape[1],
        queries,
        key.shape[2],
        width,
        value.shape[3],
        False,
        is_causal,
        window,
        attn_mask is not None,
        kv_start is not None or kv_lengths is not None,
        kv_start is not None,
        cu_seqlens is not None,
        needs_grad,
    )
    return _run(problem, query, key, value, None, restrictions, scale, backend)


def attention_maps(
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    kv_start: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Both maps of differential attention, for analysis: softmax(s Q1 K1^T) and softmax(s Q2 K2^T).

    The output of `differential_attention` is (A1 - lam A2) V (arXiv:2410.05258 eq. 1). O(n^2) memory.

    Args:
        query: (B, H, T, 2D).
        key: (B, G, S, 2D) or, shared by both maps, (B, G, S, D).
        attn_mask: As in `differential_attention`, and so are the others.
        is_causal: Bottom-right aligned.
        scale: s, 1/sqrt(D) if None.
        window: In positions; needs is_causal.
        kv_start: (B,).
        kv_lengths: (B,).
        cu_seqlens: (N + 1,).

    Returns:
        A1 and A2, (B, H, T, S) each, in fp32 (float64 for float64 inputs). Rows sum to 1, or to 0 where a query may
        attend to nothing.

    Raises:
        ShapeError: a tensor's shape or dtype breaks a rule.
        ConfigError: restrictions that exclude each other, or a window below 1.
    """
    restrictions = Restrictions(attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens)
    if query.dim() == 4 and query.shape[-1] % 2:
        raise ShapeError(
            f"query: last dimension is {query.shape[-1]}; it must be even, (B, H, T, 2D): it holds both maps' queries"
        )
    width = query.shape[-1] // 2
    _check(query, key, None, restrictions, width, (2 * width, width))
    with without_autocast(query.device.type):
        return reference.attention_maps(query, key, restrictions, scale)


def softmax_maps(
    query: Tensor,
    key: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    window: int | None = None,
    kv_start: Tensor | None = None,
    kv_lengths: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """The map of ordinary attention, softmax(s Q K^T) (arXiv:1706.03762 eq. 1), for analysis. O(n^2) memory.

    Args:
        query: (B, H, T, D).
        key: (B, G, S, D).
        attn_mask: As in `differential_attention`, and so are the others.
        is_causal: Bottom-right aligned.
        scale: s, 1/sqrt(D) if None.
        window: In positions; needs is_causal.
        kv_start: (B,).
        kv_lengths: (B,).
        cu_seqlens: (N + 1,).

    Returns:
        (B, H, T, S) in fp32 (float64 for float64 inputs).

    Raises:
        ShapeError: a tensor's shape or dtype breaks a rule.
        ConfigError: restrictions that exclude each other, or a window below 1.
    """
    restrictions = Restrictions(attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens)
    width = query.shape[-1]
    _check(query, key, None, restrictions, width, (width,))
    allowed_BHTS = allowed_keys(restrictions, query.shape[2], key.shape[2], query.device)
    with without_autocast(query.device.type):
        return reference.softmax_map(query, key, scale, allowed_BHTS)


def _differential(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lam: Tensor | float,
    restrictions: Restrictions,
    scale: float | None,
    backend: str,
    norm: Norm | None,
) -> Tensor:
    if query.dim() == 4 and query.shape[-1] % 2:
        raise ShapeError(
            f"query: last dimension is {query.shape[-1]}; it must be even, (B, H, T, 2D): it holds both maps' queries"
        )
    width = query.shape[-1] // 2
    _check(query, key, value, restrictions, width, (2 * width, width))
    batch, heads, queries = query.shape[:3]
    lam = _lam_BHT(lam, query)
    needs_grad = torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or lam.requires_grad
        or (norm is not None and norm[0] is not None and norm[0].requires_grad)
    )
    problem = Problem(
        "differential",
        query.device.type,
        query.dtype,
        batch,
        heads,
        key.shape[1],
        queries,
        key.shape[2],
        width,
        value.shape[3],
        key.shape[3] == width,
        restrictions.is_causal,
        restrictions.window,
        restrictions.attn_mask is not None,
        restrictions.kv_start is not None or restrictions.kv_lengths is not None,
        restrictions.kv_start is not None,
        restrictions.cu_seqlens is not None,
        needs_grad,
    )
    return _run(problem, query, key, value, lam, restrictions, scale, backend, norm)


def _run(
    problem: Problem,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lam: Tensor | None,
    restrictions: Restrictions,
    scale: float | None,
    backend: str,
    norm: Norm | None = None,
) -> Tensor:
    chosen = select_backend(problem, backend)
    see = _watched()
    if see is not None:
        maps = ((query, key),) if lam is None else reference.inputs_of_maps(query, key)
        see(maps, restrictions, maps[0][0].shape[-1] ** -0.5 if scale is None else scale)
    arguments = (query, key, value, lam, restrictions, scale)
    # Dtypes are the caller's: autocast acts in the layers above, not in here.
    with without_autocast(problem.device_type):
        if norm is None:
            return chosen.run(*arguments)
        if chosen.run_normed is not None:
            return chosen.run_normed(*arguments, *norm)
        weight, eps, factor = norm
        return rms_norm(chosen.run(*arguments), weight, eps) * factor


def _lam_BHT(lam: Tensor | float, query: Tensor) -> Tensor:
    """`lam` as three dimensions that broadcast to (B, H, T), in the dtype of the maps."""
    batch, heads, queries = query.shape[:3]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    if not isinstance(lam, Tensor):
        return torch.full((1, 1, 1), lam, dtype=dtype, device=query.device)
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


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    restrictions: Restrictions,
    width: int,
    key_widths: tuple[int, ...],
) -> None:
    """Raise where a shape, dtype or device breaks a rule; costs no wait for a device."""
    tensors = {"query": query, "key": key} if value is None else {"query": query, "key": key, "value": value}
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
        if tensor.device != query.device:
            raise ShapeError(f"{name}: on {tensor.device}, query is on {query.device}; move both to one device")
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
    if any(restriction is not None for restriction in restrictions):
        _check_restrictions(restrictions, query, keys)


def _check_restrictions(restrictions: Restrictions, query: Tensor, keys: int) -> None:
    attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens = restrictions
    batch, heads, queries = query.shape[:3]
    if attn_mask is not None:
        if attn_mask.dtype != torch.bool:
            raise ShapeError(
                f"attn_mask: dtype {attn_mask.dtype}; it must be bool, True = may attend: "
                "convert an additive mask by attn_mask == 0"
            )
        full = (batch, heads, queries, keys)
        tail = full[4 - attn_mask.dim() :] if attn_mask.dim() <= 4 else ()
        if attn_mask.dim() > 4 or any(
            size not in (1, whole) for size, whole in zip(attn_mask.shape, tail, strict=True)
        ):
            raise ShapeError(
                f"attn_mask: shape {tuple(attn_mask.shape)} does not broadcast to (B, H, T, S) = {full}; "
                "give each dimension that size or 1"
            )
    if window is not None:
        if not is_causal:
            raise ConfigError(f"window={window} needs is_causal=True; set it, or say the window with attn_mask")
        if window < 1:
            raise ConfigError(f"window={window}; it must be at least 1 position, the query's own, or None")
    for name, tensor in (("kv_start", kv_start), ("kv_lengths", kv_lengths)):
        if tensor is not None:
            _check_integers(name, tensor, query)
            if tensor.shape != (batch,):
                raise ShapeError(f"{name}: shape {tuple(tensor.shape)}; it must be (B,) = ({batch},), one a row")
            if _is_readable(tensor) and not all(0 <= position <= keys for position in tensor.tolist()):
                raise ShapeError(
                    f"{name}: values {_short(tensor)}; each must lie between 0 and S = {keys}: count in key positions"
                )
    if cu_seqlens is not None:
        if kv_start is not None or kv_lengths is not None:
            raise ConfigError(
                "cu_seqlens and kv_start/kv_lengths were given together; packed documents have no padding: "
                "drop the padding, or unpack"
            )
        _check_integers("cu_seqlens", cu_seqlens, query)
        if batch != 1 or queries != keys:
            raise ShapeError(
                f"cu_seqlens: B = {batch}, T = {queries}, S = {keys}; packed documents need B = 1 and T = S: "
                "flatten the batch into one row"
            )
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
            raise ShapeError(
                f"cu_seqlens: shape {tuple(cu_seqlens.shape)}; it must be (N + 1,), the bounds of N >= 1 documents"
            )
        if _is_readable(cu_seqlens):
            bounds = cu_seqlens.tolist()
            if bounds[0] != 0 or bounds[-1] != queries or bounds != sorted(bounds):
                raise ShapeError(
                    f"cu_seqlens: values {_short(cu_seqlens)}; they must rise from 0 to T = {queries}: "
                    "give the running sum of the documents' lengths"
                )


def _check_integers(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.dtype not in _INTEGERS:
        raise ShapeError(f"{name}: dtype {tensor.dtype}; it must be int32 (or int64): convert it with .to(torch.int32)")
    if tensor.device != query.device:
        raise ShapeError(f"{name}: on {tensor.device}, query is on {query.device}; move both to one device")


def _is_readable(tensor: Tensor) -> bool:
    """Whether values can be read without waiting for a device and without breaking a traced graph."""
    return not torch.compiler.is_compiling() and type(tensor) is Tensor and tensor.device.type == "cpu"


def _short(tensor: Tensor) -> str:
    values = tensor.tolist()
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
