"""A file that grows by one line of JSON at a time and survives an interruption of its writer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from difftransformer.jsonl import DamagedLine, RowWriter, read_rows


class OtherHeader(Exception):
    """The first row of a journal is not the header that its reader expects."""


class Journal:
    """Rows on disk, in the order in which they were added.

    An incomplete last line, left by a killed writer, is dropped when the file is opened again.

    Args:
        path: The file; created with its folder if it is missing.
        take: Called with each existing row; it raises KeyError, TypeError or ValueError for one that it does not accept.
        header: First row of the file, if not None. It is written with the first added row, so that an empty run blocks no
            later one, and a file with another header is refused.
        sync_seconds: Every row is flushed; fsync runs at most this often.

    Raises:
        DamagedLine: A complete line is not a row, or not one that `take` accepts.
        OtherHeader: The header is another one.
    """

    def __init__(
        self, path: Path, take: Callable[[Any], None], *, header: Any = None, sync_seconds: float = 0.0
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole, self._missing_header = 0, header
        for number, (row, end) in enumerate(read_rows(path) if path.exists() else (), start=1):
            if self._missing_header is None:
                try:
                    take(row)
                except (KeyError, TypeError, ValueError):
                    raise DamagedLine(number) from None
            elif row != header:
                raise OtherHeader(f"the first row is {row}")
            self._missing_header, whole = None, end
        self._rows = RowWriter(path, keep_bytes=whole, sync_seconds=sync_seconds)

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()

    def add(self, row: Any) -> None:
        if self._missing_header is not None:
            header, self._missing_header = self._missing_header, None
            self._rows.write(header)
        self._rows.write(row)
