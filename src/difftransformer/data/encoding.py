"""Tokenise a stream of documents in batches, in this process or in several, with bounded memory.

A worker is `python -m difftransformer.data.encoding TOKENIZER plain|special`. It reads batches of texts from standard input,
writes token ids to standard output, and ends with its input.
"""

import os
import queue
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from .documents import Example
from .tokenizer import Tokenizer

BATCH_CHARACTERS = 2**20  # of texts that are tokenised together; bounds the memory of a process
_OVERLAP_CHARACTERS = 200  # on each side of a cut, which are tokenised to see whether the cut changes tokens

Ids = npt.NDArray[np.uint32]


class Part(NamedTuple):
    """Text of a document up to a cut, or all of it. `ends` says whether the document ends here.

    An `example` has its tokens already, and no text. Parts of a conversation say whether they are `scored`.
    """

    split: str
    text: str
    ends: bool
    example: Example | None = None
    scored: bool | None = None

    @property
    def size(self) -> int:
        """What it adds to the size of a batch."""
        return len(self.text) if self.example is None else len(self.example.inputs)


def cut_parts(split: str, texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Part]:
    """Yield the parts of a document, joined again where a cut would change its tokens."""
    before: str | None = None
    for text in texts:
        if before is None:
            before = text
        elif _is_safe_cut(before, text, tokenizer):
            yield Part(split, before, False)
            before = text
        else:
            before += text
    yield Part(split, before or "", True)


def _is_safe_cut(before: str, after: str, tokenizer: Tokenizer) -> bool:
    before, after = before[-_OVERLAP_CHARACTERS:], after[:_OVERLAP_CHARACTERS]
    return tokenizer.encode(before + after) == tokenizer.encode(before) + tokenizer.encode(after)


def batches_of(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Group parts into batches of about `BATCH_CHARACTERS` characters, or tokens of examples. Conversations stay whole."""
    batch: list[Part] = []
    characters = 0
    for part in parts:
        batch.append(part)
        characters += part.size
        if characters >= BATCH_CHARACTERS and (part.ends or part.scored is None):
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], *, special: bool = False
) -> tuple[npt.NDArray[np.int64], Ids]:
    """Return the number of tokens of each text, and all token ids one after another.

    `special` says whether the names of special tokens stand for these tokens.
    """
    encoded = tokenizer.encode_batch(texts, special=special)
    counts = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return counts, np.fromiter(chain.from_iterable(encoded), np.uint32, int(counts.sum()))


def encode_batches(
    batches: Iterable[list[Part]], tokenizer: Tokenizer, folder: Path, processes: int, *, special: bool = False
) -> Iterator[tuple[list[Part], npt.NDArray[np.int64], Ids]]:
    """Yield each batch in order, with the results of `encode_texts`.

    Args:
        batches: See `batches_of`.
        tokenizer: The tokenizer.
        folder: Where it is saved, for other processes.
        processes: Number of processes; with 1, this process works with the tokenizer's own threads.
        special: See `encode_texts`.

    Raises:
        DataError: A process has ended.
    """
    workers = [_Worker(folder, special) for _ in range(processes)] if processes > 1 else []
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def encode(texts: list[str]) -> tuple[npt.NDArray[np.int64], Ids]:
        if not workers:
            return encode_texts(tokenizer, texts, special=special)
        worker = idle.get()
        try:
            return worker.encode(texts)
        finally:
            idle.put(worker)

    pool = ThreadPoolExecutor(max(2, processes))  # two threads: one tokenises while the other copies its tokens
    try:
        waiting: deque[Any] = deque()
        for batch in batches:
            waiting.append((batch, pool.submit(encode, [part.text for part in batch])))
            while len(waiting) > 2 * processes or (waiting and waiting[0][1].done()):
                done, future = waiting.popleft()
                yield done, *future.result()
        for done, future in waiting:
            yield done, *future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.end()


class _Worker:
    def __init__(self, folder: Path, special: bool) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder), "special" if special else "plain"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,  # a Ctrl-C at the terminal reaches this process alone
        )

    def encode(self, texts: list[str]) -> tuple[npt.NDArray[np.int64], Ids]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            _send(self.process.stdin, [text.encode() for text in texts])
            counts, ids = _receive(self.process.stdout)
        except (OSError, EOFError):
            raise DataError(
                f"a tokenising process ended with status {self.process.wait()}; it may have run out of memory: use fewer "
                "processes"
            ) from None
        return np.frombuffer(counts, np.int64), np.frombuffer(ids, np.uint32)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def _send(file: IO[bytes], items: Sequence[bytes]) -> None:
    """Write the number of items, their sizes and the items."""
    file.write(struct.pack(f"<{len(items) + 1}Q", len(items), *map(len, items)))
    file.writelines(items)
    file.flush()


def _receive(file: IO[bytes]) -> list[bytes]:
    """Read what `_send` has written.

    Raises:
        EOFError: The other side has ended.
    """

    def read(count: int) -> bytes:
        content = file.read(count)
        if len(content) < count:
            raise EOFError
        return content

    (count,) = struct.unpack("<Q", read(8))
    return [read(size) for size in struct.unpack(f"<{count}Q", read(8 * count))]


def main(folder: str, names: str) -> None:
    """Be a worker, until the input ends."""
    tokenizer = Tokenizer.load(folder)
    while True:
        try:
            texts = _receive(sys.stdin.buffer)
        except EOFError:
            return
        counts, ids = encode_texts(tokenizer, [text.decode() for text in texts], special=names == "special")
        _send(sys.stdout.buffer, [counts.tobytes(), ids.tobytes()])


if __name__ == "__main__":
    main(*sys.argv[1:])
