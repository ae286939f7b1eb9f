"""Multi-needle retrieval, over lengths and depths.

This is arXiv:2410.05258 section 3.3: which magic number belongs to a city?

The paper states neither the haystack, the prompt of a base model, nor how two answers are scored. Here the prompt ends with
the start of the needle's own sentence. Every needle asked for is one trial, right when the greedy continuation starts with
all its digits. The negative log-likelihood of the right answer says more with few trials: it tells near misses from far ones.

A model that names some number of the context is right in 1/N of the questions with N numbers, so accuracy alone does not tell
finding from copying. Of a question with N > 1 numbers, lookup counts a right answer as 1, another number of the context as
-1 / (N - 1), and any other answer as 0. Its mean is (p - 1/N) / (1 - 1/N), where p is the accuracy if each answer that names no
number of the context were one of its N numbers, drawn at random. So lookup is 0 for copying at random and 1 for right answers.

With --absent a model is also asked for cities of no needle. Any number that it gives then is made up. A base model has no words
to say that there is none, and one trained on needles alone has only met questions that have an answer: of such a model, the
share of numbers says that it knows the form of an answer, and that of numbers of the context says where it takes them from.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from difftransformer.data import NeedleQuestion, answer_tokens

from ...plots import ACCURACY_COLOURS, INK, ON_DARK, ON_PALE, heat_map, labels, panels, select
from ...results import ItemScore, Measurement, TaskResult
from ..engine import Scores, Task
from ..prompts.chat import chat_frame
from ..prompts.haystack import CITIES, Kind, NeedleOptions, draw_documents
from ..prompts.texts import HAYSTACK_TOKENS, TaskContext, token_stream
from ..registry import TaskKind, refused, register
from ..requests import Continuation, ScoredContinuation
from ..scores import details, mean, proportion, single, unit_scores

_CHAT_INSTRUCTION = (
    "Somewhere in the text below are sentences that give cities a special magic number. Read it, then answer the question "
    "with the number alone.\n\n"
)
_CHAT_ANSWER_TOKENS = 32
ANSWER_NLL = "nll of the answer"
CHANCE = "accuracy of copying"
COPYING = "number of the context"
LOOKUP = "lookup"
MADE_UP = "number, absent city"
MADE_UP_COPYING = "number of the context, absent city"
DEFAULT_LENGTHS = (1024, 2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class Options(NeedleOptions):
    """Multi-needle retrieval on any model.

    Attributes:
        lengths: Prompt lengths in tokens, question and answer included; an empty list means the model's context. By default
            those of 1024, 2048, 4096 and 8192 that fit into it, or else the context.
        needles: [needles in the context, needles asked for] pairs; the paper has [1,1], [2,2], [4,2], [6,2] and [8,1].
        cities: Cities to name: all, those that training documents name (seen), the others (unseen), or both kinds apart.
        prompt: base ends with the beginning of the needle's own sentence; chat asks a question in the chat template.
        absent: Whether to ask as well for cities that are not in the context, of as many documents as a cell has, once for
            each length, number of needles and kind of city.
    """

    lengths: list[int] | None = None
    needles: list[list[int]] = field(default_factory=lambda: [[1, 1]])
    cities: Literal["all", "seen", "unseen", "apart"] = "all"
    prompt: Literal["base", "chat"] = "base"
    absent: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(length < 1 for length in self.lengths or ()):
            raise refused(self, "lengths", "give lengths of at least 1 token")
        if not self.needles or any(len(pair) != 2 for pair in self.needles):
            raise refused(self, "needles", "give [needles, asked] pairs, such as [[1,1],[4,2]]")
        if any(not 1 <= asked <= needles for needles, asked in self.needles):
            raise refused(self, "needles", "ask for at least 1 and at most all of the needles")


class Trial(NamedTuple):
    """A question: its place, its document, which others share, the numbers of its context, and the right one, if any."""

    at: dict[str, Any]
    document: str
    numbers: Sequence[str]
    right: str | None


class NeedleTask(Task):
    """The grid's documents, and the share of exact answers and the loss of the right ones in each cell."""

    rules = 2

    def __init__(self, options: Options, context: TaskContext) -> None:
        self.options, self.tokenizer, self.data_name = options, context.tokenizer, options.text
        self.choices = _choices(options, context.tokenizer.begin_of_text_token)
        self.requests: list[Continuation] = []
        self._trials: list[Trial] = []
        self._frame = chat_frame(context.tokenizer) if options.prompt == "chat" else None
        tokens = _CHAT_ANSWER_TOKENS if self._frame else answer_tokens(options.digits) - 1
        haystack = token_stream(context, options.text, enough=HAYSTACK_TOKENS)
        kinds: tuple[Kind, ...] = ("seen", "unseen") if options.cities == "apart" else (options.cities,)
        usual = [length for length in DEFAULT_LENGTHS if options.lengths is None and length <= context.prompt_tokens]
        lengths = options.lengths or usual or [context.context_tokens]
        cells: list[tuple[int, int, int, float, Kind]] = [
            (needles, asked, length, depth, kind)
            for (needles, asked), length, depth, kind in product(options.needles, lengths, options.depths, kinds)
        ]
        if options.absent:
            counts = sorted({needles for needles, _ in options.needles})
            cells += [(needles, 0, length, 0.5, kind) for needles, length, kind in product(counts, lengths, kinds)]
        for needles, asked, length, depth, kind in cells:
            questions = self._questions(context, haystack, needles, asked, length, depth, kind)
            own = [] if options.paired else [kind, f"{length} tokens", f"depth {depth:g}"]
            at: dict[str, Any] = {} if kind == "all" else {"cities": kind}
            at |= {"needles": needles, "asked": asked, "length_tokens": length, "depth": depth}
            if not asked:
                del at["asked"], at["depth"]
                own = own[:2]
            for number, question in enumerate(questions):
                document = ", ".join([f"N={needles} R={asked}", *own, f"document {number}"])
                for place, prompt in enumerate(question.prompts):
                    request = Continuation(tuple(prompt), tokens)
                    if asked and not self._frame:  # a chat model may begin its answer with any words
                        request = ScoredContinuation(tuple(prompt), tokens, right=tuple(question.answer_ids[place]))
                    self.requests.append(request)
                    self._trials.append(
                        Trial(at, document, question.numbers, question.answers[place] if asked else None)
                    )

    def _questions(
        self,
        context: TaskContext,
        haystack: npt.NDArray[Any],
        needles: int,
        asked: int,
        length: int,
        depth: float,
        cities: Kind,
    ) -> list[NeedleQuestion]:
        options, before, asking, room = self.options, [], {}, 0
        if self._frame:
            before = [*self._frame[0], *self.tokenizer.encode(_CHAT_INSTRUCTION)]
            for city in CITIES[cities]:
                text = f"\n\nQuestion: What is the special magic number for {city}?"
                asking[city] = [*self.tokenizer.encode(text), *self._frame[1]]
            longest = max(map(len, asking.values()))
            room = len(before) + longest + _CHAT_ANSWER_TOKENS - answer_tokens(options.digits)
        own = [options.seed, length, needles, asked, round(depth * 1000), len(CITIES[cities])]
        cell = {"length_tokens": length - room, "depth": depth, "needles": needles, "asked": asked}
        shared = [options.seed, needles, asked]
        questions = list(draw_documents(options, context, haystack, shared, own, **cell, cities=CITIES[cities]))
        if self._frame:
            for question in questions:
                prompts = zip(question.prompts, question.query_starts, question.cities, strict=True)
                question.prompts[:] = [[*before, *prompt[1:start], *asking[city]] for prompt, start, city in prompts]
        return questions

    def score(self, answers: Sequence[Any]) -> Scores:
        """Return the accuracy over everything, for each number of needles, for each length, and in each cell.

        Beside it stand the accuracy of copying, 1/N, the share of answers that name a number of the context, lookup where N is
        above 1, and the negative log-likelihood of the right answer, the sum over its tokens, if the model told it. The figures
        of absent cities stand over everything, for each number of needles and for each length.
        """
        groups: dict[tuple[tuple[str, Any], ...], list[tuple[Trial, str, float | None]]] = defaultdict(list)
        for trial, answer in zip(self._trials, answers, strict=True):
            told = isinstance(answer, dict)
            text = self.tokenizer.decode(answer["ids"] if told else answer).strip()
            loss = math.fsum(answer["losses"]) if told else None
            left_out = [0, 1, 2, 4] if trial.right else [0, 1, 2]
            for fewer in left_out if len(self.options.needles) > 1 else left_out[:-1]:
                place = tuple(trial.at.items())[: len(trial.at) - fewer]
                groups[(("absent", not trial.right), *place)].append((trial, text, loss))
        # Rows of few places first, as a reader wants them.
        rows: list[Measurement] = []
        items: list[ItemScore] = []
        for ((_, absent), *key), answered in sorted(groups.items(), key=lambda group: len(group[0])):
            at, documents = dict(key), [trial.document for trial, *_ in answered]
            for values, row in (self._of_absent if absent else self._of_asked)(answered, at, documents):
                rows += details([row]) if "depth" in at else [row]
                if values and key and key[-1][0] == ("needles" if absent else "asked"):
                    cities = f", {at['cities']} cities" if "cities" in at else ""
                    name = f"{row.name} N={at['needles']} R={at.get('asked', 0)}{cities}"
                    items += unit_scores(name, values, documents)
        return Scores(measurements=rows, items=items)

    def _of_asked(
        self, answered: Sequence[tuple[Trial, str, float | None]], at: dict[str, Any], units: Sequence[str]
    ) -> list[tuple[Sequence[float], Measurement]]:
        """Return the figures of questions with an answer, with their value for each question."""
        right = [self._says(text, trial.right or "") for trial, text, _ in answered]
        named = [self._names_one(text, trial.numbers) for trial, text, _ in answered]
        losses = [loss for *_, loss in answered if loss is not None]
        chances = [1 / len(trial.numbers) for trial, *_ in answered]
        figures: list[tuple[Sequence[float], Measurement]] = [
            (right, proportion("accuracy", right, at, units=units)),
            ([], single(CHANCE, "share", math.fsum(chances) / len(chances), len(chances), at)),
            (named, proportion(COPYING, named, at, units=units, better=None)),
        ]
        if at.get("needles", 1) > 1:
            figures.append(_lookup(right, named, at, units))
        if len(losses) == len(answered):
            figures.append((losses, mean(ANSWER_NLL, "nats", losses, at, units=units, better="lower")))
        return figures

    def _of_absent(
        self, answered: Sequence[tuple[Trial, str, float | None]], at: dict[str, Any], units: Sequence[str]
    ) -> list[tuple[Sequence[float], Measurement]]:
        """Return the figures of questions without an answer, with their value for each question."""
        find = re.search if self._frame else re.match
        marks = {
            MADE_UP: [find(r"\d", text) is not None for _, text, _ in answered],
            MADE_UP_COPYING: [self._names_one(text, trial.numbers) for trial, text, _ in answered],
        }
        return [(made, proportion(name, made, at, units=units, better="lower")) for name, made in marks.items()]

    def _says(self, text: str, number: str) -> bool:
        return number in text if self._frame else text.startswith(number)

    def _names_one(self, text: str, numbers: Sequence[str]) -> bool:
        return any(self._says(text, number) for number in numbers)


def _lookup(
    right: Sequence[bool], named: Sequence[bool], at: dict[str, Any], units: Sequence[str]
) -> tuple[Sequence[float], Measurement]:
    """Return (p - 1/N) / (1 - 1/N) with the interval of the share p, and its value for each question."""
    count = at["needles"]

    def beyond(share: float) -> float:
        return (count * share - 1) / (count - 1)

    marks = [float(found) if found or one else 1 / count for found, one in zip(right, named, strict=True)]
    share = proportion(LOOKUP, marks, at, units=units)
    assert share.low is not None
    assert share.high is not None
    error = None if share.standard_error is None else share.standard_error * count / (count - 1)
    row = replace(share, unit="beyond 1/N", value=beyond(share.value), standard_error=error)
    return [*map(beyond, marks)], replace(row, low=beyond(share.low), high=beyond(share.high))


def _choices(options: Options, begin: str) -> list[str]:
    nll = (
        f"The {ANSWER_NLL} is the sum over its tokens, the space before the number included, each given the prompt and the "
        "right tokens before it."
    )
    return [
        f"{options.haystack}; documents begin at random places.",
        "The same needles in the same haystack stand at every depth and length: cells are paired, and standard errors are "
        "over documents."
        if options.paired
        else "Every cell draws its own documents: cells are independent.",
        "The first needle asked for stands at the depth of its cell, the others at random places.",
        "Each needle asked for is one trial. A base model's continuation must start with all its digits; a chat model's "
        "answer must contain them.",
        *(
            []
            if options.prompt == "chat"
            else [f"Each prompt begins with {begin!r}, whatever the tokenizer itself does."]
        ),
        "Lengths include the question and room for the answer.",
        *(
            [
                "An absent city is one of the same kind that no needle of the context names; any answer that "
                f"{'has' if options.prompt == 'chat' else 'begins with'} a digit is a number."
            ]
            if options.absent
            else []
        ),
        *([] if options.prompt == "chat" else [nll]),
    ]


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw a column for each model, and a row for each kind of city and, with several lengths, number of needles."""
    cells = [[row for row in select(result, "accuracy") if "depth" in row.at] for result in results]
    shown = [row for rows in cells for row in rows]
    depths = sorted({row.at["depth"] for row in shown})
    by_length = len({row.at["length_tokens"] for row in shown}) > 1
    columns = sorted({_column(row, by_length) for row in shown})
    lines = sorted({_panel(row, by_length) for row in shown})
    height = len(lines) * (1.0 + 0.42 * len(depths)) + 0.4
    figure, axes = panels(height, len(lines), len(results), sharex=True, sharey=True)
    image: Any = None
    for line, panel in zip(axes, lines, strict=True):
        for ax, rows, label in zip(line, cells, labels(results), strict=True):
            grid = np.full((len(depths), len(columns)), np.nan)
            for row in rows:
                if _panel(row, by_length) != panel:
                    continue
                y, x = depths.index(row.at["depth"]), columns.index(_column(row, by_length))
                grid[y, x] = row.value
                text, colour = f"{round(row.value * row.n)}/{row.n}", ON_DARK if row.value > 0.62 else ON_PALE
                ax.text(x, y, text, ha="center", va="center", fontsize=8.5, color=colour)
            image = heat_map(ax, grid, ACCURACY_COLOURS, 0, 1, edgecolors="white", linewidth=1)
            ax.set_title(", ".join([label, *_words(panel)]))
            ticks = [f"{first:,}" + "".join(f"\n{asked} asked" for asked in rest) for first, *rest in columns]
            ax.set_xticks(range(len(columns)), ticks)
            ax.set_yticks(range(len(depths)), [f"{100 * depth:g} %" for depth in depths])
            ax.spines[:].set_visible(False)
            ax.tick_params(length=0)
        line[0].set_ylabel("depth of the answer")
    x_label = "length (tokens)" if by_length else "needles hidden, and how many of them are asked for"
    figure.supxlabel(x_label, fontsize=9.5)
    bar = figure.colorbar(image, ax=list(axes.flat), label="accuracy", fraction=0.03, pad=0.03, aspect=30)
    counts = sorted({row.at["needles"] for row in shown} - {1})
    for count in counts:
        bar.ax.axhline(1 / count, color="white", linewidth=2)
        bar.ax.axhline(1 / count, color=INK, linewidth=1, linestyle=(0, (2, 2)))
        look: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": 8}
        bar.ax.text(-0.2, 1 / count, f"1/{count}", transform=bar.ax.get_yaxis_transform(), **look)
    digits = results[0].options["digits"]
    caption = f"Share of {digits}-digit numbers given back exactly; in each cell right answers of all."
    caption += f" A guess is right with probability {10.0**-digits:g}."
    if counts:
        caption += " Dashed lines in the colour bar: 1/N, the accuracy of a model that gives back any of the N numbers."
    if not by_length:
        caption += f" Contexts of {shown[0].at['length_tokens']:,} tokens."
    if any("cities" in row.at for row in shown):
        caption += " Unseen cities never occur as needles in training."
    return "Needle retrieval", caption, figure


def _column(row: Measurement, by_length: bool) -> tuple[int, ...]:
    return (row.at["length_tokens"],) if by_length else (row.at["needles"], row.at["asked"])


def _panel(row: Measurement, by_length: bool) -> tuple[str, int, int]:
    """Return kind of city, needles and asked; the last two are 0 where columns tell them."""
    return row.at.get("cities", ""), row.at["needles"] if by_length else 0, row.at["asked"] if by_length else 0


def _words(panel: tuple[str, int, int]) -> list[str]:
    cities, needles, asked = panel
    count = ["one needle" if needles == 1 else f"{needles} needles, {asked} asked"] if needles else []
    return [*([f"{cities} cities"] if cities else []), *count]


register(TaskKind(name="needle", doc=__doc__, options=Options, make=NeedleTask, draw=draw))
