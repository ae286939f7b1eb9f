"""The figures of a benchmark, one for each question: attention by shape, peaked scores, whole models.

Dots are ratios of times, with their quartiles.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from difftransformer_lab.plots.style import INK, STYLE, WIDTH_INCHES, Drawing, finish, legend_above
from difftransformer_lab.report.bench import (
    BASE,
    LOOKS,
    MEAN,
    OTHER_LOOK,
    SHAPE,
    implementations,
    in_panel,
    is_gpu,
    panels,
    place_of,
    row_of,
)
from difftransformer_lab.results import Bench, Timing

_ROW_INCHES = 0.36
_MARKER_INCHES = 0.045  # height that a row needs for each implementation
_SPREAD = 0.6  # share of a row over which the implementations are laid out
# On the CPU the figure of attention shows only these; the tables and the results file have all.
_CPU_NAMES = ("diff cpu", "softmax cpu", "diff chunked", "DiffLlama sdpa")
_MODEL_LOOKS = {
    "DIFF": ("#0072B2", "o"),
    "twin": ("#E69F00", "D"),
    "DiffLlama sdpa": ("#D55E00", "P"),
    "DiffLlama eager": ("#CC79A7", "X"),
}


class Dot(NamedTuple):
    """A ratio with its quartiles; a mean has none, and is hollow where shapes are missing."""

    ratio: float
    quartiles: tuple[float, float] | None = None
    is_hollow: bool = False


def _dot(ratio: float, timing: Timing, base_seconds: float) -> Dot:
    return Dot(ratio, (timing.low_seconds / base_seconds, timing.high_seconds / base_seconds))


Panel = defaultdict[str, dict[str, Dot]]  # implementation -> row -> dot


def bench_drawings(bench: Bench, png: bool = False) -> list[Drawing]:
    """Draw a figure for each question that the benchmark answers."""
    drawn = (draw_attention(bench, png), draw_peaked(bench, png), draw_models(bench, png))
    return [drawing for drawing in drawn if drawing is not None]


def draw_attention(bench: Bench, png: bool = False) -> Drawing | None:
    """Draw each implementation's ratio to PyTorch's kernel: a panel for each mode and dtype, a row for each shape.

    If means are taken for each width, widths have their own panels too.
    """
    if not bench.attention:
        return None
    names = [name for name in implementations(bench.attention) if name != BASE]
    if not is_gpu(bench):
        names = [name for name in names if name in _CPU_NAMES] or names
    lines: dict[str, dict[str, Panel]] = {}
    for mode, column in panels(bench):
        dtype, width = column
        title = f"{mode}, {dtype}" + ("" if width is None else f", d = {width}")
        panel = lines.setdefault(mode, {}).setdefault(title, Panel(dict))
        timings = in_panel(bench, mode, column)
        base = {place_of(timing): timing.median_seconds for timing in timings if timing.implementation == BASE}
        for timing in sorted(timings, key=place_of):
            if timing.implementation in names:
                dot = _dot(timing.ratio_to_torch_sdpa, timing, base[place_of(timing)])
                panel[timing.implementation][row_of(place_of(timing), column)] = dot
        for mean in bench.means:
            measured = (mean.mode, (mean.dtype, mean.head_dim), mean.against)
            if mean.implementation in names and measured == (mode, column, BASE):
                panel[mean.implementation][MEAN] = Dot(mean.ratio, is_hollow=mean.shapes < len(base))
    label = SHAPE if panels(bench)[0][1][1] is None else "n"
    parts = "attention", "Time of attention", _caption(bench)
    return _draw_panels(*parts, list(lines.values()), LOOKS, BASE, png, label)


def _caption(bench: Bench) -> str:
    clock = "Wall time"
    kernel, rows = "", "A row is a shape: n tokens, h differential heads, maps of width d."
    if is_gpu(bench):
        clock, kernel = "Time on the GPU", "flash kernel in "
        rows = "A row is a length; 8x2048 is 8 rows of 2,048 tokens. A token rate is the inverse of a ratio."
    return (
        f"{clock} over that of PyTorch's {kernel}scaled_dot_product_attention with 2 h heads, the attention of a "
        f"Transformer of the same size: medians of interleaved rounds, with quartiles. {rows} Lowest row: the geometric "
        "mean; hollow where the implementation was not timed on every shape."
    )


def draw_peaked(bench: Bench, png: bool = False) -> Drawing | None:
    """Draw our kernels' ratios to PyTorch's over the spread of the scores: a panel for each mode and dtype."""
    if not bench.peaked:
        return None
    found: dict[str, Panel] = defaultdict(lambda: Panel(dict))
    base = {(t.mode, t.dtype, t.score_factor): t.median_seconds for t in bench.peaked if t.implementation == BASE}
    for t in bench.peaked:
        if t.implementation != BASE:
            row = "1 nat" if t.score_factor == 1 else f"{t.score_factor:g} nats"
            dot = _dot(t.ratio_to_torch_sdpa, t, base[t.mode, t.dtype, t.score_factor])
            found[f"{t.mode}, {t.dtype}"][t.implementation][row] = dot
    first = bench.peaked[0]
    caption = (
        f"Wall time over that of PyTorch's attention on the same numbers, by the standard deviation of the scores: medians of "
        f"interleaved rounds, with quartiles; n = {first.length_tokens:,}, h = {first.heads}, d = {first.head_dim}."
    )
    drawn, columns = list(found.items()), 2 if len(found) == 4 else 1
    lines = [dict(drawn[at : at + columns]) for at in range(0, len(drawn), columns)]
    return _draw_panels("peaked", "Time of attention on peaked scores", caption, lines, LOOKS, BASE, png)


def draw_models(bench: Bench, png: bool = False) -> Drawing | None:
    """Draw the ratios of whole models to transformers' Llama of the same shape: a panel for each kind of work."""
    base = {(t.work, t.model, t.dtype): t.median_seconds for t in bench.models if t.ratio_to_llama == 1}
    found: dict[str, Panel] = defaultdict(lambda: Panel(dict))
    for t in bench.models:
        if t.implementation in _MODEL_LOOKS:
            dot = _dot(t.ratio_to_llama, t, base[t.work, t.model, t.dtype])
            found[t.work][t.implementation][f"{t.model}, {t.dtype}"] = dot
    if not found:
        return None
    caption = (
        "Wall time of whole models over that of transformers' Llama on PyTorch's attention, all of one shape: medians of "
        "interleaved rounds, with quartiles."
    )
    lines = [{title: panel} for title, panel in found.items()]
    return _draw_panels("models", "Time of whole models", caption, lines, _MODEL_LOOKS, "Llama", png)


def _draw_panels(
    name: str,
    title: str,
    caption: str,
    lines: Sequence[Mapping[str, Panel]],
    looks: Mapping[str, tuple[str, str]],
    base: str,
    png: bool,
    label: str = "",
) -> Drawing:
    """Draw lines of panels. The panels of a line share their rows; the row of means comes last."""
    found = {name for line in lines for panel in line.values() for name in panel}
    names = sorted(found, key=lambda name: list(looks).index(name) if name in looks else len(looks))
    rows = [
        sorted(
            dict.fromkeys(row for panel in line.values() for dots in panel.values() for row in dots), key=MEAN.__eq__
        )
        for line in lines
    ]
    heights = [len(labels) for labels in rows]
    inches = max(_ROW_INCHES, _MARKER_INCHES * len(names)) * sum(heights) + 0.75 * len(lines) + 0.8
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, inches), layout="constrained")
        grid = figure.subplots(
            len(lines), len(lines[0]), squeeze=False, sharex=True, sharey="row", height_ratios=heights
        )
        for axes, line, labels in zip(grid, lines, rows, strict=True):
            for ax, (heading, panel) in zip(axes, line.items(), strict=True):
                for index, one in enumerate(names):
                    shift = _SPREAD * (index / max(1, len(names) - 1) - 0.5)
                    _draw_dots(ax, panel.get(one, {}), labels, shift, *looks.get(one, OTHER_LOOK))
                _dress(ax, heading, labels)
            axes[0].set_ylabel(label)
        for ax in grid[-1]:
            ax.set_xlabel(f"time over that of {base} (logarithmic; left of 1 is faster)")
        handles = []
        for one in names:
            colour, marker = looks.get(one, OTHER_LOOK)
            handles.append(Line2D([], [], color=colour, marker=marker, markersize=5, linestyle="none", label=one))
        legend_above(figure, handles)
        return finish(name, title, caption, figure, png)


def _draw_dots(ax: Axes, dots: Mapping[str, Dot], rows: Sequence[str], shift: float, colour: str, marker: str) -> None:
    for row, dot in dots.items():
        y = rows.index(row) + shift
        if dot.quartiles:
            ax.plot(dot.quartiles, [y, y], color=colour, linewidth=1.2)
        face, size = "white" if dot.is_hollow else colour, 6.5 if row == MEAN else 5
        ax.plot(dot.ratio, y, marker, color=colour, markerfacecolor=face, markersize=size)


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
