"""The figures of a benchmark, one a question: attention by shape, peaked scores, whole models. Dots are ratios of times."""

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from difftransformer.plots.style import INK, STYLE, WIDTH_INCHES, Drawing, finish, legend_above
from difftransformer.report.bench import (
    BASE,
    LOOKS,
    MEAN,
    OTHER_LOOK,
    SHAPE,
    Column,
    implementations,
    in_panel,
    is_gpu,
    panels,
    place_of,
    places_of,
    row_of,
)
from difftransformer.results import Bench

_ROW_INCHES = 0.36
_MARKER_INCHES = 0.045  # of a row's height for each implementation, where there are many
_SPREAD = 0.6  # of a row, over which the implementations are laid out
# On the CPU the figure of attention shows these; the tables and the results file have all.
_CPU_NAMES = ("diff cpu", "softmax cpu", "diff chunked", "DiffLlama sdpa")
_MODEL_LOOKS = {
    "DIFF": ("#0072B2", "o"),
    "twin": ("#E69F00", "D"),
    "DiffLlama sdpa": ("#D55E00", "P"),
    "DiffLlama eager": ("#CC79A7", "X"),
}
_RATIO_AXIS = "time over that of {} (logarithmic; left of 1 is faster)"

Dot = tuple[float, float, float]  # ratio, and its quartiles
Series = Mapping[str, Mapping[str, Dot]]  # name -> row -> dot


def bench_drawings(bench: Bench, png: bool = False) -> list[Drawing]:
    """A figure for each question that was asked."""
    drawn = (draw_attention(bench, png), draw_peaked(bench, png), draw_models(bench, png))
    return [drawing for drawing in drawn if drawing is not None]


def draw_attention(bench: Bench, png: bool = False) -> Drawing | None:
    """Dots of every implementation's ratio to PyTorch's kernel: a panel for each mode and dtype, a row for each shape.

    Where means are of each width, widths have panels of their own too.
    """
    if not bench.attention:
        return None
    modes = list(dict.fromkeys(timing.mode for timing in bench.attention))
    columns = list(dict.fromkeys(column for _, column in panels(bench)))
    names = [name for name in implementations(bench.attention) if name != BASE]
    if not is_gpu(bench):
        names = [name for name in names if name in _CPU_NAMES] or names
    rows = {
        mode: list(
            dict.fromkeys(
                row_of(place, columns[0]) for place in places_of(t for t in bench.attention if t.mode == mode)
            )
        )
        for mode in modes
    }
    heights = [1 + len(rows[mode]) for mode in modes]
    row_inches = max(_ROW_INCHES, _MARKER_INCHES * len(names))
    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(WIDTH_INCHES, row_inches * sum(heights) + 0.75 * len(modes) + 0.8), layout="constrained"
        )
        axes = figure.subplots(
            len(modes), len(columns), squeeze=False, sharex=True, sharey="row", height_ratios=heights
        )
        for down, mode in enumerate(modes):
            for across, column in enumerate(columns):
                ax = axes[down, across]
                for name in names:
                    _draw_dots(ax, bench, mode, column, rows[mode], name, _shift(name, names))
                _dress(ax, mode, column, rows[mode])
            axes[down, 0].set_ylabel(SHAPE if columns[0][1] is None else "n")
        for ax in axes[-1]:
            ax.set_xlabel(_RATIO_AXIS.format(BASE))
        legend_above(figure, [_handle(name, LOOKS) for name in names])
        return finish("attention", "Time of attention", _caption(bench), figure, png)


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


def _draw_dots(ax: Axes, bench: Bench, mode: str, column: Column, rows: Sequence[str], name: str, shift: float) -> None:
    """One implementation in one panel: its ratios with quartiles, and in the lowest row their mean."""
    timings = in_panel(bench, mode, column)
    base = {place_of(timing): timing.median_seconds for timing in timings if timing.implementation == BASE}
    colour, marker = LOOKS.get(name, OTHER_LOOK)
    for timing in timings:
        if timing.implementation == name:
            place = place_of(timing)
            y = rows.index(row_of(place, column)) + shift
            quartiles = [timing.low_seconds / base[place], timing.high_seconds / base[place]]
            ax.plot(quartiles, [y, y], color=colour, linewidth=1.2)
            ax.plot(timing.ratio_to_torch_sdpa, y, marker, color=colour, markersize=5)
    for mean in bench.means:
        if (mean.mode, mean.dtype, mean.head_dim, mean.implementation, mean.against) == (mode, *column, name, BASE):
            face = colour if mean.shapes == len(base) else "white"
            ax.plot(mean.ratio, len(rows) + shift, marker, color=colour, markerfacecolor=face, markersize=6.5)


def _dress(ax: Axes, mode: str, column: Column, rows: Sequence[str]) -> None:
    dtype, width = column
    ax.axhline(len(rows) - 0.5, color="#555555", linewidth=0.7)
    _dress_axis(ax, f"{mode}, {dtype}" + ("" if width is None else f", d = {width}"), [*rows, MEAN])


def _dress_axis(ax: Axes, title: str, rows: Sequence[str]) -> None:
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


def _shift(name: str, names: Sequence[str]) -> float:
    """Of an implementation's dots within a row."""
    return _SPREAD * (names.index(name) / max(1, len(names) - 1) - 0.5)


def _handle(name: str, looks: Mapping[str, tuple[str, str]]) -> Line2D:
    colour, marker = looks.get(name, OTHER_LOOK)
    return Line2D([], [], color=colour, marker=marker, markersize=5, linestyle="none", label=name)


def draw_peaked(bench: Bench, png: bool = False) -> Drawing | None:
    """Our kernels' ratios to PyTorch's over the spread of the scores: a panel for each mode and dtype."""
    found: dict[str, dict[str, dict[str, Dot]]] = {}
    base = {(t.mode, t.dtype, t.score_factor): t.median_seconds for t in bench.peaked if t.implementation == BASE}
    for t in bench.peaked:
        if t.implementation != BASE:
            whole = base[t.mode, t.dtype, t.score_factor]
            dot = (t.ratio_to_torch_sdpa, t.low_seconds / whole, t.high_seconds / whole)
            row = "1 nat" if t.score_factor == 1 else f"{t.score_factor:g} nats"
            found.setdefault(f"{t.mode}, {t.dtype}", {}).setdefault(t.implementation, {})[row] = dot
    if not found:
        return None
    first = bench.peaked[0]
    caption = (
        f"Wall time over that of PyTorch's attention on the same numbers, by the standard deviation of the scores: medians of "
        f"interleaved rounds, with quartiles; n = {first.length_tokens:,}, h = {first.heads}, d = {first.head_dim}."
    )
    return _draw_panels("peaked", "Time of attention on peaked scores", caption, found, LOOKS, BASE, png)


def draw_models(bench: Bench, png: bool = False) -> Drawing | None:
    """Whole models over transformers' Llama of the same shape: a panel for each kind of work."""
    base = {(t.work, t.model, t.dtype): t.median_seconds for t in bench.models if t.ratio_to_llama == 1}
    found: dict[str, dict[str, dict[str, Dot]]] = {}
    for t in bench.models:
        if t.implementation in _MODEL_LOOKS:
            whole = base[t.work, t.model, t.dtype]
            dot = (t.ratio_to_llama, t.low_seconds / whole, t.high_seconds / whole)
            found.setdefault(t.work, {}).setdefault(t.implementation, {})[f"{t.model}, {t.dtype}"] = dot
    if not found:
        return None
    caption = (
        "Wall time of whole models over that of transformers' Llama on PyTorch's attention, all of one shape: medians of "
        "interleaved rounds, with quartiles."
    )
    return _draw_panels("models", "Time of whole models", caption, found, _MODEL_LOOKS, "Llama", png)


def _draw_panels(
    name: str,
    title: str,
    caption: str,
    panels_: Mapping[str, Series],
    looks: Mapping[str, tuple[str, str]],
    base: str,
    png: bool,
) -> Drawing:
    """Dots of ratios, two panels beside each other or three below one another."""
    columns = 2 if len(panels_) == 4 else 1
    lines = -(-len(panels_) // columns)
    rows = {
        panel: list(dict.fromkeys(row for dots in series.values() for row in dots)) for panel, series in panels_.items()
    }
    names = sorted({one for series in panels_.values() for one in series}, key=list(looks).index)
    height = _ROW_INCHES * max(map(len, rows.values())) * lines + 0.75 * lines + 0.8
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
        axes = figure.subplots(lines, columns, squeeze=False, sharex=True)
        for ax, (panel, series) in zip(axes.flat, panels_.items(), strict=True):
            for one, dots in series.items():
                colour, marker = looks.get(one, OTHER_LOOK)
                for row, (ratio, low, high) in dots.items():
                    y = rows[panel].index(row) + _shift(one, names)
                    ax.plot([low, high], [y, y], color=colour, linewidth=1.2)
                    ax.plot(ratio, y, marker, color=colour, markersize=5)
            _dress_axis(ax, panel, rows[panel])
        for ax in axes[-1]:
            ax.set_xlabel(_RATIO_AXIS.format(base))
        legend_above(figure, [_handle(one, looks) for one in names])
        return finish(name, title, caption, figure, png)
