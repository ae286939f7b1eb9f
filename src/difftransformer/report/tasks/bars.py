"""Grouped bars with intervals: a group a place, a bar a model."""

from collections.abc import Callable, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from difftransformer.report.figures import COLOURS, INK, WIDTH_INCHES, _legend_above
from difftransformer.report.tasks import labels
from difftransformer.results import Measurement, TaskResult

_HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx")
_ALL_BARS_WIDTH = 0.8


def bars(
    results: Sequence[TaskResult],
    groups: Sequence[str],
    find: Callable[[TaskResult, str], Measurement | None],
    *,
    form: str,
) -> Figure:
    """A bar for each model in each group, its value written above it; nothing where a model lacks the figure.

    Args:
        results: A model each.
        groups: Their names, from left to right.
        find: A model's figure in a group.
        form: Of the values, such as ".2f".
    """
    figure = Figure(figsize=(WIDTH_INCHES, 3.8), layout="constrained")
    ax = figure.subplots()
    width = _ALL_BARS_WIDTH / len(results)
    size = 9.0 if len(results) * len(groups) <= 24 else 7.0
    for index, result in enumerate(results):
        colour, hatch = COLOURS[index % len(COLOURS)], _HATCHES[index % len(_HATCHES)]
        for place, group in enumerate(groups):
            if (row := find(result, group)) is None:
                continue
            x = place - _ALL_BARS_WIDTH / 2 + (index + 0.5) * width
            low, high = _interval(row)
            ax.bar(x, row.value, 0.92 * width, color=colour, alpha=0.75, hatch=hatch, edgecolor="white", linewidth=0)
            ax.plot([x, x], [low, high], color=INK, linewidth=1.3, solid_capstyle="butt")
            ax.annotate(
                f"{row.value:{form}}",
                (x, high),
                (0, 2),
                textcoords="offset points",
                ha="center",
                va="bottom",
                fontsize=size,
            )
    ax.set_xticks(range(len(groups)), groups)
    ax.set_xlim(-0.6, len(groups) - 0.4)
    ax.grid(False, axis="x")
    ax.tick_params(axis="x", length=0)
    ax.margins(y=0.12)
    ax.set_ylim(bottom=0)
    _legend_above(
        figure,
        [
            Patch(
                facecolor=COLOURS[index % len(COLOURS)],
                alpha=0.75,
                hatch=_HATCHES[index % len(_HATCHES)],
                edgecolor="white",
                linewidth=0,
                label=label,
            )
            for index, label in enumerate(labels(results))
        ],
    )
    return figure


def sets_of(results: Sequence[TaskResult], name: str) -> list[str]:
    """The data sets in which a figure was taken, in the order of their first result."""
    return list(
        dict.fromkeys(
            row.at["set"] for result in results for row in result.measurements if row.name == name and "set" in row.at
        )
    )


def _interval(row: Measurement) -> tuple[float, float]:
    """Of a share Wilson's, else one standard error to each side."""
    error = row.standard_error or 0.0
    return (row.value - error if row.low is None else row.low), (row.value + error if row.high is None else row.high)
