"""Where attention goes: stacked bars by the answer's depth, and the answer's share by layer and head."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from difftransformer.plots.curves import labels, select
from difftransformer.plots.style import ACCURACY_COLOURS, COLOURS, INK, WIDTH_INCHES, legend_above
from difftransformer.results import Grid, TaskResult

SEGMENTS = ("first", "before", "answer", "after", "query")
_SEGMENT_WORDS = {
    "first": "first token",
    "before": "context before",
    "answer": "answer",
    "after": "context after",
    "query": "query",
}
_SEGMENT_COLOURS = dict(zip(SEGMENTS, (COLOURS[4], "#8c8c8c", COLOURS[0], "#c9c9c9", COLOURS[2]), strict=True))
_BARS = ("signed", "absolute")
_ROW_INCHES = 3.2


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw a row for each model: bars of signed and of absolute weights, and a heat map of the heads if it was kept."""
    grids = [_grid(result) for result in results]
    columns = 3 if any(grids) else 2
    figure = Figure(figsize=(WIDTH_INCHES, _ROW_INCHES * len(results) + 0.6), layout="constrained")
    widths = (1, 1, 0.9)[:columns]
    axes = figure.subplots(len(results), columns, squeeze=False, gridspec_kw={"width_ratios": widths})
    top = max((value for grid in grids if grid for row in grid.values for value in row), default=1.0)
    image: Any = None
    for line, result, label, grid in zip(axes, results, labels(results), grids, strict=True):
        for ax, form in zip(line, _BARS, strict=False):
            _bars(ax, result, form)
            ax.set_title(f"{label}: {form}", loc="left")
        line[0].set_ylabel("share of attention")
        if grid:
            image = _heads(line[2], grid, top)
            line[2].set_title(f"{label}: answer, by head", loc="left")
        elif columns == 3:
            line[2].set_visible(False)
    for ax in axes[-1, :2]:
        ax.set_xlabel("depth of the answer")
    options, first = results[0].options, next((grid for grid in grids if grid), None)
    caption = (
        f"Where the last prompt token looks, over all heads and layers, mean of {options['documents']} documents with "
        f"{options['needles']} needles. Signed weights of both signs cancel inside a segment, absolute ones do not; for "
        "softmax attention both are the same."
    )
    if first:
        axes[-1, 2].set_xlabel("head")
        figure.colorbar(image, ax=list(axes[:, 2]), label="share of |weights|", fraction=0.06, pad=0.02, aspect=30)
        depth = _percent(first.at["depth"])
        caption += f" Right: the answer's share of |weights| in each head, answer at {depth}."
    legend_above(figure, [Patch(color=_SEGMENT_COLOURS[s], label=_SEGMENT_WORDS[s]) for s in SEGMENTS])
    return "Attention allocation", caption, figure


def _bars(ax: Axes, result: TaskResult, form: str) -> None:
    rows = select(result, "attention share", form=form)
    depths = sorted({row.at["depth"] for row in rows})
    ends = {1: np.zeros(len(depths)), -1: np.zeros(len(depths))}
    for segment in SEGMENTS:
        found = {row.at["depth"]: row.value for row in rows if row.at["segment"] == segment}
        for x, depth in enumerate(depths):
            value = found[depth]
            side = ends[-1 if value < 0 else 1]
            ax.bar(x, value, 0.78, bottom=side[x], color=_SEGMENT_COLOURS[segment])
            if abs(value) >= 0.06:
                middle = side[x] + value / 2
                ax.text(x, middle, f"{value:.2f}", ha="center", va="center", fontsize=8, color=INK)
            side[x] += value
    ax.axhline(0, color="#555555", linewidth=0.8)
    ax.set_xticks(range(len(depths)), [_percent(depth) for depth in depths])
    ax.grid(axis="x", visible=False)


def _heads(ax: Axes, grid: Grid, top: float) -> Any:
    heads = max(map(len, grid.values))
    cells = np.full((len(grid.values), heads), np.nan)
    for layer, row in enumerate(grid.values):
        cells[layer, : len(row)] = row
    edges = [np.arange(count + 1) - 0.5 for count in (heads, len(cells))]
    image = ax.pcolormesh(*edges, np.ma.masked_invalid(cells), cmap=ACCURACY_COLOURS, vmin=0, vmax=top or 1)
    ax.set_ylim(len(cells) - 0.5, -0.5)
    ax.set_ylabel("layer")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    ax.grid(False)
    ax.spines[:].set_visible(False)
    return image


def _grid(result: TaskResult) -> Grid | None:
    found = (grid for grid in result.grids if (grid.at["form"], grid.at["segment"]) == ("absolute", "answer"))
    return next(found, None)


def _percent(depth: float) -> str:
    return f"{100 * depth:g} %"
