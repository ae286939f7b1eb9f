"""Contextual hallucination: summaries and answers of a model, judged against their documents.

This is arXiv:2410.05258 section 3.5. In the paper GPT-4o gives a binary verdict on 100 greedy outputs for each set, following
Chuang et al. (arXiv:2407.07071). Here you choose the judge. Verdicts are kept in a file, so that a person can check them.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from matplotlib.figure import Figure

from difftransformer.errors import DataError, EvaluationError

from ...plots.bars import accuracy_bars
from ...plots.curves import labels, select
from ...plots.seeds import share_intervals
from ...results import TaskResult
from ..engine import Scores, Task
from ..judges.base import Case, Judge, Judgment, judge_all
from ..judges.endpoint import EndpointJudge
from ..judges.overlap import OverlapJudge
from ..models.stopping import closing_tokens, stop_tokens
from ..prompts.chat import chat_frame
from ..prompts.texts import TaskContext
from ..registry import TaskKind, at_least, refused, register
from ..requests import Continuation
from ..scores import accuracy_of_sets, proportion, single
from ..sets.grounded import GROUNDED_SETS, GroundedItem, Kind, read_grounded, read_grounded_file

ANSWER_TOKENS = {"xsum": 64, "cnn_dm": 128, "multinews": 512, "qasper": 128, "hotpotqa": 32, "2wikimqa": 32}
"""The caps of LongBench; for XSum and CNN/DM, which are not in it, about twice the length of a reference."""

FILE_ANSWER_TOKENS: dict[Kind, int] = {"summary": 256, "qa": 64}

PROMPTS: dict[tuple[str, Kind], tuple[str, str]] = {
    ("base", "summary"): ("Document:\n", "\n\nA short summary of the document, stating only what it says:"),
    ("base", "qa"): (
        "Document:\n",
        "\n\nQuestion about the document: {question}\nShort answer, taken from the document:",
    ),
    ("chat", "summary"): (
        "Summarise the document below in a few sentences. State only what the document says.\n\nDocument:\n",
        "\n\nGive the summary alone.",
    ),
    ("chat", "qa"): (
        "Answer the question from the document below, as briefly as you can, using nothing but the document.\n\nDocument:\n",
        "\n\nQuestion: {question}\nGive the answer alone.",
    ),
}
"""Texts before and after a document."""

_LEAST_DOCUMENT_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Options:
    """Summaries and answers, judged against their documents.

    Attributes:
        sets: xsum, cnn_dm, multinews, qasper, hotpotqa, 2wikimqa. Without a file all six.
        file: Your own items: JSONL with document, reference, and question for kind qa.
        kind: What to ask about the documents of the file.
        items: Items of each set, drawn at random; the paper has 100.
        prompt: Continue the text, or ask in the chat template.
        max_new_tokens: Longest answer; by default each set has its own.
        judge: overlap; nli:FOLDER, a local model of inference; or openai:MODEL.
        judgments: File of verdicts; an answer in it is not judged again.
        endpoint: Server for openai:MODEL, without /chat/completions.
        key_variable: Environment variable with the endpoint's key; empty for none.
        max_judgments: Most requests to the endpoint in this run.
        max_cost_tokens: Most tokens of requests and replies in this run.
        timeout_seconds: Time limit of one request to the endpoint.
        retries: Retries of a failed request.
        overlap_threshold: Share of an answer's content words in the document, for overlap.
        seed: Seed of the random draws.
    """

    sets: list[str] = field(default_factory=list)
    file: str | None = None
    kind: Kind = "summary"
    items: int = 100
    prompt: Literal["base", "chat"] = "base"
    max_new_tokens: int | None = None
    judge: str = "overlap"
    judgments: str = "evals/judgments.jsonl"
    endpoint: str = "https://api.openai.com/v1"
    key_variable: str = "OPENAI_API_KEY"
    max_judgments: int | None = None
    max_cost_tokens: int | None = None
    timeout_seconds: float = 120.0
    retries: int = 6
    overlap_threshold: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, "items", "max_new_tokens", "max_judgments", "max_cost_tokens")
        at_least(self, 0, "retries", "seed")
        if not self.timeout_seconds > 0:
            raise refused(self, "timeout_seconds", "give more than 0")


def make_judge(options: Options) -> Judge:
    """Return the judge that the options name.

    Raises:
        ConfigError: There is no such judge, or it is not available.
    """
    kind, _, name = options.judge.partition(":")
    if kind == "overlap" and not name:
        return OverlapJudge(options.overlap_threshold)
    if kind == "nli" and name:
        from ..judges.nli import NliJudge

        return NliJudge(name)
    if kind == "openai" and name:
        return EndpointJudge(
            name,
            options.endpoint,
            options.key_variable,
            timeout_seconds=options.timeout_seconds,
            retries=options.retries,
            max_requests=options.max_judgments,
            max_tokens=options.max_cost_tokens,
        )
    raise refused(options, "judge", "choose overlap, nli:FOLDER or openai:MODEL")


class HallucinationTask(Task):
    def __init__(self, options: Options, context: TaskContext) -> None:
        self.options, self.tokenizer, self.chosen_judge = options, context.tokenizer, make_judge(options)
        self.items: list[tuple[str, GroundedItem]] = []
        self.requests: list[Continuation] = []
        self._cut = 0
        # The answer to a base prompt is one line, which some models begin with a line end; a chat model ends its turn with
        # a special token.
        self.one_line = options.prompt == "base"
        self.stop = stop_tokens(self.tokenizer, "\n" if self.one_line else None)
        self.closing = closing_tokens(self.tokenizer, "\n") if self.one_line else ()
        self.leading = tuple(token for token in self.stop if not self.tokenizer.decode([token]).strip())
        names = options.sets or ([] if options.file else list(GROUNDED_SETS))
        for name in names:
            kind = GROUNDED_SETS[name].kind if name in GROUNDED_SETS else "summary"
            self._add(name, kind, read_grounded(name, options.items, options.seed), ANSWER_TOKENS.get(name, 0), context)
        if options.file:
            items = read_grounded_file(options.file, options.kind, options.items, options.seed)
            self._add(Path(options.file).stem, options.kind, items, FILE_ANSWER_TOKENS[options.kind], context)
        self.data_name = ", ".join([*names, *([options.file] if options.file else [])])
        self.choices = self._choices()

    def _add(self, name: str, kind: Kind, items: list[GroundedItem], cap: int, context: TaskContext) -> None:
        cap = self.options.max_new_tokens or cap
        before, after = PROMPTS[self.options.prompt, kind]
        frame = chat_frame(self.tokenizer) if self.options.prompt == "chat" else ([self.tokenizer.begin_of_text], [])
        for item in items:
            start = [*frame[0], *self.tokenizer.encode(before)]
            end = [*self.tokenizer.encode(after.format(question=item.question)), *frame[1]]
            room = context.prompt_tokens - len(start) - len(end) - cap
            if room < _LEAST_DOCUMENT_TOKENS:
                raise DataError(
                    f"{name}/{item.name}: the prompt without its document takes {len(start) + len(end)} tokens and the answer "
                    f"up to {cap}, the model's context has {context.prompt_tokens}; lower --max-new-tokens"
                )
            document = self.tokenizer.encode(item.document)
            if len(document) > room:
                document = [*document[: (room + 1) // 2], *document[len(document) - room // 2 :]]
                self._cut += 1
            self.items.append((name, item))
            prompt = (*start, *document, *end)
            self.requests.append(Continuation(prompt, cap, self.stop, self.leading, closing=self.closing))

    def scored_by(self) -> Any:
        """Return the judge, and what it is shown of each item."""
        shown = ([name, item.name, item.document, item.question, item.reference] for name, item in self.items)
        return [self.chosen_judge.identity, *shown]

    def judge(self, answers: Sequence[Any]) -> list[tuple[Case, Judgment | None]]:
        """Return a case for each answer, and its verdict; None for an empty answer and where the judge gave none.

        Raises:
            EvaluationError: The judge gave no verdict at all.
        """
        texts = [self.tokenizer.decode(ids).strip() for ids in answers]
        if self.one_line:
            texts = [text.partition("\n")[0].strip() for text in texts]
        cases = [
            Case(name, item.name, item.document, item.question, item.reference, text)
            for (name, item), text in zip(self.items, texts, strict=True)
        ]
        written, file = [case for case in cases if case.answer], Path(self.options.judgments)
        verdicts, reasons = judge_all(self.chosen_judge, written, file)
        if verdicts and not any(verdicts):
            raise EvaluationError(f"{self.chosen_judge.name} judged nothing: {reasons[0]}; every answer is saved")
        if left := verdicts.count(None):
            without = f"{left} of {len(cases)} answers have no verdict and are left out of the accuracy"
            self.choices = [*self.choices, f"{without}: {'; '.join(reasons)}."]
        given = iter(verdicts)
        return [(case, next(given) if case.answer else None) for case in cases]

    def score(self, answers: Sequence[tuple[Case, Judgment | None]]) -> Scores:
        """Compute the share of faithful answers among the judged ones in each set, and count empty and unjudged answers."""
        right: list[tuple[str, str, bool]] = []
        empty: dict[str, list[bool]] = defaultdict(list)
        documents: dict[str, list[str]] = defaultdict(list)
        unjudged: Counter[str] = Counter()
        named: dict[tuple[str, str], str] = {}
        for case, verdict in answers:
            name = case.set_name
            empty[name].append(not case.answer)
            document = named.setdefault((name, case.document), f"{name}/{case.item}")  # questions may share a document
            documents[name].append(document)
            if verdict is None and case.answer:
                unjudged[name] += 1
            else:
                right.append((name, document, verdict is not None and verdict.faithful))
        measurements, items = accuracy_of_sets(right)
        for name, marks in empty.items():
            at, units = {"set": name}, documents[name]
            measurements.append(proportion("empty answers", marks, at, units=units, better="lower"))
            measurements.append(single("unjudged", "answers", float(unjudged[name]), len(marks), at, "lower"))
        return Scores(measurements=measurements, items=items)

    def is_whole(self, result: TaskResult) -> bool:
        """Whether every answer has a verdict."""
        return not any(row.value for row in select(result, "unjudged"))

    def _choices(self) -> list[str]:
        return [
            *self.chosen_judge.rules,
            f"The judge is {self.chosen_judge.name}; verdicts of different judges, and those of GPT-4o in the paper, cannot be "
            "compared.",
            "The prompts were written for this package; the paper gives none. Answers are greedy, with the length limits of "
            "LongBench (XSum 64 and CNN/DM 128 tokens), and end at a special token"
            + (" or the end of the first line that is not empty." if self.one_line else "."),
            f"{self._cut} of {len(self.items)} documents do not fit into the model's context and lose their middle; the judge "
            "sees the whole document.",
            "MultiNews and the questions are those of LongBench. An empty answer is not judged and counts as wrong.",
            "The mean over sets gives each set the same weight.",
        ]


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw the share of faithful answers in each set (arXiv:2410.05258 Table 4), a bar for each model."""
    figure = accuracy_bars(results, "answers without hallucination (share)")
    judges = list(dict.fromkeys(str(result.options["judge"]) for result in results))
    which = "Judge" if len(judges) == 1 else "Different judges, which do not compare"
    caption = (
        f"Share of answers that keep to their document, with {share_intervals(results)}. {which}: {', '.join(judges)}."
    )
    for result, label in zip(results, labels(results), strict=True):
        if left := sum(row.value for row in select(result, "unjudged")):
            caption += f" {label}: {left:.0f} answers have no verdict and are left out."
    return "Contextual hallucination", caption, figure


register(TaskKind(name="hallucination", doc=__doc__, options=Options, make=HallucinationTask, draw=draw))
