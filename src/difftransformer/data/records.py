"""Text files, rows of JSONL files, and rows of public data sets."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ..errors import DataError
from ..reading import parse_json
from ..typed import short
from .hub import load_set
from .streams import OnRead, not_utf8, read_lines, readable

T = TypeVar("T")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class PublicSet:
    """Location of a data set on the Hugging Face hub: the arguments of `load_set`, with several configurations."""

    hub_name: str
    split: str
    configs: tuple[str | None, ...] = (None,)
    revision: str | None = None


def read_text(path: Path) -> str:
    """Read a UTF-8 file unchanged, except for a leading byte-order mark, which is dropped.

    Raises:
        DataError: The file cannot be read or is not UTF-8.
    """
    with readable(path):
        content = path.read_bytes()
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise not_utf8(path, content, error) from None


def files_sha256(paths: Iterable[Path]) -> str:
    """Return a fingerprint of the names and contents of files, whatever their order."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        with open(path, "rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def json_lines(path: Path, on_read: OnRead = lambda size: None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for the lines of a JSONL file that are not blank. The first line is line 1.

    The file may be compressed (.gz, .zst), and is read line by line.

    Raises:
        DataError: The file cannot be read, or a line is not a JSON object.
    """
    for number, line in enumerate(read_lines(path, on_read), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}: line {number} is not JSON ({error.msg} at column {error.colno}); correct the line"
            ) from None
        except ValueError as error:
            raise DataError(f"{path}: line {number} cannot be read ({error}); correct the line") from None
        # UTF-8 has no surrogates, so only an escape can hold one.
        if "\\u" in line and (half := _SURROGATE.search(json.dumps(row, ensure_ascii=False))):
            raise DataError(
                f"{path}: line {number} holds half a surrogate pair, U+{ord(half[0]):04X}, which is not valid Unicode; "
                "correct the line"
            )
        if not isinstance(row, dict):
            raise DataError(f"{path}: line {number} is a JSON {type(row).__name__}; give one JSON object per line")
        yield number, row


def jsonl_rows(path: Path, fields: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for the lines of a JSONL file, each of which has text in all of `fields`.

    Raises:
        DataError: The file is missing, empty, not UTF-8 or not JSONL, or a line lacks a field.
    """
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
    """Return a field that must hold text. Numbers are converted to text; messages begin with `place`, where the row is.

    Raises:
        DataError: The field is missing, empty or of another type.
    """
    value = row.get(field)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        met = f"met {', '.join(sorted(map(str, row)))}" if value is None else f"it holds {short(value)}"
        raise DataError(f'{place} has no text in "{field}" ({met}); give every line a "{field}"')
    return value


def public_rows(name: str, public: PublicSet) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name of the row, row) for the rows of a public set. The names are unique in the set.

    Raises:
        DataError: The `datasets` library is missing or cannot load the set.
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


def split_by_hash(items: Sequence[T], names: Sequence[str], share: float, seed: int) -> tuple[list[T], list[T]]:
    """Split items by a hash of (seed, name) into the rest and an expected `share` of them, each in the given order.

    An item stays on its side when other items are added, removed or reordered.
    """
    sides: tuple[list[T], list[T]] = [], []
    for item, name in zip(items, names, strict=True):
        sides[is_held_out(name, share, seed)].append(item)
    return sides


def is_held_out(name: str, share: float, seed: int) -> bool:
    """Whether an item of that name is among the expected `share` that `split_by_hash` splits off."""
    return hash_of(name, seed) < share * 2**64


def hash_of(name: str, seed: int) -> int:
    """Return a hash of (seed, name), which is below 2^64."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest(), "big")


def chosen(count: int, wanted: int | None, seed: int) -> list[int]:
    """Return the ascending indices of `wanted` items drawn from `count`, or of all items if `wanted` is None."""
    if wanted is None or wanted >= count:
        return list(range(count))
    return sorted(np.random.default_rng(seed).choice(count, wanted, replace=False).tolist())
