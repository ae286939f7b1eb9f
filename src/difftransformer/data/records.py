"""Read files of text and rows of data sets one at a time: JSONL, Parquet, and public sets through `datasets`.

No code of a data set is run. Whatever cannot be read is one error that names the file and the place.
"""

import gzip
import hashlib
import io
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import DataError
from ..reading import parse_json

_ROWS = 1000  # of a Parquet file that are read together

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

    The file is read line by line, and decompressed if its name ends in .gz or .zst.

    Raises:
        DataError: The file cannot be read, or a line is not a JSON object.
    """
    for number, content in enumerate(_lines(path, on_read), start=1):
        place = f"{path}: line {number}"
        try:
            line = content.decode("utf-8-sig" if number == 1 else "utf-8")
            if not line.strip():
                continue
            row = parse_json(line)
            if "\\u" in line:  # an escape may be half a surrogate pair, which has no encoding
                json.dumps(row, ensure_ascii=False).encode()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{place} is not UTF-8 text (byte 0x{content[error.start]:02x} at offset {error.start} of the line); "
                "convert the file to UTF-8 (for example with iconv)"
            ) from None
        except UnicodeEncodeError:
            raise DataError(
                f"{place} holds half a surrogate pair, which is not valid Unicode; correct the line"
            ) from None
        except json.JSONDecodeError as error:
            raise DataError(f"{place} is not JSON ({error.msg} at column {error.colno}); correct the line") from None
        except ValueError as error:
            raise DataError(f"{place} cannot be read ({error}); correct the line") from None
        if not isinstance(row, dict):
            raise DataError(f"{place} is a JSON {type(row).__name__}; give one JSON object per line")
        yield number, row


def _lines(path: Path, on_read: OnRead) -> Iterator[bytes]:
    """Yield the lines of a file that may be compressed."""
    number = place = 0
    with readable(path), path.open("rb") as raw:
        try:
            for line in _decompressed(path, raw):
                number += 1
                yield line
                before, place = place, raw.tell()
                on_read(place - before)
        except (OSError, EOFError, zlib.error) as error:
            if path.suffix.lower() not in (".gz", ".zst"):
                raise
            reason = str(error).partition("\n")[0]
            raise DataError(
                f"{path}: broken compressed data after line {number:,} ({reason}); fetch or compress the file again"
            ) from None


def _decompressed(path: Path, raw: io.BufferedReader) -> Iterable[bytes]:
    if path.suffix.lower() == ".gz":
        return gzip.GzipFile(fileobj=raw)
    if path.suffix.lower() != ".zst":
        return raw
    return io.BufferedReader(_arrow(path).CompressedInputStream(raw, "zstd"))


def _arrow(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{path}: reading {path.suffix} takes the package pyarrow; run pip install 'difftransformer[data]'"
        ) from None
    return pyarrow


def parquet_rows(path: Path, columns: tuple[str, ...], on_read: OnRead = lambda size: None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file as mappings of those of the `columns` that it has.

    Raises:
        DataError: The file cannot be read or is broken, or the extra `data` is missing.
    """
    arrow, row = _arrow(path), 0
    try:
        with arrow.parquet.ParquetFile(path) as file:
            size, total = path.stat().st_size, max(1, file.metadata.num_rows)
            present = [name for name in columns if name in file.schema_arrow.names]
            if not present:
                raise DataError(
                    f"{path}: no column {columns[0]!r} (met {sorted(file.schema_arrow.names)}); rename the column of the text"
                )
            for batch in file.iter_batches(_ROWS, columns=present):
                yield from batch.to_pylist()
                on_read(size * (row + len(batch)) // total - size * row // total)
                row += len(batch)
    except (arrow.ArrowException, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise DataError(
            f"{path}: broken Parquet data after row {row} ({reason}); fetch or write the file again"
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

    Error messages begin with `name`, which the user gave, and end with `otherwise`, an alternative: ", or ...".

    Raises:
        DataError: The library is missing or cannot load the set.
    """
    try:
        import datasets
    except ImportError:
        raise DataError(
            f"{name}: the package datasets is not installed; run pip install 'difftransformer[data]'{otherwise}"
        ) from None
    try:
        with errors_only("huggingface_hub"):  # not its warnings about retries
            options: dict[str, Any] = {"streaming": True} if streaming else {}
            return datasets.load_dataset(hub_name, config, split=split, revision=revision, **options)
    except Exception as error:  # datasets raises its own errors, those of the hub's client and those of the network
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise DataError(
            f"{name}: datasets cannot load {hub_name} ({reason}); check name, configuration, split and network{otherwise}"
        ) from None


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


def is_held_out(name: str, share: float, seed: int) -> bool:
    """Whether an item of that name is among the expected `share` of all that a hash of (seed, name) splits off.

    An item stays on its side when other items are added, removed or reordered.
    """
    digest = hashlib.blake2b(f"{seed}\0{name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
