"""The figures of a benchmark: `python benchmarks/figures.py RESULT.json FOLDER` draws PART.svg for each part that was timed.

A panel for each kind of work and dtype has dots for ratios of times to those of one implementation, with their quartiles.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from difftransformer_lab.bench.tables import BASES, Cell, cells, grouped, ratio
from difftransformer_lab.plots import INK, STYLE, Drawing, arm_styles, finish, legend_above, panels
from difftransformer_lab.results import Bench, BenchRow, read_result

MEAN = "geometric mean"
ROW_INCHES = 0.36
MARKER_INCHES = 0.045  # height that a row needs for each implementation
SPREAD = 0.6  # share of a row over which the implementations are laid out


def drawings(bench: Bench) -> list[Drawing]:
    """Draw a figure of the times of each part in which several implementations were timed."""
    parts = grouped((row for row in bench.rows if row.timing), lambda row: row.part)
    return [draw(part, rows) for part, rows in parts.items() if len({row.implementation for row in rows}) > 1]


@matplotlib.rc_context(STYLE)
def draw(part: str, rows: Sequence[BenchRow]) -> Drawing:
    """Draw a line of panels for each kind of work, a column for each dtype."""
    names, dtypes = (
        list(dict.fromkeys(row.implementation for row in rows)),
        list(dict.fromkeys(row.dtype for row in rows)),
    )
    base = BASES[part] if BASES.get(part) in names else names[0]
    names.remove(base)
    looks = {name: style | {"linestyle": "none"} for name, style in arm_styles([base, *names], base).items()}
    lines = grouped(rows, lambda row: row.work)
    measured = {
        (work, dtype): {
            key.partition(" ")[2]: cell for key, cell in cells(row for row in line if row.dtype == dtype).items()
        }
        for work, line in lines.items()
        for dtype in dtypes
    }
    mean = [MEAN] if part == "attention" else []
    labels = {work: [*dict.fromkeys(key for dtype in dtypes for key in measured[work, dtype]), *mean] for work in lines}
    heights = [len(labels[work]) for work in lines]
    inches = max(ROW_INCHES, MARKER_INCHES * len(names)) * sum(heights) + 0.75 * len(lines) + 0.8
    figure, grid = panels(inches, len(lines), len(dtypes), sharex=True, sharey="row", height_ratios=heights)
    for axes, work in zip(grid, lines, strict=True):
        for ax, dtype in zip(axes, dtypes, strict=True):
            dress(ax, f"{work}, {dtype}", labels[work])
            for index, name in enumerate(names):
                shift = SPREAD * (index / max(1, len(names) - 1) - 0.5)
                draw_dots(ax, measured[work, dtype], (name, base), labels[work], shift, looks[name])
    for ax in grid[-1]:
        ax.set_xlabel(f"time over that of {base} (logarithmic; left of 1 is faster)")
    legend_above(figure, [Line2D([], [], **looks[name], markersize=5, label=name) for name in names])
    caption = (
        f"Time over that of {base}: medians of interleaved rounds, with quartiles. Attention by n/h/d: n tokens, h "
        "differential heads, maps of width d. A geometric mean is hollow where not every shape was timed."
    )
    return finish(part, f"Time of {part}", caption, figure, False)


def draw_dots(
    ax: Axes,
    measured: Mapping[str, Cell],
    pair: tuple[str, str],
    rows: Sequence[str],
    shift: float,
    look: dict[str, Any],
) -> None:
    """Draw the ratios of an implementation to the base, and their mean."""
    ratios = []
    for row, cell in measured.items():
        y = rows.index(row) + shift
        mine, whole = (cell[name].timing if name in cell else None for name in pair)
        if mine and whole:
            quartiles = [mine.low_seconds / whole.median_seconds, mine.high_seconds / whole.median_seconds]
            ax.plot(quartiles, [y, y], color=look["color"], linewidth=1.2)
            ratios.append(ratio(cell, pair[0], pair[1:]))
            ax.plot(ratios[-1], y, **look, markersize=5)
    if rows[-1] == MEAN and ratios:
        face = look["color"] if len(ratios) == len(measured) else "white"
        ax.plot(geometric_mean(ratios), len(rows) - 1 + shift, **look, markerfacecolor=face, markersize=6.5)


def dress(ax: Axes, title: str, rows: Sequence[str]) -> None:
    """Draw a panel's axes and name its rows."""
    if rows[-1] == MEAN:
        ax.axhline(len(rows) - 1.5, color="#555555", linewidth=0.7)
    ax.axvline(1, color=INK, linewidth=1)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(LogLocator(2))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_yticks(range(len(rows)), rows)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    for y in range(0, len(rows), 2):
        ax.axhspan(y - 0.5, y + 0.5, color="#f4f4f4", linewidth=0, zorder=0)
    ax.set_title(title, loc="left")
    ax.tick_params(axis="x", labelbottom=True)


def main(path: str, folder: str) -> None:
    """Draw the figures of a result."""
    for drawing in drawings(read_result(path, Bench)):
        Path(folder, f"{drawing.name}.svg").write_text(drawing.svg, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
