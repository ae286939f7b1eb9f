"""Text that is installed on every machine: the sources of Python's standard library. It is read where it lies."""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import DataError
from .documents import Document
from .records import read_text

STDLIB = "python-stdlib"
# Tests, bundled wheels, editors and demos are no library sources, or differ between installations.
_SKIPPED_FOLDERS = frozenset({
    "__pycache__", "dist-packages", "ensurepip", "idle_test", "idlelib", "lib-dynload", "site-packages", "test", "tests",
    "turtledemo",
})  # fmt: skip


def walk(
    folder: Path, suffixes: Sequence[str], skipped_folders: frozenset[str] = frozenset()
) -> list[tuple[str, Path]]:
    """Return (name, path) of the files below a folder, sorted by name, without hidden files and folders."""
    files = []
    for current, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped_folders]
        for name in names:
            if not name.startswith(".") and name.endswith(tuple(suffixes)):
                path = Path(current, name)
                files.append((path.relative_to(folder).as_posix(), path))
    return sorted(files)


def stdlib_files() -> tuple[Path, list[tuple[str, Path]]]:
    """Return the folder of the running interpreter's library, and (name, path) of its sources without tests."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return folder, walk(folder, (".py",), _SKIPPED_FOLDERS)


def read_stdlib() -> Iterator[Document]:
    """Yield the library sources of the running interpreter, and the topics of its `help()`, sorted by name.

    Raises:
        DataError: This Python was installed without its sources.
    """
    folder, files = stdlib_files()
    documents = []
    for name, path in files:
        # The topics become documents of their own below. _sysconfigdata records how this interpreter was built.
        if name == "pydoc_data/topics.py" or path.name.startswith("_sysconfigdata") or name.startswith("config-"):
            continue
        with suppress(DataError):
            documents.append(Document(name, read_text(path)))
    with suppress(ImportError):  # some distributions leave the topics out
        from pydoc_data.topics import topics

        documents += [Document(f"pydoc_data/topics:{topic}", text) for topic, text in topics.items()]
    documents = [document for document in documents if document.text]
    if not documents:
        raise DataError(
            f"{STDLIB}: no library sources in {folder} (this Python was installed without them); name another source"
        )
    yield from sorted(documents, key=lambda document: document.name)
