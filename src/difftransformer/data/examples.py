"""Rows that say what is learned from each token: token ids with labels."""

from typing import Any

import numpy as np

from ..errors import DataError
from ..typed import short
from .documents import IGNORED, Example


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
