"""Read documents from a source, and split them into training and validation.

A source is one of `SOURCES`. Every reader yields documents in an order that depends on their names alone, and holds at most one
of them in memory; of a large text file, only parts. Text that is missing, empty, broken or not UTF-8 is refused with a
one-line error that names the file and the line.
"""

import hashlib
import json
import math
import os
import sysconfig
import time
import warnings
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DataError
from ..typed import short
from . import packages
from .documents import FIELDS, AnyDocument, Document, Example, LargeDocument, read_example
from .records import json_lines, load_set, read_text, readable, set_rows, split_hash
from .shards import SPLITS, Split

STDLIB = "python-stdlib"
# Tests, bundled wheels, editors and demos are no library sources, or differ between installations; tables are generated.
_SKIPPED_FOLDERS = frozenset({
    "__pycache__", "dist-packages", "encodings", "ensurepip", "idle_test", "idlelib", "lib-dynload", "pydoc_data",
    "site-packages", "test", "tests", "turtledemo",
})  # fmt: skip
_SKIPPED_FILES = frozenset({"html/entities.py", "token.py", "symbol.py"})
TEXT_SUFFIXES = (".txt", ".md", ".py")
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz")
SUFFIXES = (*TEXT_SUFFIXES, *JSONL_SUFFIXES)
SOURCES = (
    f"{STDLIB}; {packages.NAME}; a folder of files that end in {', '.join(SUFFIXES)}; one such file; "
    "hf:NAME[:CONFIG][:SPLIT] (a set of the Hugging Face hub, or a folder or file that datasets reads, such as CSV or "
    "Parquet), or hf-stream:NAME[:CONFIG][:SPLIT], which is not stored first"
)
HUB_PREFIXES = ("hf:", "hf-stream:")
LARGE_BYTES = 2**24
"""Size from which a text file is read in parts."""

_RECENT_SECONDS = 2.0  # the coarsest resolution of file times


@dataclass
class Reading:
    """How much of a source has been read, in bytes of files or rows of a data set. `total` is 0 if it is unknown.

    A `LargeDocument` is read several times; its last reader adds its bytes.
    """

    report: Callable[[int, int], None] = lambda done, total: None
    done: int = 0
    total: int = 0

    def add(self, size: int) -> None:
        """Add what has been read since the last call."""
        self.done += size
        if self.total:
            self.report(self.done, self.total)


def read_documents(source: str) -> list[Document]:
    """Read all documents of a source into memory, in an order fixed by their names.

    Args:
        source: See `iter_documents`.

    Returns:
        At least one document. No document is empty.

    Raises:
        DataError: The source is none of these, is missing or empty, or holds text that is not UTF-8.
    """
    documents = []
    for document in iter_documents(source):
        if isinstance(document, Example):
            raise DataError(f"source {source!r} holds token ids and no text; name a source of text")
        documents.append(Document(document.name, document.text))
    return documents


def iter_documents(source: str, reading: Reading | None = None) -> Iterator[AnyDocument]:
    """Yield the documents of a source, in an order fixed by their names.

    Args:
        source: `python-stdlib` (see `read_stdlib`); `python-packages` (see `packages.py`); a folder, which is read recursively
            without hidden files; a `.txt`, `.md` or `.py` file, which is one document; a `.jsonl` file (also
            `.jsonl.gz`) with one object per line that has a string `text` and optionally a string `name`; or
            `hf:NAME[:CONFIG][:SPLIT]`, which `datasets` reads (extra `data`): a set of the hub, or a folder or file of
            Parquet or another of its formats. The split defaults to `train`, and CONFIG may be empty, as in
            `hf:NAME::validation`. With `hf-stream:` in place of `hf:`, the set is not stored first.
        reading: Gets how much of it has been read.

    Names of files may end in upper case too. A file or row whose text is empty is left out, and counted in a warning. A
    row with `input_ids` in place of `text` is an `Example`.

    Raises:
        DataError: The source is none of these, is missing or empty, or holds text that is broken or not UTF-8.
    """
    reading = reading or Reading()
    if source == STDLIB:
        return read_stdlib()
    if source == packages.NAME:
        return packages.read()
    if source.startswith(HUB_PREFIXES):
        return _read_hub(source, reading)
    path = Path(source)
    if not source or not path.exists():
        raise DataError(f"source {source!r}: no such file or folder; allowed are {SOURCES}")
    if path.is_dir():
        files, missing = walk(path, SUFFIXES), "all {} text files are empty; name a folder that holds text"
        if not files:
            raise DataError(
                f"{path}: no {', '.join(SUFFIXES)} file in this folder; name a folder that holds text, or write "
                f"hf:{path} to read other files with datasets"
            )
    else:
        files, missing = [(path.name, path)], "the file has no text; name another one"
        if is_named(path, JSONL_SUFFIXES):
            missing = 'the file has no text; give one JSON object with a "text" field on each line'
        if not is_named(path, SUFFIXES):
            raise DataError(f"source {source!r}: files ending in {path.suffix!r} are not read; allowed are {SOURCES}")
    for _, one in files:
        with readable(one):
            reading.total += one.stat().st_size
    documents = (document for name, one in files for document in _read_file(one, name, reading))
    return _with_text(documents, str(path), missing.format(len(files)))


def is_named(path: Path, suffixes: Sequence[str]) -> bool:
    """Whether the name of a file ends in one of the suffixes, in upper or lower case."""
    return path.name.lower().endswith(tuple(suffixes))


def walk(
    folder: Path, suffixes: Sequence[str], skipped_folders: frozenset[str] = frozenset()
) -> list[tuple[str, Path]]:
    """Return (name, path) of the files below a folder, sorted by name, without hidden files and folders.

    A folder with several names (by links) is read once.
    """
    files, seen, tops = list[tuple[str, Path]](), set[str](), [str(folder)]
    for top in tops:  # folders that are linked follow, so that what is in this one keeps its name
        for current, folders, names in os.walk(top):
            if (real := os.path.realpath(current)) in seen:
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(n for n in folders if not n.startswith(".") and n not in skipped_folders)
            tops += [link for name in folders if os.path.islink(link := os.path.join(current, name))]
            visible = (Path(current, name) for name in names if not name.startswith("."))
            files += [(path.relative_to(folder).as_posix(), path) for path in visible if is_named(path, suffixes)]
    return sorted(files)


def stdlib_files() -> tuple[Path, list[tuple[str, Path]]]:
    """Return the folder of the running interpreter's library, and (name, path) of its sources without tests."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return folder, walk(folder, (".py",), _SKIPPED_FOLDERS)


def read_stdlib() -> Iterator[Document]:
    """Yield the library sources of the running interpreter, without generated tables, sorted by name.

    Raises:
        DataError: This Python was installed without its sources.
    """
    folder, files = stdlib_files()
    is_empty = True
    for name, path in files:
        # _sysconfigdata records how this interpreter was built.
        if name in _SKIPPED_FILES or path.name.startswith("_sysconfigdata") or name.startswith("config-"):
            continue
        with suppress(DataError):
            if text := read_text(path):
                is_empty = False
                yield Document(name, text)
    if is_empty:
        raise DataError(
            f"{STDLIB}: no library sources in {folder} (this Python was installed without them); name another source"
        )


def source_state(source: str) -> str | None:
    """Return a fingerprint of the names, sizes and times of a source's files. If it is the same, so is the text.

    A set of the Hugging Face hub is assumed not to change. Returns None if files have just changed, since another change
    might leave their times the same.
    """
    if source == packages.NAME:
        return hashlib.sha256(packages.LIST.read_bytes()).hexdigest()
    located = _source_files(source)
    if located is None:
        return hashlib.sha256(source.encode()).hexdigest()
    folder, files = located
    states: list[object] = [str(folder.absolute())]
    try:
        for name, path in files:
            status = path.stat()
            if max(status.st_mtime, status.st_ctime) > time.time() - _RECENT_SECONDS:
                return None
            states.append((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    except OSError:
        return None
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()


def is_missing(source: str) -> bool:
    """Whether a source is a folder or a file that is not there."""
    located = _source_files(source)
    return located is not None and not located[0].exists()


def source_bytes(source: str) -> int | None:
    """Return the size of a source's files, or None for a set of the Hugging Face hub."""
    located = _source_files(source)
    return None if located is None else sum(path.stat().st_size for _, path in located[1] if path.exists())


def is_of_unknown_size(source: str) -> bool:
    """Whether the size of a source's text is unknown: its files are compressed, or it is a data set."""
    located = _source_files(source)
    return located is None or not all(is_named(path, (*TEXT_SUFFIXES, ".jsonl")) for _, path in located[1])


def _source_files(source: str) -> tuple[Path, list[tuple[str, Path]]] | None:
    """Return the folder or file of a source and its files with their names, or None for a set of the hub."""
    if source == STDLIB:
        return stdlib_files()
    suffixes: Sequence[str] = SUFFIXES
    if source == packages.NAME:
        return None
    folder = Path(source)
    if source.startswith(HUB_PREFIXES):
        folder, suffixes = Path(source.split(":")[1]), [""]  # datasets reads local folders with files of any kind
        if not folder.exists():
            return None
    return folder, walk(folder, suffixes) if folder.is_dir() else [(folder.name, folder)]


def iter_split(
    documents: Iterable[AnyDocument], *, validation_share: float, seed: int, source: str = ""
) -> Iterator[tuple[Split, AnyDocument]]:
    """Yield documents with their splits, which are chosen by a hash of (seed, name) (see `records.split_hash`).

    For `python-packages`, the validation documents are the held-out packages. A single text is cut at a line end, and its last
    `validation_share` becomes the validation document.

    Args:
        documents: Documents as yielded by `iter_documents`.
        validation_share: Expected share of validation documents, 0 < share < 1.
        seed: Any integer.

    Raises:
        ConfigError: The share is not between 0 and 1.
        DataError: One side would be empty.
    """
    if not 0.0 < validation_share < 1.0:
        raise ConfigError(f"validation_share is {validation_share}; give a share between 0 and 1, for example 0.05")
    if source == packages.NAME:
        yield from packages.split(documents)
        return
    documents = iter(documents)
    first = list(islice(documents, 2))
    if len(first) == 1 and isinstance(first[0], Document | LargeDocument):
        train, validation = _cut_document(first[0], validation_share)
        yield "train", train
        yield "validation", validation
        return
    total = held = 0
    lowest: list[int] = []
    for document in chain(first, documents):
        number = split_hash(document.name, seed)
        lowest = sorted([*lowest, number])[:2]
        is_validation = number < validation_share * 2**64
        total, held = total + 1, held + is_validation
        yield ("validation" if is_validation else "train"), document
    if not 0 < held < total:
        side, share = "validation" if held == 0 else "training", _share_of_one(lowest)
        advice = f"set validation_share to {share}, which holds out 1 of them, or " if share else ""
        raise DataError(
            f"{source}{source and ': '}validation_share {validation_share} of {total} documents leaves none for {side}; "
            f"{advice}give more documents"
        )


def check_split(source: str, *, validation_share: float, seed: int) -> None:
    """Check that a split leaves documents on both sides. Documents are read until both sides have one.

    Raises:
        ConfigError, DataError: See `iter_documents` and `iter_split`.
    """
    sides = set[Split]()
    for side, _ in iter_split(iter_documents(source), validation_share=validation_share, seed=seed, source=source):
        sides.add(side)
        if len(sides) == len(SPLITS):
            break


def _share_of_one(lowest: Sequence[int]) -> float | None:
    """Return a share with few digits that holds out one document, given the two lowest hashes."""
    for digits in range(2, 7):
        share = math.ceil(10**digits * lowest[0] / 2**64) / 10**digits if lowest else 0.0
        if len(lowest) == 2 and lowest[0] < share * 2**64 <= lowest[1]:
            return share
    return None


def _cut_document(
    document: Document | LargeDocument, validation_share: float
) -> tuple[Document | LargeDocument, Document | LargeDocument]:
    """Cut a document at the last line end before the validation share, or the first one after it, or anywhere."""
    characters = sum(map(len, document.parts()))
    target = round(characters * (1.0 - validation_share))
    before = after = offset = 0
    for part in document.parts():
        if (found := part.rfind("\n", 0, max(0, target - offset)) + 1) > 0:
            before = offset + found
        if not after and (found := part.find("\n", max(0, target - offset)) + 1) > 0:
            after = offset + found
        offset += len(part)
    cut = before or after
    if cut in (0, characters):
        cut = target
    if not 0 < cut < characters:
        raise DataError(
            f"{document.name}: one document of {characters} characters cannot be split with validation_share "
            f"{validation_share}; give more text or more documents"
        )
    names = f"{document.name}#train", f"{document.name}#validation"
    if isinstance(document, Document):
        return Document(names[0], document.text[:cut]), Document(names[1], document.text[cut:])
    offset, middle = 0, document.start
    for part in document.parts():
        middle += len(part[: max(0, cut - offset)].encode())
        offset += len(part)
        if offset >= cut:
            break
    return (
        LargeDocument(names[0], document.path, document.start, middle),
        LargeDocument(names[1], document.path, middle, document.stop),
    )


def _with_text(documents: Iterable[AnyDocument | None], source: str, empty: str) -> Iterator[AnyDocument]:
    """Yield documents, and leave out None, which has no text. A warning counts them; if all are None, it is an error."""
    read = left_out = 0
    for document in documents:
        if document is None:
            left_out += 1
        else:
            read += 1
            yield document
    if not read:
        raise DataError(f"{source}: {empty}")
    if left_out:
        warnings.warn(
            f"{source}: {left_out:,} of {read + left_out:,} documents have no text, and are left out", stacklevel=2
        )


def _read_file(path: Path, name: str, reading: Reading) -> Iterator[AnyDocument | None]:
    """Yield the documents of a file, and None for each that has no text."""
    if is_named(path, JSONL_SUFFIXES):
        for number, row in json_lines(path, reading.add):
            where, row_name = f"{path}: line {number}", row.get("name")
            if not isinstance(row_name, str | None):
                raise DataError(f'{where} has the "name" {short(row_name)}; it must be a string, or left out')
            yield _row_document(row, f"{name}:{number}" if row_name is None else row_name, where)
    elif (size := path.stat().st_size) > LARGE_BYTES:
        with path.open("rb") as file:
            start = len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0
        yield LargeDocument(name, path, start, size)
    else:
        text = read_text(path)
        reading.add(size)
        yield Document(name, text) if text else None


def _row_document(row: dict[str, Any], name: str, where: str) -> AnyDocument | None:
    """Return the document of a row, or None if its text is empty. Messages begin with `where`."""
    if row.get("text") is None and row.get("input_ids") is not None:
        return read_example(row, name, where)
    text = row.get("text", 0)
    if not isinstance(text, str | None):
        met = short(text) if "text" in row else sorted(row)
        raise DataError(f'{where} has no string "text" (met {met}); give a "text" field')
    return Document(name, text) if text else None


def _read_hub(source: str, reading: Reading) -> Iterator[AnyDocument]:
    prefix, _, rest = source.partition(":")
    name, config, split, *others = [*rest.split(":"), "", ""]
    if not name or any(others):
        raise DataError(
            f"source {source!r}: a datasets name is written {prefix}:NAME[:CONFIG][:SPLIT], for example "
            f"{prefix}:wikitext:wikitext-2-v1"
        )
    split = split or "train"
    streaming = prefix == "hf-stream"
    rows = load_set(f"source {source!r}", name, config=config or None, split=split, streaming=streaming)
    if (columns := rows.column_names) is not None:
        if not {"text", "input_ids"} & set(columns):
            raise DataError(
                f'source {source!r}: no column "text" or "input_ids" (met {sorted(columns)}); rename the column of the text'
            )
        rows = rows.select_columns([column for column in FIELDS if column in columns])
    reading.total = 0 if streaming else len(rows)

    def documents() -> Iterator[AnyDocument | None]:
        for index, row in enumerate(set_rows(rows, f"source {source!r}")):
            yield _row_document(row, f"{name}/{split}/{index}", f"source {source!r}: row {index}")
            reading.add(1)

    return _with_text(documents(), f"source {source!r}", f"the split {split!r} holds no text; name another split")
