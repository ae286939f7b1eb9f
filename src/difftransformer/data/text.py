"""Read documents from a source, and split them into training and validation.

A source is one of `SOURCES`. Every reader yields documents in an order that depends on their names alone, and holds at most one
of them in memory; of a large text file, only parts. Text that is missing, empty, broken or not UTF-8 is refused with a
one-line error that names the file and the place.
"""

import hashlib
import json
import time
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError, DataError
from ..typed import short
from .documents import AnyDocument, Document, Example, LargeDocument
from .examples import FIELDS, read_special
from .hub import load_set
from .installed import installed_source, walk
from .records import hash_of, is_held_out, json_lines, read_text
from .streams import OnRead, parquet_rows, readable

TEXT_SUFFIXES = (".txt", ".md", ".py")
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
SUFFIXES = (*TEXT_SUFFIXES, *JSONL_SUFFIXES, ".parquet")
SOURCES = (
    "python-stdlib; python-packages[:NAME,...]; wiki-offline[:LANGUAGE]; wikitext-2; "
    f"a folder of files that end in {', '.join(SUFFIXES)}; one such file; "
    "hf:NAME[:CONFIG][:SPLIT] (a Hugging Face datasets name), or hf-stream:NAME[:CONFIG][:SPLIT], which is not stored first"
)
_HUB_PREFIXES = ("hf:", "hf-stream:")
LARGE_BYTES = 2**24
"""Size from which a text file is read in parts."""
_Progress = Callable[[int, int], None]

_RECENT_SECONDS = 2.0  # the coarsest resolution of file times


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


def iter_documents(
    source: str, progress: _Progress = lambda done, total: None, *, origin: dict[str, Any] | None = None
) -> Iterator[AnyDocument]:
    """Yield the documents of a source, in an order fixed by their names.

    Args:
        source: A name of text that is installed (see `installed_source`); a folder, which is read recursively without hidden
            and empty files; a `.txt`, `.md` or `.py` file, which is one document; a `.jsonl` file (also `.jsonl.gz` and
            `.jsonl.zst`) with one object per line that has a string `text` and optionally a string `name`; a `.parquet` file
            with such columns; or `hf:NAME[:CONFIG][:SPLIT]`, which needs the extra `data`. The split defaults to `train`, and
            CONFIG may be empty, as in `hf:NAME::validation`. With `hf-stream:` in place of `hf:`, the set is not stored first.
        progress: Called with the bytes of files (rows of a data set) that are read, and their total if it is known.
        origin: Gets what is known of installed text when all of it has been read: packages, licences and what was left out.

    In place of `text`, a row may have `messages`, and is a `Conversation`, or `input_ids`, and is an `Example`.

    Raises:
        DataError: The source is none of these, is missing or empty, or holds text that is broken or not UTF-8.
    """
    if (installed := installed_source(source)) is not None:
        return (Document(*piece) for piece in installed.read({} if origin is None else origin))
    if source.startswith(_HUB_PREFIXES):
        return _read_hugging_face(source, progress)
    path = Path(source)
    if not source or not path.exists():
        raise DataError(f"source {source!r}: no such file or folder; allowed are {SOURCES}")
    if path.is_dir():
        files, missing = walk(path, SUFFIXES), "all {} text files are empty; name a folder that holds text"
        if not files:
            raise DataError(f"{path}: no {', '.join(SUFFIXES)} file in this folder; name a folder that holds text")
    else:
        files, missing = [(path.name, path)], "the file is empty; name a file with text in it"
        if path.name.endswith(JSONL_SUFFIXES):
            missing = 'the file is empty; give one JSON object with a "text" field on each line'
        if not path.name.endswith(SUFFIXES):
            raise DataError(f"source {source!r}: files ending in {path.suffix!r} are not read; allowed are {SOURCES}")
    return _read_files(files, DataError(f"{path}: {missing.format(len(files))}"), progress)


def source_state(source: str) -> str | None:
    """Return a fingerprint of the names, sizes and times of a source's files: while it stays equal, so does the text.

    A set of the Hugging Face hub is taken to stay as it is. Returns None for files changed so recently that a further change
    might leave their times as they are.
    """
    files = _source_files(source)
    if files is None:
        return hashlib.sha256(source.encode()).hexdigest()
    folder, found = files
    states: list[object] = [str(folder.absolute())]
    try:
        for name, path in found:
            status = path.stat()
            if max(status.st_mtime, status.st_ctime) > time.time() - _RECENT_SECONDS:
                return None
            states.append((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    except OSError:
        return None
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()


def source_bytes(source: str) -> int | None:
    """Return the size of a source's files, or None for a set of the Hugging Face hub."""
    files = _source_files(source)
    return None if files is None else sum(path.stat().st_size for _, path in files[1] if path.exists())


def _source_files(source: str) -> tuple[Path, list[tuple[str, Path]]] | None:
    """Return the folder or file of a source and its files with their names, or None for a set of the hub."""
    if (installed := installed_source(source)) is not None:
        return installed.files()
    suffixes: Sequence[str] = SUFFIXES
    folder = Path(source)
    if source.startswith(_HUB_PREFIXES):
        folder, suffixes = Path(source.split(":")[1]), [""]  # datasets reads local folders with files of any kind
        if not folder.exists():
            return None
    return folder, walk(folder, suffixes) if folder.is_dir() else [(folder.name, folder)]


def split_documents(
    documents: Iterable[Document], *, validation_share: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Split documents into training and validation by a hash of (seed, name) (see `records.split_by_hash`).

    A single text is cut at a line end instead, and its last `validation_share` becomes the validation document.

    Args:
        documents: Documents as returned by `read_documents`.
        validation_share: Expected share of validation documents, 0 < share < 1.
        seed: Any integer.

    Returns:
        (train, validation), each in the given order.

    Raises:
        ConfigError: The share is not between 0 and 1.
        DataError: One side would be empty.
    """
    sides: dict[str, list[Document]] = {"train": [], "validation": []}
    for split, document in iter_split(documents, validation_share=validation_share, seed=seed):
        assert not isinstance(document, Example)
        sides[split].append(Document(document.name, document.text))
    return sides["train"], sides["validation"]


def held_out_groups(source: str, *, validation_share: float, seed: int) -> frozenset[str]:
    """Return the groups of a source, such as packages, that are held out as a whole; none where it has no groups.

    They are the first ones in an order drawn from the seed that hold at most half of `validation_share` of the bytes. A group
    that would exceed it is passed over.
    """
    installed = installed_source(source)
    found = installed.files() if installed is not None and installed.is_grouped else None
    sizes: Counter[str] = Counter()
    for name, path in found[1] if found else ():
        sizes[name.partition("/")[0]] += path.stat().st_size
    room, chosen = validation_share / 2 * sizes.total(), set()
    for group in sorted(sizes, key=lambda group: hash_of(group, seed)):
        if sizes[group] <= room:
            chosen.add(group)
            room -= sizes[group]
    return frozenset(chosen)


def iter_split(
    documents: Iterable[AnyDocument],
    *,
    validation_share: float,
    seed: int,
    held_out: Collection[str] = (),
) -> Iterator[tuple[Literal["train", "validation"], AnyDocument]]:
    """Yield documents with their splits; see `split_documents`.

    Documents of the groups `held_out` (see `held_out_groups`) are validation documents. Of the others, half of the share is
    held out then.
    """
    if not 0.0 < validation_share < 1.0:
        raise ConfigError(f"validation_share is {validation_share}; give a share between 0 and 1, for example 0.05")
    documents = iter(documents)
    first = list(islice(documents, 2))
    if len(first) == 1 and isinstance(first[0], Document | LargeDocument):
        train, validation = _cut_document(first[0], validation_share)
        yield "train", train
        yield "validation", validation
        return
    total = held = 0
    share = validation_share / 2 if held_out else validation_share
    for document in chain(first, documents):
        is_validation = document.name.partition("/")[0] in held_out or is_held_out(document.name, share, seed)
        total, held = total + 1, held + is_validation
        yield ("validation" if is_validation else "train"), document
    if not 0 < held < total:
        raise DataError(
            f"splitting {total} documents with validation_share {validation_share} and seed {seed} leaves "
            f"{total - held} for training and {held} for validation, each needs at least 1; "
            "give more documents, another share or another seed"
        )


def _cut_document(
    document: Document | LargeDocument, validation_share: float
) -> tuple[Document | LargeDocument, Document | LargeDocument]:
    """Cut a document at the last line end before the validation share, or the first one after it, or anywhere."""
    characters = sum(map(len, document.parts()))
    target = round(characters * (1.0 - validation_share))
    before = after = place = 0
    for part in document.parts():
        if (found := part.rfind("\n", 0, max(0, target - place)) + 1) > 0:
            before = place + found
        if not after and (found := part.find("\n", max(0, target - place)) + 1) > 0:
            after = place + found
        place += len(part)
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
    place, middle = 0, document.start
    for part in document.parts():
        middle += len(part[: max(0, cut - place)].encode())
        place += len(part)
        if place >= cut:
            break
    return (
        LargeDocument(names[0], document.path, document.start, middle),
        LargeDocument(names[1], document.path, middle, document.stop),
    )


def _read_files(files: Sequence[tuple[str, Path]], empty: DataError, progress: _Progress) -> Iterator[AnyDocument]:
    """Yield the documents of files; raise `empty` if there are none."""
    with readable(files[0][1].parent):
        total = sum(path.stat().st_size for _, path in files)
    done, is_empty = 0, True

    def on_read(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    for name, path in files:
        for document in _read_file(path, name, on_read):
            is_empty = False
            yield document
    if is_empty:
        raise empty


def _read_file(path: Path, name: str, on_read: OnRead) -> Iterator[AnyDocument]:
    if path.name.endswith(JSONL_SUFFIXES):
        yield from _read_jsonl(path, name, on_read)
    elif path.suffix == ".parquet":
        for number, row in enumerate(parquet_rows(path, FIELDS, on_read), start=1):
            text, row_name = row.get("text"), row.get("name")
            given_name = row_name if isinstance(row_name, str) else f"{name}:{number}"
            if (special := read_special(row, given_name, f"{path}: row {number}")) is not None:
                yield special
                continue
            if "text" not in row or not isinstance(text, str | None):
                raise DataError(
                    f'{path}: row {number} has no string "text" (met {short(row)}); rename the column of the text'
                )
            if text:
                yield Document(given_name, text)
    elif path.stat().st_size > LARGE_BYTES:
        yield _large_document(path, name)
        on_read(path.stat().st_size)
    else:
        text = read_text(path)
        on_read(path.stat().st_size)
        if text:
            yield Document(name, text)


def _large_document(path: Path, name: str) -> LargeDocument:
    with path.open("rb") as file:
        has_mark = file.read(len(BOM_UTF8)) == BOM_UTF8
    return LargeDocument(name, path, len(BOM_UTF8) if has_mark else 0, path.stat().st_size)


def _read_jsonl(path: Path, name: str, on_read: OnRead) -> Iterator[AnyDocument]:
    for number, row in json_lines(path, on_read):
        text, row_name, place = row.get("text"), row.get("name", f"{name}:{number}"), f"{path}: line {number}"
        if not isinstance(row_name, str):
            raise DataError(f'{place} has the "name" {short(row_name)}; it must be a string, or left out')
        if (special := read_special(row, row_name, place)) is not None:
            yield special
            continue
        if not isinstance(text, str):
            raise DataError(f'{place} has no string "text" (met {sorted(row)}); give a "text" field')
        if not text:
            raise DataError(f'{place} has an empty "text"; give it text or remove the line')
        yield Document(row_name, text)


def _read_hugging_face(source: str, progress: _Progress) -> Iterator[AnyDocument]:
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
    columns = rows.column_names
    if columns is not None:
        if not {"text", "messages", "input_ids"} & set(columns):
            raise DataError(
                f'source {source!r}: no column "text", "messages" or "input_ids" (met {sorted(columns)}); write a .jsonl file'
            )
        rows = rows.select_columns([column for column in FIELDS if column in columns and column != "name"])
    total = None if streaming else len(rows)
    is_empty = True
    for index, row in enumerate(rows):
        text = row.get("text")
        if (special := read_special(row, f"{name}/{split}/{index}", f"source {source!r}: row {index}")) is not None:
            is_empty = False
            yield special
        if text is not None and not isinstance(text, str):
            raise DataError(
                f'source {source!r}: row {index} has a "text" of type {type(text).__name__}; it must be a string'
            )
        if text:
            is_empty = False
            yield Document(f"{name}/{split}/{index}", text)
        if total is not None:
            progress(index + 1, total)
    if is_empty:
        raise DataError(f"source {source!r}: the split {split!r} holds no text; name another split")
