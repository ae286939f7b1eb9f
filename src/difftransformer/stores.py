"""Folders in object stores and on other file systems, such as s3://bucket/shards: they are copied to this machine.

A folder there counts if it has its index, such as the manifest of shards.
"""

import contextlib
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import fsspec

from .errors import ConfigError, DataError, on_one_line
from .files import NO_ROOM, locked, naming
from .progress import report
from .reading import is_plain_name

_FILES_AT_ONCE = 32

logger = logging.getLogger(__name__)


def is_url(place: Path | str) -> bool:
    """Whether a place is in a store."""
    return "://" in str(place)


class Store:
    """Whole folders side by side at a URL.

    Every fault of the store is an error of one line.

    Args:
        url: Such as s3://bucket/shards.

    Raises:
        ConfigError: There is no such kind of store, or its package is missing.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._fs, root = fsspec.core.url_to_fs(self.url)
        except (ImportError, ValueError) as problem:
            raise ConfigError(
                f"{url} cannot be opened ({problem}); install the package of the store, for s3:// with "
                "pip install 'difftransformer[s3]'"
            ) from None
        self._root = root.rstrip("/")

    def folders(self, index: str) -> list[str]:
        """Return the names of the folders that have an index."""
        with self._faults():
            self._fs.invalidate_cache()
            paths = [path.removeprefix(f"{self._root}/").split("/") for path in self._fs.find(self._root)]
        return sorted(path[0] for path in paths if path[1:] == [index])

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        with self._faults(name):
            return bytes(self._fs.cat_file(f"{self._root}/{name}"))

    def get(self, name: str, target: Path, check: Callable[[Path], object] = lambda folder: None) -> None:
        """Copy a folder to this machine, where it gets its name when it is whole.

        Args:
            name: Name of the folder.
            target: Path of the copy.
            check: Raises a `DataError` if a folder is damaged. What it says of the copy is said of the store.
        """
        logger.info("copying %s/%s", self.url, name)
        temporary = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        temporary.mkdir(parents=True)
        try:
            with self._faults(name), naming(temporary):
                prefix = f"{self._root}/{name}/"
                listed = self._fs.find(prefix.rstrip("/"), detail=True)
                copies = {path: temporary / path.removeprefix(prefix) for path in listed}
                for path, copy in copies.items():
                    if not all(map(is_plain_name, path.removeprefix(prefix).split("/"))):
                        raise ValueError(f"{path} leads out of the folder")
                    copy.parent.mkdir(parents=True, exist_ok=True)
                for batch in _batches({path: listed[path]["size"] or 0 for path in copies}):
                    self._fs.get(batch, [str(copies[path]) for path in batch])
            check(temporary)
            temporary.rename(target)
        except DataError as problem:
            raise DataError(str(problem).replace(str(temporary), f"{self.url}/{name}")) from problem
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @contextlib.contextmanager
    def _faults(self, name: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as problem:  # each store has classes of its own
            if isinstance(problem, OSError) and problem.errno in NO_ROOM:  # on this machine
                raise
            is_missing = isinstance(problem, FileNotFoundError)
            raise DataError(
                f"{self.url}{name and '/'}{name}: {'not found' if is_missing else 'cannot be read'} "
                f"({on_one_line(problem)}); check the {'URL' if is_missing else 'store and its keys'}"
            ) from problem


def _batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield files in batches, and report how many of their bytes have been copied."""
    files, done, total = list(sizes), 0, sum(sizes.values())
    for start in range(0, len(files), _FILES_AT_ONCE):
        batch = files[start : start + _FILES_AT_ONCE]
        yield batch
        done += sum(sizes[file] for file in batch)
        report(done, max(1, total), "copying")


def local_copy(url: str, index: str, cache: Path, check: Callable[[Path], object], *, is_damaged: bool = False) -> Path:
    """Return the copy of a folder on this machine, which is made once; the processes of a machine share it.

    Args:
        url: URL of the folder.
        index: Name of the folder's index.
        cache: Folder for copies.
        check: See `Store.get`.
        is_damaged: Whether the copy was found to be damaged. It is made again, unless another process has done so.

    Raises:
        ConfigError: See `Store`.
        DataError: The folder is not whole, or cannot be read.
    """
    parent, _, name = url.rpartition("/")
    store = Store(parent)
    # Another index, and so other content, is another copy.
    copy = cache / _short_sha256(parent.encode()) / f"{name}-{_short_sha256(store.read(f'{name}/{index}'))}"
    if is_damaged or not copy.exists():
        with locked(copy.parent, name=f".{copy.name}.lock", wait=True):
            if is_damaged and copy.exists():
                try:
                    check(copy)
                except DataError:
                    shutil.rmtree(copy)
            if not copy.exists():
                store.get(name, copy, check)
    return copy


def _short_sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
