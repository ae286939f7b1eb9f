"""Folders in object stores and on other file systems, such as s3://bucket/shards: copied to this machine and from it.

A folder there is whole if it has its index: the file that is written last.
"""

import contextlib
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import fsspec

from .errors import ConfigError, DataError, DiffTransformerError, on_one_line
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
        url: Such as s3://bucket/run.
        error: Class of the errors.

    Raises:
        ConfigError: There is no such kind of store, or its package is missing.
    """

    def __init__(self, url: str, *, error: type[DiffTransformerError] = DataError) -> None:
        self.url, self._error = url.rstrip("/"), error
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
        with self._faults("read"):
            self._fs.invalidate_cache()
            paths = [path.removeprefix(f"{self._root}/").split("/") for path in self._fs.find(self._root)]
        return sorted(path[0] for path in paths if path[1:] == [index])

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        with self._faults("read", name):
            return bytes(self._fs.cat_file(f"{self._root}/{name}"))

    def write(self, name: str, content: bytes) -> None:
        """Write a file."""
        with self._faults("written", name):
            self._make_folders([f"{self._root}/{name}"])
            self._fs.pipe_file(f"{self._root}/{name}", content)

    def get(self, name: str, target: Path, check: Callable[[Path], object] = lambda folder: None) -> None:
        """Copy a folder to this machine, where it gets its name when it is whole.

        Args:
            name: Name of the folder.
            target: Path of the copy.
            check: Raises an error of the store's class if a folder is damaged. What it says of the copy is said of the store.
        """
        logger.info("copying %s/%s", self.url, name)
        temporary = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        temporary.mkdir(parents=True)
        try:
            with self._faults("read", name), naming(temporary):
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
        except self._error as problem:
            raise self._error(str(problem).replace(str(temporary), f"{self.url}/{name}")) from problem
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def put(self, folder: Path, name: str, index: str) -> None:
        """Copy a folder of this machine into the store. One that has its name there is replaced."""
        logger.info("copying %s to %s/%s", folder, self.url, name)
        copies = {
            str(path): f"{self._root}/{name}/{path.relative_to(folder).as_posix()}"
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        if name in self.folders(index):
            self.delete(name, index)
        with self._faults("written", name):
            self._make_folders(copies.values())
            last = str(folder / index)
            for batch in _batches({path: Path(path).stat().st_size for path in copies if path != last}):
                self._fs.put(batch, [copies[path] for path in batch])
            self._fs.put_file(last, copies[last])

    def delete(self, name: str, index: str) -> None:
        """Delete a folder, its index first, so that a part of it is no folder."""
        with self._faults("written", name):
            self._fs.rm_file(f"{self._root}/{name}/{index}")
            self._fs.rm(f"{self._root}/{name}", recursive=True)

    def _make_folders(self, paths: Iterable[str]) -> None:
        """Make the folders of files on a file system. An object store has none, and would make a bucket of a mistyped name."""
        if getattr(self._fs, "local_file", False):
            for folder in {path.rpartition("/")[0] for path in paths}:
                self._fs.makedirs(folder, exist_ok=True)

    @contextlib.contextmanager
    def _faults(self, what: str, name: str = "") -> Iterator[None]:
        try:
            yield
        except Exception as problem:  # each store has classes of its own
            if isinstance(problem, OSError) and problem.errno in NO_ROOM:  # on this machine
                raise
            is_missing = isinstance(problem, FileNotFoundError)
            raise self._error(
                f"{self.url}{name and '/'}{name}: {'not found' if is_missing else f'cannot be {what}'} "
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


def place_of_copy(url: str, index: bytes, cache: Path) -> Path:
    """Return the place of a folder's copy. Another index, and so other content, is another copy."""
    parent, _, name = url.rpartition("/")
    return place_of_copies(parent, cache) / f"{name}-{_short_sha256(index)}"


def place_of_copies(url: str, cache: Path) -> Path:
    """Return the folder for copies of the folders side by side at a URL."""
    return cache / _short_sha256(url.encode())


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
    copy = place_of_copy(url, store.read(f"{name}/{index}"), cache)
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
