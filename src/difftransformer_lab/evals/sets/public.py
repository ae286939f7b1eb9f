"""What the readers of data sets share: rows of JSONL files, and draws among them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from difftransformer.data.records import json_lines
from difftransformer.errors import DataError
from difftransformer.typed import short

CONVERTED = "refs/convert/parquet"
"""Branch with the hub's conversion to Parquet, for sets that are published as a script. Scripts are not run."""


def jsonl_rows(path: Path, fields: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for each line of a JSONL file. Every object must have text in all of `fields`."""
    listed = " and ".join(f'"{field}"' for field in fields)
    if not path.is_file():
        raise DataError(f"{path}: no such file; name a .jsonl file with {listed} on each line")
    is_empty = True
    for number, row in json_lines(path):
        for field in fields:
            text_field(row, field, f"{path}: line {number}")
        is_empty = False
        yield number, row
    if is_empty:
        raise DataError(f"{path}: the file is empty; give one JSON object with {listed} on each line")


def text_field(row: dict[str, Any], field: str, place: str) -> str:
    """Return a field as text; numbers are converted. `place` says in messages where the row is."""
    value = row.get(field)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        met = f"met {', '.join(sorted(map(str, row)))}" if value is None else f"it holds {short(value)}"
        raise DataError(f'{place} has no text in "{field}" ({met}); give every line a "{field}"')
    return value


def chosen(count: int, wanted: int | None, seed: int) -> list[int]:
    """Draw `wanted` of `count` indices, all if None, in ascending order."""
    if wanted is None or wanted >= count:
        return list(range(count))
    return sorted(np.random.default_rng(seed).choice(count, wanted, replace=False).tolist())
