"""What an attention call asks for: which keys each query may attend to, and the facts by which a backend is chosen.

Dimensions: B batch, H differential heads, G key/value groups, T query positions, S key positions, D width of one map's
queries and keys, E value width. `q` and `k` below are positions, not tensors.
"""

import contextlib
import numbers
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor

from ..errors import ConfigError, ShapeError

LOW_PRECISION = (torch.bfloat16, torch.float16)
FORBIDDEN = torch.finfo(torch.float16).min  # an additive mask that is as low as this forbids in every dtype
_INTEGERS = (torch.int32, torch.int64)
LARGEST_WINDOW = 2**31 - 1  # positions are int32 in kernels


def without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    """Disable autocast inside the block: the dtypes of the operators are explicit."""
    if _has_autocast(device_type) and torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


@torch.compiler.assume_constant_result
def _has_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)  # torch 2.11 cannot trace it


class Restrictions(NamedTuple):
    """The keys that each query may attend to. All restrictions hold at once.

    This is the one form they have between the keywords of a public function and the arguments of an operator, which takes
    the fields in this order (`SCHEMA`).

    Attributes:
        attn_mask: bool, broadcastable to (B, H, T, S); True = may attend.
        is_causal: The last query attends to the last key (bottom-right alignment), each earlier query to one key less.
        window: With `is_causal`, a query attends only to the last `window` of those positions, itself included.
        kv_start: (B,) integers; row b attends only to keys j >= kv_start[b].
        kv_lengths: (B,) integers; row b attends only to keys j < kv_lengths[b], and causal alignment is to kv_lengths[b].
        cu_seqlens: (N + 1,) integers; document i is positions cu_seqlens[i] <= t < cu_seqlens[i + 1], and attends only to
            itself.
    """

    attn_mask: Tensor | None = None
    is_causal: bool = False
    window: int | None = None
    kv_start: Tensor | None = None
    kv_lengths: Tensor | None = None
    cu_seqlens: Tensor | None = None


class RestrictionKeywords(TypedDict, total=False):
    """The fields of `Restrictions` as keywords of a public function, which `differential_attention` describes."""

    attn_mask: Tensor | None
    is_causal: bool
    window: int | None
    kv_start: Tensor | None
    kv_lengths: Tensor | None
    cu_seqlens: Tensor | None


SCHEMA = (
    "Tensor? attn_mask",
    "bool is_causal",
    "int? window",
    "Tensor? kv_start",
    "Tensor? kv_lengths",
    "Tensor? cu_seqlens",
)
"""The fields of `Restrictions` in the language of operator schemas."""


Norm = tuple[Tensor | None, float, float | Tensor]
"""Weight or None, eps and factor of a norm of each head's output. Backends get the factor as a float."""


class Call(NamedTuple):
    """The checked arguments of one call, as a backend takes them.

    Attributes:
        query: (B, H, T, 2D); (B, H, T, D) without `lam`.
        key: (B, G, S, 2D), or (B, G, S, D) shared by both maps.
        value: (B, G, S, E).
        lam: fp32 or float64, three-dimensional, broadcastable to (B, H, T); None for ordinary attention.
        restrictions: The keys that each query may attend to.
        scale: s, which multiplies the logits.
        norm: The norm of each head's output, or None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    lam: Tensor | None
    restrictions: Restrictions
    scale: float
    norm: Norm | None = None

    @property
    def width(self) -> int:
        """D."""
        return self.query.shape[-1] // (1 if self.lam is None else 2)

    def maps(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Return the query (B, H, T, D) and the key (B, G, S, D) of each map."""
        return ((self.query, self.key),) if self.lam is None else inputs_of_maps(self.query, self.key)


def inputs_of_maps(query: Tensor, key: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the query (B, H, T, D) and the key (B, G, S, D) of each map of differential attention."""
    width = query.shape[-1] // 2
    query_1, query_2 = query.split(width, -1)
    key_1, key_2 = (key, key) if key.shape[-1] == width else key.split(width, -1)
    return (query_1, key_1), (query_2, key_2)


@dataclass(frozen=True)
class Problem:
    """What the choice of a backend may depend on: shapes and flags, never the values in a tensor.

    Attributes:
        op: "differential" or "softmax".
        device_type: As in `torch.device.type`.
        dtype: The dtype of query, key and value.
        batch: B.
        heads: H.
        groups: G; H // G heads read each group's keys and values.
        queries: T.
        keys: S.
        width: D, the width of one map's queries and keys.
        value_width: E.
        shared_key: Whether both maps read one key of width D.
        is_causal: Whether the call is causal, aligned to the bottom right.
        window: Sliding window in positions, or None.
        attn_mask: Whether a bool mask is given.
        kv_range: Whether kv_start or kv_lengths is given.
        kv_start: Whether kv_start is given.
        cu_seqlens: Whether documents are packed.
        needs_grad: Whether the output needs a gradient.
    """

    op: str
    device_type: str
    dtype: torch.dtype
    batch: int
    heads: int
    groups: int
    queries: int
    keys: int
    width: int
    value_width: int
    shared_key: bool = False
    is_causal: bool = False
    window: int | None = None
    attn_mask: bool = False
    kv_range: bool = False
    kv_start: bool = False
    cu_seqlens: bool = False
    needs_grad: bool = False

    @classmethod
    def of(cls, call: Call) -> "Problem":
        """Describe a call."""
        query, key, value, lam, restrictions, _, norm = call
        inputs = (query, key, value, lam, None if norm is None else norm[0])
        return cls(
            op="softmax" if lam is None else "differential",
            device_type=query.device.type,
            dtype=query.dtype,
            batch=query.shape[0],
            heads=query.shape[1],
            groups=key.shape[1],
            queries=query.shape[2],
            keys=key.shape[2],
            width=call.width,
            value_width=value.shape[3],
            shared_key=lam is not None and key.shape[3] == call.width,
            is_causal=restrictions.is_causal,
            window=restrictions.window,
            attn_mask=restrictions.attn_mask is not None,
            kv_range=restrictions.kv_start is not None or restrictions.kv_lengths is not None,
            kv_start=restrictions.kv_start is not None,
            cu_seqlens=restrictions.cu_seqlens is not None,
            needs_grad=torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs),
        )

    @property
    def needs_mask(self) -> bool:
        """Whether ordinary attention calls, which align causal masks to the top left, need a T x S mask for this."""
        if self.attn_mask or self.kv_range or self.cu_seqlens:
            return True
        if not self.is_causal:
            return False
        if self.window is not None and self.window < self.keys:
            return True
        return self.queries not in (1, self.keys)


def allowed_keys(
    restrictions: Restrictions,
    num_queries: int,
    num_keys: int,
    device: torch.device,
    query_range: tuple[int, int] | None = None,
    key_range: tuple[int, int] | None = None,
) -> Tensor | None:
    """Return the bool mask of a rectangle of the attention map, True = may attend, or None where nothing is restricted.

    Args:
        restrictions: The restrictions of the whole call.
        num_queries: T.
        num_keys: S.
        device: Device of the mask. No value is read back from it.
        query_range: Rows first <= t < last of the rectangle; all if None.
        key_range: Columns first <= j < last of the rectangle; all if None.

    Returns:
        bool, four-dimensional, each dimension either 1 or that of (B, H, rows, columns).
    """
    row_first, row_last = query_range or (0, num_queries)
    column_first, column_last = key_range or (0, num_keys)
    attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens = restrictions
    conditions = []
    q_T1 = torch.arange(row_first, row_last, device=device).unsqueeze(-1)
    k_S = torch.arange(column_first, column_last, device=device)
    if is_causal:
        offset = num_keys - num_queries if kv_lengths is None else kv_lengths[:, None, None, None] - num_queries
        newest = q_T1 + offset
        conditions.append(k_S <= newest)
        if window is not None:
            conditions.append(k_S > newest - window)
    if kv_start is not None:
        conditions.append(k_S >= kv_start[:, None, None, None])
    if kv_lengths is not None:
        conditions.append(k_S < kv_lengths[:, None, None, None])
    if cu_seqlens is not None:
        boundaries = cu_seqlens.to(k_S.dtype)
        conditions.append(
            torch.searchsorted(boundaries, q_T1, right=True) == torch.searchsorted(boundaries, k_S, right=True)
        )
    if attn_mask is not None:
        attn_mask_BHTS = attn_mask[(None,) * (4 - attn_mask.dim())]
        if query_range is not None and attn_mask_BHTS.shape[2] != 1:
            attn_mask_BHTS = attn_mask_BHTS[:, :, row_first:row_last]
        if key_range is not None and attn_mask_BHTS.shape[3] != 1:
            attn_mask_BHTS = attn_mask_BHTS[..., column_first:column_last]
        conditions.append(attn_mask_BHTS)
    if not conditions:
        return None
    allowed = conditions[0]
    for condition in conditions[1:]:
        allowed = allowed & condition
    return allowed[(None,) * (4 - allowed.dim())]


def seen_keys(
    restrictions: Restrictions, queries: int, keys: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """Return the interval of keys of each query, its first key and one past its last, (B, T) or (1, T) each in int32.

    Ends may cross or lie outside the keys. The bool mask is left out. The result is None where nothing else is restricted.
    """
    _, is_causal, window, kv_start, kv_lengths, cu_seqlens = restrictions
    if is_causal and queries == 1 and kv_lengths is None and (window is None or window >= keys):
        is_causal = False
    if not is_causal and kv_start is None and kv_lengths is None and cu_seqlens is None:
        return None
    q_1T = torch.arange(queries, dtype=torch.int32, device=device).unsqueeze(0)
    first, last = torch.zeros_like(q_1T), torch.full_like(q_1T, keys)
    if kv_start is not None:
        first = torch.maximum(first, kv_start.to(torch.int32).unsqueeze(-1))
    if kv_lengths is not None:
        last = torch.minimum(last, kv_lengths.to(torch.int32).unsqueeze(-1))
    if is_causal:
        offset = keys - queries if kv_lengths is None else kv_lengths.to(torch.int32).unsqueeze(-1) - queries
        after_newest = q_1T + offset + 1
        last = torch.minimum(last, after_newest)
        if window is not None:
            first = torch.maximum(first, after_newest - window)
    if cu_seqlens is not None:
        bounds = cu_seqlens.to(torch.int32)
        following = torch.searchsorted(bounds, q_1T, right=True)
        first = torch.maximum(first, bounds[following - 1])
        last = torch.minimum(last, bounds[following])
    return torch.broadcast_tensors(first, last)


def is_number(x: object) -> bool:
    """Whether `x` is a real number, or stands for one in a traced graph."""
    return isinstance(x, numbers.Real | torch.SymInt | torch.SymFloat)


def shown(x: object) -> str:
    """Return a value as error messages show it: itself if it is a number or None, else its type."""
    return repr(x) if x is None or is_number(x) else f"a {type(x).__name__}"


def check_tensor(name: str, x: object, other: Tensor, name_of_other: str = "query") -> None:
    """Raise ShapeError unless `x` is a tensor on the device of the `other` one."""
    if not isinstance(x, Tensor):
        raise ShapeError(f"{name}: {shown(x)}; it must be a tensor")
    if x.layout != torch.strided:
        layout = str(x.layout).removeprefix("torch.")
        raise ShapeError(f"{name}: layout {layout}; it must be strided: convert it with .to_dense()")
    if x.device != other.device:
        raise ShapeError(f"{name}: on {x.device}, {name_of_other} is on {other.device}; move both to one device")


def bool_mask(mask: Tensor, name: str) -> Tensor:
    """Return a bool mask, True = may attend, from a bool mask or from one that is added to the logits.

    Raises:
        ShapeError: an additive mask holds other values than 0 and -inf, or the lowest number of a dtype.
    """
    if mask.dtype == torch.bool:
        return mask
    allowed = mask == 0
    if not mask.is_floating_point() or not bool((allowed | (mask <= FORBIDDEN)).all()):
        raise ShapeError(
            f"{name} of {mask.dtype} with shape {tuple(mask.shape)} is neither bool (True = may attend) nor additive with "
            f"values 0 and -inf (at most {FORBIDDEN:g}); biases cannot be added to the logits"
        )
    return allowed


def check_restrictions(restrictions: Restrictions, query: Tensor, keys: int) -> None:
    """Check restrictions against a query (B, H, T, ...) and the number of keys, without waiting for a device.

    Raises:
        ShapeError: a shape, dtype or device does not fit, or a value that can be read lies outside its range.
        ConfigError: restrictions that exclude each other, or a window that is not an int or is below 1.
    """
    attn_mask, is_causal, window, kv_start, kv_lengths, cu_seqlens = restrictions
    batch, heads, queries = query.shape[:3]
    if not isinstance(is_causal, bool):
        raise ConfigError(f"is_causal: {shown(is_causal)}; it must be True or False")
    if attn_mask is not None:
        check_tensor("attn_mask", attn_mask, query)
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
        if not isinstance(window, numbers.Integral | torch.SymInt) or isinstance(window, bool):
            raise ConfigError(f"window: {shown(window)}; it must be an int, a number of positions, or None")
        if not is_causal:
            raise ConfigError(f"window={window} needs is_causal=True; set it, or say the window with attn_mask")
        if window < 1:
            raise ConfigError(f"window={window}; it must be at least 1 position, the query's own, or None")
        if window > LARGEST_WINDOW:
            raise ConfigError(
                f"window={window}; it must be at most {LARGEST_WINDOW} positions, or None for all of them"
            )
    for name, tensor in (("kv_start", kv_start), ("kv_lengths", kv_lengths)):
        if tensor is not None:
            _check_integers(name, tensor, query)
            if tensor.shape != (batch,):
                raise ShapeError(f"{name}: shape {tuple(tensor.shape)}; it must be (B,) = ({batch},), one a row")
            if is_readable(tensor) and not all(0 <= position <= keys for position in tensor.tolist()):
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
        if is_readable(cu_seqlens):
            bounds = cu_seqlens.tolist()
            if bounds[0] != 0 or bounds[-1] != queries or bounds != sorted(bounds):
                raise ShapeError(
                    f"cu_seqlens: values {_short(cu_seqlens)}; they must rise from 0 to T = {queries}: "
                    "give the running sum of the documents' lengths"
                )


def _check_integers(name: str, tensor: Tensor, query: Tensor) -> None:
    check_tensor(name, tensor, query)
    if tensor.dtype not in _INTEGERS:
        raise ShapeError(f"{name}: dtype {tensor.dtype}; it must be int32 (or int64): convert it with .to(torch.int32)")


def is_readable(tensor: Tensor) -> bool:
    """Whether values can be read without waiting for a device and without breaking a traced graph."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) is Tensor
        and tensor.device.type == "cpu"
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)  # of vmap, for example
    )


def _short(tensor: Tensor) -> str:
    values = tensor.tolist()
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
