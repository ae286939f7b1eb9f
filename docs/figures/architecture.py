"""Draw the figures of docs/architecture.md: `python docs/figures/architecture.py` writes the SVG files beside this script.

The layers come from the import-linter contract in pyproject.toml. A test checks that every file and function named here exists,
and that the committed SVG files show these texts.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from difftransformer.report.figures import _STYLE as STYLE
from difftransformer.report.figures import COLOURS, INK

FOLDER = Path(__file__).parent
WIDTH_INCHES = 9.0
CODE = "DejaVu Sans Mono"
FILE_COLOUR, DISK_COLOUR = "#eaf2f8", "#fdf2e3"

PACKAGES = {
    "__main__": "",
    "cli": "one file per verb",
    "studies": "compare, upcycle --train, suites",
    "train": "loop, checkpoints",
    "evals": "engine, probes, tasks",
    "bench": "timing",
    "report": "tables, figures, pages",
    "convert": "other layouts",
    "serving": "vLLM",
    "model": "config, layers, cards",
    "data": "text, shards, loader",
    "attention": "one file per variant",
    "ops": "the op and its backends",
    "statistics": "intervals",
    "results": "typed JSON files",
    "typed": "checks of fields",
    "errors": "one error family",
}


@dataclass(frozen=True)
class Step:
    """One box of a walk: a file, a function in it, what happens there, and the shape or the file on disk that results."""

    file: str
    name: str
    does: str
    gives: str = ""


QUERY = (
    Step("model/modeling.py", "DiffTransformerForCausalLM.forward", "token ids come in, logits go out", "ids (B, T)"),
    Step("model/modeling.py", "DiffTransformerModel.forward", "embeds ids, prepares rotary tables and restrictions", "hidden (B, T, M)"),
    Step("model/modeling.py", "DecoderLayer.forward", "normalizes, calls attention, adds the residual", "hidden (B, T, M)"),
    Step("attention/base.py", "Attention.forward", "projects, rotates, appends keys and values to the cache", "query (B, H, T, 2 D)"),
    Step("attention/differential.py", "Differential.attend", "adds lambda and the headwise norm", "lam (H,) or (B, H, T)"),
    Step("ops/attention.py", "normed_differential_attention", "checks shapes, describes the call as a Problem", "restrictions"),
    Step("ops/backends.py", "choose", "takes the first backend that can compute it", "backend: cpu"),
    Step("ops/cpu.py", "run", "calls the registered operator", "cpu_attention"),
    Step("ops/csrc/operators.cpp", "attention", "reads strides, splits blocks of queries among threads", "64 queries a block"),
    Step("ops/csrc/forward.h", "", "both maps, (P1 - lam P2) V, norm", "heads (B, H, T, E)"),
)


def box(ax: Axes, x: float, y: float, width: float, height: float, colour: str, edge: str = "#7a8a99") -> None:
    """Draw a rounded box whose lower left corner is (x, y)."""
    shape = "round,pad=0,rounding_size=0.06"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=colour, edgecolor=edge, linewidth=0.9))


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = INK, bend: float = 0.0) -> None:
    """Draw an arrow between two points."""
    style = f"arc3,rad={bend}"
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=11, linewidth=1.2, color=colour, connectionstyle=style, shrinkA=0, shrinkB=0
        )
    )


def canvas(height: float) -> tuple[Figure, Axes]:
    """An empty figure whose units are inches."""
    figure = Figure(figsize=(WIDTH_INCHES, height))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_xlim(0, WIDTH_INCHES)
    ax.set_ylim(0, height)
    ax.axis("off")
    return figure, ax


def draw_layers() -> Figure:
    """The layers of the contract, the highest on top: a package imports only from rows below its own."""
    contracts = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    rows = [[name.strip() for name in layer.split("|")] for layer in contracts[0]["layers"]]
    rows = [[name for name in row if not name.startswith("_")] for row in rows]
    rows = [row for row in rows if row]
    step, height, left, right = 0.66, 0.5, 0.9, WIDTH_INCHES - 0.15
    figure, ax = canvas(step * len(rows) + 0.3)
    for place, row in enumerate(reversed(rows)):
        y = 0.2 + place * step
        width = (right - left - 0.12 * (len(row) - 1)) / len(row)
        for index, name in enumerate(row):
            x = left + index * (width + 0.12)
            box(ax, x, y, width, height, FILE_COLOUR)
            ax.text(x + width / 2, y + 0.335, name, ha="center", va="center", family=CODE, weight="bold", fontsize=9.5)
            ax.text(x + width / 2, y + 0.145, PACKAGES[name], ha="center", va="center", fontsize=7.5 if len(row) > 4 else 8.5)
    top = 0.2 + (len(rows) - 1) * step + height
    arrow(ax, (0.5, top), (0.5, 0.2), COLOURS[0])
    ax.text(0.3, (top + 0.2) / 2, "may import", rotation=90, ha="center", va="center", color=COLOURS[0])
    return figure


def draw_query() -> Figure:
    """How a query goes from `forward` to the kernel."""
    step, height, left, width = 0.78, 0.6, 0.2, 5.75
    figure, ax = canvas(step * len(QUERY) + 0.25)
    for place, part in enumerate(QUERY):
        y = 0.15 + (len(QUERY) - 1 - place) * step
        box(ax, left, y, width, height, FILE_COLOUR)
        ax.text(left + 0.14, y + 0.41, part.name, va="center", family=CODE, weight="bold", fontsize=9.5)
        ax.text(left + width - 0.14, y + 0.41, part.file, va="center", ha="right", family=CODE, fontsize=8, color="#555555")
        ax.text(left + 0.14, y + 0.17, part.does, va="center", fontsize=9)
        ax.text(left + width + 0.25, y + height / 2, part.gives, va="center", fontsize=9.5, color=COLOURS[0])
        if place:
            arrow(ax, (left + width / 2, y + step), (left + width / 2, y + height))
    return figure


FIGURES = {"architecture-layers": draw_layers, "architecture-query": draw_query}


def main() -> None:
    """Write every figure as SVG."""
    for name, draw in FIGURES.items():
        with matplotlib.rc_context(STYLE):
            figure = draw()
            figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
