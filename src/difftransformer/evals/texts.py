"""Text of any source as one stream of a model's tokens."""

import numpy as np
import numpy.typing as npt

from ..data import Tokenizer, read_documents
from ..errors import DataError

HAYSTACK_TOKENS = 2**20
"""Of a text in which needles are hidden: more than any one document takes, and read in seconds."""


def token_stream(
    tokenizer: Tokenizer, source: str, at_least: int = 0, *, enough: int | None = None
) -> npt.NDArray[np.int64]:
    """The first documents of a source behind one another, each followed by the end of text.

    Args:
        tokenizer: Of the model.
        source: What `read_documents` takes.
        at_least: Tokens that are needed.
        enough: Stop when there are so many; None takes all.

    Raises:
        DataError: the source cannot be read, or has fewer tokens.
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
