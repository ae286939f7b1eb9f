"""Read documents from a source, and split them into training and validation.

A source is one of `SOURCES`. Every reader returns whole documents in an order that depends on their names alone. Text that
is missing, empty or not UTF-8 is refused with a one-line error that names the file and the place.
"""

import hashlib
import json
import os
import sysconfig
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, DataError
from ..typed import short
from .hub import load_set
from .records import json_lines, read_text, split_by_hash

TEXT_SUFFIXES = (".txt", ".md", ".py")
SOURCES = (
    "python-stdlib; a folder of .txt, .md, .py or .jsonl files; one such file; "
    "hf:NAME[:CONFIG][:SPLIT] (a Hugging Face datasets name)"
)

# Tests, bundled wheels, editors and demos are no library sources, or differ between installations.
_STDLIB_SKIPPED_FOLDERS = frozenset({
    "__pycache__", "dist-packages", "ensurepip", "idle_test", "idlelib", "lib-dynload", "site-packages", "test", "tests",
    "turtledemo",
})  # fmt: skip
_RECENT_SECONDS = 2.0  # the coarsest resolution of file times


@dataclass(frozen=True)
class Document:
    """A text and its name, which is unique in the source (a path, or a path with a line number)."""

    name: str
    text: str


def read_documents(source: str) -> list[Document]:
    """Read all documents of a source, in an order fixed by their names.

    Args:
        source: `python-stdlib`; a folder, which is read recursively without hidden and empty files; a `.txt`, `.md` or
            `.py` file, which is one document; a `.jsonl` file with one object per line that has a string `text` and
            optionally a string `name`; or `hf:NAME[:CONFIG][:SPLIT]`, which needs the extra `data`. The split defaults
            to `train`, and CONFIG may be empty, as in `hf:NAME::validation`.

    Returns:
        At least one document. No document is empty.

    Raises:
        DataError: The source is none of these, is missing or empty, or holds text that is not UTF-8.
    """
    if source == "python-stdlib":
        return _read_python_stdlib()
    if source.startswith("hf:"):
        return list(_read_hugging_face(source))
    path = Path(source)
    if not source or not path.exists():
        raise DataError(f"source {source!r}: no such file or folder; allowed are {SOURCES}")
    if path.is_dir():
        return _read_folder(path)
    if path.suffix in TEXT_SUFFIXES:
        text = read_text(path)
        if not text:
            raise DataError(f"{path}: the file is empty; name a file with text in it")
        return [Document(path.name, text)]
    if path.suffix == ".jsonl":
        documents = list(_read_jsonl(path, path.name))
        if not documents:
            raise DataError(f'{path}: the file is empty; give one JSON object with a "text" field on each line')
        return documents
    raise DataError(f"source {source!r}: files ending in {path.suffix!r} are not read; allowed are {SOURCES}")


def source_state(source: str) -> str | None:
    """Return a fingerprint of the names, sizes and times of a source's files: while it stays equal, so does the text.

    Returns None for a source without local files, and for files changed so recently that a further change might leave
    their times as they are.
    """
    if source == "python-stdlib":
        folder = _stdlib_folder()
        files = _walk(folder, (".py",), _STDLIB_SKIPPED_FOLDERS)
    else:
        folder = Path(source)
        files = _walk(folder, (*TEXT_SUFFIXES, ".jsonl")) if folder.is_dir() else [(folder.name, folder)]
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


def split_documents(
    documents: Iterable[Document], *, validation_share: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Split documents into training and validation by a hash of (seed, name) (see `records.split_by_hash`).

    A single document is cut at a line end instead, and its last `validation_share` becomes the validation document.

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
    if not 0.0 < validation_share < 1.0:
        raise ConfigError(f"validation_share is {validation_share}; give a share between 0 and 1, for example 0.05")
    documents = list(documents)
    if len(documents) == 1:
        return _cut_document(documents[0], validation_share)
    names = [document.name for document in documents]
    train, validation = split_by_hash(documents, names, validation_share, seed)
    if not train or not validation:
        raise DataError(
            f"splitting {len(documents)} documents with validation_share {validation_share} and seed {seed} leaves "
            f"{len(train)} for training and {len(validation)} for validation, each needs at least 1; "
            "give more documents, another share or another seed"
        )
    return train, validation


def _cut_document(document: Document, validation_share: float) -> tuple[list[Document], list[Document]]:
    text = document.text
    target = round(len(text) * (1.0 - validation_share))
    cut = text.rfind("\n", 0, target) + 1
    if cut == 0:
        cut = text.find("\n", target) + 1
    if cut == 0 or cut == len(text):
        cut = target
    if not 0 < cut < len(text):
        raise DataError(
            f"{document.name}: one document of {len(text)} characters cannot be split with validation_share "
            f"{validation_share}; give more text or more documents"
        )
    return [Document(f"{document.name}#train", text[:cut])], [Document(f"{document.name}#validation", text[cut:])]


def _walk(
    folder: Path, suffixes: Sequence[str], skipped_folders: frozenset[str] = frozenset()
) -> list[tuple[str, Path]]:
    """Return (name, path) of the files below a folder, sorted by name, without hidden files and folders."""
    found = []
    for current, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped_folders]
        for file in files:
            if not file.startswith(".") and file.endswith(tuple(suffixes)):
                path = Path(current, file)
                found.append((path.relative_to(folder).as_posix(), path))
    return sorted(found)


def _read_folder(folder: Path) -> list[Document]:
    suffixes = (*TEXT_SUFFIXES, ".jsonl")
    files = _walk(folder, suffixes)
    if not files:
        raise DataError(f"{folder}: no {', '.join(suffixes)} file in this folder; name a folder that holds text")
    documents: list[Document] = []
    for name, path in files:
        if path.suffix == ".jsonl":
            documents.extend(_read_jsonl(path, name))
        elif text := read_text(path):
            documents.append(Document(name, text))
    if not documents:
        raise DataError(f"{folder}: all {len(files)} text files are empty; name a folder that holds text")
    return documents


def _read_jsonl(path: Path, name: str) -> Iterator[Document]:
    for number, row in json_lines(path):
        text, row_name = row.get("text"), row.get("name", f"{name}:{number}")
        if not isinstance(text, str):
            raise DataError(f'{path}: line {number} has no string "text" (met {sorted(row)}); give a "text" field')
        if not text:
            raise DataError(f'{path}: line {number} has an empty "text"; give it text or remove the line')
        if not isinstance(row_name, str):
            raise DataError(f'{path}: line {number} has the "name" {short(row_name)}; it must be a string, or left out')
        yield Document(row_name, text)


def _stdlib_folder() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _read_python_stdlib() -> list[Document]:
    """Read the running interpreter's library sources without tests, and the topics of its `help()`."""
    folder = _stdlib_folder()
    documents = []
    for name, path in _walk(folder, (".py",), _STDLIB_SKIPPED_FOLDERS):
        # The topics become documents of their own below. _sysconfigdata records how this interpreter was built.
        if name == "pydoc_data/topics.py" or path.name.startswith("_sysconfigdata") or name.startswith("config-"):
            continue
        try:
            text = read_text(path)
        except DataError:
            continue
        if text:
            documents.append(Document(name, text))
    with suppress(ImportError):  # some distributions leave the topics out
        from pydoc_data.topics import topics

        documents.extend(Document(f"pydoc_data/topics:{topic}", text) for topic, text in topics.items() if text)
    if not documents:
        raise DataError(
            f"python-stdlib: no library sources in {folder} (this Python was installed without them); "
            f"name another source: {SOURCES}"
        )
    return sorted(documents, key=lambda document: document.name)


def _read_hugging_face(source: str) -> Iterator[Document]:
    name, config, split, *rest = [*source.removeprefix("hf:").split(":"), "", ""]
    if not name or any(rest):
        raise DataError(
            f"source {source!r}: a datasets name is written hf:NAME[:CONFIG][:SPLIT], for example "
            "hf:wikitext:wikitext-2-v1"
        )
    split = split or "train"
    rows = load_set(f"source {source!r}", name, config=config or None, split=split)
    if "text" not in rows.column_names:
        raise DataError(f'source {source!r}: no column "text" (met {sorted(rows.column_names)}); write a .jsonl file')
    is_empty = True
    for index, text in enumerate(rows["text"]):
        if text is not None and not isinstance(text, str):
            raise DataError(
                f'source {source!r}: row {index} has a "text" of type {type(text).__name__}; it must be a string'
            )
        if text:
            is_empty = False
            yield Document(f"{name}/{split}/{index}", text)
    if is_empty:
        raise DataError(f"source {source!r}: the split {split!r} holds no text; name another split")
