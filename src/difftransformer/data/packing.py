"""Rows cut from one source: windows of the concatenated text, or whole documents or examples packed side by side.

All divide an epoch into a number of rows that depends on the lengths of the documents alone, so that any row of any epoch
is found by its index. The random numbers of an epoch decide the order of rows, and which documents of equal length share a row.

Documents are packed within blocks of the stream, and rows are shuffled within groups of blocks that are drawn from the whole
stream, so that memory does not grow with it.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .documents import IGNORED
from .shards import LAST, SCORED, TokenStream

BLOCK_TOKENS = 2**24
BLOCK_DOCUMENTS = 2**19
GROUP_BLOCKS = 8
"""Blocks whose rows are shuffled together."""

Ints = npt.NDArray[np.int64]


class Row(NamedTuple):
    """Inputs, targets (`IGNORED` in padding) and positions, (T,) int64 each. Positions start at 0 in each document."""

    inputs: npt.NDArray[Any]
    targets: npt.NDArray[Any]
    positions: npt.NDArray[Any]


def with_long_documents_again(stream: TokenStream, end_of_text: int, *, long_tokens: int, times: int) -> TokenStream:
    """Return a stream followed by `times` - 1 copies of its documents of at least `long_tokens` tokens."""
    again, start = [], 0
    for first in range(0, len(stream), BLOCK_TOKENS):
        for end in (np.flatnonzero(stream[first : first + BLOCK_TOKENS] == end_of_text) + first + 1).tolist():
            if end - start >= long_tokens:
                again.append(stream[start:end])
            start = end
    if len(stream) - start >= long_tokens:
        again.append(stream[start:])
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


class _Group(NamedTuple):
    """Packed rows of some blocks: row i holds the pieces from bounds[i] to bounds[i + 1], and order says when it comes."""

    offsets: Ints
    sizes: npt.NDArray[np.int32]
    bounds: Ints
    order: npt.NDArray[np.int32]


@dataclass(eq=False)
class Packs:
    """Rows of whole documents, packed by best fit in order of decreasing length (arXiv:2404.10830).

    The inputs of a document are the end of text and its tokens, and its targets are its tokens and the end of text: none
    is predicted from another document. Documents longer than a row are cut into pieces of one row each and a rest.

    A block of at most `BLOCK_TOKENS` tokens and `BLOCK_DOCUMENTS` documents is packed by itself. An epoch goes through the
    blocks in random order, `GROUP_BLOCKS` at a time, and through the rows of such a group in random order. What is held
    is the plan of two groups, and the first token and the number of rows of each block.

    Args:
        stream: Tokens of the source.
        context: Row length T.
        key: Seeds of the random numbers; the epoch is added.
        end_of_text: The token that ends documents.
        pad: Input in padding.
        long_tokens: Length from which documents are read `times` times an epoch; 0 for none.
        times: See `long_tokens`.

    Attributes:
        per_epoch: Number of rows.
        left_out: Number of pieces of an epoch that no row holds, since they have no target that counts in the loss.
    """

    stream: TokenStream
    _: KW_ONLY
    context: int
    key: tuple[int, ...]
    end_of_text: int
    pad: int
    long_tokens: int = 0
    times: int = 1

    def __post_init__(self) -> None:
        firsts, rows, self.left_out = [0], [], 0
        while firsts[-1] < len(self.stream):
            starts = self._starts(firsts[-1])
            _, sizes, left_out = self._pieces(starts)
            self.left_out += left_out
            rows.append(int(best_fit(np.sort(sizes)[::-1], self.context).max(initial=-1)) + 1)
            firsts.append(int(starts[-1]))
        self._firsts, self._rows = firsts, np.array(rows)
        self.per_epoch = int(self._rows.sum())
        self._epoch = lru_cache(maxsize=2)(self._draw_epoch)
        self._group = lru_cache(maxsize=2)(self._draw_group)

    def _starts(self, first: int) -> Ints:
        """Return the offsets of the documents of the block that begins at `first`, and its end, (N + 1,)."""
        tokens = self.stream[first : first + BLOCK_TOKENS]
        ends = np.flatnonzero(self._are_last(tokens))[:BLOCK_DOCUMENTS] + first + 1
        stop = first + len(tokens)
        if stop == len(self.stream) and len(ends) < BLOCK_DOCUMENTS and not (len(ends) and ends[-1] == stop):
            ends = np.append(ends, stop)  # the stream ends within a document
        elif not len(ends):  # a document that is longer than a block
            ends = np.array([first + max(1, BLOCK_TOKENS // self.context) * self.context])
        return np.concatenate([[first], ends])

    def _are_last(self, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Mark the tokens that end a document."""
        return tokens == self.end_of_text

    def _pieces(self, starts: Ints) -> tuple[Ints, npt.NDArray[np.int32], int]:
        """Cut documents at these offsets into pieces: their offsets and sizes, and how many are left out."""
        lengths = np.diff(starts)
        again = np.where(lengths >= self.long_tokens, self.times, 1) if self.long_tokens else 1
        pieces = np.repeat(-(-lengths // self.context), again)
        first, length = np.repeat(starts[:-1], again), np.repeat(lengths, again)
        place = (np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * self.context
        sizes = np.minimum(np.repeat(length, pieces) - place, self.context)
        offsets = np.repeat(first, pieces) + place
        kept = self._have_targets(starts, offsets, sizes)
        return offsets[kept], sizes[kept].astype(np.int32), len(kept) - int(np.count_nonzero(kept))

    def _have_targets(self, starts: Ints, offsets: Ints, sizes: Ints) -> npt.NDArray[np.bool_]:
        """Mark the pieces that have a target in the loss."""
        return np.ones(len(sizes), bool)

    def _draw_epoch(self, epoch: int) -> tuple[Ints, Ints]:
        """Return the blocks in their order, and the number of rows up to the end of each group."""
        blocks = np.random.default_rng([*self.key, epoch]).permutation(len(self._rows))
        return blocks, np.add.reduceat(self._rows[blocks], np.arange(0, len(blocks), GROUP_BLOCKS)).cumsum()

    def _draw_group(self, epoch: int, group: int) -> _Group:
        blocks = self._epoch(epoch)[0][group * GROUP_BLOCKS : (group + 1) * GROUP_BLOCKS]
        rng = np.random.default_rng([*self.key, epoch, *([group] if len(self._rows) > 1 else [])])
        offsets, sizes, bounds = [], [], [np.zeros(1, np.int64)]
        for block in blocks.tolist():
            place, size, _ = self._pieces(self._starts(self._firsts[block]))
            pieces = np.lexsort((rng.random(len(size)), -size))
            rows = best_fit(size[pieces], self.context)
            slots = np.argsort(rows, kind="stable")
            pieces = pieces[slots]
            offsets.append(place[pieces])
            sizes.append(size[pieces])
            bounds.append(bounds[-1][-1] + np.searchsorted(rows[slots], np.arange(1, self._rows[block] + 1)))
        ends = np.concatenate(bounds)
        order = rng.permutation(len(ends) - 1).astype(np.int32)
        return _Group(np.concatenate(offsets), np.concatenate(sizes), ends, order)

    def row(self, index: int) -> Row:
        """Return a row, counted from 0 over all epochs. Padding is at its end, with positions of its own."""
        inputs = np.full(self.context, self.pad, np.int64)
        targets = np.full(self.context, IGNORED, np.int64)
        positions = np.arange(self.context)
        begin = 0
        for offset, size in self._row_pieces(index):
            end = begin + size
            inputs[begin:end], targets[begin:end] = self._read(offset, size)
            positions[begin:] -= positions[begin]
            begin = end
        if begin < self.context:
            positions[begin:] -= positions[begin]
        return Row(inputs, targets, positions)

    def _row_pieces(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield the offset and the size of each piece of a row."""
        epoch, place = divmod(index, self.per_epoch)
        ends = self._epoch(epoch)[1]
        group = int(np.searchsorted(ends, place, side="right"))
        plan = self._group(epoch, group)
        row = plan.order[place - (int(ends[group - 1]) if group else 0)]
        pieces = slice(plan.bounds[row], plan.bounds[row + 1])
        return zip(plan.offsets[pieces].tolist(), plan.sizes[pieces].tolist(), strict=True)

    def _read(self, offset: int, size: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return inputs and targets. The input before a document is the end of text of its predecessor."""
        targets = self.stream[offset : offset + size]
        if not offset:
            return np.concatenate([[self.end_of_text], targets[:-1]]), targets
        return self.stream[offset - 1 : offset - 1 + size], targets

    def targets(self, index: int) -> int:
        """Return the number of targets of a row that count in the loss."""
        return sum(size for _, size in self._row_pieces(index))


class ExamplePacks(Packs):
    """Rows of whole examples, packed as documents are. An example as long as a row has a row of its own.

    `stream` holds records, which are inputs and targets as they are: nothing is put before or after an example. Pieces of a
    longer example from which nothing is learned are left out.
    """

    def _are_last(self, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return (tokens["flags"] & LAST).astype(bool)

    def _have_targets(self, starts: Ints, offsets: Ints, sizes: Ints) -> npt.NDArray[np.bool_]:
        scored = self.stream[int(starts[0]) : int(starts[-1])]["flags"] & SCORED
        before = np.concatenate([[0], np.cumsum(scored, dtype=np.int64)])
        first = offsets - starts[0]
        return before[first + sizes] > before[first]

    def _read(self, offset: int, size: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        records = self.stream[offset : offset + size]
        return records["input"], np.where(records["flags"] & SCORED, records["target"].astype(np.int64), IGNORED)

    def targets(self, index: int) -> int:
        """Return the number of targets of a row that count in the loss."""
        flags = (self.stream[offset : offset + size]["flags"] for offset, size in self._row_pieces(index))
        return sum(int(np.count_nonzero(part & SCORED)) for part in flags)


def best_fit(sizes: npt.NDArray[np.integer[Any]], capacity: int) -> Ints:
    """Pack items into rows: each goes into the fullest row that has room, or into a new one.

    Items of equal size are placed together, so time grows with the number of different sizes, not of items.

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
