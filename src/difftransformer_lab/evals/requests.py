"""The narrow interface between tasks and models: five kinds of requests, and the model that answers them.

A task turns its options into requests, a `LanguageModel` answers them in any order, and the task scores the answers. The task
never sees a module: tests give it an oracle that is always right, or a uniform model that is right by chance. Requests and
answers are plain data, so that a journal on disk can keep them and an interrupted evaluation can continue.

`requests_sha256` covers what a request's `asked` returns, in a form that does not depend on the names in this code.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from difftransformer.data import Tokenizer
from difftransformer.errors import EvaluationError

FINGERPRINT_VERSION = "v1"
"""Raised with the form of what is hashed; fingerprints of two versions are never equal."""


class TooLong(EvaluationError):
    """A request takes more tokens than the model's context has."""


class Asked:
    """A request.

    Attributes:
        asks: Name of the kind of request, and the fields on which its answer depends: what its fingerprint covers.
        shown_tokens: Tokens that the model reads, for progress.
        row_tokens: Positions of the context that the request takes, its answer included.
    """

    asks: ClassVar[tuple[str, ...]]

    def asked(self) -> list[Any]:
        """Return what is asked, as JSON: the kind and the values of the fields."""
        kind, *names = self.asks
        return [kind, *(getattr(self, name) for name in names)]


@dataclass(frozen=True)
class Text(Asked):
    ids: tuple[int, ...]

    @property
    def shown_tokens(self) -> int:
        return len(self.ids)

    @property
    def row_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Loss(Text):
    """Asks how likely a text is. The answer: negative log-likelihoods in nats of `ids[first:]`, each given all ids before.

    Like every text, `ids` begin with the tokenizer's `begin_of_text`, if it has one.
    """

    asks = ("loss", "ids", "first")
    first: int = 1

    @property
    def row_tokens(self) -> int:
        return len(self.ids) - 1  # the last token is a target only


@dataclass(frozen=True)
class Predictions(Text):
    """Asks for the most likely next token at some places of a text. The answer: a token id for each of `places`.

    The prediction at a place is given the ids up to it, that at the place included. Of equally likely tokens, the lowest id is
    the answer.
    """

    asks = ("predictions", "ids", "places")
    places: tuple[int, ...]


@dataclass(frozen=True)
class Prompted(Asked):
    prompt: tuple[int, ...]

    @property
    def shown_tokens(self) -> int:
        return len(self.prompt)

    @property
    def row_tokens(self) -> int:
        return len(self.prompt)


@dataclass(frozen=True)
class Continuation(Prompted):
    """Asks for the greedy continuation. The answer: `tokens` token ids, or fewer if one of `stop` ended it.

    A token of `leading` does not end an answer that holds nothing else so far. The token that ended an answer is part of it
    if it is one of `closing`, and only then.
    """

    asks: ClassVar[tuple[str, ...]] = ("continuation", "prompt", "tokens", "stop", "leading")
    tokens: int
    stop: tuple[int, ...] = ()
    leading: tuple[int, ...] = ()
    closing: tuple[int, ...] = field(default=(), kw_only=True)

    def asked(self) -> list[Any]:
        return [*super().asked(), *([self.closing] if self.closing else [])]

    @property
    def row_tokens(self) -> int:
        return len(self.prompt) + self.tokens

    def ends(self, made: Sequence[int], token: int) -> bool:
        """Return whether a token ends an answer that consists of `made` so far."""
        return token in self.stop and (token not in self.leading or not set(made) <= set(self.leading))

    def take(self, made: list[int], token: int) -> bool:
        """Append a token to an answer if it is part of it, and return whether the answer goes on."""
        is_end = self.ends(made, token)
        if not is_end or token in self.closing:
            made.append(token)
        return not is_end and len(made) < self.tokens


@dataclass(frozen=True)
class ScoredContinuation(Continuation):
    """Asks for the greedy continuation, and how likely the right one would have been.

    The answer: {"ids": the token ids, as of a `Continuation`, "losses": negative log-likelihoods in nats of the tokens of
    `right`, each given the prompt and those before it}. A model that cannot tell likelihoods answers with the token ids alone.
    """

    asks = ("scored continuation", *Continuation.asks[1:], "right")
    right: tuple[int, ...] = ()

    @property
    def row_tokens(self) -> int:
        return len(self.prompt) + max(self.tokens, len(self.right) - 1)


@dataclass(frozen=True)
class Choice(Prompted):
    """Asks which of some continuations follows. The answer: its index.

    Decoding is greedy, a token at a time, restricted to the tokens that lead to an option (the trie of all options). No
    option may be a prefix of another.
    """

    asks = ("choice", "prompt", "options")
    options: tuple[tuple[int, ...], ...]

    @property
    def row_tokens(self) -> int:
        return len(self.prompt) + max(map(len, self.options))


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

    def answer(self, requests: Sequence[Request]) -> Answers: ...


def requests_sha256(requests: Sequence[Any]) -> str:
    """Return the fingerprint of requests: it covers every token that is shown and every option that is given."""
    return plain_sha256(request.asked() for request in requests)


def plain_sha256(rows: Iterable[Any]) -> str:
    """Return the fingerprint of rows of plain data, with the version of its form in front."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, separators=(",", ":")).encode() + b"\n")
    return f"{FINGERPRINT_VERSION}:{digest.hexdigest()}"
