"""Attention maps of a prompt, lambda over depth, and by layer how much weight is negative or near zero."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from difftransformer.plots.curves import handles, labels
from difftransformer.plots.style import COLOURS, DASHES, MARKERS, WIDTH_INCHES
from difftransformer.results import Grid, TaskResult

_COLOURS = LinearSegmentedColormap.from_list("signed", ["#8a3b00", "#e98a3d", "#ffffff", "#4a94c8", "#08306b"], N=48)
_LABELLED_TOKENS = 24
_COLUMNS = 4
_COMBINED = ("A1 - lambda A2", "A")
_CURVES_INCHES, _MAP_INCHES = 3.0, 2.35


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Curves over layers on top; below them a block a model: of one every map, of several the one that weighs the values."""
    shown = [_rows(result, all_maps=len(results) == 1) for result in results]
    heights = [_CURVES_INCHES, *(_MAP_INCHES * len(rows) + 0.5 for rows in shown)]
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    _curves(parts[0], results)
    for part, rows, label in zip(parts[1:], shown, labels(results), strict=True):
        _maps(part, rows, label)
    caption = (
        "Attention maps: down the queries, across the keys; blue adds a value, orange subtracts it, and colours follow the "
        "square root of a weight. Above: by layer, a dot a head and a line through their mean: lambda; negative weight as "
        "a share of all |weight|; the share of weights below a tenth of even attention (hollow: of A1 alone)."
    )
    return "Attention maps", caption, figure


def _curves(figure: SubFigure, results: Sequence[TaskResult]) -> None:
    names = ["negative weight", "near zero"]
    if any(_grid(result, "lambda") for result in results):
        names.insert(0, "lambda")
    for ax, name in zip(figure.subplots(1, len(names)), names, strict=True):
        for index, result in enumerate(results):
            if (grid := _grid(result, name)) is not None:
                _by_layer(ax, grid, index)
            if name == "near zero" and (alone := _grid(result, "near zero in A1 alone")) is not None:
                _by_layer(ax, alone, index, hollow=True)
        ax.set_title(name, loc="left")
        ax.set_xlabel("layer")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if name != "lambda":
            ax.set_ylim(-0.02, None)
    figure.legend(handles=handles(results), loc="outside upper left", ncols=min(5, len(results)))


def _by_layer(ax: Axes, grid: Grid, index: int, hollow: bool = False) -> None:
    colour = COLOURS[index % len(COLOURS)]
    face = "none" if hollow else colour
    for layer, row in enumerate(grid.values):
        ax.scatter([layer] * len(row), row, s=9, facecolors=face, edgecolors=colour, linewidths=0.7, alpha=0.6)
    means = [float(np.mean(row)) for row in grid.values]
    dash = ":" if hollow else DASHES[index % len(DASHES)]
    marker = MARKERS[index % len(MARKERS)]
    ax.plot(
        means, color=colour, linestyle=dash, marker=marker, markersize=4, markerfacecolor="white" if hollow else colour
    )


def _maps(figure: SubFigure, rows: list[list[Grid]], label: str) -> None:
    columns = max(_COLUMNS, *map(len, rows))
    axes = figure.subplots(len(rows), columns, squeeze=False)
    for line, grids in zip(axes, rows, strict=True):
        for ax in line[len(grids) :]:
            ax.set_visible(False)
        for place, (ax, grid) in enumerate(zip(line, grids, strict=False)):
            _map(ax, grid, named=place == 0)
    figure.suptitle(label, x=0.01, ha="left", fontsize=10.5)
    bar = figure.colorbar(
        ScalarMappable(Normalize(-1, 1), _COLOURS),
        ax=list(axes.flat),
        fraction=0.02,
        pad=0.01,
        aspect=40,
        label="weight",
    )
    ticks = (-1, -0.25, -0.04, 0, 0.04, 0.25, 1)
    bar.set_ticks([np.sign(tick) * abs(tick) ** 0.5 for tick in ticks], labels=[f"{tick:g}" for tick in ticks])


def _map(ax: Axes, grid: Grid, *, named: bool) -> None:
    count = len(grid.values)
    square = np.full((count, count), np.nan)
    for index, row in enumerate(grid.values):
        square[index, : len(row)] = row
    edges = np.arange(count + 1) - 0.5
    drawn = np.ma.masked_invalid(np.sign(square) * np.sqrt(np.abs(square)))
    ax.pcolormesh(edges, edges, drawn, cmap=_COLOURS, vmin=-1, vmax=1, rasterized=True)
    ax.set_ylim(count - 0.5, -0.5)
    ax.set_aspect("equal")
    ax.grid(False)
    ax.set_title(f"layer {grid.at['layer']}, head {grid.at['head']}: {grid.at['map']}", fontsize=8)
    ax.tick_params(length=1.5, labelsize=6, pad=1)
    if grid.labels and count <= _LABELLED_TOKENS:
        words = [_word(label) for label in grid.labels]
        size = min(6.0, 110 / count)
        ax.set_yticks(range(count), words if named else [""] * count, fontsize=size)
        ax.set_xticks(range(count), words, rotation=90, fontsize=size)
    else:
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def _word(label: str) -> str:
    shown = label.replace("\n", "\u21b5").strip(" ") or "\u2423"
    return shown if len(shown) <= 10 else shown[:9] + "\u2026"


def _rows(result: TaskResult, *, all_maps: bool) -> list[list[Grid]]:
    """A row for each layer and kind of map, a column for each head."""
    rows: dict[tuple[Any, Any], list[Grid]] = {}
    for grid in result.grids:
        if grid.name == "map" and (all_maps or grid.at["map"] in _COMBINED):
            rows.setdefault((grid.at["layer"], grid.at["map"]), []).append(grid)
    return list(rows.values())


def _grid(result: TaskResult, name: str) -> Grid | None:
    return next((grid for grid in result.grids if grid.name == name), None)
