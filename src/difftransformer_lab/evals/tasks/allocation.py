"""Where attention goes: answer, other context, first token and query, by the answer's depth.

This is arXiv:2410.05258 Figure 1 and Table 3: where does the last prompt token look?

The paper gives its formula as an image only; its authors say that scores are averaged over heads and layers. A
differential map has negative weights, so a share can be meant in three ways, and all are reported. For each document the
weights of all heads and layers of the last prompt token are added up by segment, then divided by their total:

    signed      sum of w / sum of all w          (the total of a head is 1 - lambda)
    absolute    sum of |w| / sum of all |w|
    positive    sum of max(w, 0) / sum of all max(w, 0)

For softmax attention the three agree.

Beside them stand the shares of these weights, of all heads and all tokens of the prompt, that are near zero, |w| < 0.001, and
that are negative, over all layers and by layer. Softmax attention has no negative ones. A share near zero depends on the length
of the prompt: n weights of softmax attention are 1/n on average.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from difftransformer.data import NeedleQuestion

from ...plots import ACCURACY_COLOURS, COLOURS, ON_PALE, heat_map, labels, legend_above, matrix, panels, select
from ...results import Form, Grid, Measurement, Segment, TaskResult
from ..engine import Scores
from ..probes import COUNTED, FORMS, LastRow, ProbeTask
from ..prompts.haystack import Kind, NeedleOptions, draw_documents
from ..prompts.texts import HAYSTACK_TOKENS, TaskContext, token_stream
from ..registry import TaskKind, at_least, register
from ..scores import details, mean, unit_scores

SEGMENTS: tuple[Segment, ...] = ("first", "before", "answer", "after", "query")


def segment_shares(sums: Any) -> dict[Form, list[float]]:
    """Shares of one document by form and segment, over all heads and layers.

    Args:
        sums: `probes.maps.row_sums` of the last prompt token: [layer][head][form or share][segment].

    Returns:
        For each form, the shares in the order of SEGMENTS; they sum to 1.
    """
    columns = np.array([head for layer in sums for head in layer]).sum(0)
    return {form: (row / row.sum()).tolist() for form, row in zip(FORMS, columns, strict=False)}


def edges_of(question: NeedleQuestion) -> tuple[int, ...]:
    """Bounds of SEGMENTS in a question's first prompt."""
    start, end = question.spans[0]
    return 0, 1, max(1, start), end, question.query_starts[0], len(question.prompts[0])


DEFAULT_LENGTH = 2048

_CHOICES = [
    "The paper gives its formula as an image only. Here the weights of the last prompt token are added up by segment over "
    "all heads and layers, then divided by their total; a share is the mean over documents.",
    "A differential map has negative weights: signed sums them as they are, absolute takes |w|, positive max(w, 0). The "
    "paper's bars go below zero, so that its own reading is likely the signed one.",
    "The prompt is a needle document that ends with the beginning of the needle's own sentence; that sentence is the "
    "query.",
    "By layer and head, at the depth nearest to the middle: signed weights as they are summed (a differential head's total "
    "is 1 - lambda), absolute and positive ones over the head's own total.",
    "The paper states neither the number of needles nor the length.",
    "Weights near zero, |w| < 0.001, and negative ones are counted over all heads and all tokens of the prompt, those "
    "outside of a sliding window too, whose weight is 0.",
]


@dataclass(frozen=True, kw_only=True)
class Options(NeedleOptions):
    """Attention allocation of any model.

    Attributes:
        length: Prompt length in tokens with room for the answer; the model's context by default, at most 2048.
        needles: Needles in the context; one is asked for.
        cities: Cities to name: all, those that training documents name (seen), or the others (unseen).
    """

    length: int | None = None
    needles: int = 4
    cities: Kind = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "length", "needles")


class AllocationTask(ProbeTask):
    def __init__(self, options: Options, context: TaskContext) -> None:
        self.options, self.data_name, self.choices = options, options.text, _choices(options)
        haystack = token_stream(context, options.text, enough=HAYSTACK_TOKENS)
        length = options.length or min(context.context_tokens, DEFAULT_LENGTH)
        self._places = [(depth, document) for depth in options.depths for document in range(options.documents)]
        self.requests: list[LastRow] = []
        for depth in options.depths:
            own = [options.seed, length, options.needles, round(depth * 1000)]
            cell = {"length_tokens": length, "depth": depth, "needles": options.needles, "asked": 1}
            for question in draw_documents(options, context, haystack, [options.seed, options.needles], own, **cell):
                self.requests.append(LastRow(tuple(question.prompts[0]), edges_of(question)))

    def score(self, answers: Sequence[Any]) -> Scores:
        """Shares by depth, form and segment; on the answer over all depths; by layer and head at the middle depth.

        With the shares of weights near zero and of negative ones, over all depths.
        """
        shares = [segment_shares(sums) for sums in answers]
        depths = [depth for depth, _ in self._places]
        documents = [
            f"document {number}" if self.options.paired else f"{depth:g}/{number}" for depth, number in self._places
        ]
        on_answer = {form: [share[form][SEGMENTS.index("answer")] for share in shares] for form in FORMS}
        measurements = [
            mean(f"{form} attention on the answer", "share", values, {}, units=documents, better="higher")
            for form, values in on_answer.items()
        ]
        measurements += _counted(answers, documents)
        for depth, form, (index, segment) in product(self.options.depths, FORMS, enumerate(SEGMENTS)):
            values = [share[form][index] for share, place in zip(shares, depths, strict=True) if place == depth]
            at = {"depth": depth, "form": form, "segment": segment}
            measurements += details([mean("attention share", "share", values, at)])
        items = unit_scores("signed attention on the answer", on_answer["signed"], documents)
        middle = min(self.options.depths, key=lambda depth: (abs(depth - 0.5), depth))
        sums = [one for one, depth in zip(answers, depths, strict=True) if depth == middle]
        return Scores(measurements=measurements, items=items, grids=_by_head(sums, middle))


def _choices(options: Options) -> list[str]:
    return [
        *_CHOICES,
        f"{options.haystack}.",
        "The same needles in the same haystack stand at every depth: depths are paired, and standard errors are over "
        "documents."
        if options.paired
        else "Every depth draws its own documents: depths are independent.",
    ]


def _counted(answers: Sequence[Any], documents: Sequence[str]) -> list[Measurement]:
    """Return the shares of weights that are near zero and that are negative, over all heads, and as details by layer."""
    whole: list[Measurement] = []
    by_layer: list[Measurement] = []
    for place, name in enumerate(COUNTED, len(FORMS)):
        # [layer] -> (documents, heads)
        layers = [
            np.array([[sum(head[place]) for head in one[layer]] for one in answers]) for layer in range(len(answers[0]))
        ]
        rows = [(np.concatenate(layers, 1), {}), *((heads, {"layer": layer}) for layer, heads in enumerate(layers))]
        shares = [mean(name, "share", heads.mean(1).tolist(), at, units=documents) for heads, at in rows]
        whole.append(shares[0])
        by_layer += shares[1:]
    return whole + details(by_layer)


def _by_head(answers: Sequence[Any], depth: float) -> list[Grid]:
    grids = []
    for place, form in enumerate(FORMS):
        # [layer] -> (documents, heads, segments); layers may differ in their heads
        layers = [
            np.array([[head[place] for head in one[layer]] for one in answers]) for layer in range(len(answers[0]))
        ]
        if form != "signed":
            layers = [sums / np.maximum(sums.sum(-1, keepdims=True), np.finfo(float).tiny) for sums in layers]
        for index, segment in enumerate(SEGMENTS):
            values = [sums[..., index].mean(0).round(6).tolist() for sums in layers]
            at = {"depth": depth, "form": form, "segment": segment}
            grids.append(Grid(name="attention by layer and head", at=at, values=values))
    return grids


_SEGMENT_WORDS = dict(zip(SEGMENTS, ("first token", "context before", "answer", "context after", "query"), strict=True))
_SEGMENT_COLOURS = dict(zip(SEGMENTS, (COLOURS[4], "#8c8c8c", COLOURS[0], "#c9c9c9", COLOURS[2]), strict=True))
_BARS = ("signed", "absolute")
_ROW_INCHES = 3.2


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw a row for each model: bars of signed and of absolute weights, and a heat map of the heads if it was kept."""
    grids = [_grid(result) for result in results]
    columns = 3 if any(grids) else 2
    height, widths = _ROW_INCHES * len(results) + 0.6, (1, 1, 0.9)[:columns]
    figure, axes = panels(height, len(results), columns, width_ratios=widths)
    top = max((value for grid in grids if grid for row in grid.values for value in row), default=1.0)
    image: Any = None
    for line, result, label, grid in zip(axes, results, labels(results), grids, strict=True):
        for ax, form in zip(line, _BARS, strict=False):
            _bars(ax, result, form)
            ax.set_title(f"{label}: {form}", loc="left")
        line[0].set_ylabel("share of attention")
        if grid:
            image = _heads(line[2], grid, top)
            line[2].set_title(f"{label}: answer, by head", loc="left")
        elif columns == 3:
            line[2].set_visible(False)
    for ax in axes[-1, :2]:
        ax.set_xlabel("depth of the answer")
    options, first = results[0].options, next((grid for grid in grids if grid), None)
    caption = (
        f"Where the last prompt token looks, over all heads and layers, mean of {options['documents']} documents with "
        f"{options['needles']} needles. Signed weights of both signs cancel inside a segment, absolute ones do not; for "
        "softmax attention both are the same."
    )
    if first:
        axes[-1, 2].set_xlabel("head")
        figure.colorbar(image, ax=list(axes[:, 2]), label="share of |weights|", fraction=0.06, pad=0.02, aspect=30)
        depth = _percent(first.at["depth"])
        caption += f" Right: the answer's share of |weights| in each head, answer at {depth}."
    legend_above(figure, [Patch(color=_SEGMENT_COLOURS[s], label=_SEGMENT_WORDS[s]) for s in SEGMENTS])
    return "Attention allocation", caption, figure


def _bars(ax: Axes, result: TaskResult, form: str) -> None:
    rows = select(result, "attention share", form=form)
    depths = sorted({row.at["depth"] for row in rows})
    ends = {1: np.zeros(len(depths)), -1: np.zeros(len(depths))}
    for segment in SEGMENTS:
        shares = {row.at["depth"]: row.value for row in rows if row.at["segment"] == segment}
        for x, depth in enumerate(depths):
            value = shares[depth]
            side = ends[-1 if value < 0 else 1]
            ax.bar(x, value, 0.78, bottom=side[x], color=_SEGMENT_COLOURS[segment])
            if abs(value) >= 0.06:
                middle = side[x] + value / 2
                ax.text(x, middle, f"{value:.2f}", ha="center", va="center", fontsize=8, color=ON_PALE)
            side[x] += value
    ax.axhline(0, color="#555555", linewidth=0.8)
    ax.set_xticks(range(len(depths)), [_percent(depth) for depth in depths])
    ax.grid(axis="x", visible=False)


def _heads(ax: Axes, grid: Grid, top: float) -> Any:
    image = heat_map(ax, matrix(grid.values), ACCURACY_COLOURS, 0, top or 1)
    ax.set_ylabel("layer")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    ax.spines[:].set_visible(False)
    return image


def _grid(result: TaskResult) -> Grid | None:
    grids = (grid for grid in result.grids if (grid.at["form"], grid.at["segment"]) == ("absolute", "answer"))
    return next(grids, None)


def _percent(depth: float) -> str:
    return f"{100 * depth:g} %"


register(TaskKind(name="allocation", doc=__doc__, options=Options, make=AllocationTask, draw=draw))
