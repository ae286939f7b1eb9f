"""Colours, marks and sizes of every figure, drawn by matplotlib's object interface: no display, no pyplot, no global state.

The same results give the same bytes. The colours are from Okabe and Ito's palette for colour-blind readers. Each model keeps
its colour, marker and dash in every figure, so that a grey print can be read too.
"""

import io
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from ..printable import printable

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v")
ARM_MARKERS = ("D", "s", "^", "v", "P", "X", "<", ">", "p", "h", "*", "d")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
MORE_COLOURS = (
    "#56B4E9",
    "#332288",
    "#882255",
    "#999933",
    "#44AA99",
    "#AA4499",
    "#6B4E16",
    "#117733",
    "#CC6677",
    "#000000",
)
"""Further colours, most from Okabe and Ito's and Paul Tol's palettes, for studies with many arms."""

REFERENCE_COLOUR = "#6b7178"
ARM_COLOURS = {
    "diff": 0, "wide": 1, "diff_v2": 2, "v2": 2, "grouped_diff": 3, "grouped": 3, "no-norm": 4, "dex": 5, "lambda-init": 6,
    "constant": 6,
}  # fmt: skip
"""Place in the palette of arms that several studies have, so that each has one colour in all of them."""

INK = "#1a1a1a"
WIDTH_INCHES = 10.0
_LETTER_INCHES = 0.075
"""Mean width of a letter in a legend."""

PNG_DOTS_PER_INCH = 160

STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.labelsize": 9.5,
    "legend.fontsize": 9.5,
    "xtick.labelsize": 9.0,
    "ytick.labelsize": 9.0,
    "text.color": INK,
    "axes.edgecolor": "#555555",
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "legend.frameon": False,
    "text.parse_math": False,
    "svg.hashsalt": "difftransformer",
    "svg.fonttype": "path",
}

ACCURACY_COLOURS = LinearSegmentedColormap.from_list("accuracy", ["#f7fafc", "#9cc4dd", "#2b7bb0", "#08306b"], N=48)
"""Pale to dark blue. From 50 colours on, matplotlib would put the colour bar into an SVG as a bitmap."""


@dataclass(frozen=True)
class Drawing:
    """A finished figure: SVG text for the page and the folder, and PNG bytes if they were requested."""

    name: str
    title: str
    caption: str
    svg: str
    png: bytes | None


def colour_of(index: int) -> str:
    """Return the colour of a figure's model number `index`."""
    return COLOURS[index % len(COLOURS)]


def line_style(index: int) -> dict[str, Any]:
    """Return colour, dash and marker of a figure's model number `index`, as keywords of `Axes.plot`."""
    dash, marker = DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)]
    return {"color": colour_of(index), "linestyle": dash, "marker": marker}


def arm_styles(arms: Sequence[str], reference: str) -> dict[str, dict[str, Any]]:
    """Return colour, dash and marker of each arm of a study: the reference is grey, and no other arm has its colour.

    Arms with a place in `ARM_COLOURS` have it in every study; the others take the free ones in their order.
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


def note(ax: Axes, text: str, xy: tuple[float, float], *, at_right_edge: bool = False, **options: Any) -> None:
    """Write a text beside a point, with options of `Axes.annotate`; at_right_edge measures x as a share of the axes."""
    place = ("axes fraction", "data") if at_right_edge else "data"
    ax.annotate(text, xy, xycoords=place, textcoords="offset points", **options)


def legend_above(figure: Figure, handles: Sequence[Any]) -> None:
    """Draw a legend above a figure's panels."""
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(5, len(handles), int(WIDTH_INCHES / (0.5 + _LETTER_INCHES * longest))))
    figure.legend(handles=list(handles), loc="outside upper left", ncols=columns, borderaxespad=0.2)


def finish(name: str, title: str, caption: str, figure: Figure, png: bool) -> Drawing:
    """Save a figure as SVG (without date and creator) and, if requested, as PNG."""
    text = io.StringIO()
    image = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # characters that the font lacks are drawn as boxes
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        if png:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=PNG_DOTS_PER_INCH, metadata={"Software": None})
            image = buffer.getvalue()
    return Drawing(name, title, caption, printable(text.getvalue()), image)


def inline_svg(drawing: Drawing) -> str:
    """Return the SVG as an element of an HTML page: no XML header, unique ids, full width, labelled by its heading."""
    body = drawing.svg[drawing.svg.index("<svg") :]
    prefix = f"{drawing.name}-"
    body = re.sub(r'\bid="', f'id="{prefix}', body)
    body = re.sub(r'href="#', f'href="#{prefix}', body)
    body = re.sub(r"url\(#", f"url(#{prefix}", body)
    body = re.sub(r"^<svg ([^>]*)>", lambda match: _svg_tag(match.group(1), drawing), body, count=1)
    return re.sub(r"[ \t]+$", "", body, flags=re.MULTILINE).strip()


def _svg_tag(attributes: str, drawing: Drawing) -> str:
    kept = re.sub(r'\b(?:width|height)="[^"]*" ?', "", attributes).strip()
    return f'<svg {kept} role="img" aria-labelledby="figure-{drawing.name}">'
