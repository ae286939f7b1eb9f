"""Read files piece by piece: text, JSONL that may be compressed, and Parquet. No file is held in memory."""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import DataError

COMPRESSED = (".gz", ".zst")
_CHUNK_BYTES = 2**16  # of a compressed file, which may hold a thousand times as much text
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


def read_chunks(path: Path, on_read: OnRead = lambda size: None) -> Iterator[bytes]:
    """Yield the content of a file, decompressed if its name ends in .gz or .zst.

    Raises:
        DataError: The file cannot be read, its compressed data are broken, or the extra `data` is missing.
    """
    make = _decompressor(path)
    with readable(path), path.open("rb") as file:
        if make is None:
            while chunk := file.read(2**20):
                on_read(len(chunk))
                yield chunk
            return
        decompressor, offset, rest = make(), 0, b""
        while chunk := file.read(_CHUNK_BYTES):
            on_read(len(chunk))
            rest = chunk
            while rest:
                if decompressor.eof:  # another member, unless it is padding
                    rest = rest.lstrip(b"\0")
                    if not rest:
                        break
                    decompressor = make()
                try:
                    content = decompressor.decompress(rest)
                except Exception as error:  # each library has its own
                    raise _broken(path, offset, str(error)) from None
                rest = decompressor.unused_data if decompressor.eof else b""
                offset += len(content)
                if content:
                    yield content
        if not decompressor.eof:
            raise _broken(path, offset, "the file ends too early")


def _broken(path: Path, offset: int, reason: str) -> DataError:
    return DataError(
        f"{path}: broken compressed data after {offset:,} bytes of text ({reason}); fetch or compress the file again"
    )


def _decompressor(path: Path) -> Callable[[], Any] | None:
    if path.suffix == ".gz":
        return lambda: zlib.decompressobj(wbits=31)
    if path.suffix != ".zst":
        return None
    try:
        from compression import zstd  # type: ignore[import-not-found] # Python 3.14
    except ImportError:
        pass
    else:
        return zstd.ZstdDecompressor
    try:
        import zstandard
    except ImportError:
        raise DataError(
            f"{path}: reading .zst takes the package zstandard; run pip install 'difftransformer[data]', or decompress the file"
        ) from None
    return lambda: zstandard.ZstdDecompressor().decompressobj()


def read_lines(path: Path, on_read: OnRead = lambda size: None) -> Iterator[str]:
    """Yield the lines of a UTF-8 file without their line feeds; a leading byte-order mark is dropped.

    Raises:
        DataError: See `read_chunks`; or the text is not UTF-8.
    """
    offset, rest = 0, b""

    def decoded(line: bytes) -> str:
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise not_utf8(path, line, error, offset) from None
        return text if offset else text.removeprefix("\ufeff")

    for chunk in read_chunks(path, on_read):
        first, *others = chunk.split(b"\n")
        if not others:
            rest += first
            continue
        for line in (rest + first, *others[:-1]):
            yield decoded(line)
            offset += len(line) + 1
        rest = others[-1]
    yield decoded(rest)


def parquet_rows(path: Path, columns: tuple[str, ...], on_read: OnRead = lambda size: None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file as mappings of those of the `columns` that it has.

    Raises:
        DataError: The file cannot be read or is broken, or the extra `data` is missing.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(
            f"{path}: reading .parquet takes the package pyarrow; run pip install 'difftransformer[data]'"
        ) from None
    row = 0
    try:
        with path.open("rb") as raw, pyarrow.parquet.ParquetFile(raw) as file:
            size, total = path.stat().st_size, max(1, file.metadata.num_rows)
            held = [name for name in columns if name in file.schema_arrow.names]
            if not held:
                raise DataError(
                    f"{path}: no column {columns[0]!r} (met {sorted(file.schema_arrow.names)}); rename the column of the text"
                )
            for batch in file.iter_batches(_ROWS, columns=held):
                yield from batch.to_pylist()
                on_read(size * (row + len(batch)) // total - size * row // total)
                row += len(batch)
    except (pyarrow.ArrowException, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise DataError(
            f"{path}: broken Parquet data after row {row} ({reason}); fetch or write the file again"
        ) from None
