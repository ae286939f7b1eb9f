"""Measure how many held-out lines also occur in the training text, and how many look like tables.

The loss on such lines says little about the language that a model has learned.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from operator import methodcaller
from typing import NamedTuple
from zlib import crc32

from .documents import AnyDocument, Document, LargeDocument
from .shards import Split

LONG_CHARACTERS = 30
"""Shorter lines are ignored, since they repeat in any text."""
LARGEST_SET = 2**21
"""Beyond this number of lines, only those with a hash divisible by a power of two are kept."""
# A table row begins with a hexadecimal number or an escape, or letters make up less than two fifths of it (without spaces).
_NUMBER = re.compile(r"""[\s'"(\[{,bru#]*(?:0[xX]|\\[xuUN0-7])""")
_LETTERS = re.compile(r"[^\W\d_]+")
LEAST_LETTERS = 0.4
_LONG = re.compile(rf"\S.{{{LONG_CHARACTERS - 2},}}(?<=\S)")


class HeldOutShares(NamedTuple):
    """Shares of the held-out lines of 30 characters or more.

    Attributes:
        lines: Number of held-out lines that were looked at.
        seen: Share that also occurs in the training text, ignoring spaces at both ends.
        tables: Share that looks like rows of a table.
    """

    lines: int
    seen: float
    tables: float

    def __str__(self) -> str:
        lines = f"of {self.lines:,} held-out lines of {LONG_CHARACTERS} characters or more"
        return f"{lines}, {self.seen:.1%} stand in the training text and {self.tables:.1%} look like tables"


class HeldOutLines:
    """Collects the lines of documents as they are read."""

    def __init__(self) -> None:
        self._train: set[int] = set()
        self._held: list[tuple[int, bool]] = []
        self._stride = 1

    def over(self, documents: Iterable[tuple[Split, AnyDocument]]) -> Iterator[tuple[Split, AnyDocument]]:
        """Yield the documents with their splits."""
        for split, document in documents:
            if isinstance(document, Document | LargeDocument):
                for part in document.parts():
                    self._add(split, part)
            yield split, document

    def shares(self) -> HeldOutShares | None:
        """Return the shares so far, or None if no held-out line is long enough."""
        if not self._held:
            return None
        count = len(self._held)
        seen, tables = (
            sum(flags) / count for flags in zip(*((h in self._train, t) for h, t in self._held), strict=True)
        )
        return HeldOutShares(count, seen, tables)

    def _add(self, split: Split, text: str) -> None:
        lines = long_lines(text)
        numbers: Iterable[int] = line_hashes(lines)
        if self._stride > 1:
            numbers = (number for number in numbers if number % self._stride == 0)
        if split == "train":
            self._train.update(numbers)
        else:
            tables = dict(zip(line_hashes(lines), map(is_table_row, lines), strict=True))
            self._held += [(number, tables[number]) for number in numbers]
        while len(self._train) > LARGEST_SET or len(self._held) > LARGEST_SET:
            self._stride *= 2
            self._train = {number for number in self._train if number % self._stride == 0}
            self._held = [(number, table) for number, table in self._held if number % self._stride == 0]


def long_lines(text: str) -> list[str]:
    """Return the lines of at least `LONG_CHARACTERS`, without spaces at their ends."""
    return _LONG.findall(text)


def line_hashes(lines: Sequence[str]) -> Iterator[int]:
    """Yield 32 bits of a hash of each line, the same in every process."""
    return map(crc32, map(methodcaller("encode", "utf-8", "surrogatepass"), lines))


def is_table_row(line: str) -> bool:
    """Whether a line looks like a row of a table of numbers or characters."""
    held = len(line) - line.count(" ")
    letters = len(line) - len(_LETTERS.sub("", line))
    return _NUMBER.match(line) is not None or letters < LEAST_LETTERS * held
