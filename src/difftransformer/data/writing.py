"""Write shards from a stream of documents: in one pass, with bounded memory, and resumable after each file.

While shards are written, progress.json holds how many batches of text are in them. It is written whenever a file of tokens is
complete and on disk, and a writer that finds it goes on from there. The manifest takes its place at the end.
"""

import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, DataError
from ..files import naming, write_text_atomically
from ..reading import read_json
from ..typed import build
from .chat import ChatTemplate
from .documents import IGNORED, AnyDocument, Conversation, Document, Example, LargeDocument
from .encoding import Ids, Part, batches_of, cut_parts, encode_batches
from .shards import (
    LAST,
    MANIFEST_VERSION,
    SCORED,
    SPLITS,
    Content,
    Dtype,
    Manifest,
    ShardFile,
    Split,
    SplitManifest,
    item_dtype,
    write_manifest,
)
from .tokenizer import Tokenizer

PROGRESS_FILE = "progress.json"
TOKENIZER_FOLDER = "tokenizer"
SHARD_TOKENS = 2**24
Documents = Iterable[tuple[Split, AnyDocument]]
_SAME = (
    "tokenizer_sha256",
    "shard_tokens",
    "content",
    "template_sha256",
)  # in the progress of a writer that is continued
_HELD: dict[type, str] = {Document: "text", Conversation: "messages", Example: "token ids"}


@dataclass(frozen=True, kw_only=True)
class WritingProgress:
    """Contents of progress.json.

    Attributes:
        tokenizer_sha256: Fingerprint of the tokenizer.
        source_state: State of the source's files (see `source_state`), if it is known.
        shard_tokens: Tokens per file.
        batches: Number of batches of text that are written.
        text_sha256: Fingerprint of the text read up to there.
        splits: What is written of each split; `tokens` beyond those of its files are in a file that is not complete.
        content: What the files hold.
        template_sha256: Fingerprint of the chat template, if conversations are written.
    """

    tokenizer_sha256: str
    source_state: str | None
    shard_tokens: int
    batches: int = 0
    text_sha256: str = ""
    splits: dict[str, SplitManifest] = field(default_factory=dict)
    content: Content = "text"
    template_sha256: str | None = None


class TextDigest:
    """SHA-256 over names and texts of documents, which it passes on."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def over(self, documents: Iterable[AnyDocument]) -> Iterator[AnyDocument]:
        """Yield documents, each after it was taken into the sum."""
        for document in documents:
            name = document.name.encode("utf-8", "surrogatepass")
            self._digest.update(len(name).to_bytes(8, "little") + name + document.size_bytes.to_bytes(8, "little"))
            for part in document.parts():
                self._digest.update(part.encode("utf-8", "surrogatepass"))
            yield document

    def hexdigest(self) -> str:
        """Return the sum over the documents so far."""
        return self._digest.hexdigest()


def write_shards(
    folder: Path | str,
    train: Iterable[AnyDocument],
    validation: Iterable[AnyDocument],
    tokenizer: Tokenizer,
    *,
    source: str = "",
    source_state: str | None = None,
    request: Mapping[str, Any] | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> Manifest:
    """Tokenise documents into a shard folder, replacing the shards in it.

    Args:
        folder: Folder to write; created if it is missing.
        train: Training documents: texts, or examples.
        validation: Validation documents.
        tokenizer: Tokenizer, which is saved into the folder too.
        source, source_state, request: See `Manifest`.
        shard_tokens: Tokens per file. A document may continue in the next file.

    Returns:
        The manifest as written.

    Raises:
        ConfigError: `shard_tokens` is below 1.
        DataError: A split has no documents, the folder cannot be written to, or the disk is full.
    """
    folder = Path(folder)

    def documents() -> Documents:
        for split, held in zip(SPLITS, (train, validation), strict=True):
            for document in held:
                yield split, document

    writer = ShardWriter(folder, tokenizer, source_state=source_state, shard_tokens=shard_tokens)
    with writer:
        writer.write(documents())
        manifest = writer.manifest(source=source, request=dict(request or {}))
        write_manifest(folder, manifest)
        (folder / PROGRESS_FILE).unlink()
    return manifest


class ShardWriter:
    """Writes the shards of a folder. As a context manager it removes them if the block fails, see `resumable`.

    Args:
        folder: Folder to write; created if it is missing.
        tokenizer: Tokenizer, which is saved into the folder too.
        source_state: State of the source's files, if it is known.
        shard_tokens: Tokens per file.
        resumable: Whether to go on from what a writer of the same request has left in the folder, and to leave complete
            files there if the block is interrupted.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        *,
        source_state: str | None = None,
        shard_tokens: int = SHARD_TOKENS,
        resumable: bool = False,
    ) -> None:
        if shard_tokens < 1:
            raise ConfigError(f"shard_tokens is {shard_tokens}; it must be at least 1")
        self.folder, self.tokenizer, self.resumable = folder, tokenizer, resumable
        self.dtype: Dtype = "<u2" if tokenizer.vocab_size < 2**16 else "<u4"
        self.progress = WritingProgress(
            tokenizer_sha256=tokenizer.sha256, source_state=source_state, shard_tokens=shard_tokens
        )
        self._splits: dict[str, _SplitWriter] = {}

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for split in self._splits.values():
            split.close()
        if error is None:
            return
        if not (self.resumable and self.progress.batches) or isinstance(error, OSError):
            with suppress(OSError):
                remove_shards(self.folder)
        if isinstance(error, OSError):
            what = "the disk is full" if error.errno == errno.ENOSPC else "cannot write"
            raise DataError(
                f"{self.folder}: {what} while writing {Path(error.filename or self.folder).name} "
                f"({error.strerror or error}); the partial shards were removed; free some space or name another folder"
            ) from error

    def write(self, documents: Documents, *, digest: TextDigest | None = None, processes: int = 1) -> None:
        """Tokenise documents, or those that a writer before has not written.

        Args:
            documents: Documents with their splits.
            digest: Fingerprint of the text that `documents` has read.
            processes: Number of processes that tokenise.

        Raises:
            TextChanged: What was written before came from another text; nothing of it is left.
            DataError: A split has no documents, or a document cannot be read.
            OSError: A file cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        documents = iter(documents)
        first = list(islice(documents, 1))
        self.kind = _kind(first[0][1]) if first else Document
        if self.kind is Conversation:
            self.template = ChatTemplate(self.tokenizer)
            self.tokenizer.chat_template = self.template.template  # which is saved with the shards and the model
            self.progress = dataclasses.replace(self.progress, template_sha256=self.template.sha256)
        if self.kind is not Document:
            self.progress = dataclasses.replace(self.progress, content="examples")
        found = self._found()
        if found is None:
            remove_shards(self.folder)
            self.tokenizer.save(self.folder / TOKENIZER_FOLDER)
            self._save()
        else:
            self.progress = found
        self._splits = {split: _SplitWriter(self.folder, split, self.item_dtype, self.progress) for split in SPLITS}
        parts = (part for split, document in chain(first, documents) for part in self._parts(split, document))
        done, digests = self.progress.batches, {self.progress.batches: self.progress.text_sha256}

        def batches() -> Iterator[list[Part]]:
            number = 0
            for number, batch in enumerate(batches_of(parts), start=1):
                text_sha256 = digest.hexdigest() if digest else ""
                if number == done and text_sha256 != digests[done]:
                    raise TextChanged
                if number > done:
                    digests[number] = text_sha256
                    yield batch
            if number < done:
                raise TextChanged

        saved, special = self.folder / TOKENIZER_FOLDER, self.kind is Conversation
        encoded = encode_batches(batches(), self.tokenizer, saved, processes, special=special)
        for number, (batch, counts, ids) in enumerate(encoded, start=done + 1):
            has_completed = self._add(batch, counts, ids)
            text_sha256 = digests.pop(number)
            if has_completed:
                for split in self._splits.values():
                    split.flush()
                self.progress = dataclasses.replace(
                    self.progress, batches=number, text_sha256=text_sha256, splits=self._manifests()
                )
                self._save()
        for split in self._splits.values():
            split.finish()

    @property
    def item_dtype(self) -> np.dtype[Any]:
        """What a file is an array of."""
        return item_dtype(self.dtype, self.progress.content)

    def _parts(self, split: Split, document: AnyDocument) -> Iterator[Part]:
        if _kind(document) is not self.kind:
            raise DataError(
                f"{self.folder}: {document.name} holds {_HELD[_kind(document)]}, and what comes before it {_HELD[self.kind]}; "
                "divide them into two sources, and name both in data.mixture"
            )
        if isinstance(document, Example):
            yield Part(split, "", True, document)
        elif isinstance(document, Conversation):
            segments = list(self.template.segments(document))
            for index, (text, scored) in enumerate(segments, start=1):
                yield Part(split, text, index == len(segments), scored=scored)
        else:
            yield from cut_parts(split, document.parts(), self.tokenizer)

    def _add(self, batch: list[Part], counts: npt.NDArray[np.int64], ids: Ids) -> bool:
        """Append a batch of parts with their tokens. Return whether a file is complete by it."""
        has_completed = False
        for name, split in self._splits.items():
            mine = np.array([part.split == name for part in batch])
            parts = [part for part in batch if part.split == name]
            split.documents += sum(part.ends for part in parts)
            split.bytes += sum(len(part.text.encode()) for part in parts)
            tokens, own = ids[np.repeat(mine, counts)], counts[mine]
            if self.kind is Conversation:
                items = self._records(_examples(parts, own, tokens))
            elif self.kind is Example:
                items = self._records([part.example for part in parts if part.example is not None])
            else:
                stops = np.cumsum(own)[[part.ends for part in parts]]
                items = np.insert(tokens, stops, self.tokenizer.end_of_text).astype(self.dtype)
            has_completed |= split.add(items)
        return has_completed

    def _records(self, examples: list[Example]) -> npt.NDArray[Any]:
        """Return the records of examples (see `item_dtype`)."""
        records = np.zeros(sum(len(example.inputs) for example in examples), self.item_dtype)
        for example in examples:
            if max(example.inputs.max(), example.targets.max()) >= self.tokenizer.vocab_size:
                raise DataError(
                    f"{example.name} holds the token id {max(example.inputs.max(), example.targets.max())}, and the tokenizer "
                    f"has {self.tokenizer.vocab_size:,}; name the tokenizer that the ids come from in data.tokenizer"
                )
        if examples:
            targets = np.concatenate([example.targets for example in examples])
            records["input"] = np.concatenate([example.inputs for example in examples])
            records["target"] = np.where(targets == IGNORED, 0, targets)
            records["flags"] = np.where(targets == IGNORED, 0, SCORED)
            records["flags"][np.cumsum([len(example.inputs) for example in examples]) - 1] |= LAST
        return records

    def manifest(self, *, source: str, request: dict[str, Any], origin: dict[str, Any] | None = None) -> Manifest:
        """Return the manifest of what is written."""
        return Manifest(
            version=MANIFEST_VERSION,
            source=source,
            source_state=self.progress.source_state,
            request=request,
            tokenizer_sha256=self.tokenizer.sha256,
            vocab_size=self.tokenizer.vocab_size,
            end_of_text=self.tokenizer.end_of_text,
            dtype=self.dtype,
            splits=self._manifests(),
            origin=origin or {},
            content=self.progress.content,
            template_sha256=self.progress.template_sha256,
        )

    def _manifests(self) -> dict[str, SplitManifest]:
        return {name: split.manifest() for name, split in self._splits.items()}

    def _save(self) -> None:
        write_text_atomically(self.folder / PROGRESS_FILE, json.dumps(dataclasses.asdict(self.progress)) + "\n")

    def _found(self) -> WritingProgress | None:
        """Return the progress of a writer before, if this one would write the same and its files are there."""
        if not self.resumable:
            return None
        found, own, item = read_progress(self.folder), self.progress, self.item_dtype.itemsize
        if found is None or not found.batches:
            return None
        if any(getattr(found, key) != getattr(own, key) for key in _SAME):
            return None
        for name, split in found.splits.items():
            sizes = [shard.tokens * item for shard in split.shards]
            sizes.append(split.tokens * item - sum(sizes))
            paths = [self.folder / f"{name}-{index:05d}.bin" for index in range(len(sizes))]
            if any(
                size and not (path.is_file() and path.stat().st_size >= size)
                for path, size in zip(paths, sizes, strict=True)
            ):
                return None
        return dataclasses.replace(found, source_state=own.source_state)


def _kind(document: AnyDocument) -> type:
    return Document if isinstance(document, LargeDocument) else type(document)


def _examples(parts: list[Part], counts: npt.NDArray[np.int64], tokens: Ids) -> list[Example]:
    """Return conversations that are tokenised as examples: each token is predicted from those before it."""
    scored = np.repeat([part.scored for part in parts], counts)
    targets = np.where(scored, tokens.astype(np.int64), IGNORED)
    stops = np.cumsum(counts)[[part.ends for part in parts]].tolist()
    spans = pairwise([0, *stops])
    return [Example("", tokens[start : stop - 1].astype(np.int64), targets[start + 1 : stop]) for start, stop in spans]


class TextChanged(Exception):
    """The text is not the one that the shards in the folder were begun with."""


def read_progress(folder: Path) -> WritingProgress | None:
    """Return the progress of a folder that is being written, or None if it has none that can be read."""
    path = folder / PROGRESS_FILE
    if not path.exists():
        return None
    with suppress(DataError):
        return build(WritingProgress, read_json(path, error=DataError, advice=""), source=str(path), error=DataError)
    return None


def remove_shards(folder: Path) -> None:
    """Remove the manifest, the progress and the tokens of a folder."""
    for pattern in ("manifest.json", PROGRESS_FILE, *(f"{split}-[0-9]*.bin" for split in SPLITS)):
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)


class _SplitWriter:
    """Appends token ids to the files of a split."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], progress: WritingProgress) -> None:
        self.folder, self.split, self.dtype, self.shard_tokens = folder, split, dtype, progress.shard_tokens
        before = progress.splits.get(split, SplitManifest(documents=0, tokens=0, bytes=0, shards=[]))
        self.documents, self.bytes, self.shards = before.documents, before.bytes, list(before.shards)
        self.pending = before.tokens - sum(shard.tokens for shard in self.shards)  # tokens in the file that is open
        self.file: IO[bytes] | None = None
        self.sum = hashlib.sha256()
        if self.pending:
            path = self._path()
            with naming(path), path.open("r+b") as file:
                content = file.read(self.pending * dtype.itemsize)
                file.truncate(len(content))
            self.sum.update(content)

    def _path(self) -> Path:
        return self.folder / f"{self.split}-{len(self.shards):05d}.bin"

    def add(self, tokens: npt.NDArray[Any]) -> bool:
        """Append tokens. Return whether a file is complete by them."""
        before = len(self.shards)
        while len(tokens):
            taken = tokens[: self.shard_tokens - self.pending]
            content = taken.tobytes()
            with naming(self._path()):
                if self.file is None:
                    self.file = open(self._path(), "ab" if self.pending else "wb")  # noqa: SIM115 - open for long
                self.file.write(content)
            self.sum.update(content)
            self.pending += len(taken)
            if self.pending == self.shard_tokens:
                self._complete()
            tokens = tokens[len(taken) :]
        return len(self.shards) > before

    def _complete(self) -> None:
        path = self._path()
        self.flush()
        self.close()
        self.shards.append(ShardFile(file=path.name, tokens=self.pending, sha256=self.sum.hexdigest()))
        self.pending, self.sum = 0, hashlib.sha256()

    def flush(self) -> None:
        """Bring what is written to the disk."""
        if self.file is not None:
            with naming(self._path()):
                self.file.flush()
                os.fsync(self.file.fileno())

    def finish(self) -> None:
        """Complete the last file."""
        if self.pending:
            self._complete()
        if not self.documents:
            raise DataError(
                f"{self.folder}: the {self.split} split has no documents, it needs at least 1; "
                "give more documents, or another split seed or share"
            )

    def close(self) -> None:
        """Close the file that is open."""
        if self.file is not None:
            with suppress(OSError):
                self.file.close()
            self.file = None

    def manifest(self) -> SplitManifest:
        """Return what is written."""
        tokens = sum(shard.tokens for shard in self.shards) + self.pending
        return SplitManifest(documents=self.documents, tokens=tokens, bytes=self.bytes, shards=list(self.shards))
