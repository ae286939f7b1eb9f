"""Many-shot in-context classification (arXiv:2410.05258 section 3.4): does accuracy grow with the demonstrations?

Test items are labelled one by one behind the same demonstrations. The label is decoded greedily among the tokens that lead to
a label (N. Ratner et al., arXiv:2212.10947). Demonstrations come in rounds of one a class, and a prompt of more shots starts
with that of fewer: the whole curve computes its longest prompt once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

from ...data.labelled import Example
from ...errors import ConfigError, EvaluationError
from ...results import ItemScore, Measurement
from ..scores import details, mean, proportion
from ..task import Choice, LanguageModel, Scores
from .demonstrations import DataOptions, PromptForm, draw_items, draw_rounds

CHOICES = [
    "A demonstration is its text, a line end and its label, each behind a word of its own; a line of two equal signs parts it "
    "from the next. The prompt ends with the label's word and a colon.",
    "A label is decoded greedily among the tokens that lead to a label; the line end that follows every label is part of it, "
    "so that one which begins another can be reached.",
    "All test items see the same demonstrations; the paper does not say whether its own do.",
    "The test items are drawn with as many of each class, as far as it has them; the paper does not say how it chose its 100.",
]
_CHOICES = [
    *CHOICES,
    "Demonstrations come in rounds of one a class in a drawn order, and more shots begin with the rounds of fewer; which ones "
    "the paper shows, and whether its sizes share them, is not stated.",
    "A class with fewer training examples than shots shows all that it has, and none twice: large sizes are less balanced.",
    "Without shots named, they double from 1 a class on, and end with the most that fit into the model's context.",
    "No demonstration is left out for its length, as the authors of the protocol do with the longest 1 %.",
]


@dataclass(frozen=True, kw_only=True)
class Options(DataOptions):
    """Many-shot classification.

    Attributes:
        shots: Demonstrations of each class; 1, 2, 4 and so on, and the most that fit into the context, by default.
        demonstrations: Demonstrations in all, instead of shots: the first of the rounds. 0 shows none.
        items: Test items; the paper has 100.
        draws: How often demonstrations are drawn anew; the paper has, as it seems, 1.
    """

    shots: list[int] | None = None
    demonstrations: list[int] | None = None
    items: int = 100
    draws: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shots is not None and self.demonstrations is not None:
            raise ConfigError(
                f"shots={self.shots} and demonstrations={self.demonstrations}: give one of the two, a class or in all"
            )
        for field, least in (("shots", 1), ("demonstrations", 0)):
            sizes = getattr(self, field)
            if sizes is not None and (not sizes or min(sizes) < least or len(set(sizes)) < len(sizes)):
                raise ConfigError(f"{field}={sizes}: give different numbers, none below {least}, or leave it out")
        for field in ("items", "draws"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{field}={getattr(self, field)}: give at least 1")


class ShotsTask:
    """Test items behind more and more demonstrations. See `Task`."""

    def __init__(self, options: Options, model: LanguageModel) -> None:
        data = options.read()
        self.data_name, self.choices, self.labels = data.name, _CHOICES, data.labels
        self.draws = options.draws
        self.items = draw_items(data, options.items, options.seed)
        form = PromptForm(model.tokenizer, data.labels, options.words())
        draws = [draw_rounds(data, options.seed, draw) for draw in range(options.draws)]
        room = form.room(self.items, model.context_tokens)
        self.sizes = _sizes(options, draws, form, room, model.context_tokens)
        self.requests = [
            Choice(prompt, form.options)
            for at in self.sizes
            for rounds in draws
            for prompt in _prompts(form, list(chain.from_iterable(rounds))[: at["demonstrations"]], self.items)
        ]

    def score(self, answers: Sequence[Any]) -> Scores:
        """Accuracy at each size; what a guess would have."""
        measurements: list[Measurement] = []
        items: list[ItemScore] = []
        place = 0
        for at in self.sizes:
            right: list[list[bool]] = []
            for _ in range(self.draws):
                asked = slice(place, place + len(self.items))
                place = asked.stop
                chosen = [self.labels[answer] for answer in answers[asked]]
                right.append([label == item.label for label, item in zip(chosen, self.items, strict=True)])
            measurements.append(accuracy(right, at))
            items += item_scores(f"accuracy, {at['demonstrations']} demonstrations", right)
            if self.draws > 1:
                measurements += details(
                    proportion("accuracy of a draw", found, at | {"draw": draw}) for draw, found in enumerate(right)
                )
            lengths = [
                float(len(request.prompt)) for request in self.requests[place - len(self.items) * self.draws : place]
            ]
            measurements.append(mean("prompt", "tokens", lengths, at))
        return Scores(measurements=[*measurements, chance(len(self.labels))], items=items)


def accuracy(right: Sequence[Sequence[bool]], at: dict[str, Any], *, name: str = "accuracy") -> Measurement:
    """The share of right answers over several passes through the same items.

    One pass has the binomial standard error; of several the unit is the item, whose answers are not independent.
    """
    if len(right) == 1:
        return proportion(name, right[0], at)
    shares = [sum(column) / len(column) for column in zip(*right, strict=True)]
    return mean(name, "share", shares, at, better="higher")


def item_scores(name: str, right: Sequence[Sequence[bool]]) -> list[ItemScore]:
    """What each item adds to an accuracy over several passes through the same items."""
    return [
        ItemScore(name=name, item=f"item {index}", score=float(sum(column)), weight=float(len(column)))
        for index, column in enumerate(zip(*right, strict=True))
    ]


def chance(classes: int) -> Measurement:
    """The accuracy of a guess."""
    return Measurement(name="chance", unit="share", value=1 / classes, standard_error=None, n=classes, at={})


def _prompts(form: PromptForm, shown: Sequence[Example], items: Sequence[Example]) -> list[tuple[int, ...]]:
    before = form.demonstrations(shown)
    return [before + form.question(item.text, first=not shown) for item in items]


def _sizes(
    options: Options, draws: Sequence[Sequence[Sequence[Example]]], form: PromptForm, room: int, context_tokens: int
) -> list[dict[str, int]]:
    """The numbers of demonstrations: by class, where asked for so, and in all."""
    totals = [0, *accumulate(map(len, draws[0]))]  # of each number of shots; the same in every draw
    if options.demonstrations is not None:
        most = _fitting(form, draws, room, max(options.demonstrations))
        for count in options.demonstrations:
            _check(f"demonstrations={count}", count, totals, most, context_tokens)
        return [{"demonstrations": count} for count in options.demonstrations]
    shots = options.shots
    most = fitting_shots(form, draws, room, context_tokens, None if shots is None else max(shots))
    if shots is None:
        shots = sorted({2**power for power in range(most.bit_length())} | {most})
    return [{"shots": count, "demonstrations": totals[count]} for count in shots]


def fitting_shots(
    form: PromptForm,
    draws: Sequence[Sequence[Sequence[Example]]],
    room: int,
    context_tokens: int,
    wanted: int | None = None,
) -> int:
    """How many demonstrations of each class fit into the context; no more are counted than are wanted.

    Args:
        form: Of the prompts.
        draws: Rounds of demonstrations, one a class; they must fit in every draw.
        room: Tokens for them.
        context_tokens: The model's.
        wanted: So many a class must fit; None asks for one.

    Raises:
        EvaluationError: fewer fit, or there are fewer examples.
    """
    totals = [0, *accumulate(map(len, draws[0]))]
    if wanted is not None and wanted >= len(totals):
        raise EvaluationError(
            f"shots={wanted}: the largest class has {len(totals) - 1} training examples; ask for at most so many"
        )
    most = _fitting(form, draws, room, totals[-1 if wanted is None else wanted])
    _check(f"shots={wanted or 1}", totals[wanted or 1], totals, most, context_tokens)
    return _whole_rounds(totals, most)


def _whole_rounds(totals: Sequence[int], most: int) -> int:
    return max((shots for shots, total in enumerate(totals) if total <= most), default=0)


def _fitting(form: PromptForm, draws: Sequence[Sequence[Sequence[Example]]], room: int, enough: int) -> int:
    """How many of the first demonstrations fit into so many tokens; -1 where not even a question without any does."""
    counts = []
    for rounds in draws:
        used, count = 0, -1
        for length in form.lengths(chain.from_iterable(rounds)):
            used += length
            if used > room or count == enough:
                break
            count += 1
        counts.append(count)
    return min(counts)


def _check(what: str, count: int, totals: Sequence[int], most: int, context_tokens: int) -> None:
    if count > totals[-1]:
        raise EvaluationError(f"{what}: there are {totals[-1]} training examples; ask for at most so many")
    if most < 0:
        raise EvaluationError(
            f"the longest test item with its answer takes more than the model's context of {context_tokens} tokens, even "
            "without demonstrations; take a model with a longer context, or shorter texts"
        )
    if count > most:
        raise EvaluationError(
            f"{what}: the prompt does not fit into the model's context of {context_tokens} tokens; at most {most} "
            f"demonstrations do, {_whole_rounds(totals, most)} of each class; ask for fewer (--shots, or --demonstrations "
            "in all)"
        )


def make(options: Options, model: LanguageModel) -> ShotsTask:
    """The task for a model. See `ShotsTask`.

    Raises:
        DataError: the data cannot be read, or the tokenizer cannot tell two labels apart.
        EvaluationError: demonstrations asked for do not fit into the context.
    """
    return ShotsTask(options, model)
