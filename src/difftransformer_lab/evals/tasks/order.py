"""How much many-shot accuracy changes with the order of the demonstrations.

This is the robustness of arXiv:2410.05258 section 3.5 and its appendix. The same demonstrations are shown in several orders,
each followed by the same test items. Sampling alone gives a margin between the best and the worst order too: the binomial
floor, the expected margin of as many independent draws with the mean accuracy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

from ...plots import INK, handles, legend_above, line_style, note, panels, select
from ...results import Measurement, TaskResult
from ..engine import Scores, Task
from ..prompts.demonstrations import DataOptions, PromptForm, draw_items, draw_rounds
from ..prompts.texts import TaskContext
from ..registry import TaskKind, at_least, register
from ..requests import Choice
from ..scores import details, mean, proportion, single
from ..sets.labelled import Example
from .icl import CHOICES, accuracy, chance, fitting_shots, item_scores, right_passes

Format = Literal["random", "alternating"]
_PAPER_ORDERS = {"random": 10, "alternating": 30}
_PAPER_ITEMS = {"random": 100, "alternating": 30}
_DEFAULT_SHOTS = 16
PERMUTATIONS = 9_999
_PERMUTED_AT_ONCE = 1 << 22
"""Answers permuted in one numpy call; this bounds its memory."""

_CHOICES = [
    *CHOICES,
    "The paper does not state the number of demonstrations; by default it is the largest power of two for each class that "
    f"fits into the model's context, at most {_DEFAULT_SHOTS}.",
    "random: all demonstrations are shuffled. alternating: one of each class in turn, the classes always in the same order; "
    "the seed changes that order and the sequence of demonstrations within a class, which the paper leaves open.",
    "The standard deviation (sd) is that of a sample (n - 1).",
    "The floor of best minus worst is its exact expectation for as many independent binomial draws of the mean accuracy as "
    "there are orders; the floor of the sd is sqrt(p (1 - p) / items), the root of the exact expected variance.",
    "The items are the same in every order, so a model that ignores the order has a margin of 0, below the floor: the floor "
    "describes a model whose answers change at random with the order and for which no order is better. It takes all items "
    "as equally hard.",
    "The permutation floor and its p-value keep how hard each item is: the answers to an item are exchanged between the "
    f"orders at random, {PERMUTATIONS:,} times. A small p-value says that the order matters.",
]


@dataclass(frozen=True, kw_only=True)
class Options(DataOptions):
    """The same demonstrations in several orders.

    Attributes:
        shots: Demonstrations of each class; by default as many as fit into the context, at most 16.
        format: random shuffles all demonstrations; alternating shows one of each class in turn.
        orders: Number of orders; by default 10 for random and 30 for alternating, as in the paper.
        items: Test items; by default 100 for random and 30 for alternating, as in the paper.
    """

    shots: int | None = None
    format: Format = "random"
    orders: int | None = None
    items: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 1, "shots", "items")
        at_least(self, 2, "orders")


class OrderTask(Task):
    def __init__(self, options: Options, context: TaskContext) -> None:
        data = options.read()
        self.data_name, self.choices, self.labels = data.name, _CHOICES, data.labels
        self.orders = options.orders or _PAPER_ORDERS[options.format]
        self.items = draw_items(data, options.items or _PAPER_ITEMS[options.format], options.seed)
        form = PromptForm(context.tokenizer, data.labels, options.words())
        rounds = draw_rounds(data, options.seed)
        room = form.room(self.items, context.prompt_tokens)
        fit = fitting_shots(form, [rounds], room, context.prompt_tokens, options.shots)
        shots = options.shots or min(_DEFAULT_SHOTS, 2 ** (fit.bit_length() - 1))
        shown = list(chain.from_iterable(rounds[:shots]))
        self.at = {"format": options.format, "shots": shots, "demonstrations": len(shown)}
        questions = [form.question(item.text, first=False) for item in self.items]
        self.requests = []
        for order in range(self.orders):
            rng = np.random.default_rng([options.seed, 3, order])
            before = form.demonstrations(arrange(shown, options.format, rng))
            self.requests += [Choice(before + question, form.options) for question in questions]

    def scored_by(self) -> Any:
        return [self.labels, [item.label for item in self.items]]

    def score(self, answers: Sequence[Any]) -> Scores:
        """Compute the accuracy in each order, and how far the orders differ, beside what sampling alone would give."""
        count, right = len(self.items), right_passes(answers, self.labels, self.items)
        by_order = [proportion("accuracy", marks, {"order": order}) for order, marks in enumerate(right)]
        shares = [row.value for row in by_order]
        overall = math.fsum(shares) / self.orders
        permuted, p_value = permuted_margin(right)
        measurements = [
            accuracy(right, self.at, name="mean accuracy"),
            self._figure("best minus worst", max(shares) - min(shares)),
            self._figure("best minus worst, binomial floor", binomial_margin(overall, count, self.orders)),
            self._figure("best minus worst, permutation floor", permuted),
            replace(self._figure("best minus worst, permutation p", p_value), unit="p-value", better=None),
            self._figure("sd over orders", float(np.std(shares, ddof=1))),
            self._figure("sd over orders, binomial floor", math.sqrt(overall * (1 - overall) / count)),
            mean("prompt", "tokens", [float(len(request.prompt)) for request in self.requests], self.at),
            chance(len(self.labels)),
            *details(by_order),
        ]
        return Scores(measurements=measurements, items=item_scores("accuracy", right))

    def _figure(self, name: str, value: float) -> Measurement:
        return single(name, "share", value, self.orders, self.at, None if "floor" in name else "lower")


def arrange(shown: Sequence[Example], form: Format, rng: np.random.Generator) -> list[Example]:
    """Return demonstrations in a random order: any order, or one of each class in turn until the class has no more."""
    if form == "random":
        return [shown[place] for place in rng.permutation(len(shown))]
    labels = sorted({example.label for example in shown})
    classes = []
    for place in rng.permutation(len(labels)):
        members = [example for example in shown if example.label == labels[place]]
        classes.append([members[index] for index in rng.permutation(len(members))])
    return [members[turn] for turn in range(max(map(len, classes))) for members in classes if turn < len(members)]


def binomial_margin(p: float, n: int, draws: int) -> float:
    """Return the expected range (largest minus smallest) of `draws` independent shares of n trials with probability p.

    The expected maximum of the counts is the sum of 1 - F(k)^draws over k < n, and the expected minimum is the sum of
    (1 - F(k))^draws, where F is the binomial distribution. The result is exact.
    """
    from scipy.special import bdtr

    below = bdtr(np.arange(n), n, p)
    return float((1 - below**draws - (1 - below) ** draws).sum()) / n


def permuted_margin(
    right: Sequence[Sequence[bool]], *, permutations: int = PERMUTATIONS, seed: int = 0
) -> tuple[float, float]:
    """Return the margin that is expected if the order does not matter, and the p-value of the margin that was found.

    If the order does not matter, the answers to one item can be exchanged between the orders, however hard the item is.
    They are permuted within each item, independently. The p-value is the share of permutations, with the answers as they
    are among them, whose best minus worst order is at least as large.

    Args:
        right: Whether each answer is right: (orders, items).
    """
    table = np.array(right, dtype=bool).T
    items, generator = len(table), np.random.default_rng(seed)
    batch = max(1, _PERMUTED_AT_ONCE // table.size)
    margins = []
    for start in range(0, permutations, batch):
        drawn = np.broadcast_to(table, (min(batch, permutations - start), *table.shape))
        margins.append(np.ptp(generator.permuted(drawn, axis=2).sum(axis=1), axis=1))
    permuted = np.concatenate(margins)
    as_large = int((permuted >= np.ptp(table.sum(axis=0))).sum())
    return float(permuted.mean()) / items, (1 + as_large) / (1 + permutations)


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw the accuracy in each order (like arXiv:2410.05258 Figures 7 and 11), and each model's margin beside its floor."""
    figure, ((strips, margins),) = panels(4.2, 1, 2, width_ratios=[3, 1.2])
    for index, result in enumerate(results):
        rows = sorted(select(result, "accuracy"), key=lambda row: row.at["order"])
        orders, values = [row.at["order"] for row in rows], [row.value for row in rows]
        style = line_style(index)
        colour = style["color"]
        strips.plot(orders, values, **style | {"linestyle": "none"}, markersize=6, alpha=0.9)
        (average,) = select(result, "mean accuracy")
        (floor,) = select(result, "best minus worst, binomial floor")
        strips.axhline(average.value, color=colour, linewidth=1, linestyle="--")
        half = floor.value / 2
        strips.axhspan(average.value - half, average.value + half, color=colour, alpha=0.13, linewidth=0)
        (margin,) = select(result, "best minus worst")
        margins.bar(index, margin.value, 0.6, color=colour, alpha=0.75)
        margins.hlines(floor.value, index - 0.38, index + 0.38, color=INK, linewidth=1.6)
        top, words = max(margin.value, floor.value), f"{margin.value:.2f}\nfloor {floor.value:.2f}"
        for row in select(result, "best minus worst, permutation p"):
            words += f"\np {row.value:.2g}"
        note(margins, words, (index, top), xytext=(0, 4), ha="center", fontsize=8.5)
    strips.xaxis.get_major_locator().set_params(integer=True)
    strips.set(xlabel="order of the demonstrations", ylabel="accuracy")
    top = max(margins.get_ylim()[1] * 1.25, 0.05)
    margins.set(xticks=[], xlim=(-0.8, len(results) - 0.2), ylim=(0, top), ylabel="best minus worst")
    margins.grid(axis="x", visible=False)
    legend_above(figure, handles(results))
    margin = select(results[0], "best minus worst")[0]
    at, items = margin.at, len(results[0].items)
    caption = (
        f"{items} test items of {results[0].data.name} behind the same {at['demonstrations']} demonstrations in {margin.n} "
        f"{at['format']} orders. Dashes: mean. Shaded, and black lines: the margin expected of sampling alone (binomial "
        "floor). p: of such a margin if the order does not matter, from answers permuted within each item."
    )
    return "Robustness to the order of demonstrations", caption, figure


register(TaskKind(name="order", doc=__doc__, options=Options, make=OrderTask, draw=draw))
