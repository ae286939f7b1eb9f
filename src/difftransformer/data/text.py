"""Documents: where text comes from, and how it is split into training and validation.

A source is one of `SOURCES`. Every reader gives whole documents in an order that depends on nothing but their names,
and refuses text that is missing, empty or not UTF-8 with one line that names the file and the place.
"""

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, DataError
from .hub import load_set

TEXT_SUFFIXES = (".txt", ".md", ".py")
SOURCES = (
    "python-stdlib",
    "a folder of .txt, .md, .py or .jsonl files",
    "one such file",
    "hf:NAME[:CONFIG][:SPLIT] (a Hugging Face datasets name)",
)

# Tests, vendored wheels, editors and demonstrations: not library sources, or not the same on two installations.
_STDLIB_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "ensurepip",
        "idle_test",
        "idlelib",
        "lib-dynload",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


@dataclass(frozen=True)
class Document:
    """One text with a name that is unique in its source (a path, or a path with a line number)."""

    name: str
    text: str


def read_documents(source: str) -> list[Document]:
    """Read every document of a source, in an order fixed by their names.

    Args:
        source: `python-stdlib`; a folder (read recursively; hidden and empty files are left out); a `.txt`, `.md` or
            `.py` file (one document); a `.jsonl` file (one object a line with a string `text`, and an optional string
            `name`); or `hf:NAME[:CONFIG][:SPLIT]` (extra `data`; the split is `train` unless given, and an empty CONFIG
            is none: `hf:NAME::validation`).

    Returns:
        At least one document; none is empty.

    Raises:
        DataError: the source is none of these, is missing or empty, or holds text that is not UTF-8.
    """
    if source == "python-stdlib":
        return _read_python_stdlib()
    if source.startswith("hf:"):
        return list(_read_hugging_face(source))
    path = Path(source)
    if not source or not path.exists():
        raise DataError(f"source {source!r}: no such file or folder; allowed are {_allowed()}")
    if path.is_dir():
        return _read_folder(path)
    if path.suffix in TEXT_SUFFIXES:
        text = _read_text(path)
        if not text:
            raise DataError(f"{path}: the file is empty; name a file with text in it")
        return [Document(path.name, text)]
    if path.suffix == ".jsonl":
        documents = list(_read_jsonl(path, path.name))
        if not documents:
            raise DataError(f'{path}: the file is empty; give one JSON object with a "text" field on each line')
        return documents
    raise DataError(f"source {source!r}: files ending in {path.suffix!r} are not read; allowed are {_allowed()}")


def split_documents(
    documents: Iterable[Document], *, validation_share: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """Split documents into training and validation by a hash of (seed, name).

    A document's side depends on nothing else, so it keeps its side when documents are added, removed or reordered. A
    single document cannot be split so: its last `validation_share` is the validation document, cut at a line end.

    Args:
        documents: what `read_documents` returns.
        validation_share: expected share of documents for validation, 0 < share < 1.
        seed: any integer.

    Returns:
        (train, validation), each in the order given.

    Raises:
        ConfigError: the share is not between 0 and 1.
        DataError: a side would be empty.
    """
    if not 0.0 < validation_share < 1.0:
        raise ConfigError(f"validation_share is {validation_share}; it must lie between 0 and 1, for example 0.05")
    documents = list(documents)
    if len(documents) == 1:
        return _cut_document(documents[0], validation_share)
    train: list[Document] = []
    validation: list[Document] = []
    for document in documents:
        digest = hashlib.blake2b(f"{seed}\0{document.name}".encode(), digest_size=8).digest()
        is_validation = int.from_bytes(digest, "big") < validation_share * 2**64
        (validation if is_validation else train).append(document)
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


def _allowed() -> str:
    return "; ".join(SOURCES)


def _read_text(path: Path) -> str:
    """A file's text, byte for byte but for a leading byte-order mark."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: not UTF-8 text: byte 0x{content[error.start]:02x} at offset {error.start} ({error.reason}); "
            "convert the file to UTF-8 (for example with iconv) or leave it out"
        ) from None


def _walk(
    folder: Path, suffixes: Sequence[str], skipped_folders: frozenset[str] = frozenset()
) -> list[tuple[str, Path]]:
    """(name, path) of the files below a folder, sorted by name; hidden files and folders are left out."""
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
        elif text := _read_text(path):
            documents.append(Document(name, text))
    if not documents:
        raise DataError(f"{folder}: all {len(files)} text files are empty; name a folder that holds text")
    return documents


def _read_jsonl(path: Path, name: str) -> Iterator[Document]:
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}: line {number} is not JSON ({error.msg} at column {error.colno}); mend the line"
            ) from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            met = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise DataError(
                f'{path}: line {number} has no string "text" (met {met}); give an object with a "text" field'
            )
        if not row["text"]:
            raise DataError(f'{path}: line {number} has an empty "text"; give it text or remove the line')
        row_name = row.get("name", f"{name}:{number}")
        if not isinstance(row_name, str):
            raise DataError(f'{path}: line {number} has the "name" {row_name!r}; it must be a string, or left out')
        for key, value in (("text", row["text"]), ("name", row_name)):
            if any("\ud800" <= character <= "\udfff" for character in value):
                raise DataError(
                    f'{path}: line {number}: "{key}" holds half a surrogate pair; it is not valid Unicode text'
                )
        yield Document(row_name, row["text"])


def _read_python_stdlib() -> list[Document]:
    """The running interpreter's library sources without tests, and the topics of its `help()`."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    documents = []
    for name, path in _walk(folder, (".py",), _STDLIB_SKIPPED_FOLDERS):
        # The topics come below as documents of their own; _sysconfigdata records how this one interpreter was built.
        if name == "pydoc_data/topics.py" or path.name.startswith("_sysconfigdata") or name.startswith("config-"):
            continue
        try:
            text = _read_text(path)
        except DataError:
            continue
        if text:
            documents.append(Document(name, text))
    documents.extend(Document(f"pydoc_data/topics:{topic}", text) for topic, text in _pydoc_topics().items() if text)
    if not documents:
        raise DataError(
            f"python-stdlib: no library sources in {folder} (this Python was installed without them); "
            f"name another source: {_allowed()}"
        )
    return sorted(documents, key=lambda document: document.name)


def _pydoc_topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return {}
    return dict(topics)


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
        raise DataError(
            f'source {source!r}: no column "text" (met {sorted(rows.column_names)}); write the texts to a .jsonl file'
        )
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
