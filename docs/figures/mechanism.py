"""Draw the figures of docs/how-it-works.md: `python docs/figures/mechanism.py` writes them beside this script.

The maps are those of the shipped model `demo`, which `difftransformer maps demo` shows too. Lambda comes from a results file
that `difftransformer eval maps` wrote. A test compares both with the committed figures and text.
"""

import hashlib
import io
from pathlib import Path

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from PIL import Image, PngImagePlugin

from difftransformer.attention.differential import lambda_init
from difftransformer.hub import open_model, open_tokenizer, source_folder
from difftransformer.ops import use_backend
from difftransformer.sources import shipped_models
from difftransformer_lab.explorer import DEFAULT_PROMPT
from difftransformer_lab.explorer.capture import LayerMaps, capture
from difftransformer_lab.plots import COLOURS, INK, STYLE, heat_map, line_style
from difftransformer_lab.results import TaskResult, read_result

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "results"
WIDTH_INCHES = 9.0
NAMES = ("A1", "A2", "A1 − λ A2")
SIGNED = LinearSegmentedColormap.from_list("signed", ["#8a3b00", "#e98a3d", "#ffffff", "#4a94c8", "#08306b"])
SIGNED_DARK = LinearSegmentedColormap.from_list("signed dark", ["#ffc48f", "#b5561b", "#14171b", "#2b7bb0", "#b4dcf7"])
LAYER, FINDS = 1, 1
"""The layer that is drawn, and its head that finds the number."""
LABELLED = 0.1
PAGE, WORDS = "#14171b", "#e8eaed"
DARK = (
    dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), WORDS)
    | dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), PAGE)
    | {"axes.edgecolor": "#8b929b"}
)
"""Of a picture for dark pages."""
FIRST, SECOND, BOTH = "#cfe3f1", "#f8dccb", "#eceff1"
HALVES = [
    (4.2, "Q1 (width D)", FIRST),
    (3.45, "Q2 (width D)", SECOND),
    (2.75, "K1 (width D)", FIRST),
    (2.0, "K2 (width D)", SECOND),
]
PROJECTIONS = ((3.8, "query, W_Q\n(B, H, T, 2D)"), (2.4, "key, W_K\n(B, G, S, 2D)"), (1.1, "value, W_V\n(B, G, S, 2D)"))


def shipped_maps() -> tuple[list[str], list[LayerMaps]]:
    """The tokens of the explorer's prompt, and the maps that the shipped model `demo` forms for it."""
    with source_folder("demo") as folder, use_backend("reference"):
        model, tokenizer = open_model(folder), open_tokenizer(folder)
    ids = [tokenizer.bos_token_id, *tokenizer(DEFAULT_PROMPT).input_ids]
    return [tokenizer.decode([one]) for one in ids], capture(model, torch.tensor([ids]))


def maps_of(layer: LayerMaps, head: int) -> dict[str, np.ndarray]:
    """The maps of a head, (T, T), and their difference, by name."""
    first, second = (
        np.stack([np.pad(row[head, which], (0, len(layer.rows) - row.shape[-1])) for row in layer.rows])
        for which in (0, 1)
    )
    return dict(zip(NAMES, (first, second, first - float(layer.lam[head, 0]) * second), strict=True))


def draw_maps(words: list[str], layer: LayerMaps, signed: LinearSegmentedColormap) -> Figure:
    """The maps of the head that finds the number, and below them what its last token reads."""
    figure = Figure(figsize=(WIDTH_INCHES, 5.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(3.4, 2.0))
    above.suptitle(f"Head {FINDS}: weights of every token (row) on every earlier token (column)", x=0.01, ha="left")
    for ax, (name, cells) in zip(above.subplots(1, 3), maps_of(layer, FINDS).items(), strict=True):
        image = heat_map(ax, np.cbrt(cells), signed, -1, 1)
        ax.set_aspect("equal")
        ax.set_title(name)
        ax.set_xticks([])
        ax.set_yticks([])
    bar = above.colorbar(image, ax=above.axes, fraction=0.02, pad=0.01, label="weight")
    ticks = (-1, -0.1, 0, 0.1, 1)
    bar.set_ticks(np.cbrt(ticks), labels=[f"{tick:g}" for tick in ticks])
    below.suptitle("The same, for the last token alone, which 42 must follow", x=0.01, ha="left")
    ax = below.subplots()
    rows = {name: cells[-1] for name, cells in maps_of(layer, FINDS).items()}
    for place, (name, row) in enumerate(rows.items()):
        ax.bar(np.arange(len(words)) + 0.33 * (place - 1), row, 0.33, color=COLOURS[place], label=name)
    for at in np.flatnonzero(np.max(np.abs([*rows.values()]), 0) > LABELLED):
        ax.text(at, max(row[at] for row in rows.values()) + 0.04, words[at].strip() or "␣", ha="center", fontsize=12)
    ax.axhline(0, color=matplotlib.rcParams["text.color"], linewidth=0.6)
    ax.set_ylabel("weight")
    ax.set_ylim(-0.9, 1.2)
    ax.set_xlim(-0.8, len(words) - 0.2)
    ax.set_xticks([])
    ax.set_xlabel(f"the {len(words)} tokens of the prompt, the last one at the right")
    below.legend(*ax.get_legend_handles_labels(), loc="outside upper right", ncols=3)
    return figure


def draw_lambda(result: TaskResult) -> Figure:
    """lambda_init by layer, and the lambda of a trained model."""
    (grid,) = [grid for grid in result.grids if grid.name == "lambda"]
    values = [row[0] for row in grid.values]
    figure = Figure(figsize=(WIDTH_INCHES, 2.8), layout="constrained")
    ax = figure.subplots()
    layers = range(len(values))
    ax.plot(layers, [lambda_init(layer) for layer in layers], **line_style(0), label="lambda_init", zorder=2)
    ax.plot(layers, values, **line_style(1) | {"linestyle": ""}, label="lambda after training", zorder=3)
    ax.axhline(0, color=INK, linewidth=0.6)
    ax.set_xlabel("layer_index")
    ax.set_ylabel("lambda")
    ax.set_xticks(layers)
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def box(ax: Axes, x: float, y: float, text: str, colour: str, width: float = 1.55) -> None:
    shape = FancyBboxPatch((x - width / 2, y - 0.26), width, 0.52, "round,pad=0.02", fc=colour, ec="#7a828a", lw=0.8)
    ax.add_patch(shape)
    ax.text(x, y, text, ha="center", va="center", fontsize=8.5)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    ax.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=9, color="#555555", lw=0.9, shrinkB=1))


def draw_layout() -> Figure:
    """A head of DIFF V1 from the hidden states to the output, with shapes."""
    figure = Figure(figsize=(WIDTH_INCHES, 3.5))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_xlim(0, 12.4)
    ax.set_ylim(0.2, 4.6)
    ax.set_axis_off()
    box(ax, 0.95, 2.4, "hidden states\n(B, T, M)", BOTH)
    for y, name in PROJECTIONS:
        box(ax, 3.05, y, name, BOTH)
        arrow(ax, (1.75, 2.4), (2.25, y))
    for y, name, colour in HALVES:
        box(ax, 5.15, y, name, colour, 1.4)
        arrow(ax, (3.85, 3.8 if y > 3 else 2.4), (4.42, y))
    box(ax, 7.3, 3.6, "A1 = softmax\n(T x S)", FIRST)
    box(ax, 7.3, 2.5, "A2 = softmax\n(T x S)", SECOND)
    for y, _, colour in HALVES:
        arrow(ax, (5.88, y), (6.5, 3.6 if colour == FIRST else 2.5))
    box(ax, 9.3, 3.05, "A1 − λ A2\n(B, H, T, S)", BOTH)
    arrow(ax, (8.1, 3.6), (8.5, 3.15))
    arrow(ax, (8.1, 2.5), (8.5, 2.95))
    box(ax, 9.3, 1.1, "times V\n(B, H, T, 2D)", BOTH)
    arrow(ax, (3.85, 1.1), (8.5, 1.1))
    arrow(ax, (9.3, 2.78), (9.3, 1.4))
    box(ax, 11.4, 1.1, "RMSNorm of each\nhead, (1 − λ_init)", BOTH, 1.75)
    arrow(ax, (10.1, 1.1), (10.5, 1.1))
    box(ax, 11.4, 3.05, "output, W_O\n(B, T, M)", BOTH, 1.75)
    arrow(ax, (11.4, 1.4), (11.4, 2.76))
    return figure


def source() -> str:
    """What the picture of the maps says of the model and the prompt that it was drawn from."""
    weights = (shipped_models()["demo"] / "model.safetensors").read_bytes()
    return hashlib.sha256(weights + DEFAULT_PROMPT.encode()).hexdigest()


def main() -> None:
    words, layers = shipped_maps()
    with matplotlib.rc_context(STYLE | {"axes.grid": False, "font.size": 9.0}):
        for name, colours, signed in (("maps", {}, SIGNED), ("maps-dark", DARK, SIGNED_DARK)):
            with matplotlib.rc_context(colours):
                buffer = io.BytesIO()
                draw_maps(words, layers[LAYER], signed).savefig(buffer, format="png", dpi=150)
            picture = Image.open(buffer).convert("RGB").quantize(200)
            notes = PngImagePlugin.PngInfo()
            notes.add_text("Source", source())
            picture.save(FOLDER / f"{name}.png", optimize=True, pnginfo=notes)
        for name, figure in (
            ("layout", draw_layout()),
            ("lambda", draw_lambda(read_result(RESULTS / "lambda.json", TaskResult))),
        ):
            figure.savefig(
                FOLDER / f"{name}.svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
            )


if __name__ == "__main__":
    main()
