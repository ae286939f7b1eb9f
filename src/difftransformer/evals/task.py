"""The narrow interface between experiments and models: requests, and who answers them.

A task turns its options into requests, a `LanguageModel` answers them in any order, and the task scores the answers. It never
sees a module: tests hand it an oracle that is always right and a uniform model that is right by chance. Requests and answers
are plain data, so that a journal on disk can keep them and an interrupted evaluation go on from there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from ..data import Tokenizer
from ..results import Grid, ItemScore, Measurement

Granularity = Literal["tensor", "head", "row"]


@dataclass(frozen=True)
class Loss:
    """How likely is a text? The answer: negative log-likelihoods in nats of `ids[first:]`, each given all ids before it."""

    ids: tuple[int, ...]
    first: int = 1


@dataclass(frozen=True)
class Continuation:
    """What follows greedily? The answer: `tokens` token ids; fewer where one of `stop` ended it, which is not part of it.

    One of `leading` does not end an answer that holds nothing else so far.
    """

    prompt: tuple[int, ...]
    tokens: int
    stop: tuple[int, ...] = ()
    leading: tuple[int, ...] = ()

    def ends(self, made: Sequence[int], token: int) -> bool:
        """Whether a token ends an answer of which `made` is there."""
        return token in self.stop and (token not in self.leading or not set(made) <= set(self.leading))


@dataclass(frozen=True)
class Choice:
    """Which of some continuations follows? The answer: its index.

    Decoded greedily, a token at a time, among those tokens alone that lead to an option (the trie of all options). No option
    may be the beginning of another.
    """

    prompt: tuple[int, ...]
    options: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LastRow:
    """Where does the prompt's last token look? The answer: `segments.row_sums` of its attention weights."""

    prompt: tuple[int, ...]
    edges: tuple[int, ...]


@dataclass(frozen=True)
class Maps:
    """Which maps does each head form for a prompt? The answer: `taps.head_maps`, with the maps of the chosen heads."""

    prompt: tuple[int, ...]
    layers: tuple[int, ...] = ()
    heads: tuple[int, ...] = ()


@dataclass(frozen=True)
class Magnitudes:
    """How large are attention logits and hidden states? The answer: `taps.magnitudes` over several rows."""

    rows: tuple[tuple[int, ...], ...]
    largest: int


@dataclass(frozen=True)
class Quantized:
    """Another request, under attention logits rounded to `bits` bits (16 leaves them alone), and coarser Linear layers."""

    request: "Request"
    bits: int
    granularity: Granularity
    weights: str = "none"
    activations: str = "none"


@dataclass(frozen=True)
class Harness:
    """A task of lm-eval, whole. The answer: `lm_harness.run_harness`."""

    name: str
    shots: int | None
    limit: int | None
    include_path: str | None
    batch_size: int
    seed: int


Request = Loss | Continuation | Choice | LastRow | Maps | Magnitudes | Harness | Quantized


class LanguageModel(Protocol):
    """Whatever answers requests.

    Attributes:
        tokenizer: Text to token ids; its `end_of_text` begins a text.
        context_tokens: Most tokens of a row, the answer's included.
    """

    tokenizer: Tokenizer
    context_tokens: int

    def answer(self, requests: Sequence[Request]) -> Iterator[tuple[int, Any]]:
        """Answer every request, in any order: pairs of its index and its answer, which JSON can hold."""
        ...


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a task makes of the answers: figures, what each item adds to them, and what only a picture shows."""

    measurements: list[Measurement]
    items: list[ItemScore]
    grids: list[Grid] = field(default_factory=list)


class Watch(Protocol):
    """Told how far an evaluation is: `done` of `total` tokens while the model answers, of its own items in a later stage."""

    def __call__(self, done: int, total: int, stage: str = "") -> None:
        """Called after every item."""
        ...


def unwatched(done: int, total: int, stage: str = "") -> None:
    """A `Watch` that shows nothing."""


class Task(Protocol):
    """One experiment, its data drawn and turned into requests.

    Attributes:
        requests: What is asked. A function of the options, the data and the tokenizer alone, so that every model with that
            tokenizer gets the same.
        data_name: What the data is, for the result.
        choices: Sentences: what the paper leaves open and how it was settled, where the task departs from it.
    """

    requests: Sequence[Request]
    data_name: str
    choices: Sequence[str]

    def score(self, answers: Sequence[Any]) -> Scores:
        """Figures from the answers, one for each request in its order."""
        ...


@runtime_checkable
class Watched(Protocol):
    """A task whose scoring takes long, and tells how far it is.

    Attributes:
        watch: Whom it tells.
    """

    watch: Watch


def answers_to(model: LanguageModel, requests: Sequence[Request]) -> list[Any]:
    """All answers, in the order of the requests."""
    answers: list[Any] = [None] * len(requests)
    for index, answer in model.answer(requests):
        answers[index] = answer
    return answers


def tokens_of(request: Request) -> int:
    """Tokens that a request shows the model, for progress."""
    match request:
        case Quantized():
            return tokens_of(request.request)
        case Loss():
            return len(request.ids)
        case Harness():
            return 1
        case Magnitudes():
            return sum(map(len, request.rows))
        case _:
            return len(request.prompt)
