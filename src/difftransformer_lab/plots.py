"""Style of every figure, and the parts that pictures of tasks share, drawn without display, pyplot and global state.

The same results give the same bytes. The colours are from Okabe and Ito's palette for colour-blind readers. Each model keeps
its colour, marker and dash in every figure, so that a grey print can be read too.
"""

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from .printable import printable
from .results import Measurement, TaskResult

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v")
ARM_MARKERS = ("D", "s", "^", "v", "P", "X", "<", ">", "p", "h", "*", "d")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MORE_COLOURS = (
    "#56B4E9", "#332288", "#882255", "#999933", "#44AA99", "#AA4499", "#6B4E16", "#117733", "#CC6677", "#000000",
)  # fmt: skip
"""Further colours, most from Okabe and Ito's and Paul Tol's palettes, for studies with many arms."""

REFERENCE_COLOUR = "#6b7178"
ARM_COLOURS = {
    "diff": 0, "wide": 1, "diff_v2": 2, "v2": 2, "grouped_diff": 3, "grouped": 3, "no-norm": 4, "dex": 5, "lambda-init": 6,
    "constant": 6,
}  # fmt: skip
"""Place in the palette of arms that several studies have, so that each has one colour in all of them."""

INK = "#1a1a1a"
ON_PALE, ON_DARK = "#1b1b1b", "#fefefe"
"""Of text on coloured cells, which stay as they are on a dark page."""
WIDTH_INCHES = 10.0
NARROW_INCHES = 4.2
"""Of the same figure on a telephone, where its panels stand in one column."""
_LETTER_INCHES = 0.075
"""Mean width of a letter in a legend."""

PNG_DOTS_PER_INCH = 160

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans", "font.size": 9.5, "axes.titlesize": 10.5, "axes.labelsize": 9.5, "legend.fontsize": 9.5,
    "xtick.labelsize": 9.0, "ytick.labelsize": 9.0,
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": "#555555",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#e3e3e3", "grid.linewidth": 0.7, "lines.linewidth": 1.6, "legend.frameon": False,
    "text.parse_math": False, "svg.hashsalt": "difftransformer", "svg.fonttype": "none",
}  # fmt: skip

_ON_DARK_PAGES = {
    INK: "#e8eaed", "#555555": "#8b929b", "#e3e3e3": "#2e343c", "#ffffff": "#14171b", REFERENCE_COLOUR: "#a2a9b1",
    "#0072b2": "#4ba9e3", "#d55e00": "#f2843f", "#009e73": "#2fc497", "#332288": "#9a8ce6", "#882255": "#d96b9e",
    "#6b4e16": "#c09a55", "#117733": "#53bb70", "#000000": "#f2f2f2", "#aa4499": "#d57cc6", "#999933": "#b5b54d",
    "#f4f4f4": "#1b2027", "#eceff1": "#252c34", "#eaf2f8": "#1b2b38", "#cfe3f1": "#1f3b50",
    "#fdf2e3": "#33291a", "#f8dccb": "#4a2d1e",
}  # fmt: skip
"""Colours of lines, words and pale grounds on a dark page; others are bright enough on both."""

ACCURACY_COLOURS = LinearSegmentedColormap.from_list("accuracy", ["#f7fafc", "#9cc4dd", "#2b7bb0", "#08306b"], N=48)
"""Pale to dark blue. From 50 colours on, matplotlib would put the colour bar into an SVG as a bitmap."""

_HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx")
_ALL_BARS_WIDTH = 0.8


@dataclass(frozen=True)
class Drawing:
    """A finished figure: SVG text for the page and the folder, the same for narrow screens, and PNG bytes if requested."""

    name: str
    title: str
    caption: str
    svg: str
    narrow: str
    png: bytes | None


WIDE_ALONE = ContextVar("figures have no narrow form of their own", default=False)
_MODELS: ContextVar[Sequence[dict[str, Any]]] = ContextVar("styles of the models", default=())


@contextmanager
def models_drawn_as(styles: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Draw a figure's models in these styles, so that each has one colour on a whole page."""
    token = _MODELS.set(styles)
    try:
        yield
    finally:
        _MODELS.reset(token)


def colour_of(index: int) -> str:
    return str(line_style(index)["color"])


def line_style(index: int) -> dict[str, Any]:
    """Return colour, dash and marker of a figure's model number `index`, as keywords of `Axes.plot`."""
    styles = _MODELS.get()
    if index < len(styles):
        return dict(styles[index])
    dash, marker = DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": dash, "marker": marker}


def arm_styles(arms: Sequence[str], reference: str) -> dict[str, dict[str, Any]]:
    """Return colour, dash and marker of each arm of a study: the reference is grey, and no other arm has its colour.

    Arms in `ARM_COLOURS` keep their place in every study; the rest take free places in order.
    """
    palette = COLOURS + MORE_COLOURS
    known = [arm for arm in arms if arm in ARM_COLOURS and arm != reference]
    free = iter([place for place in range(len(palette)) if place not in {ARM_COLOURS[arm] for arm in known}])
    styles: dict[str, dict[str, Any]] = {}
    for arm in arms:
        if arm == reference:
            styles[arm] = {"color": REFERENCE_COLOUR, "linestyle": "-", "marker": "o"}
            continue
        place = ARM_COLOURS[arm] if arm in ARM_COLOURS else next(free, len(styles) % len(palette))
        dash, marker = DASHES[place % len(DASHES)], ARM_MARKERS[place % len(ARM_MARKERS)]
        styles[arm] = {"color": palette[place], "linestyle": dash, "marker": marker}
    return styles


def panels(height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, np.ndarray]:
    """Return a figure as wide as a page with its panels, (rows, columns); `options` go to `Figure.subplots`."""
    figure = Figure(figsize=(WIDTH_INCHES, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def note(ax: Axes, text: str, xy: tuple[float, float], *, at_right_edge: bool = False, **options: Any) -> None:
    """Write a text beside a point, with options of `Axes.annotate`; at_right_edge measures x as a share of the axes."""
    place = ("axes fraction", "data") if at_right_edge else "data"
    ax.annotate(text, xy, xycoords=place, textcoords="offset points", **options)


def legend_above(figure: Figure, handles: Sequence[Any], width: float = WIDTH_INCHES) -> None:
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(5, len(handles), int(width / (0.5 + _LETTER_INCHES * longest))))
    figure.legend(handles=list(handles), loc="outside upper left", ncols=columns, borderaxespad=0.2)


def finish(name: str, title: str, caption: str, figure: Figure, png: bool) -> Drawing:
    """Save a figure as SVG (without date and creator), wide and narrow, and, if requested, as PNG."""
    image = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # characters that the font lacks are drawn as boxes
        wide = _svg(figure)
        if png:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=PNG_DOTS_PER_INCH, metadata={"Software": None})
            image = buffer.getvalue()
        narrow = wide if figure.subfigs or WIDE_ALONE.get() else _svg(_made_narrow(figure))
    return Drawing(name, title, caption, wide, narrow, image)


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = printable(text.getvalue())
    # Matplotlib's ids are hashes of positions in full precision, which differ from one processor to another.
    for place, name in enumerate(dict.fromkeys(re.findall(r' id="([mp][0-9a-f]{10})"', svg))):
        svg = svg.replace(name, f"{name[0]}{place}")
    return svg


_NARROW_LETTERS = {"title": 44, "tick": 22}


def _made_narrow(figure: Figure) -> Figure:
    """Rearrange the panels in one column, for a telephone."""
    every = [ax for ax in figure.axes if ax.get_subplotspec() is not None]
    axes = [ax for ax in every if ax.get_visible()]
    if not axes:
        return figure
    grid = axes[0].get_subplotspec().get_gridspec()  # type: ignore[union-attr]
    rows, columns = grid.get_geometry()
    ratios = np.broadcast_to(np.asarray(grid.get_height_ratios(), dtype=float), rows)
    inches = figure.get_figheight() * ratios / ratios.sum()
    places = [ax.get_subplotspec().rowspan.start for ax in axes]  # type: ignore[union-attr]
    heights = [max(1.4, 0.9 * inches[row]) + 0.35 * (columns > 1) for row in places]
    y_labels = {row: ax.get_ylabel() for row, ax in reversed([*zip(places, axes, strict=True)])}
    columns_of = [ax.get_subplotspec().colspan.start for ax in axes]  # type: ignore[union-attr]
    x_labels = {column: label for column, ax in zip(columns_of, axes, strict=True) if (label := ax.get_xlabel())}
    stacked = figure.add_gridspec(len(axes), 1, height_ratios=heights)
    for place, (row, ax) in enumerate(zip(places, axes, strict=True)):
        ax.set_subplotspec(stacked[place])
        if columns > 1:
            ax.tick_params(labelleft=True, labelbottom=True)
            ax.set_ylabel(ax.get_ylabel() or y_labels[row])
            ax.set_xlabel(ax.get_xlabel() or x_labels.get(columns_of[place], ""))
        for side in ("left", "center"):
            title = ax.get_title(loc=side)
            ax.set_title(
                "\n".join(fill(line, _NARROW_LETTERS["title"]) for line in title.splitlines()), loc=side, fontsize=9.5
            )
        words = [label.get_text() for label in ax.get_yticklabels()]
        if any(len(word) > _NARROW_LETTERS["tick"] for word in words):
            wrapped = [fill(word.replace("\n", " "), _NARROW_LETTERS["tick"]) for word in words]
            ax.set_yticks(ax.get_yticks(), wrapped, fontsize=8)
    for ax in every:
        if ax not in axes:
            ax.remove()
    extra = 0.3
    for legend in list(figure.legends):
        handles, names = legend.legend_handles, [text.get_text() for text in legend.texts]
        for handle, label in zip(handles, names, strict=True):
            handle.set_label(label)  # type: ignore[union-attr]
        legend.remove()
        legend_above(figure, handles, NARROW_INCHES)
        extra += 0.22 * math.ceil(len(names) / 2)
    figure.set_size_inches(NARROW_INCHES, sum(heights) + extra)
    return figure


def inline_svg(drawing: Drawing) -> str:
    """Return the figure as two elements of an HTML page, for wide and for narrow screens, labelled by its heading.

    They have no XML header and unique ids; colours of lines and words follow the page, which is light or dark.
    """
    kinds = {"wide": (drawing.svg, ""), "narrow": (drawing.narrow, "narrow-")}
    return "\n".join(_inline(svg, shown, drawing.name, prefix) for shown, (svg, prefix) in kinds.items())


def colours_of_pages() -> str:
    """Return the colours of figures on light and dark pages, as custom properties of CSS."""
    return " ".join(f"--f{light[1:]}: light-dark({light}, {dark});" for light, dark in _ON_DARK_PAGES.items())


def dark_svg(svg: str) -> str:
    """Return a figure in the colours of dark pages."""
    return re.sub(f"(?<=: )({'|'.join(_ON_DARK_PAGES)})", lambda match: _ON_DARK_PAGES[match[1]], svg)


def _inline(svg: str, shown: str, name: str, prefix: str) -> str:
    body = svg[svg.index("<svg") :]
    body = re.sub(r'\bid="|href="#|url\(#', lambda match: f"{match[0]}{name}-{prefix}", body)
    known = "|".join(_ON_DARK_PAGES)
    body = re.sub(f"(?<=: )({known})", lambda match: f"var(--f{match[1][1:]})", body)
    label = f'class="{shown}" role="img" aria-labelledby="figure-{name}"'
    tag, _, rest = body.partition(">")
    unsized = re.sub(r'\b(?:width|height)="[^"]*" ?', "", tag).strip()
    return re.sub(r"[ \t]+$", "", f"{unsized} {label}>{rest}", flags=re.MULTILINE).strip()


def select(result: TaskResult, name: str, **at: Any) -> list[Measurement]:
    """Return the measurements with this name that were taken at the given places."""
    named = (row for row in result.measurements if row.name == name)
    return [row for row in named if all(row.at.get(key) == value for key, value in at.items())]


def labels(results: Sequence[TaskResult]) -> list[str]:
    return short_names([result.model.name for result in results])


def short_names(models: Sequence[str]) -> list[str]:
    """Return a short name for each model: the end of its path, longer where two models would have the same name."""
    paths = [Path(model) for model in models]
    for length in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def interval(row: Measurement) -> tuple[float, float]:
    """Return the Wilson interval of a share, or one standard error to each side."""
    error = row.standard_error or 0.0
    return (row.value - error if row.low is None else row.low), (row.value + error if row.high is None else row.high)


def curves(results: Sequence[TaskResult], name: str, along: str) -> tuple[Figure, Axes]:
    """Draw a measurement over the place `along`, on a logarithmic axis; a line for each model, the bands are `interval`."""
    figure, ((ax,),) = panels(3.8)
    for index, result in enumerate(results):
        rows = sorted(select(result, name), key=lambda row: row.at[along])
        x, y = [row.at[along] for row in rows], [row.value for row in rows]
        ax.plot(x, y, **line_style(index), markersize=4, markevery=max(1, len(x) // 20))
        low, high = np.array([interval(row) for row in rows]).reshape(-1, 2).T
        ax.fill_between(x, low, high, color=colour_of(index), alpha=0.18, linewidth=0)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    legend_above(figure, handles(results))
    return figure, ax


def handles(results: Sequence[TaskResult]) -> list[Line2D]:
    return [
        Line2D([], [], **line_style(index), markersize=5, label=label) for index, label in enumerate(labels(results))
    ]


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


def matrix(rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Make a matrix of rows of different lengths, filled up with NaN."""
    cells = np.full((len(rows), max(map(len, rows))), np.nan)
    for index, row in enumerate(rows):
        cells[index, : len(row)] = row
    return cells


def heat_map(ax: Axes, cells: np.ndarray, colours: Any, low: float, high: float, **options: Any) -> Any:
    """Draw a matrix, without its NaN cells, and return the image for a colour bar."""
    edges = [np.arange(count + 1) - 0.5 for count in reversed(cells.shape)]
    drawn = np.ma.masked_invalid(cells)
    image = ax.pcolormesh(*edges, drawn, cmap=colours, vmin=low, vmax=high, **options)
    ax.set_ylim(len(cells) - 0.5, -0.5)
    ax.grid(False)
    return image


@dataclass(frozen=True, kw_only=True)
class Pooled(TaskResult):
    """A model's results over seeds as one result; `seeds` holds them one by one."""

    seeds: list[TaskResult]


def share_intervals(results: Sequence[TaskResult]) -> str:
    seeds = len(results[0].seeds) if isinstance(results[0], Pooled) else 1
    return f"Student's t intervals of 95 % over {seeds} seeds" if seeds > 1 else "Wilson intervals of 95 % over items"
