"""Rows cut from one source: windows of the concatenated text, or whole documents or examples packed side by side.

All divide an epoch into a number of rows that depends on the lengths of the documents alone, so that any row of any epoch
is found by its index. The random numbers of an epoch decide the order of rows, and which documents of equal length share a row.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .documents import IGNORED
from .shards import LAST, SCORED, TokenStream

_SCANNED_TOKENS = 2**24

Ints = npt.NDArray[np.int64]


class Row(NamedTuple):
    """Inputs, targets (`IGNORED` in padding) and positions, (T,) int64 each. Positions start at 0 in each document."""

    inputs: npt.NDArray[Any]
    targets: npt.NDArray[Any]
    positions: npt.NDArray[Any]


def document_starts(stream: TokenStream, end_of_text: int) -> Ints:
    """Return the offset of each document of a stream, and the length of the stream, (N + 1,)."""
    return _starts_after(stream, lambda tokens: tokens == end_of_text)


def example_starts(records: TokenStream) -> Ints:
    """Return the offset of each example of a stream of records, and the length of the stream, (N + 1,)."""
    return _starts_after(records, lambda part: part["flags"] & LAST)


def _starts_after(stream: TokenStream, are_last: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> Ints:
    ends = (
        np.flatnonzero(are_last(stream[first : first + _SCANNED_TOKENS])) + first + 1
        for first in range(0, len(stream), _SCANNED_TOKENS)
    )
    starts = np.concatenate([np.zeros(1, np.int64), *ends])
    return starts if starts[-1] == len(stream) else np.append(starts, len(stream))


def example_targets(records: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the targets of records, `IGNORED` where they do not count in the loss."""
    return np.where(records["flags"] & SCORED, records["target"].astype(np.int64), IGNORED)


def with_long_documents_again(stream: TokenStream, starts: Ints, *, long_tokens: int, times: int) -> TokenStream:
    """Return a stream followed by `times` - 1 copies of its documents of at least `long_tokens` tokens."""
    lengths = np.diff(starts)
    again = [stream[starts[index] : starts[index + 1]] for index in np.flatnonzero(lengths >= long_tokens)]
    return TokenStream([*stream.parts, *again * (times - 1)])


@dataclass(eq=False)
class Windows:
    """Windows of a stream without overlap, cut at a shift that is drawn for each epoch.

    Args:
        stream: Tokens of the source.
        context: Row length T.
        key: Seeds of the random numbers; the epoch is added.
    """

    stream: TokenStream
    _: KW_ONLY
    context: int
    key: tuple[int, ...]

    def __post_init__(self) -> None:
        # Leaves room for a shift by up to a window if possible.
        self.per_epoch = max(1, (len(self.stream) - self.context) // self.context)
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    def _draw_epoch(self, epoch: int) -> tuple[int, Ints]:
        rng = np.random.default_rng([*self.key, epoch])
        shift = int(rng.integers(len(self.stream) - self.per_epoch * self.context))
        return shift, rng.permutation(self.per_epoch)

    def row(self, index: int) -> Row:
        """Return a row, counted from 0 over all epochs. All of it is one document."""
        epoch, place = divmod(index, self.per_epoch)
        shift, order = self._epoch(epoch)
        offset = shift + int(order[place]) * self.context
        window = self.stream[offset : offset + self.context + 1]
        return Row(window[:-1], window[1:], np.arange(self.context))

    def targets(self, index: int) -> int:
        """Return the number of targets of a row that count in the loss."""
        return self.context


@dataclass(eq=False)
class Packs:
    """Rows of whole documents, packed by best fit in order of decreasing length (arXiv:2404.10830).

    The inputs of a document are the end of text and its tokens, and its targets are its tokens and the end of text: none
    is predicted from another document. Documents longer than a row are cut into pieces of one row each and a rest.

    Args:
        stream: Tokens of the source.
        starts: Offsets of its documents, and its length (see `document_starts`).
        context: Row length T.
        key: Seeds of the random numbers; the epoch is added.
        end_of_text: The token that ends documents.
        pad: Input in padding.
        long_tokens: Length from which documents are read `times` times an epoch; 0 for none.
        times: See `long_tokens`.
    """

    stream: TokenStream
    _: KW_ONLY
    starts: Ints
    context: int
    key: tuple[int, ...]
    end_of_text: int
    pad: int
    long_tokens: int = 0
    times: int = 1

    def __post_init__(self) -> None:
        lengths = np.diff(self.starts)
        again = np.where(lengths >= self.long_tokens, self.times, 1) if self.long_tokens else 1
        pieces = np.repeat(-(-lengths // self.context), again)
        first, length = np.repeat(self.starts[:-1], again), np.repeat(lengths, again)
        place = (np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * self.context
        self._offsets = np.repeat(first, pieces) + place
        self._sizes = np.minimum(np.repeat(length, pieces) - place, self.context)
        rows = best_fit(np.sort(self._sizes)[::-1], self.context)
        self.per_epoch = int(rows.max()) + 1
        self._slots = np.argsort(rows, kind="stable")
        self._bounds = np.searchsorted(rows[self._slots], np.arange(self.per_epoch + 1))
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)

    @cached_property
    def _filled(self) -> Ints:
        """Number of tokens in each row of the plan."""
        return np.add.reduceat(np.sort(self._sizes)[::-1][self._slots], self._bounds[:-1])

    def _draw_epoch(self, epoch: int) -> tuple[Ints, Ints]:
        rng = np.random.default_rng([*self.key, epoch])
        pieces = np.lexsort((rng.random(len(self._sizes)), -self._sizes))
        return pieces, rng.permutation(self.per_epoch)

    def row(self, index: int) -> Row:
        """Return a row, counted from 0 over all epochs. Padding is at its end, with positions of its own."""
        inputs = np.full(self.context, self.pad, np.int64)
        targets = np.full(self.context, IGNORED, np.int64)
        positions = np.arange(self.context)
        begin = 0
        for offset, size in self._pieces(index):
            end = begin + size
            inputs[begin:end], targets[begin:end] = self._read(offset, size)
            positions[begin:] -= positions[begin]
            begin = end
        if begin < self.context:
            positions[begin:] -= positions[begin]
        return Row(inputs, targets, positions)

    def _pieces(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield the offset and the size of each piece of a row."""
        epoch, place = divmod(index, self.per_epoch)
        pieces, order = self._epoch(epoch)
        row = int(order[place])
        for piece in pieces[self._slots[self._bounds[row] : self._bounds[row + 1]]].tolist():
            yield int(self._offsets[piece]), int(self._sizes[piece])

    def _read(self, offset: int, size: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return inputs and targets. The input before a document is the end of text of its predecessor."""
        targets = self.stream[offset : offset + size]
        return self.stream[offset - 1 : offset - 1 + size] if offset else self._first(targets), targets

    def _first(self, targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.concatenate([[self.end_of_text], targets[:-1]])

    def targets(self, index: int) -> int:
        """Return the number of targets of a row that count in the loss."""
        epoch, place = divmod(index, self.per_epoch)
        return int(self._filled[self._epoch(epoch)[1][place]])


class ExamplePacks(Packs):
    """Rows of whole examples, packed as documents are. An example as long as a row has a row of its own.

    `stream` holds records, which are inputs and targets as they are: nothing is put before or after an example.
    """

    def _read(self, offset: int, size: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        records = self.stream[offset : offset + size]
        return records["input"], example_targets(records)

    def targets(self, index: int) -> int:
        """Return the number of targets of a row that count in the loss."""
        flags = (self.stream[offset : offset + size]["flags"] for offset, size in self._pieces(index))
        return sum(int(np.count_nonzero(part & SCORED)) for part in flags)


def best_fit(sizes: Ints, capacity: int) -> Ints:
    """Pack items into rows: each goes into the fullest row that has room, or into a new one.

    Items of equal size are placed together, so time grows with the number of different sizes and not with that of items.

    Args:
        sizes: (N,) sizes in descending order, each from 1 to `capacity`.
        capacity: Size of a row.

    Returns:
        (N,) the row of each item. Rows count from 0 and none is empty.
    """
    placed = np.empty(len(sizes), np.int64)
    rooms: dict[int, Ints] = {}  # rows by the room that is left in them
    ascending: list[int] = []  # the keys of `rooms`
    total = first = 0

    def add(room: int, rows: Ints) -> None:
        if room and len(rows):
            if room not in rooms:
                insort(ascending, room)
            rooms[room] = np.concatenate([rooms[room], rows]) if room in rooms else rows

    for size, count in zip(*(part[::-1].tolist() for part in np.unique(sizes, return_counts=True)), strict=True):
        left = count
        while left:
            place = bisect_left(ascending, size)
            if place < len(ascending):
                room = ascending.pop(place)
                rows = rooms.pop(room)
            else:
                room = capacity
                rows = total + np.arange(-(-left // (capacity // size)))
                total += len(rows)
            each = room // size
            full, rest = rows[: left // each], rows[left // each :]
            taken = np.repeat(full, each)
            add(room - each * size, full)
            if remainder := min(left - len(taken), each) if len(rest) else 0:
                taken = np.append(taken, np.repeat(rest[:1], remainder))
                add(room - remainder * size, rest[:1])
                rest = rest[1:]
            add(room, rest)
            placed[first : first + len(taken)] = taken
            first, left = first + len(taken), left - len(taken)
    return placed
