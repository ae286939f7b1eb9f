"""The equations in plain differentiable PyTorch: two n x n maps, any dtype, any device, any order of derivative.

Dimensions: B batch, H differential heads, G key/value groups, T query positions, S key positions, D width of one map's
queries and keys, C = 2D, E value width. A name that ends in `_BGRS`, say, is a tensor of those dimensions, with
R = T * H // G: the queries of all heads of a group, so that keys and values are never repeated.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from .problem import LOW_PRECISION, Problem, Restrictions, allowed_keys

DESCRIPTION = "the equations in plain PyTorch, n x n maps; subtracts in fp32, once; any order of derivative"

Watch = Callable[[Tensor, Tensor | None], Tensor]
_watch: ContextVar[Watch | None] = ContextVar("difftransformer_watch_logits", default=None)


@contextmanager
def watching_logits(watch: Watch) -> Iterator[None]:
    """Show every map's logits to a function before the softmax, and use what it returns.

    It is called with the scaled logits (B, H, T, S) and the bool mask of allowed keys, which broadcasts to them, or None;
    for differential attention once for each of the two maps, the first one first. Inside another `watching_logits` it sees
    what that one made of them. Only this backend calls it. `torch.compile` reads it once, when it compiles: enter before
    that."""
    outer = _watch.get()
    both = watch if outer is None else lambda scores, allowed: watch(outer(scores, allowed), allowed)
    token = _watch.set(both)
    try:
        yield
    finally:
        _watch.reset(token)


@torch.compiler.assume_constant_result
def _watched() -> Watch | None:
    return _watch.get()


def supports(problem: Problem) -> str | None:
    """Why this backend cannot run the problem, or None: it runs every problem."""
    return None


def has_quadratic_memory(problem: Problem) -> bool:
    """Always: both maps are materialised."""
    return True


def softmax_map(query: Tensor, key: Tensor, scale: float | None, allowed_BHTS: Tensor | None) -> Tensor:
    """One attention map, softmax(s Q K^T), zero where a query may not attend (a row of zeros if it may attend nowhere).

    Args:
        query: (B, H, T, D).
        key: (B, G, S, D); head h reads group h // (H // G).
        scale: s, 1/sqrt(D) if None.
        allowed_BHTS: bool, four-dimensional, broadcastable to (B, H, T, S), or None.

    Returns:
        (B, H, T, S) in fp32, or float64 where the inputs are.
    """
    batch, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    scale = width**-0.5 if scale is None else scale
    if query.dtype in LOW_PRECISION:
        query, key = query.float(), key.float()
    q_BGRD = (query * scale).reshape(batch, groups, heads // groups * queries, width)
    scores_BHTS = (q_BGRD @ key.mT).view(batch, heads, queries, keys)
    watch = _watched()
    return softmax_of(scores_BHTS if watch is None else watch(scores_BHTS, allowed_BHTS), allowed_BHTS)


def softmax_of(scores_BHTS: Tensor, allowed_BHTS: Tensor | None) -> Tensor:
    """The map of scaled logits, as `softmax_map` forms it; (B, H, T, S)."""
    if allowed_BHTS is None:
        return scores_BHTS.softmax(-1)
    # A finite fill keeps rows with no allowed key free of NaN, in the gradient too; the second fill makes them zero.
    lowest = torch.finfo(scores_BHTS.dtype).min
    return scores_BHTS.masked_fill(~allowed_BHTS, lowest).softmax(-1).masked_fill(~allowed_BHTS, 0.0)


def attention_maps(
    query: Tensor, key: Tensor, restrictions: Restrictions, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Both maps of differential attention, (B, H, T, S) each; arguments as in `run`."""
    allowed_BHTS = allowed_keys(restrictions, query.shape[2], key.shape[2], query.device)
    first, second = inputs_of_maps(query, key)
    return softmax_map(*first, scale, allowed_BHTS), softmax_map(*second, scale, allowed_BHTS)


def inputs_of_maps(query: Tensor, key: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Query (B, H, T, D) and key (B, G, S, D) of either map of differential attention."""
    width = query.shape[-1] // 2
    query_1, query_2 = query.split(width, -1)
    key_1, key_2 = (key, key) if key.shape[-1] == width else key.split(width, -1)
    return (query_1, key_1), (query_2, key_2)


def run(
    query: Tensor, key: Tensor, value: Tensor, lam: Tensor | None, restrictions: Restrictions, scale: float | None
) -> Tensor:
    """(softmax(s Q1 K1^T) - lam softmax(s Q2 K2^T)) V (arXiv:2410.05258 eq. 1), or softmax(s Q K^T) V without `lam`.

    Scores, softmax and difference are formed in fp32 (float64 for float64), then rounded once to the value's dtype.

    Args:
        query: (B, H, T, 2D); (B, H, T, D) without `lam`.
        key: (B, G, S, 2D), or (B, G, S, D) shared by both maps.
        value: (B, G, S, E).
        lam: fp32 or float64, three-dimensional, broadcastable to (B, H, T), or None.
        restrictions: Who may attend to whom.
        scale: s, 1/sqrt(D) if None.

    Returns:
        (B, H, T, E) in the value's dtype.
    """
    batch, heads, queries = query.shape[:3]
    groups, keys, value_width = value.shape[1:]
    if lam is None:
        allowed_BHTS = allowed_keys(restrictions, queries, keys, query.device)
        map_BHTS = softmax_map(query, key, scale, allowed_BHTS)
    else:
        map_1_BHTS, map_2_BHTS = attention_maps(query, key, restrictions, scale)
        map_BHTS = map_1_BHTS - lam.unsqueeze(-1) * map_2_BHTS
    map_BGRS = map_BHTS.to(value.dtype).view(batch, groups, heads // groups * queries, keys)
    return (map_BGRS @ value).view(batch, heads, queries, value_width)
