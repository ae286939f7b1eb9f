"""What a source holds: texts, texts too large for memory, and examples and conversations, which say what is learned."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .streams import not_utf8, readable

IGNORED = -100
"""Target that no loss is computed for, as in PyTorch and transformers."""
PART_CHARACTERS = 2**20
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
        return _cut_parts(iter([self.text]))


@dataclass(frozen=True, eq=False)
class Example:
    """Token ids with their targets, which are learned as they are: nothing is tokenised, and nothing is added.

    An example of T tokens fills a row of T tokens by itself.

    Attributes:
        name: Name, which is unique in the source.
        inputs: (T,) token ids.
        targets: (T,) the token id to predict at each input, -100 where the loss does not count. Of text, it is the next input.
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
    """A text file, or the bytes from `start` to `stop` of one, that is read in parts."""

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
        return _cut_parts(self._blocks())

    def _blocks(self) -> Iterator[str]:
        with readable(self.path), self.path.open("rb") as file:
            file.seek(self.start)
            place, rest = self.start, b""
            while block := file.read(min(PART_CHARACTERS, self.stop - place - len(rest))):
                block = rest + block
                try:
                    text = block.decode("utf-8")
                    rest = b""
                except UnicodeDecodeError as error:
                    is_cut = error.reason == "unexpected end of data" and place + len(block) < self.stop
                    if not is_cut:
                        raise not_utf8(self.path, block, error, place) from None
                    text, rest = block[: error.start].decode("utf-8"), block[error.start :]
                place += len(block) - len(rest)
                yield text


@dataclass(frozen=True)
class Conversation:
    """Messages, of which the assistant's are learned.

    Attributes:
        name: Name, which is unique in the source.
        messages: Role and content of each.
        place: Where it is, for messages about errors.
    """

    name: str
    messages: tuple[tuple[str, str], ...]
    place: str

    @property
    def text(self) -> str:
        """Roles and contents."""
        return "".join(self.parts())

    @property
    def size_bytes(self) -> int:
        """Size of the text in UTF-8."""
        return len(self.text.encode())

    def parts(self) -> Iterator[str]:
        """Yield role and content of each message."""
        for role, content in self.messages:
            yield f"### {role}\n{content}\n\n"


AnyDocument = Document | LargeDocument | Example | Conversation


def _cut_parts(blocks: Iterable[str]) -> Iterator[str]:
    rest = ""
    for block in blocks:
        rest += block
        while len(rest) > PART_CHARACTERS:
            found = next((match for cut in _CUTS if (match := cut.match(rest, 0, PART_CHARACTERS))), None)
            end = found.end() if found else PART_CHARACTERS
            yield rest[:end]
            rest = rest[end:]
    if rest:
        yield rest
