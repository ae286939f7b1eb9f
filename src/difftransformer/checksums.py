"""Checksums of files and of lines, so that a byte that changed on disk is found when it is read.

A line of JSON ends with the field `crc32`, of the bytes of the line before that field. A file of JSON ends with the field
`sha256`, of the bytes of the file before that field. What release 0.1.0 wrote has neither and is read as it is.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .reading import parse_json

_WHOLE = re.compile(rb', "crc32": "[0-9a-f]{8}"\}.')


class DamagedLine(ValueError):
    """A line of a file is not what was written. `line` is its number, from 1."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line} is damaged")
        self.line = line


def line_of(row: Mapping[str, Any]) -> bytes:
    """Return a row, which is not empty, as a line of JSON with its checksum."""
    body = json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace")[:-1]
    return body + _line_end(body)


def rows(content: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the rows of a file of lines, each with the place at which its line ends.

    A last line without a line end, which a killed writer leaves, is left out.

    Raises:
        DamagedLine: A line is not JSON, or has another checksum.
    """
    end = 0
    *lines, last = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        end += len(line) + 1
        try:
            yield _row(line + b"\n"), end
        except ValueError:
            raise DamagedLine(number) from None
    if _WHOLE.search(last):  # all of a row is there, and then something else than its line end
        raise DamagedLine(len(lines) + 1)


def sealed(document: Mapping[str, Any], *, is_short: bool = False) -> str:
    """Return a document, which is not empty, as JSON with its checksum; `is_short` leaves out indentation."""
    body = json.dumps(document, indent=None if is_short else 1, allow_nan=False).removesuffix("}").removesuffix("\n")
    return body + _file_end(body.encode()).decode()


def opened(content: bytes, objects: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Read JSON that `sealed` returned, or that has no checksum; `objects` is the `object_pairs_hook` of `json.loads`.

    Raises:
        ValueError: It is not JSON, or has another checksum.
    """
    document = parse_json(content, object_pairs_hook=objects)
    return _without(document, "sha256", content, _file_end, "the sha256 at its end is that of another content")


def _row(line: bytes) -> dict[str, Any]:
    row = parse_json(line)
    if not isinstance(row, dict):
        raise ValueError("not a row")
    return _without(row, "crc32", line, _line_end, "the crc32 at its end is that of another line")


def _without(document: Any, name: str, content: bytes, end_of: Callable[[bytes], bytes], problem: str) -> Any:
    """Return a document without its checksum, which is compared with the content."""
    body_bytes = len(content) - len(end_of(b""))
    body, end = content[: max(0, body_bytes)], content[max(0, body_bytes) :]
    expected = end_of(body)
    # In a damaged end either the name or the digits are still there.
    digits = expected.split(b'"')[-2]
    has_name = isinstance(document, dict) and name in document
    if end != expected and (has_name or digits in end):
        raise ValueError(problem)
    if has_name:
        del document[name]
    return document


def _line_end(body: bytes) -> bytes:
    return b', "crc32": "%08x"}\n' % zlib.crc32(body)


def _file_end(body: bytes) -> bytes:
    return b',\n "sha256": "%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()
