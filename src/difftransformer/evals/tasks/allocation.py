"""Where attention goes: answer, other context, first token and query, by the depth of the answer.

This is arXiv:2410.05258 Figure 1 and Table 3: where does the last prompt token look?

The paper gives its formula as an image only; its authors say that scores are averaged over heads and layers. A
differential map has negative weights, so a share can be meant in three ways, and all are reported. For each document the
weights of all heads and layers of the last prompt token are added up by segment, then divided by their total:

    signed      sum of w / sum of all w          (the total of a head is 1 - lambda)
    absolute    sum of |w| / sum of all |w|
    positive    sum of max(w, 0) / sum of all max(w, 0)

For softmax attention the three agree.

`evaluate_allocation` asks a model that was trained here, on its own validation text. `make` asks any model, on any text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from ...data import CITIES_SEEN, CITIES_UNSEEN, NeedleQuestion, Shards, Tokenizer, evaluation_document
from ...errors import ConfigError
from ...plots.curves import labels, select
from ...plots.heat_map import heat_map, matrix
from ...plots.style import ACCURACY_COLOURS, COLOURS, INK, WIDTH_INCHES, legend_above
from ...results import AllocationResult, AllocationShare, Form, Grid, ItemScore, Measurement, Segment, TaskResult
from ..config import AllocationConfig
from ..engine import Scores
from ..probes import FORMS, LastRow, ProbeTask
from ..prompts.texts import HAYSTACK_TOKENS, token_stream
from ..registry import TaskKind, register
from ..requests import LanguageModel
from ..scores import details, mean

SEGMENTS: tuple[Segment, ...] = ("first", "before", "answer", "after", "query")


def segment_shares(sums: Any) -> dict[Form, list[float]]:
    """Shares of one document by form and segment, over all heads and layers.

    Args:
        sums: `probes.last_row.row_sums` of the last prompt token: [layer][head][form][segment].

    Returns:
        For each form, the shares in the order of SEGMENTS; they sum to 1.
    """
    columns = np.array([head for layer in sums for head in layer]).sum(0)
    return {form: (row / row.sum()).tolist() for form, row in zip(FORMS, columns, strict=True)}


def edges_of(question: NeedleQuestion) -> tuple[int, ...]:
    """Bounds of SEGMENTS in a question's first prompt."""
    start, end = question.spans[0]
    return 0, 1, max(1, start), end, question.query_starts[0], len(question.prompts[0])


def allocation_questions(
    shards: Shards, config: AllocationConfig, *, context_tokens: int
) -> dict[float, list[NeedleQuestion]]:
    """Depth -> documents: a function of the configuration's seed and the shards, so every model gets the same.

    Raises:
        DataError: needles and question do not fit into the length.
    """
    length = config.length_tokens or context_tokens
    haystack = shards.tokens("validation")
    questions = {}
    for depth in config.depths:
        rng = np.random.default_rng([config.seed, length, config.needles, round(depth * 1000)])
        questions[depth] = [
            evaluation_document(
                rng,
                shards.tokenizer,
                haystack,
                length_tokens=length,
                depth=depth,
                needles=config.needles,
                asked=1,
                digits=config.digits,
                cities=CITIES_SEEN,
            )
            for _ in range(config.documents)
        ]
    return questions


def evaluate_allocation(
    model: LanguageModel, shards: Shards, config: AllocationConfig, *, context_tokens: int
) -> AllocationResult:
    """Mean share of each segment over documents, with its standard error, at every depth of the answer.

    Args:
        model: The model.
        shards: Validation text and tokenizer.
        config: Needles, depths and documents.
        context_tokens: Length where the configuration names none.

    Raises:
        DataError: needles and question do not fit into the length.
    """
    shares: list[AllocationShare] = []
    for depth, questions in allocation_questions(shards, config, context_tokens=context_tokens).items():
        requests = [LastRow(tuple(question.prompts[0]), edges_of(question)) for question in questions]
        answers = dict(model.probe(requests))  # type: ignore[attr-defined]
        documents = [segment_shares(answers[index]) for index in range(len(requests))]
        for form in FORMS:
            for index, segment in enumerate(SEGMENTS):
                values = np.array([document[form][index] for document in documents])
                error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else 0.0
                shares.append(
                    AllocationShare(
                        depth=depth,
                        form=form,
                        segment=segment,
                        share=float(values.mean()),
                        standard_error=float(error),
                    )
                )
    return AllocationResult(
        length_tokens=config.length_tokens or context_tokens,
        needles=config.needles,
        documents=config.documents,
        shares=shares,
    )


DEFAULT_LENGTH = 2048

_CHOICES = [
    "The paper gives its formula as an image only. Here the weights of the last prompt token are added up by segment over "
    "all heads and layers, then divided by their total; a share is the mean over documents.",
    "A differential map has negative weights: signed sums them as they are, absolute takes |w|, positive max(w, 0). The "
    "paper's bars go below zero, so that its own reading is likely the signed one.",
    "The prompt is a needle document that ends with the beginning of the needle's own sentence; that sentence is the "
    "query.",
    f"The haystack is the first {HAYSTACK_TOKENS:,} tokens of the text named in the options.",
    "The same needles in the same haystack stand at every depth: depths are paired, not independent.",
    "By layer and head, at the depth nearest to the middle: signed weights as they are summed (a differential head's total "
    "is 1 - lambda), absolute and positive ones over the head's own total.",
    "The paper states neither the number of needles nor the length.",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Attention allocation of any model.

    Attributes:
        length: Prompt length in tokens with room for the answer; the model's context by default, at most 2048.
        needles: Needles in the context; one is asked for.
        depths: Places of the answer, 0 (start of the context) to 1 (its end).
        documents: Documents at each depth.
        digits: Digits of a number.
        text: The haystack: python-stdlib, a text file, a folder of them, or hf:NAME[:CONFIG][:SPLIT].
        seed: Of places, cities and numbers.
    """

    length: int | None = None
    needles: int = 4
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    documents: int = 10
    digits: int = 7
    text: str = "python-stdlib"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length is not None and self.length < 1:
            raise ConfigError(f"length={self.length}: give at least 1, or leave it out for the model's context")
        AllocationConfig(
            needles=self.needles, depths=self.depths, documents=self.documents, digits=self.digits, seed=self.seed
        )


class AllocationTask(ProbeTask):
    """Needle documents, and where each prompt's last token looks. See `Task`."""

    def __init__(self, options: Options, tokenizer: Tokenizer, context_tokens: int) -> None:
        self.options, self.data_name, self.choices = options, options.text, _CHOICES
        haystack = token_stream(tokenizer, options.text, enough=HAYSTACK_TOKENS)
        self._places = [(depth, document) for depth in options.depths for document in range(options.documents)]
        self.requests: list[LastRow] = []
        for depth, document in self._places:
            question = evaluation_document(
                np.random.default_rng([options.seed, options.needles, document]),
                tokenizer,
                haystack,
                length_tokens=options.length or min(context_tokens, DEFAULT_LENGTH),
                depth=depth,
                needles=options.needles,
                asked=1,
                digits=options.digits,
                cities=CITIES_SEEN + CITIES_UNSEEN,
            )
            self.requests.append(LastRow(tuple(question.prompts[0]), edges_of(question)))

    def score(self, answers: Sequence[Any]) -> Scores:
        """Shares by depth, form and segment; on the answer over all depths; by layer and head at the middle depth."""
        shares = [segment_shares(sums) for sums in answers]
        depths = [depth for depth, _ in self._places]
        answer = SEGMENTS.index("answer")
        measurements: list[Measurement] = []
        for form in FORMS:
            values = [share[form][answer] for share in shares]
            measurements.append(mean(f"{form} attention on the answer", "share", values, {}, better="higher"))
        for depth in self.options.depths:
            for form in FORMS:
                for index, segment in enumerate(SEGMENTS):
                    values = [share[form][index] for share, place in zip(shares, depths, strict=True) if place == depth]
                    at = {"depth": depth, "form": form, "segment": segment}
                    measurements += details([mean("attention share", "share", values, at)])
        items = [
            ItemScore(
                name="signed attention on the answer", item=f"{depth:g}/{document}", score=share["signed"][answer]
            )
            for (depth, document), share in zip(self._places, shares, strict=True)
        ]
        middle = min(self.options.depths, key=lambda depth: (abs(depth - 0.5), depth))
        sums = [found for found, depth in zip(answers, depths, strict=True) if depth == middle]
        return Scores(measurements=measurements, items=items, grids=_by_head(sums, middle))


def _by_head(answers: Sequence[Any], depth: float) -> list[Grid]:
    """Layer by head, a grid for each form and segment."""
    grids = []
    for place, form in enumerate(FORMS):
        # [layer] -> (documents, heads, segments); layers may differ in their heads
        layers = [
            np.array([[head[place] for head in found[layer]] for found in answers]) for layer in range(len(answers[0]))
        ]
        if form != "signed":
            layers = [sums / np.maximum(sums.sum(-1, keepdims=True), np.finfo(float).tiny) for sums in layers]
        for index, segment in enumerate(SEGMENTS):
            values = [sums[..., index].mean(0).round(6).tolist() for sums in layers]
            grids.append(
                Grid(
                    name="attention by layer and head",
                    at={"depth": depth, "form": form, "segment": segment},
                    values=values,
                )
            )
    return grids


def make(options: Options, model: LanguageModel) -> AllocationTask:
    """The task for a model. See `AllocationTask`.

    Raises:
        DataError: needles and question do not fit into the length, or the text cannot be read.
    """
    return AllocationTask(options, model.tokenizer, model.context_tokens)


_SEGMENT_COLOURS = dict(zip(SEGMENTS, (COLOURS[4], "#8c8c8c", COLOURS[0], "#c9c9c9", COLOURS[2]), strict=True))
_SEGMENT_WORDS = {
    "first": "first token",
    "before": "context before",
    "answer": "answer",
    "after": "context after",
    "query": "query",
}
_BARS = ("signed", "absolute")
_ROW_INCHES = 3.2


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw bars of signed and of absolute weights and a heat map of heads, a row for each model."""
    figure = Figure(figsize=(WIDTH_INCHES, _ROW_INCHES * len(results) + 0.6), layout="constrained")
    axes = figure.subplots(len(results), 3, squeeze=False, gridspec_kw={"width_ratios": (1, 1, 0.9)})
    grids = [_grid(result) for result in results]
    top = max(value for grid in grids for row in grid.values for value in row)
    image: Any = None
    for row, (result, label, grid) in enumerate(zip(results, labels(results), grids, strict=True)):
        for ax, form in zip(axes[row], _BARS, strict=False):
            _bars(ax, result, form)
            ax.set_title(f"{label}: {form}", loc="left")
        axes[row, 0].set_ylabel("share of attention")
        image = _heads(axes[row, 2], grid, top)
        axes[row, 2].set_title(f"{label}: answer, by head", loc="left")
    for ax in axes[-1, :2]:
        ax.set_xlabel("depth of the answer")
    axes[-1, 2].set_xlabel("head")
    figure.colorbar(image, ax=list(axes[:, 2]), label="share of |weights|", fraction=0.06, pad=0.02, aspect=30)
    legend_above(figure, [Patch(color=_SEGMENT_COLOURS[s], label=_SEGMENT_WORDS[s]) for s in SEGMENTS])
    options, depth = results[0].options, _percent(grids[0].at["depth"])
    caption = (
        f"Where the last prompt token looks, over all heads and layers, mean of {options['documents']} documents with "
        f"{options['needles']} needles. Signed weights of both signs cancel inside a segment, absolute ones do not; for "
        f"softmax attention both are the same. Right: the answer's share of |weights| in each head, answer at {depth}."
    )
    return "Attention allocation", caption, figure


def _bars(ax: Axes, result: TaskResult, form: str) -> None:
    rows = select(result, "attention share", form=form)
    depths = sorted({row.at["depth"] for row in rows})
    ends = {1: np.zeros(len(depths)), -1: np.zeros(len(depths))}
    for segment in SEGMENTS:
        found = {row.at["depth"]: row.value for row in rows if row.at["segment"] == segment}
        for x, depth in enumerate(depths):
            value = found[depth]
            side = ends[-1 if value < 0 else 1]
            ax.bar(x, value, 0.78, bottom=side[x], color=_SEGMENT_COLOURS[segment])
            if abs(value) >= 0.06:
                middle = side[x] + value / 2
                ax.text(x, middle, f"{value:.2f}", ha="center", va="center", fontsize=8, color=INK)
            side[x] += value
    ax.axhline(0, color="#555555", linewidth=0.8)
    ax.set_xticks(range(len(depths)), [_percent(depth) for depth in depths])
    ax.grid(axis="x", visible=False)


def _heads(ax: Axes, grid: Grid, top: float) -> Any:
    image = heat_map(ax, matrix(grid.values), ACCURACY_COLOURS, 0, top or 1)
    ax.set_ylabel("layer")
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    ax.spines[:].set_visible(False)
    return image


def _grid(result: TaskResult) -> Grid:
    return next(grid for grid in result.grids if grid.at["form"] == "absolute" and grid.at["segment"] == "answer")


def _percent(depth: float) -> str:
    return f"{100 * depth:g} %"


register(TaskKind(name="allocation", doc=__doc__, options=Options, make=make, draw=draw))
