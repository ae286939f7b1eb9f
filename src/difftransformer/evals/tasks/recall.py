"""Loss on tokens that the context can tell (arXiv:2410.05258 Table 6, after Zoology, arXiv:2312.04927).

An AR-hit is the last token of an n-gram that occurred earlier in the same window and was rare in training, so that the
context, not the weights, must supply it. All other tokens are "others": their n-gram is new to the window, or frequent.
The paper gives neither n nor its threshold; those of Zoology are the defaults, 2 and 1250.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...data import Shards, Tokenizer, read_documents
from ...errors import ConfigError, DataError
from ...results import ItemScore
from ..scores import mean
from ..task import Loss, Scores
from ..texts import Setting, token_stream
from .perplexity import DEFAULT_WINDOW

_CHUNK_TOKENS = 1 << 22
"""Training tokens whose n-grams are counted at once: some 100 MB."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Loss on AR-hits and on all other tokens.

    Attributes:
        text: What is scored: python-stdlib, a text file, a folder of them, or hf:NAME[:CONFIG][:SPLIT].
        train_text: What the model was trained on, to count n-grams in: a text as above, or a folder of shards. Without it no
            n-gram counts as frequent.
        window: Tokens of a window; the model's context by default, at most 4096.
        windows: Most windows, from the start of the text.
        ngram: Tokens of an n-gram.
        max_train_count: An n-gram that training holds more often than this is no AR-hit.
    """

    text: str = "python-stdlib"
    train_text: str | None = None
    window: int | None = None
    windows: int = 32
    ngram: int = 2
    max_train_count: int = 1250

    def __post_init__(self) -> None:
        if self.windows < 1 or (self.window is not None and self.window < 2):
            raise ConfigError(f"windows={self.windows}, window={self.window}: give at least 1 window of 2 tokens")
        if self.ngram < 2:
            raise ConfigError(f"ngram={self.ngram}: give at least 2")
        if self.max_train_count < 0:
            raise ConfigError(f"max_train_count={self.max_train_count}: give 0 or more")


class RecallTask:
    """Windows of a text, and which of their tokens are AR-hits. See `Task`."""

    def __init__(self, options: Options, setting: Setting) -> None:
        tokenizer, self.data_name = setting.tokenizer, options.text
        if tokenizer.vocab_size**options.ngram > 2**63:
            raise ConfigError(
                f"ngram={options.ngram}: with {tokenizer.vocab_size} tokens n-grams do not fit into 64 bits; give less"
            )
        window = options.window or min(setting.context_tokens, DEFAULT_WINDOW)
        if window < options.ngram:
            raise ConfigError(f"window={window} is shorter than an n-gram of {options.ngram} tokens; give more")
        wanted = window * options.windows + 1
        stream = token_stream(setting, options.text, window + 1, enough=wanted)
        starts = range(0, min(len(stream), wanted) - window, window)
        rows = np.stack([stream[start : start + window + 1] for start in starts])
        self.requests = [Loss(tuple(row)) for row in rows.tolist()]
        grams = np.stack([packed(row, options.ngram, tokenizer.vocab_size) for row in rows])
        self.hits = np.zeros((len(rows), window), bool)  # of targets: all tokens of a window but the first
        self.hits[:, options.ngram - 2 :] = [repeated(row) for row in grams]
        if options.train_text is not None:
            kinds, places = np.unique(grams, return_inverse=True)
            counts = counted(kinds, _training_parts(options.train_text, tokenizer), options.ngram, tokenizer.vocab_size)
            frequent = (counts > options.max_train_count)[places].reshape(grams.shape)
            self.hits[:, options.ngram - 2 :] &= ~frequent
        if not self.hits.any() or self.hits.all():
            raise DataError(
                f"{options.text}: {int(self.hits.sum())} of {self.hits.size} tokens are AR-hits, so one side has no loss; "
                "give longer windows, or another --max_train_count"
            )
        self.choices = _choices(options)

    def score(self, answers: Sequence[Any]) -> Scores:
        """Nats a token on AR-hits, on others and on all, and the share of AR-hits; errors are over windows."""
        losses, size = np.array(answers, np.float64), self.hits.shape[1]
        sides = {"nll of AR-hits": self.hits, "nll of others": ~self.hits, "nll": np.ones_like(self.hits)}
        measurements, items = [], []
        for name, side in sides.items():
            nats, tokens = (losses * side).sum(1).tolist(), side.sum(1).astype(float).tolist()
            measurements.append(mean(name, "nats/token", nats, {}, weights=tokens, better="lower"))
            items += [
                ItemScore(name=name, item=f"window {index}", score=score, weight=weight)
                for index, (score, weight) in enumerate(zip(nats, tokens, strict=True))
            ]
        share = mean("share of AR-hits", "share", (self.hits.sum(1) / size).tolist(), {})
        return Scores(measurements=[*measurements, share], items=items)


def make(options: Options, setting: Setting) -> RecallTask:
    """Return the task for a model. See `RecallTask`.

    Raises:
        ConfigError: n-grams too long to count.
        DataError: a text cannot be read, is shorter than one window, or has no AR-hit.
    """
    return RecallTask(options, setting)


def packed(ids: Ids, ngram: int, vocab_size: int) -> Ids:
    """Every n-gram of a row as one number, (T - n + 1,)."""
    length = len(ids) - ngram + 1
    grams = np.zeros(max(0, length), np.int64)
    for offset in range(ngram if length > 0 else 0):
        grams = grams * vocab_size + ids[offset : offset + length]
    return grams


def repeated(grams: Ids) -> npt.NDArray[np.bool_]:
    """Which n-grams of a row occurred before in it."""
    _, first, places = np.unique(grams, return_index=True, return_inverse=True)
    return first[places] < np.arange(len(grams))


def counted(kinds: Ids, parts: Iterable[Ids], ngram: int, vocab_size: int) -> Ids:
    """How often each of `kinds`, sorted, occurs in a text that comes in parts; no other n-gram is kept."""
    counts = np.zeros(len(kinds), np.int64)
    before = np.empty(0, np.int64)
    for part in parts:
        ids = np.concatenate([before, part])
        grams = packed(ids, ngram, vocab_size)
        places = np.minimum(np.searchsorted(kinds, grams), len(kinds) - 1)
        found, times = np.unique(places[kinds[places] == grams], return_counts=True)
        counts[found] += times
        before = ids[-(ngram - 1) :]
    return counts


def _training_parts(source: str, tokenizer: Tokenizer) -> Iterator[Ids]:
    if Path(source, "manifest.json").is_file():
        shards = Shards.open(source, verify=False)
        if shards.tokenizer.sha256 != tokenizer.sha256:
            raise DataError(f"{source}: shards of another tokenizer than the model's; name the text itself")
        stream = shards.tokens("train")
        for start in range(0, len(stream), _CHUNK_TOKENS):
            yield stream[start : start + _CHUNK_TOKENS].astype(np.int64)
        return
    for document in read_documents(source):
        yield np.asarray([*tokenizer.encode(document.text), tokenizer.end_of_text], np.int64)


def _choices(options: Options) -> list[str]:
    rare = (
        f"An n-gram that {options.train_text} holds more than {options.max_train_count} times is frequent, and no AR-hit."
        if options.train_text is not None
        else "No training text was named: no n-gram counts as frequent, so that more tokens are AR-hits than in the paper."
    )
    return [
        f"An AR-hit ends an n-gram of {options.ngram} tokens that occurred earlier in its window; the paper gives no n.",
        rare,
        "A window may hold several documents, with an end of text between them; it counts as one context.",
        "Each token is scored given all before it in its window, so early tokens have little context.",
        "AR-hits depend on the tokenizer: models with different tokenizers do not compare.",
    ]
