"""Read files of text, rows of JSONL files, and data sets through the library `datasets`.

No code of a data set is run. What cannot be read raises an error of one line that names the file and the line.
"""

import gzip
import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..reading import parse_json

OnRead = Callable[[int], None]
"""Called with the number of bytes of a file that have been read since the last call."""


def not_utf8(path: Path, content: bytes, error: UnicodeDecodeError, offset: int = 0) -> DataError:
    """Return the error for bytes that are not UTF-8. `content` starts at `offset` of the text."""
    return DataError(
        f"{path}: not UTF-8 text: byte 0x{content[error.start]:02x} at offset {offset + error.start} ({error.reason}); "
        "convert the file to UTF-8 (for example with iconv) or leave it out"
    )


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into one that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); check the path and its permissions") from None


def read_text(path: Path) -> str:
    """Read a UTF-8 file unchanged, except for a leading byte-order mark, which is dropped.

    Raises:
        DataError: The file cannot be read or is not UTF-8.
    """
    with readable(path):
        content = path.read_bytes()
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise not_utf8(path, content, error) from None


def files_sha256(paths: Iterable[Path]) -> str:
    """Return a fingerprint of the names and contents of files, whatever their order."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        with open(path, "rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def json_lines(path: Path, on_read: OnRead = lambda size: None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for the lines of a JSONL file that are not blank. The first line is line 1.

    The file is read line by line, and decompressed if its name ends in .gz.

    Raises:
        DataError: The file cannot be read, or a line is not a JSON object.
    """
    for number, content in enumerate(_lines(path, on_read), start=1):
        where = f"{path}: line {number}"
        try:
            line = content.decode("utf-8-sig" if number == 1 else "utf-8")
            if not line.strip():
                continue
            row = parse_json(line)
            if "\\u" in line:  # an escape may be half a surrogate pair, which has no encoding
                json.dumps(row, ensure_ascii=False).encode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where} is not UTF-8 text (byte 0x{content[error.start]:02x} at offset {error.start} of the line); "
                "convert the file to UTF-8 (for example with iconv)"
            ) from None
        except UnicodeEncodeError:
            raise DataError(
                f"{where} holds half a surrogate pair, which is not valid Unicode; correct the line"
            ) from None
        except json.JSONDecodeError as error:
            raise DataError(f"{where} is not JSON ({error.msg} at column {error.colno}); correct the line") from None
        except ValueError as error:
            raise DataError(f"{where} cannot be read ({error}); correct the line") from None
        if not isinstance(row, dict):
            raise DataError(f"{where} is a JSON {type(row).__name__}; give one JSON object per line")
        yield number, row


def _lines(path: Path, on_read: OnRead) -> Iterator[bytes]:
    """Yield the lines of a file that may be compressed."""
    number = offset = 0
    with readable(path), path.open("rb") as raw:
        lines = gzip.GzipFile(fileobj=raw) if path.suffix.lower() == ".gz" else raw
        try:
            for line in lines:
                number += 1
                yield line
                before, offset = offset, raw.tell()
                on_read(offset - before)
        except (OSError, EOFError, zlib.error) as error:
            if lines is raw:
                raise
            reason = str(error).partition("\n")[0]
            raise DataError(
                f"{path}: broken compressed data after line {number:,} ({reason}); fetch or compress the file again"
            ) from None


def load_set(
    name: str,
    hub_name: str,
    *,
    config: str | None,
    split: str,
    revision: str | None = None,
    otherwise: str = "",
    streaming: bool = False,
) -> Any:
    """Load a split of a data set with `datasets`, or open it as a stream, which is not stored first.

    `hub_name` is the name of a set on the hub, or a local folder or file. Error messages begin with `name`, which the user
    gave, and end with `otherwise`, an alternative: ", or ...".

    Raises:
        DataError: The library is missing or cannot load the set.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{name}: the package datasets is not installed; run pip install 'difftransformer[data]'{otherwise}"
        ) from None
    options: dict[str, Any] = {"streaming": True} if streaming else {}
    if (path := Path(hub_name)).is_file():
        hub_name, options["data_files"] = str(path.absolute().parent), path.name
    advice = f"check name, configuration, split and network{otherwise}"
    with _set_faults(name, f"load {path}", advice), errors_only("huggingface_hub"):  # not its warnings about retries
        return datasets.load_dataset(hub_name, config, split=split, revision=revision, **options)


def set_rows(rows: Iterable[dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set, which a stream reads from files or the network.

    Raises:
        DataError: They cannot be read.
    """
    with _set_faults(name, "read all rows", "check the files, or the network and try again"):
        yield from rows


@contextmanager
def _set_faults(name: str, task: str, advice: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # datasets raises its own errors, its hub client's and the network's
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(f"{name}: datasets cannot {task} ({reason}); {advice}") from None


@contextmanager
def errors_only(name: str) -> Iterator[None]:
    """Silence the warnings of a library's logger."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def split_hash(name: str, seed: int) -> int:
    """Return 64 bits of a hash of (seed, name). Items with the lowest ones are held out first.

    So an item stays on its side when other items are added, removed or reordered.
    """
    digest = hashlib.blake2b(f"{seed}\0{name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
