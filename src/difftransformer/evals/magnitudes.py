"""The largest and the median of many absolute values, in memory that does not grow with their number.

The largest are exact. The median is that of the values rounded to bf16 (8 significant bits): exact for bf16 numbers, and within
2^-8 of any other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import EvaluationError

_BINS = 1 << 15
"""A bin for each number that is not negative in bf16: its 15 bits are the bin's index."""

_FIRST_NOT_FINITE = 0x7F80


class Magnitude:
    """Collects absolute values.

    Args:
        name: Of what, for messages.
        largest: k, how many of the largest are kept.
    """

    def __init__(self, name: str, largest: int) -> None:
        self.name, self.largest = name, largest
        self.counts = torch.zeros(_BINS, dtype=torch.int64)
        self.top = torch.empty(0)

    def add(self, values: Tensor, allowed: Tensor | None = None) -> None:
        """Count more values, of any shape and floating dtype; of those with a bool mask, where it is True.

        Raises:
            EvaluationError: one of them is not finite.
        """
        sizes, count = values.detach().float().abs(), values.numel()
        if allowed is not None:
            # Zeros in place of the others, taken off again below: cheaper than picking the values.
            sizes = sizes.masked_fill_(~allowed, 0)
            count = int(allowed.sum()) * (values.numel() // allowed.numel())
        if not count:
            return
        sizes = sizes.flatten()
        places = sizes.bfloat16().view(torch.int16) & (_BINS - 1)  # a number that is none may keep its sign
        bins = torch.bincount(places, minlength=_BINS).cpu()
        bins[0] -= len(sizes) - count
        if int(bins[_FIRST_NOT_FINITE:].sum()):
            raise EvaluationError(f"{self.name}: some are not finite in this dtype; use --dtype fp32")
        self.counts += bins
        if len(self.top) == self.largest:
            sizes = sizes[sizes > self.top[-1]]
        best = sizes.topk(min(self.largest, count, len(sizes))).values.cpu()
        self.top = torch.cat((self.top, best)).sort(descending=True).values[: self.largest].clone()

    def summary(self) -> dict[str, Any]:
        """`largest` in descending order, and the bins that are not empty with their counts."""
        filled = self.counts.nonzero().flatten()
        return {"largest": self.top.tolist(), "bins": filled.tolist(), "counts": self.counts[filled].tolist()}


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of all values: how many, the largest in descending order, and the median."""

    count: int
    largest: list[float]
    median: float


def merged(summaries: Sequence[dict[str, Any]], largest: int) -> Spread:
    """The largest and the median of several collections' values together.

    Args:
        summaries: `Magnitude.summary` of each.
        largest: At most what each of them kept.
    """
    counts = np.zeros(_BINS, np.int64)
    for summary in summaries:
        counts[summary["bins"]] += summary["counts"]
    total, below = int(counts.sum()), counts.cumsum()
    middle = np.searchsorted(below, [(total - 1) // 2, total // 2], side="right")
    values = (middle.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    top = sorted((value for summary in summaries for value in summary["largest"]), reverse=True)
    return Spread(count=total, largest=top[:largest], median=float(values.mean()))
