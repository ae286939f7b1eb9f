"""Documents of a source: texts, texts too large for memory, and examples of token ids with their targets."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from ..typed import short
from .records import not_utf8, readable

IGNORED = -100
"""Target that no loss is computed for, as in PyTorch and transformers."""
PART_CHARACTERS = 2**20
FIELDS = ("text", "input_ids", "labels")
"""Columns read from data sets. A row that has `text` is read as text."""
# Where a text is cut into parts: before a space between words, or else after a line feed between lines.
_CUTS = (re.compile(r"(?s).*[^\W\d_](?= [^\W\d_])"), re.compile(r"(?s).*\S\n(?=\S)"))


@dataclass(frozen=True)
class Document:
    """A text and its name, which is unique in the source (a path, or a path with a line number)."""

    name: str
    text: str

    @property
    def size_bytes(self) -> int:
        """Size of the text in UTF-8."""
        return len(self.text.encode("utf-8", "surrogatepass"))

    def parts(self) -> Iterator[str]:
        """Yield the text in parts of about `PART_CHARACTERS`."""
        return cut_text([self.text], PART_CHARACTERS)


@dataclass(frozen=True, eq=False)
class Example:
    """Token ids with a target for each. They are used as they are: nothing is tokenised or added.

    An example of T tokens fills a row of T tokens by itself.

    Attributes:
        name: Name, which is unique in the source.
        inputs: (T,) token ids.
        targets: (T,) token id to predict at each input, or -100 to leave it out of the loss. In text it is the next input.
    """

    name: str
    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]

    @property
    def size_bytes(self) -> int:
        """Size of the text in UTF-8."""
        return sum(map(len, self.parts()))

    def parts(self) -> Iterator[str]:
        """Yield inputs and targets as text."""
        yield " ".join(map(str, self.inputs.tolist()))
        yield "\n" + " ".join(map(str, self.targets.tolist()))


@dataclass(frozen=True)
class LargeDocument:
    """A text file, or its bytes from `start` to `stop`, read in parts."""

    name: str
    path: Path
    start: int
    stop: int

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.parts())

    @property
    def size_bytes(self) -> int:
        """Size of the text in UTF-8."""
        return self.stop - self.start

    def parts(self) -> Iterator[str]:
        """Yield the text in parts of about `PART_CHARACTERS`.

        Raises:
            DataError: The file cannot be read or is not UTF-8.
        """
        return cut_text(self._blocks(), PART_CHARACTERS)

    def _blocks(self) -> Iterator[str]:
        with readable(self.path), self.path.open("rb") as file:
            file.seek(self.start)
            offset, rest = self.start, b""
            while block := file.read(min(PART_CHARACTERS, self.stop - offset - len(rest))):
                block = rest + block
                try:
                    text = block.decode("utf-8")
                    rest = b""
                except UnicodeDecodeError as error:
                    is_cut = error.reason == "unexpected end of data" and offset + len(block) < self.stop
                    if not is_cut:
                        raise not_utf8(self.path, block, error, offset) from None
                    text, rest = block[: error.start].decode("utf-8"), block[error.start :]
                offset += len(block) - len(rest)
                yield text


AnyDocument = Document | LargeDocument | Example


def cut_text(blocks: Iterable[str], characters: int) -> Iterator[str]:
    """Cut a text, given in blocks, into parts of at most `characters`, between words or lines where possible."""
    rest = ""
    for block in blocks:
        rest, start = rest + block, 0
        while len(rest) - start > characters:
            found = next((match for cut in _CUTS if (match := cut.match(rest, start, start + characters))), None)
            end = found.end() if found else start + characters
            yield rest[start:end]
            start = end
        rest = rest[start:]
    if rest:
        yield rest


def read_example(row: dict[str, Any], name: str, where: str) -> Example:
    """Read a tokenised row: `input_ids`, and optionally `labels` of the same length.

    As in transformers, the label of a token is its own id, or -100 to leave it out of the loss. Without labels, all tokens
    count. Errors begin with `where`, the file and the line.

    Raises:
        DataError: The fields are not lists of ids, or all labels after the first are -100.
    """
    ids = _ids(row, "input_ids", 0, where)
    labels = _ids(row, "labels", IGNORED, where) if row.get("labels") is not None else ids
    if len(labels) != len(ids) or len(ids) < 2:
        raise DataError(
            f"{where} has {len(ids)} input_ids and {len(labels)} labels; give equally many of both, at least 2"
        )
    if (labels[1:] == IGNORED).all():
        raise DataError(f"{where}: all labels after the first are {IGNORED}, so nothing is learned; leave the row out")
    return Example(name, ids[:-1], labels[1:])


def _ids(row: dict[str, Any], field: str, least: int, where: str) -> Any:
    values = row[field]
    is_list = isinstance(values, list) and all(type(value) is int and least <= value < 2**32 for value in values)
    if not is_list or any(least < value < 0 for value in values):
        raise DataError(f"{where}: {field} is {short(values)}; give a list of token ids")
    return np.array(values, dtype=np.int64)
