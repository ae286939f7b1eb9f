"""A text from any source as one stream of a model's tokens."""

import numpy as np
import numpy.typing as npt

from ...data import Tokenizer, read_documents
from ...errors import DataError

HAYSTACK_TOKENS = 2**20
"""Tokens of the text in which needles are hidden: more than one document takes, and read within seconds."""


def token_stream(
    tokenizer: Tokenizer, source: str, at_least: int = 0, *, enough: int | None = None
) -> npt.NDArray[np.int64]:
    """Concatenate the first documents of a source (see `read_documents`), each followed by the end-of-text token.

    Stop after `enough` tokens; None reads the whole source.

    Raises:
        DataError: The source cannot be read, or has fewer than `at_least` tokens.
    """
    parts, count = [], 0
    for document in read_documents(source):
        ids = [*tokenizer.encode(document.text), tokenizer.end_of_text]
        parts.append(np.asarray(ids, np.int64))
        count += len(ids)
        if enough is not None and count >= enough:
            break
    if count < at_least:
        raise DataError(f"{source}: {count} tokens, and {at_least} are needed; name a longer text or ask for less")
    return np.concatenate(parts)
