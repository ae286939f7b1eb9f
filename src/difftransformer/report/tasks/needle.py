"""Heat maps of retrieval: depth by length, or by the number of needles where there is one length."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from difftransformer.plots.curves import labels, select
from difftransformer.plots.style import ACCURACY_COLOURS, INK, WIDTH_INCHES
from difftransformer.results import Measurement, TaskResult


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw a column for each model, and a row for each kind of city and, with several lengths, number of needles."""
    cells = [[row for row in select(result, "accuracy") if "depth" in row.at] for result in results]
    found = [row for rows in cells for row in rows]
    depths = sorted({row.at["depth"] for row in found})
    by_length = len({row.at["length_tokens"] for row in found}) > 1
    columns = sorted({_column(row, by_length) for row in found})
    panels = sorted({_panel(row, by_length) for row in found})
    figure = Figure(figsize=(WIDTH_INCHES, len(panels) * (1.0 + 0.42 * len(depths)) + 0.4), layout="constrained")
    axes = figure.subplots(len(panels), len(results), squeeze=False, sharex=True, sharey=True)
    image: Any = None
    for line, panel in zip(axes, panels, strict=True):
        for ax, rows, label in zip(line, cells, labels(results), strict=True):
            grid = np.full((len(depths), len(columns)), np.nan)
            for row in rows:
                if _panel(row, by_length) != panel:
                    continue
                y, x = depths.index(row.at["depth"]), columns.index(_column(row, by_length))
                grid[y, x] = row.value
                text, colour = f"{round(row.value * row.n)}/{row.n}", "white" if row.value > 0.62 else INK
                ax.text(x, y, text, ha="center", va="center", fontsize=8.5, color=colour)
            edges = [np.arange(count + 1) - 0.5 for count in (len(columns), len(depths))]
            image = ax.pcolormesh(
                *edges,
                np.ma.masked_invalid(grid),
                cmap=ACCURACY_COLOURS,
                vmin=0,
                vmax=1,
                edgecolors="white",
                linewidth=1,
            )
            ax.set_ylim(len(depths) - 0.5, -0.5)  # the start of the context on top
            ax.set_title(", ".join([label, *_words(panel)]))
            ax.set_xticks(range(len(columns)), [_tick(column) for column in columns])
            ax.set_yticks(range(len(depths)), [f"{100 * depth:g} %" for depth in depths])
            ax.grid(False)
            ax.spines[:].set_visible(False)
            ax.tick_params(length=0)
        line[0].set_ylabel("depth of the answer")
    figure.supxlabel("length (tokens)" if by_length else "needles hidden (N) and asked for (R)", fontsize=9.5)
    figure.colorbar(image, ax=list(axes.flat), label="accuracy", fraction=0.03, pad=0.01, aspect=30)
    digits = results[0].options["digits"]
    caption = f"Share of {digits}-digit numbers given back exactly; in each cell right answers of all."
    caption += f" A guess is right with probability {10.0**-digits:g}."
    if not by_length:
        caption += f" Contexts of {found[0].at['length_tokens']:,} tokens."
    if any("cities" in row.at for row in found):
        caption += " Unseen cities never occur as needles in training."
    return "Needle retrieval", caption, figure


def _column(row: Measurement, by_length: bool) -> tuple[int, ...]:
    return (row.at["length_tokens"],) if by_length else (row.at["needles"], row.at["asked"])


def _panel(row: Measurement, by_length: bool) -> tuple[str, int, int]:
    """Return kind of city, needles and asked; the last two are 0 where columns tell them."""
    return row.at.get("cities", ""), row.at["needles"] if by_length else 0, row.at["asked"] if by_length else 0


def _words(panel: tuple[str, int, int]) -> list[str]:
    cities, needles, asked = panel
    count = ["one needle" if needles == 1 else f"{needles} needles, {asked} asked"] if needles else []
    return [*([f"{cities} cities"] if cities else []), *count]


def _tick(column: tuple[int, ...]) -> str:
    return f"{column[0]:,}" if len(column) == 1 else f"N{column[0]}R{column[1]}"
