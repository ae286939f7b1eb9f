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

from difftransformer_lab.plots import COLOURS, INK, STYLE

FOLDER = Path(__file__).parent
WIDTH_INCHES = 9.0
CODE = "DejaVu Sans Mono"
CODE_COLOUR, DISK_COLOUR = "#eaf2f8", "#fdf2e3"

PACKAGES = {
    "cli": "one file per command",
    "demo": "three models that learn while you watch",
    "studies": "designs, runs, records",
    "hub": "open and export saved models",
    "analysis": "records, findings, pages",
    "train": "loop, checkpoints",
    "evals": "engine, probes, tasks, suites",
    "bench": "times and memory",
    "explorer": "attention maps in the browser",
    "serving": "vLLM",
    "families": "other people's models: layouts, upcycling, speed",
    "model": "configuration, layers, masks, cards",
    "data": "text, tokenizers, shards, loader, needles",
    "attention": "one file per variant",
    "ops": "the op and its backends",
    "plots": "style and parts of figures",
    "statistics": "intervals",
    "environment": "machine, code and command of a result",
    "table": "tables as text",
    "results": "typed results files",
    "sources": "models and texts by name",
    "recipe_files": "recipes by name",
    "jsonl": "files of JSON lines",
    "stores": "folders at a URL",
    "child": "processes that end with their parent",
    "doctor": "checks of backends and machine",
    "files": "locks, whole files",
    "typed": "checks of fields and types",
    "reading": "JSON and YAML of others",
    "errors": "one family of errors",
    "progress": "how far long work has come",
    "printable": "text that a terminal and a page can show",
    "torchrun": "what torchrun has set",
}


@dataclass(frozen=True)
class Step:
    """One box of a walk: a function, its file, and what it does.

    Attributes:
        file: Path below src/difftransformer or src/difftransformer_lab.
        name: A function or Class.method of that file.
        does: What it does.
        gives: What it passes on: a tensor with its shape, or files on disk.
        verb: Command that runs this step, where one begins here.
    """

    file: str
    name: str
    does: str
    gives: str
    verb: str = ""


QUERY = (
    Step("model/modeling.py", "DiffTransformerForCausalLM.forward", "turns token ids into logits", "ids (B, T)"),
    Step("model/modeling.py", "DiffTransformerModel.forward", "embeds ids, then runs the layers", "hidden (B, T, M)"),
    Step("model/masks.py", "arrange_rows", "describes masks, packing and cache by one object", "Restrictions"),
    Step("model/modeling.py", "DecoderLayer.forward", "normalizes, attends, adds the residual", "hidden (B, T, M)"),
    Step(
        "attention/base.py",
        "Attention.forward",
        "projects, rotates, appends keys and values to the cache",
        "query (B, H, T, 2 D)",
    ),
    Step("attention/head_norm.py", "NormedAttention.attend", "adds lambda and the headwise norm", "lam, norm"),
    Step("ops/attention.py", "attend", "checks shapes, and describes the call", "Call, Problem"),
    Step("ops/backends.py", "select_backend", "takes the first backend that fits, or the named one", "Backend"),
    Step("ops/cpu.py", "run", "calls what define returned", "Call"),
    Step("ops/fused.py", "define", "made the operator, its schema and its gradient", "tensors and numbers"),
    Step(
        "ops/csrc/operators.cpp", "attention", "reads shapes and strides, allocates the output", "pointers and strides"
    ),
    Step("ops/csrc/forward.cpp", "attend", "computes both maps, (P1 - lam P2) V, and the norm", "heads (B, H, T, E)"),
)
BACK_TO = 4  # the box that the kernel's output returns to

TOKEN = (
    Step("data/text.py", "iter_documents", "reads a folder, a file or a data set", "", "tokenize"),
    Step(
        "data/writing.py", "write_documents", "tokenizes every document once", "shards/\nmanifest.json, train-00000.bin"
    ),
    Step("data/loader.py", "Loader.batch", "cuts rows: a function of data, seed and step", "", "train"),
    Step(
        "train/trainer.py",
        "Trainer.fit",
        "optimizer steps, validation, checkpoints",
        "runs/NAME/\nmetrics.jsonl, checkpoints/step-000500/",
    ),
    Step("evals/opening.py", "open_language_model", "opens a run, a folder or a name on the hub", "", "eval"),
    Step(
        "evals/engine.py",
        "run_task",
        "asks a task's requests, scores the answers",
        "evals/\nneedle.answers.jsonl, needle.json",
    ),
    Step(
        "studies/comparison.py",
        "compare",
        "trains and evaluates every arm and seed",
        "reports/NAME/\nresults.json",
        "compare",
    ),
    Step(
        "analysis/page.py",
        "write_page",
        "shows findings, figures and tables",
        "reports/NAME/\nindex.html, figures/, tables/",
        "report",
    ),
)


def box(ax: Axes, x: float, y: float, width: float, height: float, colour: str, edge: str = "#7a8a99") -> None:
    """Draw a rounded box whose lower left corner is (x, y)."""
    shape = "round,pad=0,rounding_size=0.06"
    ax.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=shape, facecolor=colour, edgecolor=edge, linewidth=0.9))


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = INK) -> None:
    """Draw an arrow between two points."""
    style = {"arrowstyle": "-|>", "mutation_scale": 11, "shrinkA": 0, "shrinkB": 0}
    ax.add_patch(FancyArrowPatch(start, end, linewidth=1.2, color=colour, **style))


def canvas(height: float) -> tuple[Figure, Axes]:
    """An empty figure whose units are inches."""
    figure = Figure(figsize=(WIDTH_INCHES, height))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_xlim(0, WIDTH_INCHES)
    ax.set_ylim(0, height)
    ax.axis("off")
    return figure, ax


def draw_layers() -> Figure:
    """The layers of both contracts, the laboratory on top: a package imports only from rows below its own."""
    project = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {
        tuple(contract.get("containers", ())): contract for contract in project["tool"]["importlinter"]["contracts"]
    }
    rows = []
    for package in ("difftransformer_lab", "difftransformer"):
        named = [layer.split("|") for layer in contracts[(package,)]["layers"]]
        named = [[(package, name.strip()) for name in row if not name.strip().startswith("_")] for row in named]
        rows += [row for row in named if row]
    step, height, left, right = 0.66, 0.5, 0.9, WIDTH_INCHES - 0.15
    figure, ax = canvas(step * len(rows) + 0.3)
    for place, row in enumerate(reversed(rows)):
        y = 0.2 + place * step
        width = (right - left - 0.12 * (len(row) - 1)) / len(row)
        for index, (package, name) in enumerate(row):
            x = left + index * (width + 0.12)
            box(ax, x, y, width, height, CODE_COLOUR if package == "difftransformer" else DISK_COLOUR)
            ax.text(x + width / 2, y + 0.335, name, ha="center", va="center", family=CODE, weight="bold", fontsize=9.5)
            ax.text(
                x + width / 2,
                y + 0.145,
                PACKAGES[name],
                ha="center",
                va="center",
                fontsize=7.5 if len(row) > 4 else 8.5,
            )
    top = 0.2 + (len(rows) - 1) * step + height
    arrow(ax, (0.5, top), (0.5, 0.2), COLOURS[0])
    ax.text(0.3, (top + 0.2) / 2, "may import", rotation=90, ha="center", va="center", color=COLOURS[0])
    return figure


def step_box(ax: Axes, x: float, y: float, width: float, height: float, step: Step) -> None:
    """Draw a step with its name, file and deed."""
    box(ax, x, y, width, height, CODE_COLOUR)
    ax.text(x + 0.12, y + 0.68 * height, step.name, va="center", family=CODE, weight="bold", fontsize=9)
    ax.text(
        x + width - 0.12,
        y + 0.68 * height,
        step.file,
        va="center",
        ha="right",
        family=CODE,
        fontsize=7.5,
        color="#555555",
    )
    ax.text(x + 0.12, y + 0.28 * height, step.does, va="center", fontsize=8.5)


def draw_query() -> Figure:
    """How a query goes from `forward` to the kernel, and its heads back."""
    step, height, left, width = 0.78, 0.58, 0.15, 5.6
    figure, ax = canvas(step * len(QUERY) + 0.15)
    bottoms = [0.15 + (len(QUERY) - 1 - place) * step for place in range(len(QUERY))]
    for place, (part, y) in enumerate(zip(QUERY, bottoms, strict=True)):
        step_box(ax, left, y, width, height, part)
        ax.text(left + width + 0.2, y + 0.6 * height, part.gives, va="center", fontsize=9, color=COLOURS[0])
        if place:
            arrow(ax, (left + width / 2, y + step), (left + width / 2, y + height))
    right, edge = WIDTH_INCHES - 0.45, left + width
    start, end = bottoms[-1] + 0.1, bottoms[BACK_TO] + 0.1
    ax.plot([edge, right, right], [start, start, end], color=COLOURS[1], linewidth=1.3)
    arrow(ax, (right, end), (edge, end), COLOURS[1])
    ax.text(
        right + 0.2,
        (start + end) / 2,
        "back to the output projection",
        rotation=90,
        ha="center",
        va="center",
        color=COLOURS[1],
    )
    return figure


def draw_token() -> Figure:
    """How a token goes from text to report: functions on the left, what they leave on disk on the right."""
    step, height, left, width, disk, disk_width = 0.82, 0.58, 1.05, 4.75, 6.35, 2.5
    figure, ax = canvas(step * len(TOKEN) + 0.15)
    reads = None
    for place, part in enumerate(TOKEN):
        y = 0.15 + (len(TOKEN) - 1 - place) * step
        middle = y + height / 2
        step_box(ax, left, y, width, height, part)
        if part.verb:
            ax.text(
                left - 0.12, middle, part.verb, ha="right", va="center", family=CODE, weight="bold", color=COLOURS[1]
            )
        if reads is not None:
            arrow(ax, (disk + 0.3, reads), (left + width, y + 0.8 * height), COLOURS[0])
        elif place:
            arrow(ax, (left + width / 2, y + step), (left + width / 2, y + height))
        reads = None
        if part.gives:
            folder, files = part.gives.split("\n")
            box(ax, disk, y, disk_width, height, DISK_COLOUR, "#c08a3e")
            ax.text(disk + 0.12, y + 0.68 * height, folder, va="center", family=CODE, weight="bold", fontsize=8.5)
            ax.text(disk + 0.12, y + 0.28 * height, files, va="center", family=CODE, fontsize=6.8)
            arrow(ax, (left + width, middle), (disk, middle))
            reads = y
    return figure


FIGURES = {"architecture-layers": draw_layers, "architecture-query": draw_query, "architecture-token": draw_token}


def main() -> None:
    """Write every figure as SVG."""
    for name, draw in FIGURES.items():
        with matplotlib.rc_context(STYLE | {"svg.fonttype": "path"}):
            figure = draw()
            figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
