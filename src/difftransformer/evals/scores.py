"""Measurements from items: shares and means with their standard errors."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from ..results import ItemScore, Measurement
from ..statistics import wilson_interval


def single(
    name: str, unit: str, value: float, n: int, at: dict[str, Any], better: Literal["higher", "lower"] | None = None
) -> Measurement:
    """Return a measurement without a standard error."""
    return Measurement(name=name, unit=unit, value=value, standard_error=None, n=n, better=better, at=at)


def proportion(
    name: str, right: Sequence[bool], at: dict[str, Any], *, better: Literal["higher", "lower"] = "higher"
) -> Measurement:
    """Return the share of right items, its binomial standard error sqrt(p (1 - p) / n), and its Wilson interval.

    The share of no items is undefined, NaN.
    """
    n, p = len(right), sum(right) / len(right) if right else math.nan
    low, high = wilson_interval(sum(right), n)
    return Measurement(
        name=name,
        unit="share",
        value=p,
        standard_error=math.sqrt(p * (1 - p) / n),
        n=n,
        better=better,
        at=at,
        low=low,
        high=high,
    )


def mean(
    name: str,
    unit: str,
    values: Sequence[float],
    at: dict[str, Any],
    *,
    weights: Sequence[float] | None = None,
    better: Literal["higher", "lower"] | None = None,
) -> Measurement:
    """Return a mean over items, or a ratio of sums, sum(values) / sum(weights), with its standard error.

    The error is that of the residuals value - mean * weight of a ratio estimator (W. G. Cochran, Sampling Techniques,
    section 6.4). For equal weights it is s / sqrt(n); for one item it is None. Without any weight the mean is undefined, NaN.
    """
    n = len(values)
    weights = [1.0] * n if weights is None else weights
    total = math.fsum(weights)
    value = math.fsum(values) / total if total else math.nan
    error = None
    if n > 1 and total:
        squares = math.fsum((v - value * w) ** 2 for v, w in zip(values, weights, strict=True))
        error = math.sqrt(squares * n / (n - 1)) / total
    return Measurement(name=name, unit=unit, value=value, standard_error=error, n=n, better=better, at=at)


def over_windows(
    name: str, unit: str, values: Any, weights: Any, *, better: Literal["higher", "lower"] | None = None
) -> tuple[Measurement, list[ItemScore]]:
    """Return a ratio of sums over windows and each window's contribution to it. Windows without weight are left out.

    Args:
        name, unit, better: See `Measurement`.
        values, weights: Arrays of one number for each window.
    """
    kept = [(index, float(v), float(w)) for index, (v, w) in enumerate(zip(values, weights, strict=True)) if w]
    row = mean(name, unit, [v for _, v, _ in kept], {}, weights=[w for *_, w in kept], better=better)
    return row, [ItemScore(name=name, item=f"window {index}", score=v, weight=w) for index, v, w in kept]


def details(rows: Iterable[Measurement]) -> list[Measurement]:
    """Return the same measurements, marked for pictures and full tables only."""
    return [replace(row, detail=True) for row in rows]


def mean_of_sets(name: str, rows: Sequence[Measurement]) -> Measurement:
    """Return the mean over sets with its standard error sqrt(sum of squared errors) / sets; n counts all items."""
    errors = [row.standard_error or 0.0 for row in rows]
    return Measurement(
        name=name,
        unit=rows[0].unit,
        value=math.fsum(row.value for row in rows) / len(rows),
        standard_error=math.hypot(*errors) / len(rows),
        n=sum(row.n for row in rows),
        better=rows[0].better,
        at={},
    )
