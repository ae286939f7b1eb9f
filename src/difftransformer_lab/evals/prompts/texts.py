"""What a task is drawn for: a tokenizer, a context, and text of any source as one stream of tokens."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from difftransformer.data import DataConfig, Tokenizer, read_documents
from difftransformer.errors import DataError

HAYSTACK_TOKENS = 2**20
"""Tokens of a text in which needles are hidden: more than any one document takes, and read in seconds."""

VALIDATION = "validation"
"""The source that stands for the text which a run held out from training."""


@dataclass(frozen=True, kw_only=True)
class TaskContext:
    """What a task knows of the model before it asks it anything.

    Attributes:
        tokenizer: Text to token ids.
        context_tokens: Tokens of a row where the task's options name none.
        longest: Most tokens of a prompt and its answer, where a pretrained model reads more than a row; None for a row.
        bound: Most tokens of a row, if fewer than the model's positions; else None.
        validation: Return the tokens of the text that the model's run held out; None where no run is known.
        data: Return the data of the model's run; None where no run is known.
    """

    tokenizer: Tokenizer
    context_tokens: int
    longest: int | None = None
    bound: int | None = None
    validation: Callable[[], Any] | None = None
    data: Callable[[], DataConfig] | None = None

    @property
    def prompt_tokens(self) -> int:
        return self.longest or self.context_tokens


@dataclass(frozen=True, kw_only=True)
class TextStream:
    """A text as one stream of tokens, each document followed by the separator, the tokenizer's `end_of_text`.

    Attributes:
        ids: (N,).
        sizes: (N,), the bytes of the text for which each token stands (see `Tokenizer.encode_sized`).
        loss: A sentence about text that the tokens lose; "" if they hold all of it.
        is_spelt: Whether `sizes` are the lengths of the tokens themselves.
    """

    ids: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    loss: str
    is_spelt: bool


def token_stream(
    context: TaskContext, source: str, at_least: int = 0, *, enough: int | None = None
) -> npt.NDArray[np.int64]:
    """Concatenate the first documents of a source, each followed by the separator, the tokenizer's `end_of_text`.

    The source is one of `read_documents`, read up to about `enough` tokens (None reads all of it); or
    `validation`, the held-out text of the run, which is always returned whole.
    """
    encode, end = context.tokenizer.encode, context.tokenizer.end_of_text
    return (
        _held_out(context, source, at_least)
        if source == VALIDATION
        else _joined(([*encode(text), end] for text in _texts(source)), source, at_least, enough)
    )


def text_stream(context: TaskContext, source: str, at_least: int = 0, *, enough: int | None = None) -> TextStream:
    """Return the tokens of `token_stream`, and the bytes for which they stand.

    Of a run's held-out text only the tokens are kept, so their own bytes are counted.
    """
    tokenizer = context.tokenizer
    if source == VALIDATION:
        ids = _held_out(context, source, at_least)
        loss = "Bytes are counted after the tokenizer's normaliser." if tokenizer.normalizes else ""
        return TextStream(ids=ids, sizes=tokenizer.token_byte_lengths()[ids].astype(np.int64), loss=loss, is_spelt=True)
    sizes: list[list[int]] = []
    whole: list[bool] = []

    def encoded() -> Iterator[list[int]]:
        for text in _texts(source):
            ids, own, is_whole = tokenizer.encode_sized(text)
            sizes.append(own)
            whole.append(is_whole)
            yield [*ids, tokenizer.end_of_text]

    ids = _joined(encoded(), source, at_least, enough)
    counts, lost = np.concatenate(sizes), len(whole) - sum(whole)
    try:
        is_spelt = bool((tokenizer.token_byte_lengths()[ids] == counts).all())
    except DataError:
        is_spelt = False
    loss = (
        f"The tokenizer loses text: {lost} of {len(whole)} documents cannot be restored from their tokens."
        if lost
        else ""
    )
    return TextStream(ids=ids, sizes=counts, loss=loss, is_spelt=is_spelt)


def _texts(source: str) -> Iterator[str]:
    return (document.text for document in read_documents(source))


def _held_out(context: TaskContext, source: str, at_least: int) -> npt.NDArray[np.int64]:
    if context.validation is None:
        raise DataError(
            "text=validation: only a run's folder tells which text was held out; name a run, or another text"
        )
    return _joined([context.validation()[:]], source, at_least, None)


def _joined(parts: Iterable[Any], source: str, at_least: int, enough: int | None) -> npt.NDArray[np.int64]:
    taken, count = [], 0
    for part in parts:
        taken.append(np.asarray(part).astype(np.int64))
        count += len(part)
        if enough is not None and count >= enough:
            break
    if count < at_least:
        raise DataError(f"{source}: {count} tokens, and {at_least} are needed; name a longer text or ask for less")
    return np.concatenate(taken)


def window_start(tokenizer: Tokenizer, add_bos_token: bool | None) -> tuple[list[int], str]:
    """Return the tokens that replace the first token of a window, and a sentence for the choices of a task.

    Args:
        add_bos_token: Whether the tokenizer's `begin_of_text` stands there; None as the tokenizer itself begins a text.
    """
    name = repr(tokenizer.begin_of_text_token)
    if tokenizer.begins_texts if add_bos_token is None else add_bos_token:
        return [
            tokenizer.begin_of_text
        ], f"Each window begins with {name}, which is never scored, in place of its first token."
    return [], f"No window begins with {name} (add_bos_token)."


def separation(tokenizer: Tokenizer) -> str:
    """Say what separates documents, for the choices of a task that scores tokens."""
    return (
        f"Documents (files, lines of a .jsonl file, rows of an hf: set) are separated by {tokenizer.end_of_text_token!r}, "
        "which is never scored; a window may hold several."
    )
