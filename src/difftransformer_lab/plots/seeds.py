"""Curves and results over training seeds: bands, and a model's results pooled."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from matplotlib.axes import Axes

from difftransformer.errors import ResultsError

from ..results import Curve, Grid, Measurement, TaskResult
from ..statistics import mean_and_standard_error, paired_difference

_WARM_UP_SHARE = 0.15
"""Losses of this first part of training may lie above the drawn range, so that the rest can be told apart."""


@dataclass(frozen=True, kw_only=True)
class Pooled(TaskResult):
    """A model's results over seeds as one result; `seeds` holds them one by one."""

    seeds: list[TaskResult]


def seeds_of(result: TaskResult) -> list[TaskResult]:
    return result.seeds if isinstance(result, Pooled) else [result]


def share_intervals(results: Sequence[TaskResult]) -> str:
    seeds = len(seeds_of(results[0]))
    return f"Student's t intervals of 95 % over {seeds} seeds" if seeds > 1 else "Wilson intervals of 95 % over items"


def pooled(results: Sequence[TaskResult], label: str) -> Pooled:
    """Pool a model's results over seeds.

    Figures are means over seeds with their standard error over seeds, and shares of right answers have Student's t interval
    over seeds, as far as it lies inside [0, 1]; seeds that all agree give none. With one seed, errors and intervals are
    those over items.
    """
    first, *others = results
    tables = [{(row.name, *row.at.items()): row for row in result.measurements} for result in results]
    keys = [key for key in tables[0] if all(key in table for table in tables)]
    grids = first.grids
    if others:
        every = [(grid, _same_grids(grid, others)) for grid in first.grids]
        means = [(grid, np.mean([grid.values, *same], axis=0)) for grid, same in every if same]
        grids = [replace(grid, values=mean.tolist()) for grid, mean in means]
    parts = {field.name: getattr(first, field.name) for field in fields(TaskResult)} | {
        "model": replace(first.model, name=label),
        "measurements": [_pooled([table[key] for table in tables]) for key in keys],
        "items": [],
        "grids": grids,
        "gaps": list(dict.fromkeys(gap for result in results for gap in result.gaps)),
    }
    return Pooled(**parts, seeds=list(results))


def _pooled(rows: Sequence[Measurement]) -> Measurement:
    if len(rows) == 1:
        return rows[0]
    values = [row.value for row in rows]
    statistic = mean_and_standard_error(values)
    whole = replace(rows[0], value=statistic.mean, standard_error=statistic.standard_error, units=None)
    if rows[0].low is None:
        return whole
    interval = paired_difference(values, [0.0] * len(values))
    whole = replace(whole, n=sum(row.n for row in rows), low=None, high=None)
    if not statistic.standard_error or interval.low is None or interval.high is None:
        return whole
    return replace(whole, low=max(0.0, interval.low), high=min(1.0, interval.high))


def _same_grids(grid: Grid, others: Sequence[TaskResult]) -> list[list[list[float]]]:
    """Return the values of the same grid in other results; none where one lacks it or has another shape."""
    shape = list(map(len, grid.values))
    same = (other for result in others for other in result.grids if (other.name, other.at) == (grid.name, grid.at))
    values = [other.values for other in same if list(map(len, other.values)) == shape]
    return values if len(values) == len(others) and len(set(shape)) == 1 else []


def common_values(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that every curve has, and a row of values for each curve.

    Raises:
        ResultsError: a curve whose steps and values differ in number.
    """
    for curve in curves:
        if (steps_there := len(curve.steps)) != (values_there := len(curve.values)):
            raise ResultsError(f"a curve has {steps_there} steps but {values_there} values; run the command again")
    tables = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    steps = sorted(set.intersection(*map(set, tables))) if tables else []
    values = np.array([[table[step] for step in steps] for table in tables], dtype=np.float64)
    return np.array(steps, dtype=np.float64), values.reshape(len(tables), len(steps))


def band(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Return steps that all seeds have, and mean, smallest and largest over seeds there; None where there are none."""
    steps, values = common_values(curves)
    return (steps, values.mean(0), values.min(0), values.max(0)) if steps.size else None


def settled(lines: Sequence[tuple[np.ndarray, np.ndarray]], last: float) -> list[float]:
    """Return the values after the first part of a training of `last` steps; all if there are none."""
    late = [float(v) for x, values in lines for v in values[x >= _WARM_UP_SHARE * last]]
    return late or [float(v) for _, values in lines for v in values]


def limit(ax: Axes, values: Sequence[float], margin: float = 0.06) -> None:
    low, high = min(values), max(values)
    room = (high - low) * margin or abs(high) * 0.05 or 1.0
    ax.set_ylim(low - room, high + room)
