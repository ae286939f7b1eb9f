"""Multi-needle retrieval, over lengths and depths.

This is arXiv:2410.05258 section 3.3: which magic number belongs to a city?

The paper states neither the haystack, the prompt of a base model, nor how two answers are scored. Here the haystack is
validation text, the prompt ends with the start of the needle's own sentence, and every needle asked for is one trial,
right when the greedy continuation starts with all its digits.

`evaluate_needle` asks a model that was trained here, on its own validation text, and keeps cities apart that training names.
`make` asks any model, on any text: the same needles in the same haystack are placed at every depth and length, so that what
differs between cells is depth and length alone; and prompts share most of their tokens, which are then computed once.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

from ...data import CITIES_SEEN, CITIES_UNSEEN, NeedleFormat, NeedleQuestion, Shards, Tokenizer, evaluation_document
from ...errors import ConfigError
from ...plots.curves import labels, select
from ...plots.heat_map import heat_map
from ...plots.style import ACCURACY_COLOURS, INK, WIDTH_INCHES
from ...results import Cities, ItemScore, NeedleCell, NeedleResult, TaskResult
from ..config import NeedleConfig
from ..engine import Scores, Task
from ..prompts.chat import chat_frame
from ..prompts.texts import HAYSTACK_TOKENS, token_stream
from ..registry import TaskKind, register
from ..requests import Continuation, LanguageModel, answers_to
from ..scores import details, mean, proportion

CITIES: dict[Cities, tuple[str, ...]] = {"seen": CITIES_SEEN, "unseen": CITIES_UNSEEN}


@dataclass(frozen=True, kw_only=True)
class CellQuestions:
    """The documents of one cell of the grid."""

    length_tokens: int
    depth: float
    needles: int
    asked: int
    cities: Cities
    questions: list[NeedleQuestion]


def needle_cells(shards: Shards, config: NeedleConfig, *, context_tokens: int) -> Iterator[CellQuestions]:
    """Every cell's documents: a function of the configuration's seed and the shards, so every model gets the same."""
    haystack = shards.tokens("validation")
    for length in config.lengths_tokens or [context_tokens]:
        for needles, asked in config.needles:
            for depth in config.depths:
                for cities, names in CITIES.items():
                    identity = [config.seed, length, needles, asked, round(depth * 1000), len(names)]
                    rng = np.random.default_rng(identity)
                    questions = [
                        evaluation_document(
                            rng,
                            shards.tokenizer,
                            haystack,
                            length_tokens=length,
                            depth=depth,
                            needles=needles,
                            asked=asked,
                            digits=config.digits,
                            cities=names,
                        )
                        for _ in range(config.documents)
                    ]
                    yield CellQuestions(
                        length_tokens=length,
                        depth=depth,
                        needles=needles,
                        asked=asked,
                        cities=cities,
                        questions=questions,
                    )


def evaluate_needle(model: LanguageModel, shards: Shards, config: NeedleConfig, *, context_tokens: int) -> NeedleResult:
    """The share of exact answers in every cell of needles x depth x cities.

    Args:
        model: The model.
        shards: Validation text and tokenizer.
        config: The grid.
        context_tokens: Length where the configuration names none.

    Raises:
        DataError: needles and question do not fit into the length.
    """
    # A space and one token for each digit, whatever the tokenizer merges.
    answer_tokens = config.digits + 1
    cells = []
    for cell in needle_cells(shards, config, context_tokens=context_tokens):
        prompts = [tuple(prompt) for question in cell.questions for prompt in question.prompts]
        answers = [answer for question in cell.questions for answer in question.answers]
        continuations = answers_to(model, [Continuation(prompt, answer_tokens) for prompt in prompts])
        texts = [shards.tokenizer.decode(ids) for ids in continuations]
        cells.append(
            NeedleCell(
                length_tokens=cell.length_tokens,
                depth=cell.depth,
                needles=cell.needles,
                asked=cell.asked,
                cities=cell.cities,
                correct=sum(text.strip().startswith(answer) for text, answer in zip(texts, answers, strict=True)),
                trials=len(answers),
            )
        )
    return NeedleResult(digits=config.digits, chance=10.0**-config.digits, cells=cells)


_CHAT_INSTRUCTION = (
    "Somewhere in the text below are sentences that give cities a special magic number. Read it, then answer the question "
    "with the number alone.\n\n"
)
_CHAT_ANSWER_TOKENS = 32
_ALL = 0  # in place of a length: over all of them
_CHOICES = [
    f"The haystack is the first {HAYSTACK_TOKENS:,} tokens of the text named in the options; documents begin at random places.",
    "The same needles in the same haystack stand at every depth and length: cells are paired, not independent.",
    "The first needle asked for stands at the depth of its cell, the others at random places.",
    "Each needle asked for is one trial. A base model's continuation must start with all its digits; a chat model's answer "
    "must contain them.",
    "Lengths include the question and room for the answer.",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Multi-needle retrieval on any model.

    Attributes:
        lengths: Prompt lengths in tokens, question and answer included.
        needles: [needles in the context, needles asked for] pairs; the paper has [1,1], [2,2], [4,2], [6,2] and [8,1].
        depths: Places of the answer, 0 (start of the context) to 1 (its end).
        documents: Documents in a cell; the paper has 50.
        digits: Digits of a number.
        text: The haystack: python-stdlib, a text file, a folder of them, or hf:NAME[:CONFIG][:SPLIT].
        prompt: base ends with the beginning of the needle's own sentence; chat asks a question in the chat template.
        seed: Of places, cities and numbers.
    """

    lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096, 8192])
    needles: list[list[int]] = field(default_factory=lambda: [[1, 1]])
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    documents: int = 10
    digits: int = 7
    text: str = "python-stdlib"
    prompt: Literal["base", "chat"] = "base"
    seed: int = 0

    def __post_init__(self) -> None:
        if any(len(pair) != 2 for pair in self.needles):
            raise ConfigError(f"needles={self.needles}: give [needles, asked] pairs, such as [[1,1],[4,2]]")
        if not self.lengths:
            raise ConfigError("lengths=[]: give at least one length in tokens")
        NeedleConfig(
            lengths_tokens=self.lengths,
            needles=[(pair[0], pair[1]) for pair in self.needles],
            depths=self.depths,
            documents=self.documents,
            digits=self.digits,
            seed=self.seed,
        )


@dataclass(frozen=True)
class _Trial:
    length: int
    needles: int
    asked: int
    depth: float
    document: int
    answer: str


class NeedleTask(Task):
    """The grid's documents, and the share of exact answers in each cell. See `Task`."""

    def __init__(self, options: Options, tokenizer: Tokenizer) -> None:
        self.options, self.tokenizer = options, tokenizer
        self.data_name, self.choices = options.text, _CHOICES
        self.requests: list[Continuation] = []
        self._trials: list[_Trial] = []
        frame = chat_frame(tokenizer) if options.prompt == "chat" else None
        haystack = token_stream(tokenizer, options.text, enough=HAYSTACK_TOKENS)
        for needles, asked in options.needles:
            for length in options.lengths:
                for depth in options.depths:
                    for document in range(options.documents):
                        question = self._document(haystack, needles, asked, length, depth, document, frame)
                        for prompt, answer in zip(question.prompts, question.answers, strict=True):
                            tokens = (
                                _CHAT_ANSWER_TOKENS if frame else NeedleFormat(digits=options.digits).answer_tokens - 1
                            )
                            self.requests.append(Continuation(tuple(prompt), tokens))
                            self._trials.append(_Trial(length, needles, asked, depth, document, answer))

    def _document(
        self,
        haystack: Any,
        needles: int,
        asked: int,
        length: int,
        depth: float,
        document: int,
        frame: tuple[list[int], list[int]] | None,
    ) -> NeedleQuestion:
        before, questions, room = [], {}, 0
        if frame:
            before = [*frame[0], *self.tokenizer.encode(_CHAT_INSTRUCTION)]
            for city in CITIES_SEEN + CITIES_UNSEEN:
                text = f"\n\nQuestion: What is the special magic number for {city}?"
                questions[city] = [*self.tokenizer.encode(text), *frame[1]]
            longest = max(map(len, questions.values()))
            room = len(before) + longest + _CHAT_ANSWER_TOKENS - NeedleFormat(digits=self.options.digits).answer_tokens
        question = evaluation_document(
            np.random.default_rng([self.options.seed, needles, asked, document]),
            self.tokenizer,
            haystack,
            length_tokens=length - room,
            depth=depth,
            needles=needles,
            asked=asked,
            digits=self.options.digits,
            cities=CITIES_SEEN + CITIES_UNSEEN,
        )
        if frame:
            question.prompts[:] = [
                [*before, *prompt[1:start], *questions[city]]
                for prompt, start, city in zip(question.prompts, question.query_starts, question.cities, strict=True)
            ]
        return question

    def score(self, answers: Sequence[Any]) -> Scores:
        """Accuracy in every cell, and over all depths, over all lengths: there with the standard error over documents."""
        cells: dict[tuple[int, int, int, float], list[bool]] = defaultdict(list)
        documents: dict[tuple[int, int, int], dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
        for trial, ids in zip(self._trials, answers, strict=True):
            text = self.tokenizer.decode(ids).strip()
            correct = trial.answer in text if self.options.prompt == "chat" else text.startswith(trial.answer)
            cells[trial.needles, trial.asked, trial.length, trial.depth].append(correct)
            for length in (trial.length, _ALL):
                documents[trial.needles, trial.asked, length][trial.document].append(correct)
        measurements = []
        for (needles, asked, length), found in sorted(documents.items()):
            at = {"needles": needles, "asked": asked} | ({} if length == _ALL else {"length_tokens": length})
            right, trials = [float(sum(row)) for row in found.values()], [float(len(row)) for row in found.values()]
            measurements.append(mean("accuracy", "share", right, at, weights=trials, better="higher"))
        for (needles, asked, length, depth), cell in cells.items():
            place = {"needles": needles, "asked": asked, "length_tokens": length, "depth": depth}
            measurements += details([proportion("accuracy", cell, place)])
        items = [
            ItemScore(
                name=f"accuracy N={needles} R={asked}",
                item=f"document {document}",
                score=float(sum(right)),
                weight=float(len(right)),
            )
            for (needles, asked, length), found in documents.items()
            if length == _ALL
            for document, right in found.items()
        ]
        return Scores(measurements=measurements, items=items)


def make(options: Options, model: LanguageModel) -> NeedleTask:
    """The task for a model. See `NeedleTask`.

    Raises:
        DataError: the needles do not fit into a length, or the text cannot be read.
    """
    return NeedleTask(options, model.tokenizer)


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw the accuracy of every cell of depth by length: a row for each number of needles, a column for each model."""
    cells = [row for result in results for row in select(result, "accuracy") if "depth" in row.at]
    settings = sorted({(row.at["needles"], row.at["asked"]) for row in cells})
    lengths, depths = (sorted({row.at[key] for row in cells}) for key in ("length_tokens", "depth"))
    figure = Figure(figsize=(WIDTH_INCHES, len(settings) * (1.0 + 0.42 * len(depths)) + 0.4), layout="constrained")
    axes = figure.subplots(len(settings), len(results), squeeze=False, sharex=True, sharey=True)
    image: Any = None
    for row, (needles, asked) in enumerate(settings):
        for column, (result, label) in enumerate(zip(results, labels(results), strict=True)):
            ax = axes[row, column]
            grid = np.full((len(depths), len(lengths)), np.nan)
            for cell in select(result, "accuracy", needles=needles, asked=asked):
                if "depth" not in cell.at:
                    continue
                y, x = depths.index(cell.at["depth"]), lengths.index(cell.at["length_tokens"])
                grid[y, x] = cell.value
                count, colour = f"{round(cell.value * cell.n)}/{cell.n}", "white" if cell.value > 0.62 else INK
                ax.text(x, y, count, ha="center", va="center", fontsize=8.5, color=colour)
            image = heat_map(ax, grid, ACCURACY_COLOURS, 0, 1, edgecolors="white", linewidth=1)
            ax.set_title(f"{label}: {needles} needles, {asked} asked" if needles > 1 else f"{label}: one needle")
            ax.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
            ax.set_yticks(range(len(depths)), [f"{100 * depth:g} %" for depth in depths])
            ax.spines[:].set_visible(False)
            ax.tick_params(length=0)
        axes[row, 0].set_ylabel("depth of the answer")
    for ax in axes[-1]:
        ax.set_xlabel("length (tokens)")
    figure.colorbar(image, ax=list(axes.flat), label="accuracy", fraction=0.03, pad=0.01, aspect=30)
    digits = results[0].options["digits"]
    chance = 10.0**-digits
    caption = (
        f"Share of {digits}-digit numbers given back exactly; in each cell right answers of all. A guess: {chance:g}."
    )
    return "Needle retrieval", caption, figure


register(TaskKind(name="needle", doc=__doc__, options=Options, make=make, draw=draw))
