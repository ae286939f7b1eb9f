"""Many-shot in-context classification, over the number of demonstrations.

This is arXiv:2410.05258 section 3.4, with the constrained decoding of N. Ratner et al. (arXiv:2212.10947). A prompt with more
shots starts with the prompt with fewer, so that the whole curve computes its longest prompt once.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice, product, takewhile
from typing import Any

from matplotlib.figure import Figure

from difftransformer.errors import EvaluationError

from ...plots import INK, curves, note, select, share_intervals
from ...results import ItemScore, Measurement, TaskResult
from ..engine import Scores, Task
from ..prompts.demonstrations import DataOptions, PromptForm, draw_items, draw_rounds
from ..prompts.texts import TaskContext
from ..registry import TaskKind, at_least, refused, register
from ..requests import Choice
from ..scores import details, mean, proportion, single, unit_scores
from ..sets.labelled import Example

CHOICES = [
    "A demonstration is its text, a line end and its label, each after a word such as Question and Type; a line of two equal "
    "signs separates it from the next one. The prompt ends with the label's word and a colon.",
    "A label is decoded greedily among the tokens that lead to a label; the line end after every label is part of it, so that "
    "a label which is a prefix of another one can be reached.",
    "All test items see the same demonstrations; the paper does not say whether its items do.",
    "The test items are balanced over the classes as far as possible; the paper does not say how it chose its 100.",
]
_CHOICES = [
    *CHOICES,
    "Demonstrations come in rounds of one per class in a random order, and more shots begin with the rounds of fewer; the "
    "paper does not state which ones it shows, and whether its sizes share them.",
    "A class with fewer training examples than shots shows all of them once, so large sizes are less balanced.",
    "By default the shots double from 1 per class, and end with the most that fit into the model's context.",
    "No demonstration is left out for its length; the authors of the protocol leave out the longest 1 %.",
]


@dataclass(frozen=True, kw_only=True)
class Options(DataOptions):
    """Many-shot classification.

    Attributes:
        shots: Demonstrations of each class; by default 1, 2, 4 and so on, and the most that fit into the context.
        demonstrations: Demonstrations in total, instead of shots: the first ones of the rounds. 0 shows none.
        items: Test items; the paper has 100.
        draws: Number of independent draws of the demonstrations; the paper seems to have 1.
    """

    shots: list[int] | None = None
    demonstrations: list[int] | None = None
    items: int = 100
    draws: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shots is not None and self.demonstrations is not None:
            raise refused(self, "shots demonstrations", "give one of the two, per class or in total")
        for field, least in (("shots", 1), ("demonstrations", 0)):
            sizes = getattr(self, field)
            if sizes is not None and (not sizes or min(sizes) < least or len(set(sizes)) < len(sizes)):
                raise refused(self, field, f"give different numbers, none below {least}, or leave it out")
        at_least(self, 1, "items", "draws")


class ShotsTask(Task):
    def __init__(self, options: Options, context: TaskContext) -> None:
        data = options.read()
        self.data_name, self.choices, self.labels = data.name, _CHOICES, data.labels
        self.draws = options.draws
        self.items = draw_items(data, options.items, options.seed)
        form = PromptForm(context.tokenizer, data.labels, options.words())
        draws = [draw_rounds(data, options.seed, draw) for draw in range(options.draws)]
        room = form.room(self.items, context.prompt_tokens)
        self.sizes = _sizes(options, draws, form, room, context.prompt_tokens)
        self.requests = []
        for at, rounds in product(self.sizes, draws):
            shown = list(chain.from_iterable(rounds))[: at["demonstrations"]]
            before = form.demonstrations(shown)
            questions = (form.question(item.text, first=not shown) for item in self.items)
            self.requests += [Choice(before + question, form.options) for question in questions]

    def scored_by(self) -> Any:
        return [self.labels, [item.label for item in self.items]]

    def score(self, answers: Sequence[Any]) -> Scores:
        measurements: list[Measurement] = []
        items: list[ItemScore] = []
        size = len(self.items) * self.draws
        for place, at in enumerate(self.sizes):
            asked = slice(place * size, (place + 1) * size)
            right = right_passes(answers[asked], self.labels, self.items)
            measurements.append(accuracy(right, at))
            items += item_scores(f"accuracy, {at['demonstrations']} demonstrations", right)
            if self.draws > 1:
                draws = enumerate(right)
                measurements += details(
                    proportion("accuracy of a draw", marks, at | {"draw": draw}) for draw, marks in draws
                )
            lengths = [float(len(request.prompt)) for request in self.requests[asked]]
            measurements.append(mean("prompt", "tokens", lengths, at))
        return Scores(measurements=[*measurements, chance(len(self.labels))], items=items)


def right_passes(answers: Sequence[int], labels: Sequence[str], items: Sequence[Example]) -> list[list[bool]]:
    """Mark the right answers, in a list for each pass through the items."""
    passes = (answers[begin : begin + len(items)] for begin in range(0, len(answers), len(items)))
    return [[labels[answer] == item.label for answer, item in zip(one, items, strict=True)] for one in passes]


def accuracy(right: Sequence[Sequence[bool]], at: dict[str, Any], *, name: str = "accuracy") -> Measurement:
    """Compute the share of right answers over several passes through the same items; n counts the items."""
    whole = proportion(name, list(chain.from_iterable(right)), at, units=_items(right))
    return replace(whole, n=len(right[0]), units=None)


def item_scores(name: str, right: Sequence[Sequence[bool]]) -> list[ItemScore]:
    """Return each item's contribution to an accuracy over several passes through the same items."""
    return unit_scores(name, list(chain.from_iterable(right)), _items(right))


def _items(right: Sequence[Sequence[bool]]) -> list[str]:
    return [f"item {index}" for answers in right for index in range(len(answers))]


def chance(classes: int) -> Measurement:
    return single("chance", "share", 1 / classes, classes, {})


Draws = Sequence[Sequence[Sequence[Example]]]
"""Rounds of demonstrations, one of each class, in every draw."""


def _sizes(options: Options, draws: Draws, form: PromptForm, room: int, context_tokens: int) -> list[dict[str, int]]:
    """Return the numbers of demonstrations: per class, if requested so, and in total."""
    totals = [0, *accumulate(map(len, draws[0]))]  # for each number of shots; the same in every draw
    if options.demonstrations is not None:
        count = max(options.demonstrations)
        _fitting(form, draws, room, context_tokens, f"demonstrations={count}", count, count)
        return [{"demonstrations": count} for count in options.demonstrations]
    shots = options.shots
    most = fitting_shots(form, draws, room, context_tokens, None if shots is None else max(shots))
    if shots is None:
        shots = sorted({2**power for power in range(most.bit_length())} | {most})
    return [{"shots": count, "demonstrations": totals[count]} for count in shots]


def fitting_shots(form: PromptForm, draws: Draws, room: int, context_tokens: int, wanted: int | None = None) -> int:
    """Count the demonstrations of each class that fit into `room` tokens in every draw.

    At least `wanted` of them must fit, and no more are counted; None requires one.
    """
    totals = [0, *accumulate(map(len, draws[0]))]
    if wanted is not None and wanted >= len(totals):
        raise EvaluationError(
            f"shots={wanted}: the largest class has {len(totals) - 1} training examples; ask for at most this number"
        )
    enough, asked = totals[-1 if wanted is None else wanted], wanted or 1
    most = _fitting(form, draws, room, context_tokens, f"shots={asked}", totals[asked], enough)
    return _whole_rounds(draws, most)


def _whole_rounds(draws: Draws, most: int) -> int:
    return sum(total <= most for total in accumulate(map(len, draws[0])))


def _fitting(form: PromptForm, draws: Draws, room: int, context_tokens: int, what: str, count: int, enough: int) -> int:
    """Count how many of the first `enough` demonstrations fit into `room` tokens; `count` must."""

    def fitting(rounds: Sequence[Sequence[Example]]) -> int:
        used = islice(accumulate(form.lengths(chain.from_iterable(rounds))), enough + 1)
        return sum(1 for _ in takewhile(lambda tokens: tokens <= room, used)) - 1

    there, most = sum(map(len, draws[0])), min(map(fitting, draws))
    if count > there:
        raise EvaluationError(f"{what}: there are {there} training examples; ask for at most this number")
    if most < 0:  # not even a question without any
        raise EvaluationError(
            f"the longest test item with its answer takes more than the model's context of {context_tokens} tokens, even "
            "without demonstrations; take a model with a longer context, or shorter texts"
        )
    if count > most:
        raise EvaluationError(
            f"{what}: the prompt does not fit into the model's context of {context_tokens} tokens; at most {most} "
            f"demonstrations do, {_whole_rounds(draws, most)} of each class; ask for fewer (--shots per class, or "
            "--demonstrations in total)"
        )
    return most


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw accuracy over the number of demonstrations on a log axis (like arXiv:2410.05258 Figure 6), a line for each model."""
    figure, ax = curves(results, "accuracy", "demonstrations")
    counts = sorted({row.at["demonstrations"] for result in results for row in select(result, "accuracy")})
    if counts[0] == 0:  # linear up to the first demonstrations, so that 0 has a place
        ax.set_xscale("symlog", base=2, linthresh=counts[1] if len(counts) > 1 else 1)
        ax.set_xlim(left=0)
    ax.set_xticks(_spread(counts), [f"{count:,}" for count in _spread(counts)])
    ax.minorticks_off()
    guess = select(results[0], "chance")[0]
    ax.axhline(guess.value, color=INK, linewidth=1, linestyle=":")
    place = (1, guess.value)
    note(ax, f"chance, 1 of {guess.n}", place, at_right_edge=True, xytext=(-4, 3), ha="right", fontsize=8.5)
    ax.set(ylim=(0, 1.02), xlabel="demonstrations in the prompt", ylabel="accuracy")
    items, draws = (results[0].options[name] for name in ("items", "draws"))
    again = f", each behind {draws} draws of demonstrations" if draws > 1 else ""
    caption = f"Labels of {items} test items of {results[0].data.name}{again}, decoded among all labels; bands: "
    caption += f"{share_intervals(results)}."
    return "Many-shot in-context classification", caption, figure


def _spread(counts: Sequence[int]) -> list[int]:
    """Return the sizes to mark on the axis, each far enough from the one before."""
    kept: list[int] = []
    for count in counts:
        if not kept or kept[-1] == 0 or count >= 1.4 * kept[-1]:
            kept.append(count)
    return kept


register(TaskKind(name="icl", doc=__doc__, options=Options, make=ShotsTask, draw=draw))
