"""Files that other processes may want: locks on folders, whole files, and errors that name theirs."""

import contextlib
import errno
import glob
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import filelock

from .errors import FolderInUse

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextlib.contextmanager
def locked(folder: Path, *, name: str = LOCK_FILE, wait: bool = False) -> Iterator[None]:
    """Hold the lock of a folder, which is created if it is missing.

    The operating system releases the lock when the process ends, however it ends. Where the file system has no locks, a
    warning is logged and the block runs without one.

    Args:
        folder: The folder.
        name: Name of the lock file, which holds the process and the host of the holder. It is removed at the end.
        wait: Whether to wait for another process to release the lock.

    Raises:
        FolderInUse: Another process holds the lock, and `wait` is False.
    """
    is_new, path = not folder.exists(), folder / name
    folder.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path, fallback_to_soft=False)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        if not wait:
            raise FolderInUse(
                f"{folder}: {_holder(path)} is working in it; wait until it ends, or name another folder"
            ) from None
        logger.warning("waiting for %s, which is working in %s", _holder(path), folder)
        _wait_for(lock, folder)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("%s: this file system has no locks; use the folder in one process at a time", folder)
    with contextlib.suppress(OSError):  # a full disk, or Windows, where the file is locked for its holder too
        path.write_text(f"{os.getpid()} {socket.gethostname()}\n", encoding="utf-8")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()  # before the release: whoever waits for it sees that it is gone, and makes a new one
        lock.release()
        if is_new:
            with contextlib.suppress(OSError):  # it holds something now
                folder.rmdir()


def _wait_for(lock: filelock.BaseFileLock, folder: Path) -> None:
    while not lock.is_locked:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # its last holder has just removed the folder
            lock.acquire()


def _holder(path: Path) -> str:
    """Return who holds a lock, as far as its file says."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if holder := re.fullmatch(r"(\d{1,9}) ([!-~]{1,255})\n?", path.read_text(encoding="utf-8")):
            return f"process {holder[1]} on {holder[2]}"
    return "another process"


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in errors of the operating system that do not, such as that of a full disk.

    safetensors reports these errors by a class of its own, which becomes an OSError.

    Args:
        path: The file that the block writes, or a folder. Of a folder, the file that was written last is named.
    """
    try:
        yield
    except Exception as error:
        safetensors = type(error).__name__ == "SafetensorError"  # not imported: a report needs no safetensors
        code = re.search(r"\(os error (\d+)\)", str(error)) if safetensors else None
        number = int(code[1]) if code else error.errno if isinstance(error, OSError) else None
        if number is None:
            raise
        named: object = path
        if path.is_dir():
            named = getattr(error, "filename2", None) or getattr(error, "filename", None)  # of a copy, the target
            named = named or (path / "model.safetensors" if safetensors else _newest(path))  # which removes its part
        raise OSError(number, os.strerror(number), str(named)) from error


def _newest(folder: Path) -> Path:
    files = [file for file in folder.rglob("*") if file.is_file()]
    return max(files, key=lambda file: file.stat().st_mtime_ns, default=folder)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old content or the new, never a part."""
    write_atomically(path, text.encode("utf-8"))


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part.

    What processes of this machine left that were killed while they wrote it is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    here = f"{socket.gethostname()}.tmp"
    for leftover in path.parent.glob(glob.escape(f".{path.name}.") + "*" + glob.escape(f"@{here}")):
        writer = leftover.name.removeprefix(f".{path.name}.").removesuffix(f"@{here}")
        if re.fullmatch(r"\d{1,9}", writer) and not _is_alive(int(writer)):
            leftover.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}@{here}")
    try:
        with naming(path):
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    """Whether a process of this machine runs."""
    try:
        if os.name == "posix":  # elsewhere, asking would end it
            os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return True
