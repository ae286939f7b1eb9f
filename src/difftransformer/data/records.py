"""Rows of a user's JSONL file or of a public data set, with the fields that a reader asks for."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from .hub import load_set
from .text import read_text


@dataclass(frozen=True, kw_only=True)
class PublicSet:
    """Where a set is on the Hugging Face hub.

    Attributes:
        hub_name: What `datasets.load_dataset` opens.
        split: The part that is evaluated.
        configs: Its configurations, read one after another.
        revision: A branch of it.
    """

    hub_name: str
    split: str
    configs: tuple[str | None, ...] = (None,)
    revision: str | None = None


def jsonl_rows(path: Path, fields: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Lines of a JSONL file, counted from 1, each an object with text in every one of `fields`.

    Raises:
        DataError: the file is missing, empty, not UTF-8 or not JSONL, or a line lacks a field.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file; name a .jsonl file with {_listed(fields)} on each line")
    is_empty = True
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}: line {number} is not JSON ({error}); mend the line") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}: line {number} is no object; give one with {_listed(fields)}")
        for field in fields:
            text_field(row, field, f"{path}: line {number}")
        is_empty = False
        yield number, row
    if is_empty:
        raise DataError(f"{path}: the file is empty; give one JSON object with {_listed(fields)} on each line")


def text_field(row: dict[str, Any], field: str, place: str) -> str:
    """A field that must hold text; a number counts as what it is written like.

    Raises:
        DataError: it is missing, empty or something else.
    """
    value = row.get(field)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        met = f"met {', '.join(sorted(map(str, row)))}" if value is None else f"it holds {value!r}"
        raise DataError(f'{place} has no text in "{field}" ({met}); give every line a "{field}"')
    return value


def public_rows(name: str, public: PublicSet) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a public set through the `datasets` library, each with a name that is its own.

    Raises:
        DataError: the library is missing, or cannot load the set.
    """
    for config in public.configs:
        rows = load_set(
            name,
            public.hub_name,
            config=config,
            split=public.split,
            revision=public.revision,
            otherwise=", or name a .jsonl file",
        )
        for index, row in enumerate(rows):
            yield (f"{config}/{index}" if len(public.configs) > 1 else str(index)), row


def chosen(count: int, wanted: int | None, seed: int) -> list[int]:
    """Which of `count` items are asked: all of them, or `wanted` drawn by the seed, in their order."""
    if wanted is None or wanted >= count:
        return list(range(count))
    return sorted(np.random.default_rng(seed).choice(count, wanted, replace=False).tolist())


def _listed(fields: Sequence[str]) -> str:
    return " and ".join(f'"{field}"' for field in fields)
