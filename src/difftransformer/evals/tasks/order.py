"""Robustness to the order of demonstrations (arXiv:2410.05258 section 3.5 and Appendix): how much does accuracy change with it?

The same demonstrations are shown in several orders, and the same test items asked about behind each. A margin between the best
and the worst order means nothing without the margin that sampling alone would give: the binomial floor is that of as many
independent draws with the mean accuracy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np

from ...data.labelled import Example
from ...errors import ConfigError
from ...results import Measurement
from ..scores import details, mean, proportion
from ..task import Choice, LanguageModel, Scores
from .demonstrations import DataOptions, PromptForm, draw_items, draw_rounds
from .icl import CHOICES, accuracy, chance, fitting_shots, item_scores

Format = Literal["random", "alternating"]
_PAPER_ORDERS = {"random": 10, "alternating": 30}
_PAPER_ITEMS = {"random": 100, "alternating": 30}
_DEFAULT_SHOTS = 16
_CHOICES = [
    *CHOICES,
    "The paper does not state the number of demonstrations; without shots named it is the largest power of two a class that "
    f"fits into the model's context, at most {_DEFAULT_SHOTS}.",
    "random: all demonstrations are shuffled. alternating: one of each class in turn, the classes always in the same order; "
    "what the seed changes is that order and which demonstration of a class comes when, which the paper leaves open.",
    "The sd is that of a sample (n - 1).",
    "The floor of best minus worst is its exact expectation for as many independent binomial draws of the mean accuracy as "
    "there are orders; that of the sd is sqrt(p (1 - p) / items), the root of the exact expected variance.",
    "The items are the same in every order, so that a model which order does not touch at all has a margin of 0, below the "
    "floor: the floor is what order would do that changes answers at random and favours no order.",
]


@dataclass(frozen=True, kw_only=True)
class Options(DataOptions):
    """The same demonstrations in several orders.

    Attributes:
        shots: Demonstrations of each class; as many as fit into the context, at most 16, by default.
        format: random shuffles all demonstrations; alternating shows one of each class in turn.
        orders: How many orders; 10 random or 30 alternating ones, as in the paper, by default.
        items: Test items; 100, or 30 where classes alternate, as in the paper, by default.
    """

    shots: int | None = None
    format: Format = "random"
    orders: int | None = None
    items: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, least in (("shots", 1), ("orders", 2), ("items", 1)):
            value = getattr(self, field)
            if value is not None and value < least:
                raise ConfigError(f"{field}={value}: give at least {least}")


class OrderTask:
    """Test items behind every order of the same demonstrations. See `Task`."""

    def __init__(self, options: Options, model: LanguageModel) -> None:
        data = options.read()
        self.data_name, self.choices, self.labels = data.name, _CHOICES, data.labels
        self.orders = options.orders or _PAPER_ORDERS[options.format]
        self.items = draw_items(data, options.items or _PAPER_ITEMS[options.format], options.seed)
        form = PromptForm(model.tokenizer, data.labels, options.words())
        rounds = draw_rounds(data, options.seed)
        room = form.room(self.items, model.context_tokens)
        fit = fitting_shots(form, [rounds], room, model.context_tokens, options.shots)
        shots = options.shots or min(_DEFAULT_SHOTS, 2 ** (fit.bit_length() - 1))
        shown = list(chain.from_iterable(rounds[:shots]))
        self.at = {"format": options.format, "shots": shots, "demonstrations": len(shown)}
        questions = [form.question(item.text, first=False) for item in self.items]
        self.requests = []
        for order in range(self.orders):
            before = form.demonstrations(
                arrange(shown, options.format, np.random.default_rng([options.seed, 3, order]))
            )
            self.requests += [Choice(before + question, form.options) for question in questions]

    def score(self, answers: Sequence[Any]) -> Scores:
        """Accuracy in each order, and how far apart the orders are, beside what sampling alone would do."""
        count = len(self.items)
        chosen = [self.labels[answer] for answer in answers]
        right = [
            [label == item.label for label, item in zip(chosen[begin : begin + count], self.items, strict=True)]
            for begin in range(0, len(chosen), count)
        ]
        by_order = [proportion("accuracy", found, {"order": order}) for order, found in enumerate(right)]
        shares = [row.value for row in by_order]
        overall = math.fsum(shares) / self.orders
        measurements = [
            accuracy(right, self.at, name="mean accuracy"),
            self._figure("best minus worst", max(shares) - min(shares)),
            self._figure("best minus worst, binomial floor", binomial_margin(overall, count, self.orders)),
            self._figure("sd over orders", float(np.std(shares, ddof=1))),
            self._figure("sd over orders, binomial floor", math.sqrt(overall * (1 - overall) / count)),
            mean("prompt", "tokens", [float(len(request.prompt)) for request in self.requests], self.at),
            chance(len(self.labels)),
            *details(by_order),
        ]
        return Scores(measurements=measurements, items=item_scores("accuracy", right))

    def _figure(self, name: str, value: float) -> Measurement:
        return Measurement(
            name=name,
            unit="share",
            value=value,
            standard_error=None,
            n=self.orders,
            better=None if "floor" in name else "lower",
            at=self.at,
        )


def arrange(shown: Sequence[Example], form: Format, rng: np.random.Generator) -> list[Example]:
    """Demonstrations in a drawn order: any, or one of each class in turn as long as it has some."""
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

    The expected maximum of the counts is the sum of 1 - F(k)^draws over k < n, and the expected minimum is that of
    (1 - F(k))^draws, where F is the binomial distribution. The result is exact.
    """
    from scipy.special import bdtr

    below = bdtr(np.arange(n), n, p)
    return float((1 - below**draws - (1 - below) ** draws).sum()) / n


def make(options: Options, model: LanguageModel) -> OrderTask:
    """The task for a model. See `OrderTask`.

    Raises:
        DataError: the data cannot be read, or the tokenizer cannot tell two labels apart.
        EvaluationError: demonstrations asked for do not fit into the context.
    """
    return OrderTask(options, model)
