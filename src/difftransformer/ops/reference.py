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

from .problem import LOW_PRECISION, Call, Problem, allowed_keys

DESCRIPTION = "the equations in plain PyTorch, n x n maps; subtracts in fp32, once; any order of derivative"

LogitsObserver = Callable[[Tensor, Tensor | None], Tensor]
_logits_observer: ContextVar[LogitsObserver | None] = ContextVar("difftransformer_logits_observer", default=None)


@contextmanager
def observe_logits(observer: LogitsObserver) -> Iterator[None]:
    """Pass every map's logits to `observer` before the softmax, and go on with the logits that it returns.

    The observer gets the scaled logits (B, H, T, S) and the bool mask of allowed keys, which broadcasts to them, or None.
    Differential attention calls it twice, for the first and then for the second map. Observers nest: the inner one gets the
    outer one's output. Only this backend calls them. `torch.compile` looks for an observer once, when it compiles: enter the
    block before that.
    """
    outer = _logits_observer.get()
    both = observer if outer is None else lambda scores, allowed: observer(outer(scores, allowed), allowed)
    token = _logits_observer.set(both)
    try:
        yield
    finally:
        _logits_observer.reset(token)


@torch.compiler.assume_constant_result
def _observer() -> LogitsObserver | None:
    return _logits_observer.get()


def supports(problem: Problem) -> str | None:
    """Return None: this backend runs every problem."""
    return None


def has_quadratic_memory(problem: Problem) -> bool:
    """Return True: both maps are materialised."""
    return True


def softmax_map(query: Tensor, key: Tensor, scale: float, allowed_BHTS: Tensor | None) -> Tensor:
    """One attention map, softmax(s Q K^T), zero where a query may not attend (a row of zeros if it may attend to nothing).

    Args:
        query: (B, H, T, D).
        key: (B, G, S, D); head h reads group h // (H // G).
        scale: s.
        allowed_BHTS: bool, four-dimensional, broadcastable to (B, H, T, S), or None.

    Returns:
        (B, H, T, S) in fp32, or float64 where the inputs are.
    """
    if query.dtype in LOW_PRECISION:
        query, key = query.float(), key.float()
    scores_BHTS = _product_by_group(query * scale, key.mT)
    observer = _observer()
    return softmax_of(scores_BHTS if observer is None else observer(scores_BHTS, allowed_BHTS), allowed_BHTS)


def softmax_of(scores_BHTS: Tensor, allowed_BHTS: Tensor | None) -> Tensor:
    """The map (B, H, T, S) of scaled logits, as `softmax_map` forms it."""
    if allowed_BHTS is None:
        return scores_BHTS.softmax(-1)
    # A finite fill keeps rows with no allowed key free of NaN, in the gradient too; the second fill makes them zero.
    lowest = torch.finfo(scores_BHTS.dtype).min
    return scores_BHTS.masked_fill(~allowed_BHTS, lowest).softmax(-1).masked_fill(~allowed_BHTS, 0.0)


def run(call: Call) -> Tensor:
    """(softmax(s Q1 K1^T) - lam softmax(s Q2 K2^T)) V (arXiv:2410.05258 eq. 1), or softmax(s Q K^T) V without `lam`.

    Scores, softmax and difference are formed in fp32 (float64 for float64), then rounded once to the value's dtype.
    """
    allowed_BHTS = allowed_keys(call.restrictions, call.query.shape[2], call.key.shape[2], call.query.device)
    map_BHTS, *second_BHTS = (softmax_map(*inputs, call.scale, allowed_BHTS) for inputs in call.maps())
    if call.lam is not None:
        map_BHTS = map_BHTS - call.lam.unsqueeze(-1) * second_BHTS[0]
    return weighted_values(map_BHTS, call.value)


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Whether torch.export traces. In torch.compile, torch 2.11 replaces PyTorch's function by True."""
    return torch.compiler.is_exporting()


def weighted_values(map_BHTS: Tensor, value: Tensor) -> Tensor:
    """Return the product (B, H, T, E) of maps, rounded to the value's dtype, and values (B, G, S, E)."""
    return _product_by_group(map_BHTS.to(value.dtype), value)


def _product_by_group(left_BHTX: Tensor, right_BGXY: Tensor) -> Tensor:
    """Return the product (B, H, T, Y) of each head with the matrix of its group."""
    batch, heads, rows, inner = left_BHTX.shape
    groups, _, columns = right_BGXY.shape[1:]
    # A view of heads and rows as one dimension would bound a free length of an exported program.
    if heads != groups and is_exporting():
        return left_BHTX @ right_BGXY.repeat_interleave(heads // groups, 1)
    left_BGRX = left_BHTX.reshape(batch, groups, heads // groups * rows, inner)
    return (left_BGRX @ right_BGXY).view(batch, heads, rows, columns)
