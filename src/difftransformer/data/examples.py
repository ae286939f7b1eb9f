"""Rows that say what is learned: token ids with labels, and conversations."""

from typing import Any

import numpy as np

from ..errors import DataError
from ..typed import short
from .documents import IGNORED, Conversation, Example

ROLES = ("system", "user", "assistant")
FIELDS = ("text", "name", "messages", "input_ids", "labels")
"""Fields of rows that are read. A row with `text` is text."""


def read_special(row: dict[str, Any], name: str, place: str) -> Conversation | Example | None:
    """Return what a row holds in place of text, or None if it is text.

    Messages begin with `place`, where the row is.

    Raises:
        DataError: See `read_conversation` and `read_example`.
    """
    if row.get("text") is not None:
        return None
    if row.get("messages") is not None:
        return read_conversation(row["messages"], name, place)
    return read_example(row, name, place) if row.get("input_ids") is not None else None


def read_conversation(messages: Any, name: str, place: str) -> Conversation:
    """Return a conversation that is given as a list of messages, each with `role` and `content`.

    Raises:
        DataError: It is not of this form, or its last message is not an answer.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{place}: messages is {short(messages)}; give a list of messages, each with role and content")
    for number, message in enumerate(messages, start=1):
        met = message if isinstance(message, dict) else {}
        role, content = met.get("role"), met.get("content")
        if role not in ROLES:
            raise DataError(f"{place}: message {number} has the role {short(role)}; allowed are {', '.join(ROLES)}")
        if not isinstance(content, str) or not content.strip():
            raise DataError(f"{place}: message {number} ({role}) has the content {short(content)}; give it text")
        if further := sorted(key for key, value in met.items() if key not in ("role", "content") and value is not None):
            raise DataError(
                f"{place}: message {number} has {', '.join(further)}; only role and content are read, remove it"
            )
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"{place}: messages without an answer: the last one is of the {messages[-1]['role']}; end with one of the assistant"
        )
    return Conversation(name, tuple((message["role"], message["content"]) for message in messages), place)


def read_example(row: dict[str, Any], name: str, place: str) -> Example:
    """Return a row that is tokenised: `input_ids`, and optionally `labels` of the same length.

    As in transformers, the label of a token is its own id, or -100 where the loss does not count; without labels, all count.
    Messages begin with `place`, where the row is.

    Raises:
        DataError: These are not lists of ids, or no label counts.
    """
    ids = _ids(row, "input_ids", 0, place)
    labels = _ids(row, "labels", IGNORED, place) if row.get("labels") is not None else ids
    if len(labels) != len(ids) or len(ids) < 2:
        raise DataError(
            f"{place} has {len(ids)} input_ids and {len(labels)} labels; give equally many of both, at least 2"
        )
    if (labels[1:] == IGNORED).all():
        raise DataError(f"{place}: all labels after the first are {IGNORED}, so nothing is learned; leave the row out")
    return Example(name, ids[:-1], labels[1:])


def _ids(row: dict[str, Any], field: str, least: int, place: str) -> Any:
    values = row[field]
    is_list = isinstance(values, list) and all(type(value) is int and least <= value < 2**32 for value in values)
    if not is_list or any(least < value < 0 for value in values):
        raise DataError(f"{place}: {field} is {short(values)}; give a list of token ids")
    return np.array(values, dtype=np.int64)
