"""What a task is drawn for: a tokenizer, a context, and text of any source as one stream of tokens."""

from collections.abc import Callable
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
        bound: Most tokens of a row, where those are fewer than the model's positions; else None.
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


def token_stream(
    context: TaskContext, source: str, at_least: int = 0, *, enough: int | None = None
) -> npt.NDArray[np.int64]:
    """Concatenate the first documents of a source, each followed by the separator, the tokenizer's `end_of_text`.

    The source is one of `read_documents`, read up to about `enough` tokens (None reads all of it); or
    `validation`, the held-out text of the run, which is always returned whole.

    Raises:
        DataError: The source cannot be read, or has fewer than `at_least` tokens.
    """
    parts, count = [], 0
    if source == VALIDATION:
        if context.validation is None:
            raise DataError(
                "text=validation: only a run's folder tells which text was held out; name a run, or another text"
            )
        parts, count = [np.asarray(context.validation()[:]).astype(np.int64)], len(context.validation())
    else:
        for document in read_documents(source):
            ids = [*context.tokenizer.encode(document.text), context.tokenizer.end_of_text]
            parts.append(np.asarray(ids, np.int64))
            count += len(ids)
            if enough is not None and count >= enough:
                break
    if count < at_least:
        raise DataError(f"{source}: {count} tokens, and {at_least} are needed; name a longer text or ask for less")
    return np.concatenate(parts)


def separation(tokenizer: Tokenizer) -> str:
    """Return the sentence that says what separates documents, for the choices of a task that scores tokens."""
    return (
        f"Documents (files, lines of a .jsonl file, rows of an hf: set) are separated by {tokenizer.end_of_text_token!r}, "
        "which is never scored; a window may hold several."
    )
