"""The figures of a benchmark: a panel for each kind of work and dtype, dots for ratios of times with their quartiles."""

from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from difftransformer_lab.plots.style import INK, STYLE, Drawing, arm_styles, finish, legend_above, panels
from difftransformer_lab.report.bench import MEAN, Cell, base_of, cells, grouped, mean_ratio
from difftransformer_lab.results import Bench, BenchRow

_ROW_INCHES = 0.36
_MARKER_INCHES = 0.045  # height that a row needs for each implementation
_SPREAD = 0.6  # share of a row over which the implementations are laid out


def bench_drawings(bench: Bench) -> list[Drawing]:
    """Draw a figure of the times of each part in which several implementations were timed."""
    parts = grouped((row for row in bench.rows if row.timing), lambda row: row.part)
    return [_draw(part, rows) for part, rows in parts.items() if len({row.implementation for row in rows}) > 1]


@matplotlib.rc_context(STYLE)
def _draw(part: str, rows: Sequence[BenchRow]) -> Drawing:
    """Draw a line of panels for each kind of work, a column for each dtype."""
    base, dtypes = base_of(part, rows), list(dict.fromkeys(row.dtype for row in rows))
    names = [name for name in dict.fromkeys(row.implementation for row in rows) if name != base]
    looks = {name: style | {"linestyle": "none"} for name, style in arm_styles([base, *names], base).items()}
    lines = grouped(rows, lambda row: row.work)
    measured = {
        (work, dtype): cells(row for row in line if row.dtype == dtype)
        for work, line in lines.items()
        for dtype in dtypes
    }
    mean = [MEAN] if part == "attention" else []
    labels = {
        work: [*dict.fromkeys(key.partition(" ")[2] for dtype in dtypes for key in measured[work, dtype]), *mean]
        for work in lines
    }
    heights = [len(labels[work]) for work in lines]
    inches = max(_ROW_INCHES, _MARKER_INCHES * len(names)) * sum(heights) + 0.75 * len(lines) + 0.8
    figure, grid = panels(inches, len(lines), len(dtypes), sharex=True, sharey="row", height_ratios=heights)
    for axes, work in zip(grid, lines, strict=True):
        for ax, dtype in zip(axes, dtypes, strict=True):
            here = {key.partition(" ")[2]: cell for key, cell in measured[work, dtype].items()}
            _dress(ax, f"{work}, {dtype}", labels[work])
            for index, name in enumerate(names):
                shift = _SPREAD * (index / max(1, len(names) - 1) - 0.5)
                _draw_dots(ax, here, (name, base), labels[work], shift, looks[name])
    for ax in grid[-1]:
        ax.set_xlabel(f"time over that of {base} (logarithmic; left of 1 is faster)")
    legend_above(figure, [Line2D([], [], **looks[name], markersize=5, label=name) for name in names])
    caption = (
        f"Time over that of {base}: medians of interleaved rounds, with quartiles. Attention by n/h/d: n tokens, h "
        "differential heads, maps of width d. A geometric mean is hollow where not every shape was timed."
    )
    return finish(part, f"Time of {part}", caption, figure, False)


def _draw_dots(
    ax: Axes, measured: dict[str, Cell], pair: tuple[str, str], rows: Sequence[str], shift: float, look: dict[str, Any]
) -> None:
    for row, cell in measured.items():
        y = rows.index(row) + shift
        mine, whole = (cell[name].timing if name in cell else None for name in pair)
        if mine and whole:
            quartiles = [mine.low_seconds / whole.median_seconds, mine.high_seconds / whole.median_seconds]
            ax.plot(quartiles, [y, y], color=look["color"], linewidth=1.2)
            ax.plot(mine.median_seconds / whole.median_seconds, y, **look, markersize=5)
    if rows[-1] == MEAN and (mean := mean_ratio(measured.values(), pair[0], pair[1:])):
        face = look["color"] if mean[1] else "white"
        ax.plot(mean[0], len(rows) - 1 + shift, **look, markerfacecolor=face, markersize=6.5)


def _dress(ax: Axes, title: str, rows: Sequence[str]) -> None:
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
