"""Attention maps of a prompt, lambda by layer, negative weight and weight near zero.

The maps are A1, A2 and A1 - lambda A2 of arXiv:2410.05258 eq. 1. Over all queries of the prompt and the n keys to which each
query may attend, for the weights w of a head:

    negative weight    sum of max(-w, 0) / sum of |w|
    near zero          share of weights with |w| < 1 / (10 n), a tenth of uniform attention
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from difftransformer.data.records import read_text
from difftransformer.errors import DataError

from ...plots import WIDTH_INCHES, handles, heat_map, labels, line_style, matrix
from ...results import Grid, Measurement, TaskResult
from ..engine import Scores
from ..probes import Maps, ProbeTask
from ..prompts.texts import TaskContext
from ..registry import TaskKind, at_least, refused, register
from ..scores import details, mean

MOST_TOKENS = 128
DEFAULT_PROMPT = "The magic Lisbon number is: 42\nThe magic Lisbon number is:"
SHOWN = {"first": "A1", "second": "A2", "weights": "A1 - lambda A2"}

_COLOURS = LinearSegmentedColormap.from_list("signed", ["#8a3b00", "#e98a3d", "#ffffff", "#4a94c8", "#08306b"], N=48)
_LABELLED_TOKENS = 24
_MOST_COLUMNS = 4
_COMBINED = ("A1 - lambda A2", "A")
_CURVES_INCHES, _MOST_MAP_INCHES, _WORDS_INCHES = 3.0, 4.6, 0.5

_CHOICES = [
    "The prompt is one row that begins with the token that begins a text, like a document in training.",
    "Negative weight is its share of the sum of |w|; near zero means |w| < 1 / (10 n) where a query may attend to n keys.",
    "A lambda that depends on the token is given as its mean over the prompt.",
    "The n and the standard error of a figure are over heads.",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Attention maps of any model.

    Attributes:
        prompt: The text; at most 128 tokens with the token that begins it.
        prompt_file: A file with the text, instead of prompt.
        layers: Layers whose maps are drawn, from 0; the first, the middle and the last by default.
        heads: Heads of a layer that are drawn, from 0; the first four by default.
    """

    prompt: str = DEFAULT_PROMPT
    prompt_file: str | None = None
    layers: list[int] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.prompt_file is None and not self.prompt:
            raise refused(self, "prompt", "give a text")
        at_least(self, 0, "layers", "heads")


class MapsTask(ProbeTask):
    def __init__(self, options: Options, context: TaskContext) -> None:
        tokenizer = context.tokenizer
        self.options, self.choices = options, _CHOICES
        self.data_name = options.prompt_file or "a prompt"
        text = read_text(Path(options.prompt_file)) if options.prompt_file is not None else options.prompt
        ids = (tokenizer.begin_of_text, *tokenizer.encode(text))
        if len(ids) > MOST_TOKENS:
            raise DataError(
                f"the prompt has {len(ids)} tokens, and maps of at most {MOST_TOKENS} can be read; give a shorter "
                "--prompt or --prompt-file"
            )
        self.labels = [tokenizer.decode([token]) for token in ids]
        self.requests = [Maps(ids, tuple(options.layers), tuple(options.heads))]

    def score(self, answers: Sequence[Any]) -> Scores:
        """Compute the shares over all heads, by layer and, as grids, by head; return the maps of the chosen heads."""
        (answer,) = answers
        measurements: list[Measurement] = []
        grids: list[Grid] = []
        differential = answer["lambda"][0] is not None
        figures = {"negative weight": "negative", "near zero": "near_zero"}
        if differential:
            figures["near zero in A1 alone"] = "near_zero_first"
        by_layer: list[Measurement] = []
        for name, key in figures.items():
            measurements.append(mean(name, "share", list(chain(*answer[key])), {}))
            by_layer += [mean(name, "share", heads, {"layer": layer}) for layer, heads in enumerate(answer[key])]
            grids.append(Grid(name=name, at={}, values=_short(answer[key])))
        if differential:
            by_layer += [mean("lambda", "", heads, {"layer": layer}) for layer, heads in enumerate(answer["lambda"])]
            grids.append(Grid(name="lambda", at={}, values=_short(answer["lambda"])))
        for drawn in answer["maps"]:
            place = {"layer": drawn["layer"], "head": drawn["head"]}
            for key, name in SHOWN.items() if differential else [("weights", "A")]:
                grids.append(Grid(name="map", at=place | {"map": name}, values=drawn[key], labels=self.labels))
        return Scores(measurements=measurements + details(by_layer), items=[], grids=grids)


def _short(rows: Sequence[Sequence[float]]) -> list[list[float]]:
    return [[round(value, 6) for value in row] for row in rows]


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw curves over layers and, below them, maps: all maps of a single model, or the combined map of each of several."""
    shown = [_rows(result, all_maps=len(results) == 1) for result in results]
    heights = [_CURVES_INCHES, *map(_inches, shown)]
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    _curves(parts[0], results)
    for part, rows, label in zip(parts[1:], shown, labels(results), strict=True):
        _maps(part, rows, label)
    caption = (
        "Attention maps: a row for each query, a column for each key; blue adds a value, orange subtracts it, colours follow "
        "the square root of a weight. Above: by layer, a dot a head and a line through their mean: lambda; negative weight as "
        "a share of all |weight|; the share of weights below a tenth of even attention (hollow: of A1 alone)."
    )
    return "Attention maps", caption, figure


def _curves(figure: SubFigure, results: Sequence[TaskResult]) -> None:
    names = ["negative weight", "near zero"]
    if any(_grids(result, "lambda") for result in results):
        names.insert(0, "lambda")
    for ax, name in zip(figure.subplots(1, len(names)), names, strict=True):
        for index, result in enumerate(results):
            for grid in _grids(result, name):
                _by_layer(ax, grid, index)
            for alone in _grids(result, f"{name} in A1 alone"):
                _by_layer(ax, alone, index, hollow=True)
        ax.set_title(name, loc="left")
        ax.set_xlabel("layer")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if name != "lambda":
            ax.set_ylim(-0.02, None)
    figure.legend(handles=handles(results), loc="outside upper left", ncols=min(5, len(results)))


def _by_layer(ax: Axes, grid: Grid, index: int, hollow: bool = False) -> None:
    style = line_style(index)
    colour = style["color"]
    face = "none" if hollow else colour
    for layer, row in enumerate(grid.values):
        ax.scatter([layer] * len(row), row, s=9, facecolors=face, edgecolors=colour, linewidths=0.7, alpha=0.6)
    if hollow:
        style |= {"linestyle": ":"}
    ax.plot(list(map(np.mean, grid.values)), **style, markersize=4, markerfacecolor="white" if hollow else colour)


def _inches(rows: list[list[Grid]]) -> float:
    columns = max(map(len, rows))
    return (min(0.9 * WIDTH_INCHES / columns, _MOST_MAP_INCHES) + _WORDS_INCHES) * len(rows) + _WORDS_INCHES


def _maps(figure: SubFigure, rows: list[list[Grid]], label: str) -> None:
    axes = figure.subplots(len(rows), max(map(len, rows)), squeeze=False)
    for line, grids in zip(axes, rows, strict=True):
        for ax in line[len(grids) :]:
            ax.set_visible(False)
        for place, (ax, grid) in enumerate(zip(line, grids, strict=False)):
            _map(ax, grid, named=place == 0)
    figure.suptitle(label, x=0.01, ha="left", fontsize=10.5)
    colours = ScalarMappable(Normalize(-1, 1), _COLOURS)
    bar = figure.colorbar(colours, ax=list(axes.flat), fraction=0.02, pad=0.01, aspect=40, label="weight")
    ticks = (-1, -0.25, -0.04, 0, 0.04, 0.25, 1)
    bar.set_ticks([np.sign(tick) * abs(tick) ** 0.5 for tick in ticks], labels=[f"{tick:g}" for tick in ticks])


def _map(ax: Axes, grid: Grid, *, named: bool) -> None:
    square, count = matrix(grid.values), len(grid.values)
    heat_map(ax, np.sign(square) * np.sqrt(np.abs(square)), _COLOURS, -1, 1, rasterized=True)
    ax.set_aspect("equal")
    ax.set_title(f"layer {grid.at['layer']}, head {grid.at['head']}: {grid.at['map']}", fontsize=8)
    ax.tick_params(length=1.5, labelsize=6, pad=1)
    ax.set_xlabel("key", fontsize=7, labelpad=2)
    if named:
        ax.set_ylabel("query", fontsize=7, labelpad=2)
    if grid.labels and count <= _LABELLED_TOKENS:
        words = [_word(label) for label in grid.labels]
        size = min(6.0, 110 / count)
        ax.set_yticks(range(count), words if named else [""] * count, fontsize=size)
        ax.set_xticks(range(count), words, rotation=90, fontsize=size)
    else:
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def _word(label: str) -> str:
    shown = label.replace("\n", "\u21b5").strip(" ") or "\u2423"
    return shown if len(shown) <= 10 else shown[:9] + "\u2026"


def _rows(result: TaskResult, *, all_maps: bool) -> list[list[Grid]]:
    """Return the maps in rows: A1, A2 and A1 - lambda A2 of a head side by side, or where there are more heads the heads."""
    shown = [grid for grid in _grids(result, "map") if all_maps or grid.at["map"] in _COMBINED]
    kinds, heads = (len({grid.at[name] for grid in shown}) for name in ("map", "head"))
    groups: dict[tuple[Any, ...], list[Grid]] = {}
    for grid in shown:
        key = () if kinds == 1 else (grid.at["layer"], grid.at["head" if heads < _MOST_COLUMNS else "map"])
        groups.setdefault(key, []).append(grid)
    return [row for group in groups.values() for row in _filled(group)]


def _filled(maps: list[Grid]) -> list[list[Grid]]:
    """Divide maps into rows of the length that leaves the fewest places empty."""
    lengths = range(min(_MOST_COLUMNS, len(maps)), 1, -1)
    length = min(lengths, key=lambda length: -len(maps) % length, default=1)
    return [maps[start : start + length] for start in range(0, len(maps), length)]


def _grids(result: TaskResult, name: str) -> list[Grid]:
    return [grid for grid in result.grids if grid.name == name]


register(TaskKind(name="maps", doc=__doc__, options=Options, make=MapsTask, draw=draw))
