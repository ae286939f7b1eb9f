"""Write shards from a stream of documents: in one pass, in batches, with bounded memory. The manifest is written last."""

import errno
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from ..files import naming
from .documents import AnyDocument, Document, Example, LargeDocument, cut_text
from .held_out import HeldOutLines
from .shards import (
    MANIFEST_VERSION,
    SPLITS,
    Content,
    Manifest,
    ShardFile,
    Split,
    SplitManifest,
    id_dtype,
    item_dtype,
    records_of,
    write_manifest,
)
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SHARD_TOKENS = 2**24
BATCH_CHARACTERS = 2**20  # of texts that are tokenised together; bounds the memory
PIECE_CHARACTERS = 2**16  # of a text, so that all threads of the tokenizer have work
_OVERLAP_CHARACTERS = 200  # on each side of a cut, which are tokenised to see whether the cut changes tokens
_HELD: dict[type, str] = {Document: "text", Example: "token ids"}

Documents = Iterable[tuple[Split, AnyDocument]]


class Part(NamedTuple):
    """Text of a document up to a cut, or all of it. `ends` says whether the document ends here.

    An `example` has its tokens already, and no text.
    """

    split: str
    text: str
    ends: bool
    example: Example | None = None

    @property
    def size(self) -> int:
        """Size in a batch: characters of text, or tokens of an example."""
        return len(self.text) if self.example is None else len(self.example.inputs)


class TextDigest:
    """SHA-256 over the names and texts of documents, computed while they are read."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def over(self, documents: Iterable[AnyDocument]) -> Iterator[AnyDocument]:
        """Yield documents, and add each to the digest."""
        for document in documents:
            name = document.name.encode("utf-8", "surrogatepass")
            self._digest.update(len(name).to_bytes(8, "little") + name + document.size_bytes.to_bytes(8, "little"))
            for part in document.parts():
                self._digest.update(part.encode("utf-8", "surrogatepass"))
            yield document

    def hexdigest(self) -> str:
        """Return the digest of the documents so far."""
        return self._digest.hexdigest()


def write_documents(
    folder: Path,
    documents: Documents,
    tokenizer: Tokenizer,
    *,
    source: str,
    source_state: str | None,
    request: Callable[[], dict[str, Any]],
    shard_tokens: int = SHARD_TOKENS,
    on_text: Callable[[int], None] = lambda size: None,
) -> Manifest:
    """Tokenise a stream of documents with their splits into a new shard folder, and return the manifest as written.

    Args:
        folder: Folder to write; created if it is missing. The caller removes it after an error.
        documents: Documents with their splits.
        tokenizer: Tokenizer, which is saved into the folder too.
        source, source_state: See `Manifest`.
        request: Returns `Manifest.request` when all documents have been read.
        shard_tokens: Tokens per file. A document may continue in the next file.
        on_text: Called with the number of bytes of a `LargeDocument` that have been read since the last call.

    Raises:
        DataError: A split has no documents, the tokenizer is not one of text, the folder cannot be written to, or the disk
            is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        documents = iter(documents)
        first = list(islice(documents, 1))
        kind = _kind(first[0][1]) if first else Document
        if kind is not Example and tokenizer.is_of_ids:
            raise DataError(
                f"{source} holds {_HELD[kind]}, and the ids of its tokenizer stand for no text; name another one in "
                "data.tokenizer, such as bpe or byte"
            )
        writer, lines = _Writer(folder, tokenizer, kind, shard_tokens), HeldOutLines()
        writer.write(lines.over(chain(first, documents)), on_text)
        shares = lines.shares()
        if shares is not None:
            logger.info("%s: %s", source, shares)
        manifest = Manifest(
            version=MANIFEST_VERSION,
            source=source,
            source_state=source_state,
            request=request(),
            tokenizer_sha256=tokenizer.sha256,
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            dtype=writer.dtype,
            splits={name: split.manifest() for name, split in writer.splits.items()},
            content=writer.content,
            held_out=None if shares is None else shares._asdict(),
        )
        write_manifest(folder, manifest)
    except OSError as error:
        what = "the disk is full" if error.errno == errno.ENOSPC else "cannot write"
        raise DataError(
            f"{folder}: {what} while writing {Path(error.filename or folder).name} ({error.strerror or error}); "
            "the partial shards were removed; free some space or name another folder"
        ) from error
    return manifest


class _Writer:
    """Tokenises documents of one kind and appends their tokens to the files of their splits."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, kind: type, shard_tokens: int) -> None:
        self.folder, self.tokenizer, self.kind = folder, tokenizer, kind
        tokenizer.save(folder / "tokenizer")
        self.dtype = id_dtype(tokenizer)
        self.content: Content = "text" if kind is Document else "examples"
        self.item_dtype = item_dtype(self.dtype, self.content)
        self.splits = {split: _SplitWriter(folder, split, shard_tokens) for split in SPLITS}

    def write(self, documents: Documents, on_text: Callable[[int], None]) -> None:
        """Write all documents and complete the files."""
        parts = (part for split, document in documents for part in self._parts(split, document, on_text))
        try:
            for batch in batches_of(parts):
                encoded = self.tokenizer.encode_batch([part.text for part in batch])
                counts = np.fromiter(map(len, encoded), np.int64, len(encoded))
                self._add(batch, counts, np.fromiter(chain.from_iterable(encoded), np.uint32, int(counts.sum())))
            for split in self.splits.values():
                split.finish()
        finally:
            for split in self.splits.values():
                split.abandon()

    def _parts(self, split: Split, document: AnyDocument, on_text: Callable[[int], None]) -> Iterator[Part]:
        if _kind(document) is not self.kind:
            raise DataError(
                f"{self.folder}: {document.name} holds {_HELD[_kind(document)]}, and what comes before it {_HELD[self.kind]}; "
                "divide them into two sources, and name both in data.mixture"
            )
        if isinstance(document, Example):
            yield Part(split, "", True, document)
        else:
            for part in cut_parts(split, document.parts(), self.tokenizer):
                yield part
                if isinstance(document, LargeDocument):
                    on_text(len(part.text.encode()))

    def _add(self, batch: list[Part], counts: npt.NDArray[np.int64], ids: npt.NDArray[np.uint32]) -> None:
        """Append a batch of parts with their tokens."""
        for name, split in self.splits.items():
            mine = np.array([part.split == name for part in batch])
            parts = [part for part in batch if part.split == name]
            split.documents += sum(part.ends for part in parts)
            split.bytes += sum(len(part.text.encode()) for part in parts)
            tokens, own = ids[np.repeat(mine, counts)], counts[mine]
            if self.kind is Example:
                items = self._records([part.example for part in parts if part.example is not None])
            else:
                stops = np.cumsum(own)[[part.ends for part in parts]]
                items = np.insert(tokens, stops, self.tokenizer.end_of_text).astype(self.dtype)
            split.add(items)

    def _records(self, examples: list[Example]) -> npt.NDArray[Any]:
        """Return the records of examples (see `item_dtype`)."""
        for example in examples:
            if max(example.inputs.max(), example.targets.max()) >= self.tokenizer.vocab_size:
                raise DataError(
                    f"{example.name} holds the token id {max(example.inputs.max(), example.targets.max())}, and the tokenizer "
                    f"has {self.tokenizer.vocab_size:,}; name the tokenizer that the ids come from in data.tokenizer"
                )
        if not examples:
            return np.empty(0, self.item_dtype)
        inputs, targets = (np.concatenate([getattr(one, name) for one in examples]) for name in ("inputs", "targets"))
        return records_of(inputs, targets, np.cumsum([len(one.inputs) for one in examples]), self.item_dtype)


def cut_parts(split: str, texts: Iterable[str], tokenizer: Tokenizer) -> Iterator[Part]:
    """Yield the parts of a document in pieces of about `PIECE_CHARACTERS`, joined where a cut would change tokens."""
    before: str | None = None
    for text in cut_text(texts, PIECE_CHARACTERS):
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
    """Group parts into batches of about `BATCH_CHARACTERS` characters, or tokens of examples."""
    batch: list[Part] = []
    characters = 0
    for part in parts:
        batch.append(part)
        characters += part.size
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _kind(document: AnyDocument) -> type:
    return Document if isinstance(document, LargeDocument) else type(document)


class _SplitWriter:
    """Appends token ids to the files of a split."""

    def __init__(self, folder: Path, split: str, shard_tokens: int) -> None:
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.documents = self.bytes = self.pending = 0  # tokens in the file that is open
        self.shards: list[ShardFile] = []
        self.file: IO[bytes] | None = None
        self.sum = hashlib.sha256()

    def _path(self) -> Path:
        return self.folder / f"{self.split}-{len(self.shards):05d}.bin"

    def add(self, tokens: npt.NDArray[Any]) -> None:
        """Append tokens."""
        while len(tokens):
            taken = tokens[: self.shard_tokens - self.pending]
            content = taken.tobytes()
            with naming(self._path()):
                if self.file is None:
                    self.file = open(self._path(), "wb")  # noqa: SIM115 - open for long
                self.file.write(content)
            self.sum.update(content)
            self.pending += len(taken)
            if self.pending == self.shard_tokens:
                self._complete()
            tokens = tokens[len(taken) :]

    def _complete(self) -> None:
        path, file = self._path(), self.file
        assert file is not None
        with naming(path):
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self.file = None
        self.shards.append(ShardFile(file=path.name, tokens=self.pending, sha256=self.sum.hexdigest()))
        self.pending, self.sum = 0, hashlib.sha256()

    def finish(self) -> None:
        """Complete the last file."""
        if self.pending:
            self._complete()
        if not self.documents:
            raise DataError(
                f"{self.folder}: the {self.split} split has no documents, it needs at least 1; "
                "give more documents, or another split seed or share"
            )

    def abandon(self) -> None:
        """Close a file that is not complete."""
        if self.file is not None:
            with suppress(OSError):
                self.file.close()

    def manifest(self) -> SplitManifest:
        """Return the manifest of the split."""
        tokens = sum(shard.tokens for shard in self.shards)
        return SplitManifest(documents=self.documents, tokens=tokens, bytes=self.bytes, shards=self.shards)
