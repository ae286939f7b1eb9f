"""Loss on tokens that complete a repeated n-gram (AR-hits), and on all other tokens.

This is the associative recall of arXiv:2410.05258 Table 6, after Zoology (arXiv:2312.04927). An AR-hit is the last token of an
n-gram that occurred earlier in the same window and was rare in training, so that the model must take it from the context and
not from its weights. The paper gives neither n nor its threshold; the defaults are Zoology's, 2 and 1250.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from numpy.lib.stride_tricks import sliding_window_view

from difftransformer.data import Shards, Tokenizer, read_documents
from difftransformer.data.shards import MANIFEST_FILE
from difftransformer.errors import ConfigError, DataError
from difftransformer.stores import is_url

from ...plots import bars, select
from ...results import TaskResult
from ..engine import Scores, Task
from ..prompts.texts import TaskContext, separation, token_stream, window_start
from ..registry import TaskKind, at_least, register
from ..requests import Loss
from ..scores import over_windows, single
from .perplexity import DEFAULT_WINDOW

_CHUNK_TOKENS = 1 << 22
"""Training tokens to count n-grams of at once: about 100 MB of memory."""

_GROUPS = {"AR-hits": "nll of AR-hits", "others": "nll of others", "all tokens": "nll"}

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Loss on AR-hits and on all other tokens.

    Attributes:
        text: The text to score: python-stdlib, a text file, a folder of text files, or hf:NAME[:CONFIG][:SPLIT].
        train_text: The text on which the model was trained, to count n-grams: a text as above, or a folder of shards or
            its URL. Without it no n-gram counts as frequent.
        window: Tokens of a window; the model's context by default, at most 4096.
        windows: Maximum number of windows, from the start of the text.
        ngram: Tokens of an n-gram.
        max_train_count: Most occurrences in the training text for an n-gram to count as an AR-hit.
        add_bos_token: Whether each window begins with the token that begins texts, in place of its first one; by default if
            the tokenizer itself begins a text so.
    """

    text: str = "python-stdlib"
    train_text: str | None = None
    window: int | None = None
    windows: int = 32
    ngram: int = 2
    max_train_count: int = 1250
    add_bos_token: bool | None = None

    def __post_init__(self) -> None:
        at_least(self, 1, "windows")
        at_least(self, 2, "window", "ngram")
        at_least(self, 0, "max_train_count")


class RecallTask(Task):
    def __init__(self, options: Options, context: TaskContext) -> None:
        tokenizer, self.data_name = context.tokenizer, options.text
        if tokenizer.vocab_size**options.ngram > 2**63:
            raise ConfigError(
                f"ngram={options.ngram}: with {tokenizer.vocab_size} tokens n-grams do not fit into 64 bits; give less"
            )
        window = options.window or min(context.context_tokens, DEFAULT_WINDOW)
        if window < options.ngram:
            raise ConfigError(f"window={window} is shorter than an n-gram of {options.ngram} tokens; give more")
        wanted = window * options.windows + 1
        stream = token_stream(context, options.text, window + 1, enough=wanted)
        starts = range(0, min(len(stream), wanted) - window, window)
        rows = np.stack([stream[start : start + window + 1] for start in starts])
        begin, begun = window_start(tokenizer, options.add_bos_token)
        rows[:, : len(begin)] = begin
        self.requests = [Loss(tuple(row)) for row in rows.tolist()]
        grams = np.stack([packed(row, options.ngram, tokenizer.vocab_size) for row in rows])
        self.hits = np.zeros((len(rows), window), bool)  # for targets: all tokens of a window but the first
        self.hits[:, options.ngram - 2 :] = [repeated(row) for row in grams]
        # No n-gram goes beyond a document, and no separator is scored.
        is_separator = rows == tokenizer.end_of_text
        self.hits[:, options.ngram - 2 :] &= ~sliding_window_view(is_separator, options.ngram, 1).any(-1)
        self.scored = ~is_separator[:, 1:]
        if options.train_text is not None:
            kinds, places = np.unique(grams, return_inverse=True)
            counts = counted(kinds, _training_parts(options.train_text, tokenizer), options.ngram, tokenizer.vocab_size)
            frequent = (counts > options.max_train_count)[places].reshape(grams.shape)
            self.hits[:, options.ngram - 2 :] &= ~frequent
        if not 0 < self.hits.sum() < self.scored.sum():
            raise DataError(
                f"{options.text}: {int(self.hits.sum())} of {int(self.scored.sum())} tokens are AR-hits, so one group "
                "has no loss; give longer windows, or another --max-train-count"
            )
        self.choices = [separation(tokenizer), begun, *_choices(options)]

    def scored_by(self) -> Any:
        """Return two masks over targets, AR-hits and scored, as bits."""
        return [np.packbits(mask).tobytes().hex() for mask in (self.hits, self.scored)]

    def score(self, answers: Sequence[Any]) -> Scores:
        """Compute the loss on AR-hits, on others and on all tokens, and the share of AR-hits; errors are over windows."""
        losses = np.array(answers, np.float64)
        sides = {"nll of AR-hits": self.hits, "nll of others": self.scored & ~self.hits, "nll": self.scored}
        measurements, items = [], []
        for name, side in sides.items():
            nats = np.where(side, losses, 0.0).sum(1)
            row, scores = over_windows(name, "nats/token", nats, side.sum(1), better="lower")
            measurements.append(row)
            items += scores
        share, _ = over_windows("share of AR-hits", "share", self.hits.sum(1), self.scored.sum(1))
        count = single("AR-hits", "tokens", float(self.hits.sum()), int(self.scored.sum()), {})
        return Scores(measurements=[*measurements, share, count], items=items)


def packed(ids: Ids, ngram: int, vocab_size: int) -> Ids:
    """Pack every n-gram of a row into one number, (T - n + 1,)."""
    length = len(ids) - ngram + 1
    grams = np.zeros(max(0, length), np.int64)
    for offset in range(ngram if length > 0 else 0):
        grams = grams * vocab_size + ids[offset : offset + length]
    return grams


def repeated(grams: Ids) -> npt.NDArray[np.bool_]:
    """Mark the n-grams of a row that occurred earlier in it."""
    _, first, places = np.unique(grams, return_index=True, return_inverse=True)
    return first[places] < np.arange(len(grams))


def counted(kinds: Ids, parts: Iterable[Ids], ngram: int, vocab_size: int) -> Ids:
    """Count how often each of the sorted `kinds` occurs in a text that comes in parts."""
    counts = np.zeros(len(kinds), np.int64)
    before = np.empty(0, np.int64)
    for part in parts:
        ids = np.concatenate([before, part])
        grams = packed(ids, ngram, vocab_size)
        places = np.minimum(np.searchsorted(kinds, grams), len(kinds) - 1)
        hits, times = np.unique(places[kinds[places] == grams], return_counts=True)
        counts[hits] += times
        before = ids[-(ngram - 1) :]
    return counts


def _training_parts(source: str, tokenizer: Tokenizer) -> Iterator[Ids]:
    if is_url(source) or Path(source, MANIFEST_FILE).is_file():
        shards = Shards.open(source, verify=False)
        if shards.tokenizer.sha256 != tokenizer.sha256:
            raise DataError(f"{source}: the shards have another tokenizer than the model; name the text itself")
        stream = shards.tokens("train")
        for start in range(0, len(stream), _CHUNK_TOKENS):
            yield stream[start : start + _CHUNK_TOKENS].astype(np.int64)
        return
    for document in read_documents(source):
        yield np.asarray([*tokenizer.encode(document.text), tokenizer.end_of_text], np.int64)


def _choices(options: Options) -> list[str]:
    rare = (
        f"An n-gram that {options.train_text} holds more than {options.max_train_count} times is frequent and no AR-hit."
        if options.train_text is not None
        else "No training text was given, so no n-gram counts as frequent and more tokens are AR-hits than in the paper."
    )
    return [
        f"An AR-hit ends an n-gram of {options.ngram} tokens that occurred earlier in its window; the paper gives no n.",
        rare,
        "A window that holds several documents counts as one context, but no n-gram goes beyond a document.",
        "Each token is scored given all earlier tokens of its window, so the first tokens have little context.",
        "AR-hits depend on the tokenizer, so models with different tokenizers cannot be compared.",
    ]


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw the loss on AR-hits, on others and on all tokens (arXiv:2410.05258 Table 6), a bar for each model."""
    figure = bars(results, list(_GROUPS), lambda result, group: select(result, _GROUPS[group]), form=".3f")
    figure.axes[0].set_ylabel("loss (nats/token)")
    shares, counts = ([row for one in results for row in select(one, name)] for name in ("share of AR-hits", "AR-hits"))
    share = " and ".join(dict.fromkeys(f"{100 * row.value:.1f} %" for row in shares))
    hits = " and ".join(dict.fromkeys(f": {row.value:,.0f} of {row.n:,}" for row in counts))
    ngram = results[0].options["ngram"]
    caption = (
        f"Loss on tokens that end a {ngram}-gram which occurred earlier in the window (AR-hits, {share} of tokens{hits}) "
        "and on all others; black lines: one standard error over windows."
    )
    return "Associative recall", caption, figure


register(TaskKind(name="recall", doc=__doc__, options=Options, make=RecallTask, draw=draw))
