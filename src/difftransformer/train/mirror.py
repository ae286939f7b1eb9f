"""A copy of a run in an object store, such as s3://bucket/run: checkpoints and metrics, by fsspec.

Runs train in a local folder. A whole checkpoint is copied, state.json last, so one that has it in the store is whole.
"""

import shutil
import warnings
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from ..errors import CheckpointError, ConfigError
from ..model.transformers_errors import on_one_line
from .checkpoint import STATE_FILE, checkpoints, folder_of_step, step_of
from .metrics import METRICS_FILE
from .trainer import Callback, Trainer


def open_store(url: str) -> tuple[Any, str]:
    """Return the file system of a URL and the path in it.

    Raises:
        ConfigError: There is no such kind of store, or its package is missing.
    """
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"training.checkpoint.mirror: {url} cannot be opened ({error}); install the package of the store, such as s3fs"
        ) from None
    return fs, root.rstrip("/")


def fetch(url: str, run: Path) -> Path | None:
    """Copy the newest checkpoint of a store, and the metrics, into a run folder that has none; return the checkpoint.

    Raises:
        CheckpointError: The store cannot be read.
        ConfigError: See `open_store`.
    """
    if checkpoints(run):
        return None
    fs, root = open_store(url)
    try:
        whole = _checkpoints(fs, root)
        if not whole:
            return None
        final = folder_of_step(run, step_of(Path(whole[-1])))
        temporary = final.with_name(f".{final.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed
        temporary.mkdir(parents=True)
        for file in fs.ls(whole[-1], detail=False):
            fs.get_file(file, str(temporary / PurePosixPath(file).name))
        if fs.exists(f"{root}/{METRICS_FILE}"):
            fs.get_file(f"{root}/{METRICS_FILE}", str(run / METRICS_FILE))
    except Exception as error:  # each store has classes of its own
        raise CheckpointError(
            f"{url}: cannot be read ({on_one_line(error)}); check the store and its keys, or train without a mirror"
        ) from error
    temporary.rename(final)
    return final


class Mirror(Callback):
    """Copies each checkpoint of a run to a store, and deletes there those that the run no longer keeps.

    Training waits for the copy. A fault of the store is a warning, and the next checkpoint is copied again.

    Args:
        url: Folder of the run in the store.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def on_checkpoint(self, trainer: Trainer) -> None:
        """Copy the checkpoint of a step."""
        if not trainer.finish_saving() or not trainer.processes.is_first:
            return
        try:
            self._copy(trainer.folder, folder_of_step(trainer.folder, trainer.step))
        except Exception as error:  # each store has classes of its own
            warnings.warn(
                f"{self._url}: the checkpoint was not copied ({on_one_line(error)}); training goes on", stacklevel=2
            )

    def _copy(self, run: Path, checkpoint: Path) -> None:
        fs, root = open_store(self._url)
        target = f"{root}/checkpoints/{checkpoint.name}"
        if target not in _checkpoints(fs, root):
            fs.makedirs(target, exist_ok=True)
            for file in sorted(checkpoint.iterdir(), key=lambda path: path.name == STATE_FILE):
                fs.put_file(str(file), f"{target}/{file.name}")
        fs.put_file(str(run / METRICS_FILE), f"{root}/{METRICS_FILE}")
        kept = {path.name for path in checkpoints(run)}
        for old in _checkpoints(fs, root):
            if PurePosixPath(old).name not in kept:
                fs.rm_file(f"{old}/{STATE_FILE}")  # so that a part of it is no checkpoint
                fs.rm(old, recursive=True)


def _checkpoints(fs: Any, root: str) -> list[str]:
    """Return the folders of a store's whole checkpoints, oldest first."""
    fs.invalidate_cache()
    found = {str(PurePosixPath(path).parent) for path in fs.glob(f"{root}/checkpoints/step-*/{STATE_FILE}")}
    return sorted(found, key=lambda path: step_of(Path(path)))
