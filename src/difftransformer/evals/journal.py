"""A file that grows by one line of JSON at a time and survives an interruption of its writer."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..files import naming


class DamagedJournal(Exception):
    """A line of a journal that its reader does not accept. `line` is its number, from 1."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line} is not a row of this journal")
        self.line = line


class Journal:
    """Rows on disk, in the order in which they were added.

    An incomplete last line, left by a killed writer, is dropped when the file is opened again.

    Args:
        path: The file; created with its folder if it is missing.
        take: Called with each existing row; it raises KeyError, TypeError or ValueError for one that it does not accept.
        header: First row of the file, if not None. It is written with the first added row, so that an empty run blocks no
            later one, and a file with another header is refused.
        sync_seconds: Rows survive the end of the process at once, and a loss of power after this many seconds.

    Raises:
        DamagedJournal: A complete line is not a row that `take` accepts, or the header is another one.
    """

    def __init__(
        self, path: Path, take: Callable[[Any], None], *, header: Any = None, sync_seconds: float = 0.0
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole, self._missing_header = 0, header
        if path.exists():
            for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    row = json.loads(line)
                    if self._missing_header is None:
                        take(row)
                    elif row != header:
                        raise ValueError
                except (KeyError, TypeError, ValueError):
                    raise DamagedJournal(number) from None
                self._missing_header = None
                whole += len(line)
            os.truncate(path, whole)
        self._path, self._file = path, open(path, "ab")  # noqa: SIM115 - closed by __exit__
        self._sync_seconds, self._synced = sync_seconds, time.monotonic()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        with naming(self._path), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def add(self, row: Any) -> None:
        """Write a row."""
        if self._missing_header is not None:
            header, self._missing_header = self._missing_header, None
            self.add(header)
        with naming(self._path):
            self._file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
            self._file.flush()
            if time.monotonic() - self._synced >= self._sync_seconds:
                os.fsync(self._file.fileno())
                self._synced = time.monotonic()
