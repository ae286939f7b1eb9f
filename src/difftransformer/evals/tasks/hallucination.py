"""Contextual hallucination (arXiv:2410.05258 section 3.5): does a summary or an answer keep to its document?

The paper has GPT-4o give a binary verdict on 100 greedy outputs of each set, following Chuang et al. (arXiv:2407.07071). Here
the judge is chosen: any OpenAI-compatible endpoint, a local model of natural language inference, or the overlap of words.
Verdicts are kept in a file, for a person to check. The paper gives neither its prompts nor its judge's; both are our own here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...data.qa_sets import GROUNDED_SETS, GroundedItem, Kind, read_grounded, read_grounded_file
from ...errors import ConfigError, DataError, EvaluationError
from ...results import ItemScore, Measurement
from ..chat import chat_frame
from ..judges.base import Case, Judge, judge_all
from ..judges.endpoint import EndpointJudge, Spending
from ..judges.overlap import OverlapJudge
from ..scores import mean_of_sets, proportion
from ..stopping import stop_tokens
from ..task import Continuation, LanguageModel, Scores, Watch, unwatched

ANSWER_TOKENS = {"xsum": 64, "cnn_dm": 128, "multinews": 512, "qasper": 128, "hotpotqa": 32, "2wikimqa": 32}
"""LongBench's caps; of XSum and CNN/DM, which are not in it, our own: some twice a reference's length."""

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
"""What stands before and after a document."""

_LEAST_DOCUMENT_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Options:
    """Summaries and answers, judged against their documents.

    Attributes:
        sets: Public sets (xsum, cnn_dm, multinews, qasper, hotpotqa, 2wikimqa); all six where no set and no file is named.
        file: Your own items: JSONL with document and reference, for questions also question, on each line.
        kind: What is asked of the file's documents: a summary, or the answer to each one's question.
        items: Items of each set, drawn by the seed; the paper has 100.
        prompt: base goes on from the document; chat asks in the chat template.
        max_new_tokens: Most tokens of an answer; by default each set's own.
        judge: overlap; nli:FOLDER, a local model of natural language inference; or openai:MODEL.
        judgments: File of verdicts with their reasons; what is in it is not judged again.
        endpoint: Of openai:MODEL: address up to /chat/completions, of any compatible server.
        key_variable: Environment variable that holds the endpoint's key; empty for a server without keys.
        max_judgments: Most requests to the endpoint in this run, repeated ones included.
        max_cost_tokens: Most tokens that the endpoint may take in this run, requests and replies.
        timeout_seconds: For one request to the endpoint.
        retries: Further tries of a request that failed.
        backoff_seconds: Wait before the first further try; it doubles from try to try.
        overlap_threshold: Of overlap: share of an answer's content words that its document must hold.
        seed: Of the draw.
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
    backoff_seconds: float = 1.0
    overlap_threshold: float = 0.8
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("items", "max_new_tokens", "max_judgments", "max_cost_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"{name}={value}: give at least 1")
        for name in ("retries", "backoff_seconds", "seed"):
            if (value := getattr(self, name)) < 0:
                raise ConfigError(f"{name}={value}: give 0 or more")
        if not self.timeout_seconds > 0:
            raise ConfigError(f"timeout_seconds={self.timeout_seconds}: give more than 0")


def make_judge(options: Options) -> Judge:
    """The judge that the options name.

    Raises:
        ConfigError: there is none of that name, or it cannot be had.
    """
    kind, _, name = options.judge.partition(":")
    if kind == "overlap" and not name:
        return OverlapJudge(options.overlap_threshold)
    if kind == "nli" and name:
        from ..judges.nli import NliJudge

        return NliJudge(name)
    if kind == "openai" and name:
        spending = Spending(
            timeout_seconds=options.timeout_seconds,
            retries=options.retries,
            backoff_seconds=options.backoff_seconds,
            max_requests=options.max_judgments,
            max_tokens=options.max_cost_tokens,
        )
        return EndpointJudge(name, options.endpoint, options.key_variable, spending)
    raise ConfigError(f"judge={options.judge!r}: choose overlap, nli:FOLDER or openai:MODEL")


class HallucinationTask:
    """Documents to write about, and verdicts on what was written. See `Task`."""

    def __init__(self, options: Options, model: LanguageModel, judge: Judge) -> None:
        self.options, self.tokenizer, self.judge = options, model.tokenizer, judge
        self.file = Path(options.judgments)
        self.watch: Watch = unwatched
        self.items: list[tuple[str, GroundedItem]] = []
        self.requests: list[Continuation] = []
        self._cut = 0
        # The answer to a base prompt is one line, which some models begin on a new one; a chat model ends its turn with a
        # special token.
        self.one_line = options.prompt == "base"
        self.stop = stop_tokens(self.tokenizer, "\n" if self.one_line else None)
        self.leading = tuple(token for token in self.stop if not self.tokenizer.decode([token]).strip())
        names = options.sets or ([] if options.file else list(GROUNDED_SETS))
        for name in names:
            kind = GROUNDED_SETS[name].kind if name in GROUNDED_SETS else "summary"
            self._add(name, kind, read_grounded(name, options.items, options.seed), ANSWER_TOKENS.get(name, 0), model)
        if options.file:
            items = read_grounded_file(options.file, options.kind, options.items, options.seed)
            self._add(Path(options.file).stem, options.kind, items, FILE_ANSWER_TOKENS[options.kind], model)
        self.data_name = ", ".join([*names, *([options.file] if options.file else [])])
        self.choices = self._choices()

    def _add(self, name: str, kind: Kind, items: list[GroundedItem], cap: int, model: LanguageModel) -> None:
        cap = self.options.max_new_tokens or cap
        before, after = PROMPTS[self.options.prompt, kind]
        frame = chat_frame(self.tokenizer) if self.options.prompt == "chat" else ([self.tokenizer.end_of_text], [])
        for item in items:
            start = [*frame[0], *self.tokenizer.encode(before)]
            end = [*self.tokenizer.encode(after.format(question=item.question)), *frame[1]]
            room = model.context_tokens - len(start) - len(end) - cap
            if room < _LEAST_DOCUMENT_TOKENS:
                raise DataError(
                    f"{name}/{item.name}: the prompt without its document takes {len(start) + len(end)} tokens and the answer "
                    f"up to {cap}, the model's context has {model.context_tokens}; lower --max_new_tokens"
                )
            document = self.tokenizer.encode(item.document)
            if len(document) > room:
                document = [*document[: (room + 1) // 2], *document[len(document) - room // 2 :]]
                self._cut += 1
            self.items.append((name, item))
            self.requests.append(Continuation((*start, *document, *end), cap, self.stop, self.leading))

    def score(self, answers: Sequence[Any]) -> Scores:
        """The share of faithful answers in each set, of those judged; empty answers; answers without a verdict.

        Raises:
            EvaluationError: the judge gave no verdict at all.
        """
        texts = [self.tokenizer.decode(ids).strip() for ids in answers]
        if self.one_line:
            texts = [text.partition("\n")[0].strip() for text in texts]
        cases = [
            Case(
                set_name=name,
                item=item.name,
                document=item.document,
                question=item.question,
                reference=item.reference,
                answer=text,
            )
            for (name, item), text in zip(self.items, texts, strict=True)
        ]
        verdicts, reasons = judge_all(self.judge, [case for case in cases if case.answer], self.file, self.watch)
        if verdicts and not any(verdicts):
            raise EvaluationError(f"{self.judge.name} judged nothing: {reasons[0]}; every answer of the model is saved")
        given = iter(verdicts)
        right: dict[str, list[bool]] = {}
        empty: dict[str, list[bool]] = {}
        unjudged: dict[str, int] = {}
        items = []
        for case in cases:
            name, verdict = case.set_name, next(given) if case.answer else None
            empty.setdefault(name, []).append(not case.answer)
            unjudged[name] = unjudged.get(name, 0) + (verdict is None and bool(case.answer))
            if verdict is not None or not case.answer:
                faithful = verdict is not None and verdict.faithful
                right.setdefault(name, []).append(faithful)
                items.append(ItemScore(name="accuracy", item=f"{name}/{case.item}", score=float(faithful)))
        if left := sum(unjudged.values()):
            self.choices.append(
                f"{left} of {len(cases)} answers have no verdict and are left out of the accuracy: {'; '.join(reasons)}."
            )
        accuracies = [proportion("accuracy", found, {"set": name}) for name, found in right.items()]
        measurements: list[Measurement] = [*accuracies, mean_of_sets("mean accuracy", accuracies)]
        for name, found in empty.items():
            measurements.append(proportion("empty answers", found, {"set": name}, better="lower"))
            measurements.append(
                Measurement(
                    name="unjudged",
                    unit="answers",
                    value=float(unjudged[name]),
                    standard_error=None,
                    n=len(found),
                    better="lower",
                    at={"set": name},
                )
            )
        return Scores(measurements=measurements, items=items)

    def _choices(self) -> list[str]:
        return [
            *self.judge.rules,
            f"The judge is {self.judge.name}; verdicts of different judges, and the paper's of GPT-4o, do not compare.",
            "Prompts are our own; the paper gives none. Answers are greedy, at most as long as LongBench has them (XSum 64 and "
            "CNN/DM 128 tokens), and end at a special token"
            + (" or the end of the first line that is not empty." if self.one_line else "."),
            f"{self._cut} of {len(self.items)} documents do not fit into the model's context and lose their middle; the judge "
            "sees them whole.",
            "MultiNews and the questions are LongBench's. An empty answer is not judged and counts as wrong.",
            "The mean over sets gives each set the same weight.",
        ]


def make(options: Options, model: LanguageModel) -> HallucinationTask:
    """The task for a model. See `HallucinationTask`.

    Raises:
        ConfigError: no such set, or the judge cannot be had.
        DataError: a set cannot be read, or a prompt does not fit into the context.
    """
    return HallucinationTask(options, model, make_judge(options))
