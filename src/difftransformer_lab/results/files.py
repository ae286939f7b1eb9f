"""Results files: one writer, one strict reader."""

import dataclasses
import logging
from pathlib import Path
from typing import Any, TypeVar

from difftransformer.errors import DamagedResult, ResultsError
from difftransformer.files import write_text_atomically
from difftransformer.typed import build

from .bench import Bench
from .checksums import opened, sealed
from .studies import Drift, RunRecord, StudyIndex
from .tasks import TaskResult

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
VERSIONS = {"bench": 2}
"""Versions of the kinds that have changed; the rest are at SCHEMA_VERSION."""

SHORT_KINDS = ("run",)
"""Kinds with many files, so each is written as small as it can be."""

KINDS: dict[str, type] = {"drift": Drift, "bench": Bench, "task": TaskResult, "run": RunRecord, "study": StudyIndex}

Result = Bench | TaskResult | Drift | RunRecord | StudyIndex
T = TypeVar("T")


def write_result(result: Result, path: Path | str) -> Path:
    """Write a result as JSON with a checksum, whole or not at all."""
    path = Path(path)
    kind = next(name for name, cls in KINDS.items() if isinstance(result, cls))
    document = {"kind": kind, "version": VERSIONS.get(kind, SCHEMA_VERSION), "result": dataclasses.asdict(result)}
    write_text_atomically(path, sealed(document, is_short=kind in SHORT_KINDS))
    return path


def read_result(path: Path | str, cls: type[T]) -> T:
    """Read a results file of the given dataclass.

    Raises:
        ResultsError: no such file, not JSON, another kind, another version, or a field missing, unknown or mistyped.
        DamagedResult: the file is not as it was written.
    """
    kind, version, result = read_document(path)
    expected = next(name for name, known in KINDS.items() if known is cls)
    if kind != expected:
        raise ResultsError(f"{path}: holds a result of kind {kind!r}, expected {expected!r}; name another file")
    newest = VERSIONS.get(kind, SCHEMA_VERSION)
    if version != newest:
        raise ResultsError(
            f"{path}: results version {version!r}, this release reads version {newest}; use the release that wrote it"
        )
    return build(cls, result, source=str(path), error=ResultsError)


def kept_result(path: Path | str, cls: type[T]) -> T | None:
    """Read a result if there is a usable one; None if the file is missing, damaged, or of another kind or release.

    A warning names a damaged file.
    """
    try:
        return read_result(path, cls)
    except DamagedResult as damage:
        logger.warning("%s, which happens now", damage)
    except ResultsError:
        pass
    return None


def read_document(path: Path | str) -> tuple[str, Any, Any]:
    """Read kind, version and plain data of a results file.

    Raises:
        ResultsError: no such file, or not a results file.
        DamagedResult: the file is not as it was written.
    """
    try:
        document = opened(Path(path).read_bytes())
    except FileNotFoundError:
        raise ResultsError(f"{path}: no such results file; name a results.json that a command wrote") from None
    except (OSError, ValueError) as error:
        raise DamagedResult(
            f"{path}: not a results file, or changed since it was written ({error}); run the command that wrote it again"
        ) from None
    if not isinstance(document, dict) or document.keys() != {"kind", "version", "result"}:
        raise ResultsError(f"{path}: not a results file (no kind, version and result); name one that a command wrote")
    return document["kind"], document["version"], document["result"]
