"""What protects files from other processes and from a full disk: locks on folders, whole files, and errors that name theirs."""

import contextlib
import errno
import logging
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from .errors import FolderInUse

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
_ORPHANS_SECONDS = 6.0  # children of a killed process end within 5 s, see `child`
_RETRY_SECONDS = 0.1
_HOLDER_BYTES = 300
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)


@contextlib.contextmanager
def locked(folder: Path, *, name: str = LOCK_FILE, wait: bool = False) -> Iterator[int]:
    """Hold the lock of a folder, which is created if it is missing.

    The operating system releases the lock when the process ends, however it ends. A child that inherits the file descriptor
    holds the lock too. Where the file system has no locks, a warning is logged and the block runs without one.

    Args:
        folder: The folder.
        name: Name of the lock file, which holds the process and the host of the holder. It is removed at the end.
        wait: Whether to wait for another process to release the lock.

    Yields:
        The file descriptor of the lock.

    Raises:
        FolderInUse: Another process holds the lock, and `wait` is False.
    """
    is_new, path = not folder.exists(), folder / name
    with _acquire(path, wait) as file:
        try:
            yield file.fileno()
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
            if is_new:
                with contextlib.suppress(OSError):  # it holds something now
                    folder.rmdir()


def _acquire(path: Path, wait: bool) -> IO[bytes]:
    end, has_waited = time.monotonic() + _ORPHANS_SECONDS, False
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = path.open("a+b", buffering=0)
        except FileNotFoundError:  # its last holder has just removed the folder
            continue
        try:
            _flock(file)
            if _is_at(path, file):
                with contextlib.suppress(OSError):  # a full disk
                    file.truncate(0)
                    file.write(f"{os.getpid()} {socket.gethostname()}\n".encode())
                return file
        except BlockingIOError:
            file.seek(0)
            written = re.fullmatch(r"(\d{1,9}) ([!-~]{1,255})\n?", file.read(_HOLDER_BYTES).decode("ascii", "replace"))
            holder = f"process {written[1]} on {written[2]}" if written else "another process"
            if wait and not has_waited:
                logger.warning("waiting for %s, which is working in %s", holder, path.parent)
                has_waited = True
            is_ending = written and written[2] == socket.gethostname() and _has_ended(int(written[1]))
            if not wait and (not is_ending or time.monotonic() > end):
                file.close()
                raise FolderInUse(
                    f"{path.parent}: {holder} is working in it; wait until it ends, or name another folder"
                ) from None
            time.sleep(_RETRY_SECONDS)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("%s: this file system has no locks; use the folder in one process at a time", path.parent)
            return file
        file.close()


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Whether the file is still there; its last holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _flock(file: IO[bytes]) -> None:
    try:
        import fcntl
    except ImportError:  # on Windows
        raise OSError(errno.ENOSYS, "no flock") from None
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _has_ended(pid: int) -> bool:
    """Whether there is no such process on this host, or it only waits for its parent to notice its end."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] in "ZX"
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


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
    """Write a file so that a reader sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            with open(temporary, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
