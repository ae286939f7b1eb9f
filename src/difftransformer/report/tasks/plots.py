"""What several tasks' pictures share: a curve a model with bands, and marks."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from difftransformer.report.figures import COLOURS, DASHES, MARKERS, WIDTH_INCHES, _legend_above
from difftransformer.report.tasks import labels
from difftransformer.results import Measurement, TaskResult


def select(result: TaskResult, name: str, **at: Any) -> list[Measurement]:
    """The measurements of a name that were taken at the given places."""
    return [
        row
        for row in result.measurements
        if row.name == name and all(row.at.get(key) == value for key, value in at.items())
    ]


def curves(
    results: Sequence[TaskResult], name: str, along: str, *, height: float = 3.8, log: bool = False, **at: Any
) -> tuple[Figure, Axes]:
    """A line a model of one measurement along one place. Bands: Wilson's interval of a share, else one standard error."""
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    ax = figure.subplots()
    for index, result in enumerate(results):
        rows = sorted(select(result, name, **at), key=lambda row: row.at[along])
        x, y = [row.at[along] for row in rows], [row.value for row in rows]
        colour = COLOURS[index % len(COLOURS)]
        ax.plot(
            x,
            y,
            color=colour,
            linestyle=DASHES[index % len(DASHES)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            markevery=max(1, len(x) // 20),
        )
        ax.fill_between(
            x,
            [row.value - (row.standard_error or 0.0) if row.low is None else row.low for row in rows],
            [row.value + (row.standard_error or 0.0) if row.high is None else row.high for row in rows],
            color=colour,
            alpha=0.18,
            linewidth=0,
        )
    if log:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    _legend_above(figure, handles(results))
    return figure, ax


def handles(results: Sequence[TaskResult]) -> list[Line2D]:
    """A legend's entry for each model."""
    return [
        Line2D(
            [],
            [],
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            linestyle=DASHES[index % len(DASHES)],
            markersize=5,
            label=label,
        )
        for index, label in enumerate(labels(results))
    ]
