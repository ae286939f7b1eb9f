"""Measurements from items: shares and means with their standard errors."""

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

from ..results import ItemScore, Measurement
from ..statistics import effective_trials, ratio, wilson_interval


def single(
    name: str, unit: str, value: float, n: int, at: dict[str, Any], better: Literal["higher", "lower"] | None = None
) -> Measurement:
    return Measurement(name=name, unit=unit, value=value, standard_error=None, n=n, better=better, at=at)


def by_unit(values: Sequence[float], units: Sequence[Hashable]) -> tuple[list[Hashable], list[float], list[float]]:
    """Return the units, and the sum and number of values of each."""
    sums: dict[Hashable, list[float]] = {}
    for value, unit in zip(values, units, strict=True):
        sums.setdefault(unit, []).append(value)
    return list(sums), [math.fsum(own) for own in sums.values()], [float(len(own)) for own in sums.values()]


def proportion(
    name: str,
    right: Sequence[float],
    at: dict[str, Any],
    *,
    units: Sequence[Hashable] | None = None,
    better: Literal["higher", "lower"] | None = "higher",
) -> Measurement:
    """Return the share of right answers with its standard error and its Wilson interval.

    Args:
        right: For each answer whether it is right, or what it counts from 0 to 1.
        units: For each answer its document, or what else it shares with others; answers of one unit are not independent.
            None where every answer stands for itself: the standard error is then sqrt(p (1 - p) / n).

    The share of no answers is undefined, NaN.
    """
    n, p = len(right), sum(right) / len(right) if right else math.nan
    error: float | None = math.sqrt(p * (1 - p) / n) if right else math.nan
    trials, count = float(n), None
    if units is not None and len(set(units)) < n:
        _, sums, sizes = by_unit(right, units)
        error, trials, count = ratio(sums, sizes)[1], effective_trials(sums, sizes), len(sums)
    low, high = wilson_interval(p * trials if right else 0, trials)
    whole = single(name, "share", p, n, at, better)
    return replace(whole, standard_error=error, low=low, high=high, units=count)


def mean(
    name: str,
    unit: str,
    values: Sequence[float],
    at: dict[str, Any],
    *,
    weights: Sequence[float] | None = None,
    units: Sequence[Hashable] | None = None,
    better: Literal["higher", "lower"] | None = None,
) -> Measurement:
    """Return a mean over items, or a ratio of sums, sum(values) / sum(weights), with its standard error (`ratio`).

    Args:
        units: For each item of weight 1 its document, or what else it shares with others, as in `proportion`.
    """
    n, count = len(values), None
    weights = [1.0] * n if weights is None else weights
    if units is not None and len(set(units)) < n:
        _, values, weights = by_unit(values, units)
        count = len(values)
    value, error = ratio(values, weights)
    return replace(single(name, unit, value, n, at, better), standard_error=error, units=count)


def unit_scores(name: str, values: Sequence[float], units: Sequence[Hashable]) -> list[ItemScore]:
    """Return each unit's contribution to the measurement `name`: the sum and, as weight, the number of its values."""
    return [
        ItemScore(name=name, item=str(unit), score=score, weight=weight)
        for unit, score, weight in zip(*by_unit(values, units), strict=True)
    ]


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
    """Mark measurements for pictures and full tables only."""
    return [replace(row, detail=True) for row in rows]


def accuracy_of_sets(answers: Sequence[tuple[str, Hashable, bool]]) -> tuple[list[Measurement], list[ItemScore]]:
    """Return the accuracy on each data set and its mean over sets, from (set, unit, is right) for each answer."""
    sets: dict[str, list[tuple[Hashable, bool]]] = {}
    for name, unit, is_right in answers:
        sets.setdefault(name, []).append((unit, is_right))
    columns = {name: tuple(zip(*rows, strict=True)) for name, rows in sets.items()}
    accuracies = [proportion("accuracy", right, {"set": name}, units=units) for name, (units, right) in columns.items()]
    items = [item for units, right in columns.values() for item in unit_scores("accuracy", right, units)]
    return [*accuracies, mean_of_sets(accuracies)], items


def mean_of_sets(rows: Sequence[Measurement]) -> Measurement:
    """Return the mean accuracy over sets; n counts all items.

    The standard error is sqrt(sum of squared errors) / sets, and the interval adds the sets' distances from their bounds
    in the same way (R. G. Newcombe, Statistics in Medicine 17, 1998).
    """
    value = math.fsum(row.value for row in rows) / len(rows)
    below = [row.value - row.low for row in rows if row.low is not None]
    above = [row.high - row.value for row in rows if row.high is not None]
    errors = [row.standard_error for row in rows if row.standard_error is not None]
    return replace(
        rows[0],
        name="mean accuracy",
        value=value,
        standard_error=math.hypot(*errors) / len(rows) if len(errors) == len(rows) else None,
        n=sum(row.n for row in rows),
        at={},
        low=value - math.hypot(*below) / len(rows),
        high=value + math.hypot(*above) / len(rows),
        units=sum(row.units or row.n for row in rows) if any(row.units for row in rows) else None,
    )
