"""Curves and results over training seeds: bands, paired differences, and a model's results pooled."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from difftransformer.errors import ResultsError
from difftransformer_lab.plots.style import WIDTH_INCHES, line_style
from difftransformer_lab.results import Curve, Grid, Measurement, TaskResult
from difftransformer_lab.statistics import CONFIDENCE, mean_and_standard_error, paired_difference

_WARM_UP_SHARE = 0.15
"""Losses of this first part of training may lie above the drawn range, so that the rest can be told apart."""


@dataclass(frozen=True)
class Band:
    """A curve over x: the mean over seeds, and the smallest and largest seed."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int


@dataclass(frozen=True)
class DifferenceBand:
    """One model minus another over x: each seed, the mean and, from two seeds on, Student's t interval."""

    x: np.ndarray
    per_seed: np.ndarray
    mean: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None


@dataclass(frozen=True, kw_only=True)
class Pooled(TaskResult):
    """A model's results over seeds as one result; `seeds` holds them one by one."""

    seeds: list[TaskResult]


def seeds_of(result: TaskResult) -> list[TaskResult]:
    """Return the per-seed results of a pooled result, or `[result]`."""
    return result.seeds if isinstance(result, Pooled) else [result]


def share_intervals(results: Sequence[TaskResult]) -> str:
    """Return words for the intervals of shares in a caption."""
    seeds = len(seeds_of(results[0]))
    return f"Student's t intervals of 95 % over {seeds} seeds" if seeds > 1 else "Wilson intervals of 95 % over items"


def pooled(results: Sequence[TaskResult], label: str) -> Pooled:
    """Pool a model's results over seeds.

    Figures are means over seeds with their standard error over seeds, and shares of right answers have Student's t interval
    over seeds, as far as it lies inside [0, 1]; seeds that all agree give none. With one seed, errors and intervals are
    those over items.

    Args:
        results: Results of one task, one for each seed.
        label: Name of the model.
    """
    first, *others = results
    tables = [{(row.name, *row.at.items()): row for row in result.measurements} for result in results]
    keys = [key for key in tables[0] if all(key in table for table in tables)]
    grids = [grid for grid in first.grids if not others] + [
        replace(grid, values=np.mean([grid.values, *found], axis=0).tolist())
        for grid in first.grids
        if others and (found := _same_grids(grid, others))
    ]
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
    found = paired_difference(values, [0.0] * len(values))
    whole = replace(whole, n=sum(row.n for row in rows), low=None, high=None)
    if not statistic.standard_error or found.low is None or found.high is None:
        return whole
    return replace(whole, low=max(0.0, found.low), high=min(1.0, found.high))


def _same_grids(grid: Grid, others: Sequence[TaskResult]) -> list[list[list[float]]]:
    """Return the values of the same grid in other results; none where one lacks it or has another shape."""
    shape = list(map(len, grid.values))
    found = [
        other.values
        for result in others
        for other in result.grids
        if (other.name, other.at) == (grid.name, grid.at) and list(map(len, other.values)) == shape
    ]
    return found if len(found) == len(others) and len(set(shape)) == 1 else []


def common_values(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that every curve has, and a row of values for each curve.

    Raises:
        ResultsError: a curve whose steps and values differ in number.
    """
    tables: list[dict[int, float]] = []
    for curve in curves:
        if len(curve.steps) != len(curve.values):
            raise ResultsError(
                f"a curve has {len(curve.steps)} steps but {len(curve.values)} values; run the command again"
            )
        tables.append(dict(zip(curve.steps, curve.values, strict=True)))
    steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    values = np.array([[table[step] for step in steps] for table in tables], dtype=np.float64)
    return np.array(steps, dtype=np.float64), values.reshape(len(tables), len(steps))


def band(curves: Sequence[Curve]) -> Band | None:
    """Return mean, smallest and largest over seeds at the steps that all seeds have; None where there are none."""
    steps, values = common_values(curves)
    if steps.size == 0:
        return None
    return Band(x=steps, mean=values.mean(0), low=values.min(0), high=values.max(0), seeds=len(curves))


def difference_band(first: Sequence[Curve], second: Sequence[Curve]) -> DifferenceBand | None:
    """Return one model's curves minus another's, seed by seed; None where they share no step."""
    steps, values = common_values([*first, *second])
    if steps.size == 0 or len(first) != len(second):
        return None
    per_seed = values[: len(first)] - values[len(first) :]
    zeros = [0.0] * len(first)
    intervals = [paired_difference(list(column), zeros, CONFIDENCE) for column in per_seed.T]
    bounds = [(i.low, i.high) for i in intervals if i.low is not None and i.high is not None]
    low, high = np.array(bounds).T if bounds else (None, None)
    return DifferenceBand(x=steps, per_seed=per_seed, mean=per_seed.mean(0), low=low, high=high)


def over_difference(differences: int) -> tuple[Figure, Axes, Axes | None]:
    """Return a figure with a tall panel, and below it one for differences if there are any."""
    figure = Figure(figsize=(WIDTH_INCHES, 5.6 if differences else 4.0), layout="constrained")
    if not differences:
        return figure, figure.subplots(), None
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2.6) if differences == 1 else (4, 4))
    return figure, top, bottom


def draw_differences(
    ax: Axes, differences: Sequence[tuple[int, DifferenceBand]], title: str, last: float = 0.0
) -> None:
    """Draw mean differences with their intervals, and thin lines for single seeds; the lines decide the range.

    Args:
        ax: The panel.
        differences: Number of the model in its figure, and its difference to the reference.
        title: Title of the panel.
        last: Last step of a training, whose first part does not decide the range.
    """
    for index, difference in differences:
        style = line_style(index)
        for row in difference.per_seed if len(difference.per_seed) > 1 else ():
            ax.plot(difference.x, row, color=style["color"], linewidth=0.7, alpha=0.6)
        if difference.low is not None and difference.high is not None:
            ax.fill_between(
                difference.x, difference.low, difference.high, color=style["color"], alpha=0.18, linewidth=0
            )
        ax.plot(difference.x, difference.mean, **style, markersize=5, markevery=max(1, len(difference.x) // 20))
    ax.axhline(0, color="#555555", linewidth=0.9, linestyle="--")
    limit(ax, [*settled([(band.x, row) for _, band in differences for row in band.per_seed], last), 0.0], margin=0.35)
    ax.set_ylabel("difference")
    ax.set_title(title, loc="left", fontsize=9.5)


def difference_words(what: str, reference: str, seeds: int) -> str:
    """Return the sentence of a caption on the panel of differences."""
    words = f" Below: the {what} minus that of {reference}; below zero is better"
    if seeds > 1:
        return words + (
            ", thin lines seed by seed, the thick line their mean, the band Student's t interval "
            f"({100 * CONFIDENCE:g} %) at each point by itself; with few seeds it may leave the drawn range."
        )
    return words + ". One seed, so there is no interval over training."


def settled(lines: Sequence[tuple[np.ndarray, np.ndarray]], last: float) -> list[float]:
    """Return the values after the first part of a training of `last` steps; all if there are none."""
    late = [float(v) for x, values in lines for v in values[x >= _WARM_UP_SHARE * last]]
    return late or [float(v) for _, values in lines for v in values]


def limit(ax: Axes, values: Sequence[float], margin: float = 0.06) -> None:
    """Set the range of y to the values with a margin."""
    low, high = min(values), max(values)
    room = (high - low) * margin or abs(high) * 0.05 or 1.0
    ax.set_ylim(low - room, high + room)
