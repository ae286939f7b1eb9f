"""Grouped bars with intervals: a group for each place, a bar for each model."""

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ..results import Measurement, TaskResult
from .curves import interval, labels, select
from .style import INK, colour_of, legend_above, note, panels

_HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx")
_ALL_BARS_WIDTH = 0.8


def bars(
    results: Sequence[TaskResult],
    groups: Sequence[str],
    find: Callable[[TaskResult, str], Sequence[Measurement]],
    *,
    form: str,
) -> Figure:
    """Draw a bar for each model in each group, with its value above it; no bar where a model lacks the measurement.

    Args:
        find: Returns a model's measurements in a group; the first one is drawn.
        form: Format of the values, such as ".2f".
    """
    figure, ((ax,),) = panels(3.8)
    width = _ALL_BARS_WIDTH / len(results)
    size = 9.0 if len(results) * len(groups) <= 24 else 7.0
    patches = []
    for index, (result, label) in enumerate(zip(results, labels(results), strict=True)):
        hatch = _HATCHES[index % len(_HATCHES)]
        look: dict[str, Any] = {"alpha": 0.75, "hatch": hatch, "edgecolor": "white", "linewidth": 0}
        patches.append(Patch(facecolor=colour_of(index), **look, label=label))
        for place, group in enumerate(groups):
            for row in find(result, group)[:1]:
                x = place - _ALL_BARS_WIDTH / 2 + (index + 0.5) * width
                low, high = interval(row)
                ax.bar(x, row.value, 0.92 * width, color=colour_of(index), **look)
                ax.plot([x, x], [low, high], color=INK, linewidth=1.3, solid_capstyle="butt")
                note(ax, f"{row.value:{form}}", (x, high), xytext=(0, 2), ha="center", va="bottom", fontsize=size)
    ax.set_xticks(range(len(groups)), groups)
    ax.set_xlim(-0.6, len(groups) - 0.4)
    ax.grid(False, axis="x")
    ax.tick_params(axis="x", length=0)
    ax.margins(y=0.12)
    ax.set_ylim(bottom=0)
    legend_above(figure, patches)
    return figure


def accuracy_bars(results: Sequence[TaskResult], label: str) -> Figure:
    """Draw the accuracy of each model on each data set, with the y axis labelled `label`."""
    figure = bars(results, sets_of(results), lambda result, name: select(result, "accuracy", set=name), form=".2f")
    figure.axes[0].set(ylim=(0, 1.08), ylabel=label)
    return figure


def sets_of(results: Sequence[TaskResult]) -> list[str]:
    rows = (row for result in results for row in select(result, "accuracy"))
    return list(dict.fromkeys(row.at["set"] for row in rows if "set" in row.at))
