"""A curve for each model with its band, and the selection and naming that pictures of task results share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..results import Measurement, TaskResult
from .style import colour_of, legend_above, line_style, panels


def select(result: TaskResult, name: str, **at: Any) -> list[Measurement]:
    """Return the measurements with this name that were taken at the given places."""
    named = (row for row in result.measurements if row.name == name)
    return [row for row in named if all(row.at.get(key) == value for key, value in at.items())]


def labels(results: Sequence[TaskResult]) -> list[str]:
    return short_names([result.model.name for result in results])


def short_names(models: Sequence[str]) -> list[str]:
    """Return a short name for each model: the end of its path, longer where two models would have the same name."""
    paths = [Path(model) for model in models]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def interval(row: Measurement) -> tuple[float, float]:
    """Return the Wilson interval of a share, or one standard error to each side."""
    error = row.standard_error or 0.0
    return (row.value - error if row.low is None else row.low), (row.value + error if row.high is None else row.high)


def curves(
    results: Sequence[TaskResult], name: str, along: str, *, log: bool = False, **at: Any
) -> tuple[Figure, Axes]:
    """Draw a measurement over the place `along`, a line for each model; the bands are `interval`."""
    figure, ((ax,),) = panels(3.8)
    for index, result in enumerate(results):
        rows = sorted(select(result, name, **at), key=lambda row: row.at[along])
        x, y = [row.at[along] for row in rows], [row.value for row in rows]
        ax.plot(x, y, **line_style(index), markersize=4, markevery=max(1, len(x) // 20))
        low, high = np.array([interval(row) for row in rows]).reshape(-1, 2).T
        ax.fill_between(x, low, high, color=colour_of(index), alpha=0.18, linewidth=0)
    if log:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    legend_above(figure, handles(results))
    return figure, ax


def handles(results: Sequence[TaskResult]) -> list[Line2D]:
    return [
        Line2D([], [], **line_style(index), markersize=5, label=label) for index, label in enumerate(labels(results))
    ]
