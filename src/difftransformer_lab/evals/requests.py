"""The narrow interface between tasks and models: five kinds of requests, and the model that answers them.

A task turns its options into requests, a `LanguageModel` answers them in any order, and the task scores the answers. The task
never sees a module: tests give it an oracle that is always right, or a uniform model that is right by chance. Requests and
answers are plain data, so that a journal on disk can keep them and an interrupted evaluation can continue.

`requests_sha256` covers what a request's `asked` returns, in a form that does not depend on the names in this code.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from difftransformer.data import Tokenizer

FINGERPRINT_VERSION = "v1"
"""Raised with the form of what is hashed; fingerprints of two versions are never equal."""


@dataclass(frozen=True)
class Loss:
    """Asks how likely a text is. The answer: negative log-likelihoods in nats of `ids[first:]`, each given all ids before."""

    ids: tuple[int, ...]
    first: int = 1

    @property
    def shown_tokens(self) -> int:
        """Tokens that the model reads, for progress."""
        return len(self.ids)

    @property
    def row_tokens(self) -> int:
        """Positions of the context that the request takes, its answer included."""
        return len(self.ids) - 1  # the last token is a target only

    def asked(self) -> list[Any]:
        """What is asked, as JSON: the kind of request, and all that its answer depends on."""
        return ["loss", self.ids, self.first]


@dataclass(frozen=True)
class Predictions:
    """Asks for the most likely next token at some places of a text. The answer: a token id for each of `places`.

    The prediction at a place is given the ids up to it, that at the place included. Of equally likely tokens, the lowest id is
    the answer.
    """

    ids: tuple[int, ...]
    places: tuple[int, ...]

    @property
    def shown_tokens(self) -> int:
        """See `Loss`."""
        return len(self.ids)

    @property
    def row_tokens(self) -> int:
        """See `Loss`."""
        return len(self.ids)

    def asked(self) -> list[Any]:
        """See `Loss`."""
        return ["predictions", self.ids, self.places]


@dataclass(frozen=True)
class Prompted:
    """A request about a prompt."""

    prompt: tuple[int, ...]

    @property
    def shown_tokens(self) -> int:
        """See `Loss`."""
        return len(self.prompt)

    @property
    def row_tokens(self) -> int:
        """See `Loss`."""
        return len(self.prompt)


@dataclass(frozen=True)
class Continuation(Prompted):
    """Asks for the greedy continuation. The answer: `tokens` token ids, or fewer if one of `stop` (excluded) ended it.

    A token of `leading` does not end an answer that holds nothing else so far.
    """

    tokens: int
    stop: tuple[int, ...] = ()
    leading: tuple[int, ...] = ()

    @property
    def row_tokens(self) -> int:
        """See `Loss`."""
        return len(self.prompt) + self.tokens

    def ends(self, made: Sequence[int], token: int) -> bool:
        """Return whether a token ends an answer that consists of `made` so far."""
        return token in self.stop and (token not in self.leading or not set(made) <= set(self.leading))

    def asked(self) -> list[Any]:
        """See `Loss`."""
        return ["continuation", self.prompt, self.tokens, self.stop, self.leading]


@dataclass(frozen=True)
class ScoredContinuation(Continuation):
    """Asks for the greedy continuation, and how likely the right one would have been.

    The answer: {"ids": the token ids, as of a `Continuation`, "losses": negative log-likelihoods in nats of the tokens of
    `right`, each given the prompt and those before it}. A model that cannot tell likelihoods answers with the token ids alone.
    """

    right: tuple[int, ...] = ()

    @property
    def row_tokens(self) -> int:
        """See `Loss`."""
        return len(self.prompt) + max(self.tokens, len(self.right) - 1)

    def asked(self) -> list[Any]:
        """See `Loss`."""
        return ["scored continuation", *super().asked()[1:], self.right]


@dataclass(frozen=True)
class Choice(Prompted):
    """Asks which of some continuations follows. The answer: its index.

    Decoding is greedy, a token at a time, restricted to the tokens that lead to an option (the trie of all options). No
    option may be a prefix of another.
    """

    options: tuple[tuple[int, ...], ...]

    @property
    def row_tokens(self) -> int:
        """See `Loss`."""
        return len(self.prompt) + max(map(len, self.options))

    def asked(self) -> list[Any]:
        """See `Loss`."""
        return ["choice", self.prompt, self.options]


Request = Loss | Predictions | Continuation | ScoredContinuation | Choice
Answers = Iterator[tuple[int, Any]]
"""Pairs of a request's index and its answer, which JSON can hold, in any order."""


class LanguageModel(Protocol):
    """A model that answers requests.

    Attributes:
        tokenizer: Converts text to token ids; its `begin_of_text` begins a text.
        context_tokens: Most tokens of a row, the answer included.
    """

    tokenizer: Tokenizer
    context_tokens: int

    def answer(self, requests: Sequence[Request]) -> Answers:
        """Answer every request."""
        ...


def requests_sha256(requests: Sequence[Any]) -> str:
    """Return the fingerprint of requests: it covers every token that is shown and every option that is given."""
    return plain_sha256(request.asked() for request in requests)


def plain_sha256(rows: Iterable[Any]) -> str:
    """Return the fingerprint of rows of plain data, with the version of its form in front."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    return f"{FINGERPRINT_VERSION}:{digest.hexdigest()}"


def answers_to(model: LanguageModel, requests: Sequence[Request]) -> list[Any]:
    """Return all answers, in the order of the requests."""
    answers: list[Any] = [None] * len(requests)
    for index, answer in model.answer(requests):
        answers[index] = answer
    return answers
