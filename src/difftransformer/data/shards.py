"""Shards: a corpus that is tokenised once into flat binary files and read as one memory-mapped stream per split.

    manifest.json   tokenizer/   train-00000.bin   train-00001.bin ...   validation-00000.bin ...

The manifest is written last and atomically, so a writer that was stopped (by a full disk or a signal) leaves no folder
that passes for complete. A `.bin` file is a little-endian array without a header. Of text it holds token ids, and every
document is followed by the end-of-text token. Of examples, which have targets of their own, it holds records (see
`item_dtype`), and nothing is added to them.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, DataError
from ..files import write_text_atomically
from ..reading import is_plain_name, read_json
from ..stores import is_url, local_copy
from ..typed import build
from .documents import IGNORED
from .tokenizer import Tokenizer

MANIFEST_FILE = "manifest.json"
MANIFEST_VERSION = 1
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
Dtype = Literal["<u2", "<u4"]
Content = Literal["text", "examples"]
SCORED, LAST = 1, 2
"""Flags of a record: its target counts in the loss, and it is the last one of its example."""

_TOKENISE_AGAIN = "tokenise again with difftransformer tokenize"


@dataclass(frozen=True, kw_only=True)
class ShardFile:
    """One `.bin` file: name in the folder, number of tokens and SHA-256 of the bytes."""

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class SplitManifest:
    """One split. `tokens` includes one end-of-text token per document; `bytes` is the UTF-8 size of the texts alone."""

    documents: int
    tokens: int
    bytes: int
    shards: list[ShardFile]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of a shard folder.

    Attributes:
        version: Version of this format.
        source: Name of the source of the documents.
        request: Values that the caller recorded to recognise the folder.
        tokenizer_sha256: Fingerprint of the tokenizer.
        vocab_size: Number of token ids.
        end_of_text: Id of the token after every document.
        dtype: numpy name of the dtype of the token ids.
        splits: Splits by name.
        source_state: State of the source's files when they were read (see `source_state`), if it is known.
        content: What the files hold.
        held_out: Of text, the fields of `HeldOutShares`.
    """

    version: int
    source: str
    request: dict[str, Any]
    tokenizer_sha256: str
    vocab_size: int
    end_of_text: int
    dtype: Dtype
    splits: dict[str, SplitManifest]
    source_state: str | None = None
    content: Content = "text"
    held_out: dict[str, float] | None = None

    @property
    def item_dtype(self) -> np.dtype[Any]:
        """Dtype of the files."""
        return item_dtype(self.dtype, self.content)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the tokenizer and all shards: equal for equal data, wherever the folder is."""
        parts = [self.tokenizer_sha256, self.dtype, *([self.content] if self.content != "text" else [])]
        parts += [f"{split}:{shard.sha256}" for split in SPLITS for shard in self.splits[split].shards]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def item_dtype(dtype: Dtype, content: Content) -> np.dtype[Any]:
    """Return the dtype of files: token ids for text, or records of an input, its target and flags for examples."""
    if content == "text":
        return np.dtype(dtype)
    return np.dtype([("input", dtype), ("target", dtype), ("flags", "u1")])


def id_dtype(tokenizer: Tokenizer) -> Dtype:
    """Return the smallest dtype for a tokenizer's ids."""
    return "<u2" if tokenizer.vocab_size < 2**16 else "<u4"


def records_of(
    inputs: npt.NDArray[Any], targets: npt.NDArray[Any], ends: npt.NDArray[Any], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    """Return the records of examples laid end to end: (T,) inputs and targets, and `ends`, where each example ends."""
    is_scored = targets != IGNORED
    records = np.empty(len(inputs), dtype)
    records["input"], records["target"] = inputs, np.where(is_scored, targets, 0)
    records["flags"] = np.where(is_scored, SCORED, 0)
    records["flags"][ends - 1] |= LAST
    return records


class TokenStream:
    """Several one-dimensional arrays that are read as one, by a slice with step 1."""

    def __init__(self, parts: Sequence[npt.NDArray[Any]]) -> None:
        self.parts = list(parts)
        self._starts = np.cumsum([0, *(len(part) for part in self.parts)], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: slice) -> Any:
        """Return tokens in the dtype of the shards. A slice inside one file is a view of it.

        Raises:
            ValueError: The step of the slice is not 1.
        """
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"a token stream has no slices with step {step}; slice with step 1, then index the result")
        if len(self.parts) == 1:
            return self.parts[0][start:stop]
        first = max(int(np.searchsorted(self._starts, start, side="right")) - 1, 0)
        last = int(np.searchsorted(self._starts, stop))  # long documents that are read again make many parts
        pieces = [
            part[max(start - offset, 0) : stop - offset]
            for part, offset in zip(self.parts[first:last], self._starts[first:last].tolist(), strict=True)
        ]
        if not pieces:
            return self.parts[0][:0]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """One source of a mixture.

    Attributes:
        source: As in `DataConfig`.
        weight: Share of the rows, relative to the other weights.
        long_tokens: Length from which documents are long; 0 for no long documents.
        long_times: How many times an epoch long documents are read. Others are read once.
    """

    source: str
    weight: float = 1.0
    long_tokens: int = 0
    long_times: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ConfigError(f"weight={self.weight}: give a weight above 0, or leave {self.source} out")
        if self.long_tokens < 0 or self.long_times < 1:
            raise ConfigError(
                f"long_tokens={self.long_tokens}, long_times={self.long_times}: give a length in tokens, and 1 or more times"
            )


@dataclass(frozen=True, eq=False)
class Shards:
    """An open shard folder, or several of one tokenizer that are read as a mixture.

    Attributes:
        folder: Path of the folder. For a mixture, the folder above its sources.
        manifest: Its manifest. For a mixture, the sums over its sources.
        tokenizer: Tokenizer of the token ids.
        streams: Token ids by split. A mixture joins its sources one after another.
        sources: Sources of a mixture with their shards; empty otherwise.
        records: Records by split if the folder holds examples (their inputs are in `streams`); empty otherwise.
        url: URL of the original if the folder is a copy from a store.
    """

    folder: Path
    manifest: Manifest
    tokenizer: Tokenizer
    streams: Mapping[str, TokenStream]
    sources: "Sequence[tuple[SourceConfig, Shards]]" = ()
    records: Mapping[str, TokenStream] = field(default_factory=dict)
    url: str | None = None

    @classmethod
    def open(cls, folder: Path | str, *, verify: bool = True) -> "Shards":
        """Open a folder that `prepare_shards` has made.

        Args:
            folder: Path of the shard folder, or its URL, such as s3://bucket/shards/NAME. That is copied to this machine once.
            verify: Whether to read every file and compare its SHA-256 with the manifest. Sizes are always compared.

        Raises:
            DataError: The manifest is missing, damaged or of another version; a file is missing, truncated or changed;
                or the tokenizer is not the one that made the shards. Or a store cannot be read.
            ConfigError: There is no such kind of store, or its package is missing.
        """
        if is_url(folder):
            return cls._open_copy(str(folder).rstrip("/"), verify)
        folder = Path(folder)
        manifest = read_manifest(folder)
        tokenizer = Tokenizer.load(folder / "tokenizer")
        if tokenizer.sha256 != manifest.tokenizer_sha256:
            raise DataError(
                f"{folder / 'tokenizer'}: the tokenizer has sha256 {tokenizer.sha256}, the shards were made with "
                f"{manifest.tokenizer_sha256}; {_replace(folder)}"
            )
        dtype = manifest.item_dtype
        streams: dict[str, TokenStream] = {
            split: TokenStream([_open_shard(folder, shard, dtype, verify) for shard in manifest.splits[split].shards])
            for split in SPLITS
        }
        return (
            cls(folder, manifest, tokenizer, streams)
            if manifest.content == "text"
            else cls.of_records(folder, manifest, tokenizer, streams)
        )

    @classmethod
    def of_records(
        cls, folder: Path, manifest: Manifest, tokenizer: Tokenizer, records: Mapping[str, TokenStream]
    ) -> "Shards":
        """Return shards of examples."""
        inputs = {split: TokenStream([part["input"] for part in stream.parts]) for split, stream in records.items()}
        return cls(folder, manifest, tokenizer, inputs, records=records)

    @classmethod
    def _open_copy(cls, url: str, verify: bool) -> "Shards":
        copied = partial(local_copy, url, MANIFEST_FILE, copies(), cls.open)
        try:
            opened = cls.open(copied(), verify=verify)
        except DataError:  # it was whole when it was made
            opened = cls.open(copied(is_damaged=True), verify=verify)
        return dataclasses.replace(opened, url=url)

    @classmethod
    def mix(cls, sources: "Sequence[tuple[SourceConfig, Shards]]") -> "Shards":
        """Join open shards of one tokenizer into a mixture.

        Raises:
            DataError: Two of them have different tokenizers.
        """
        parts = [shards for _, shards in sources]
        first = parts[0]
        splits: dict[str, SplitManifest] = {}
        for shards in parts:
            if shards.manifest.tokenizer_sha256 != first.manifest.tokenizer_sha256:
                raise DataError(
                    f"{shards.folder} and {first.folder} were made with different tokenizers; {_TOKENISE_AGAIN}"
                )
        for split in SPLITS:
            held = [shards.manifest.splits[split] for shards in parts]
            splits[split] = SplitManifest(
                documents=sum(one.documents for one in held),
                tokens=sum(one.tokens for one in held),
                bytes=sum(one.bytes for one in held),
                shards=[
                    dataclasses.replace(file, file=f"{shards.folder.name}/{file.file}")
                    for shards, one in zip(parts, held, strict=True)
                    for file in one.shards
                ],
            )
        manifest = dataclasses.replace(
            first.manifest,
            source=" + ".join(config.source for config, _ in sources),
            request={},
            content="examples" if all(shards.records for shards in parts) else "text",
            splits=splits,
            source_state=None,
        )
        streams: dict[str, TokenStream] = {
            split: TokenStream([part for shards in parts for part in shards.streams[split].parts]) for split in SPLITS
        }
        return cls(first.folder.parent, manifest, first.tokenizer, streams, tuple(sources))

    @property
    def folders(self) -> list[Path]:
        """The shard folders: one, or one for each source of a mixture."""
        return [shards.folder for _, shards in self.sources] or [self.folder]

    def tokens(self, split: Split) -> TokenStream:
        """Return the memory-mapped token ids of a split: all documents, each followed by the end-of-text token.

        Of examples, they are the inputs.

        Raises:
            ConfigError: There is no such split.
        """
        if split not in self.streams:
            raise ConfigError(f"split is {split!r}; allowed are {', '.join(SPLITS)}")
        return self.streams[split]

    def text_bytes(self, split: Split) -> bytes:
        """Return the UTF-8 text of a split, with the documents joined without a separator."""
        table = self.tokenizer.token_bytes
        return b"".join(table[index] for part in self.tokens(split).parts for index in part.tolist())


def request_key(request: Mapping[str, Any]) -> str:
    """Return a short hash of a request, after which its folder is named."""
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:12]


def not_in_store(url: str) -> DataError:
    """Return the error for a folder in a store that lacks what a request asks for."""
    return DataError(
        f"{url} holds no shards of this request; make them with difftransformer tokenize in a folder of this machine, and "
        "copy what is in it there"
    )


def copies() -> Path:
    """Return this machine's folder for copies of shards in stores."""
    from ..ops.build import cache_folder

    return cache_folder() / "shards"


def _replace(folder: Path) -> str:
    """Say how to replace a damaged folder. It must go, since its manifest would be found again."""
    return f"delete {folder} and {_TOKENISE_AGAIN}"


def _open_shard(folder: Path, shard: ShardFile, dtype: np.dtype[Any], verify: bool) -> npt.NDArray[Any]:
    path, expected = folder / shard.file, shard.tokens * dtype.itemsize
    try:
        size = path.stat().st_size
        if size != expected:
            raise DataError(f"{path}: the file has {size} bytes, the manifest says {expected}; {_replace(folder)}")
        if verify:
            with open(path, "rb") as file:
                met = hashlib.file_digest(file, "sha256").hexdigest()
            if met != shard.sha256:
                raise DataError(
                    f"{path}: wrong checksum: expected sha256 {shard.sha256}, got {met}; {_replace(folder)}"
                )
        # A plain array, because slicing np.memmap itself costs several times more.
        return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    except FileNotFoundError:
        raise DataError(f"{path}: the file is missing, but the manifest lists it; {_replace(folder)}") from None
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); check permissions, or {_replace(folder)}"
        ) from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a shard folder atomically."""
    write_text_atomically(folder / MANIFEST_FILE, json.dumps(dataclasses.asdict(manifest), indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a shard folder.

    Raises:
        DataError: There is no manifest, or it is damaged or of another version.
    """
    path = folder / MANIFEST_FILE
    if not path.exists():
        raise DataError(
            f"{folder}: not a shard folder (no manifest.json, which is written last); "
            "run difftransformer tokenize to make one"
        )
    return manifest_of(read_json(path, error=DataError, advice=_TOKENISE_AGAIN), str(path))


def manifest_of(content: Any, path: str) -> Manifest:
    """Return the manifest of a file's content.

    Raises:
        DataError: See `read_manifest`.
    """
    version = content.get("version") if isinstance(content, dict) else None
    if version != MANIFEST_VERSION:
        raise DataError(
            f"{path}: manifest version {version!r}, this release reads version {MANIFEST_VERSION}; "
            f"{_TOKENISE_AGAIN}, or use the release that wrote it"
        )
    for former in ("origin", "template_sha256"):  # of installed packages and chats, which are no longer read
        content.pop(former, None)
    try:
        manifest = build(Manifest, content, source=path, error=DataError)
    except DataError as error:
        raise DataError(f"{error}; {_TOKENISE_AGAIN}") from None
    if missing := [split for split in SPLITS if split not in manifest.splits]:
        raise DataError(f"{path}: splits.{missing[0]}: missing; {_TOKENISE_AGAIN}")
    for shard in (shard for split in manifest.splits.values() for shard in split.shards):
        if not is_plain_name(shard.file):
            raise DataError(f"{path}: {shard.file!r} is not a file of this folder; {_TOKENISE_AGAIN}")
    return manifest
