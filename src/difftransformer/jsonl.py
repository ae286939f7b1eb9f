"""Files of JSON lines, which grow by one row at a time and survive the end of their writer."""

import contextlib
import json
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .files import naming
from .reading import parse_json


class DamagedLine(ValueError):
    """A line of a file is not a row. `line` is its number, from 1."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line} is damaged")
        self.line = line


def read_rows(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the rows of a file, each with the place at which its line ends.

    A last line that is not whole, as a killed writer leaves it, is left out with a warning.

    Raises:
        DamagedLine: Another line is not a JSON object.
    """
    end = 0
    *lines, rest = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is None:
            if rest or number < len(lines) or number == 1:  # a file of one such line is something else
                raise DamagedLine(number)
            rest = line
            break
        end += len(line) + 1
        yield row, end
    else:
        number = len(lines) + 1
    if rest:
        warnings.warn(f"{path}: line {number} is not whole and is left out", stacklevel=2)


class RowWriter:
    """Appends rows to a file.

    Args:
        path: The file, which is created if it is missing.
        keep_bytes: What is kept of it; the rest is cut off.
        sync_seconds: Rows survive the end of the process at once, and a loss of power after this many seconds; None leaves that
            to the system.
    """

    def __init__(self, path: Path, *, keep_bytes: int, sync_seconds: float | None = None) -> None:
        self._path, self._sync_seconds, self._synced = path, sync_seconds, time.monotonic()
        with naming(path):
            self._file = path.open("ab")
            self._file.truncate(keep_bytes)

    def write(self, row: Mapping[str, Any]) -> None:
        """Append a row."""
        with naming(self._path):
            self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
            self._file.flush()
            if self._sync_seconds is not None and time.monotonic() - self._synced >= self._sync_seconds:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()

    def close(self) -> None:
        """Close the file."""
        with naming(self._path), contextlib.closing(self._file):
            self._file.flush()
            if self._sync_seconds is not None:
                os.fsync(self._file.fileno())


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = parse_json(line)
    except ValueError:
        return None
    if not isinstance(row, dict):
        return None
    row.pop("crc32", None)  # a sum of the line, in files of earlier releases
    return row
