"""A copy of a run in an object store, such as s3://bucket/run: checkpoints, metrics and recipe.

Runs train in a local folder. A whole checkpoint is copied, state.json last, so one that has it in the store is whole.
"""

import warnings
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError
from ..stores import Store
from .checkpoint import STATE_FILE, checkpoints, folder_of_step, step_of
from .metrics import METRICS_FILE
from .run_summary import RECIPE_FILE
from .trainer import Callback, Trainer


def fetch(url: str, run: Path, check: Callable[[Path], object] | None = None) -> Path | None:
    """Copy the newest checkpoint of a store, and the metrics, into a run folder that has none; return the checkpoint.

    Args:
        url: Folder of the run in the store.
        run: The run folder.
        check: Raises an error if a recipe is not the run's. It gets a copy of the store's, which is then the folder's. None
            for a run without a recipe.

    Raises:
        CheckpointError: The store cannot be read, or has no recipe to check.
        ConfigError: See `Store`.
    """
    if checkpoints(run):
        return None
    whole, store = Store(url, error=CheckpointError), _checkpoint_store(url)
    steps = _steps(store)
    if not steps:
        return None
    run.mkdir(parents=True, exist_ok=True)
    if check is not None:
        recipe = run / f".{RECIPE_FILE}.tmp"
        recipe.write_bytes(whole.read(RECIPE_FILE))
        try:
            check(recipe)
            recipe.replace(run / RECIPE_FILE)
        finally:
            recipe.unlink(missing_ok=True)
    (run / METRICS_FILE).write_bytes(whole.read(METRICS_FILE))
    newest = folder_of_step(run, max(steps))
    store.get(newest.name, newest)
    return newest


class Mirror(Callback):
    """Copies each checkpoint of a run to a store, and deletes there those that its configuration no longer keeps.

    Training waits for the copy. A fault of the store is a warning, and the next checkpoint is copied again.

    Args:
        url: Folder of the run in the store.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    def on_checkpoint(self, trainer: Trainer) -> None:
        """Copy the checkpoint of a step."""
        if trainer.finish_saving():
            trainer.processes.broadcast(lambda: self._copy_if_possible(trainer))  # the others wait as long as it takes

    def _copy_if_possible(self, trainer: Trainer) -> None:
        try:
            self._copy(trainer)
        except (CheckpointError, OSError) as error:
            warnings.warn(f"the checkpoint was not copied, and training goes on: {error}", stacklevel=2)

    def _copy(self, trainer: Trainer) -> None:
        run, now = trainer.folder, trainer.step
        for name in (RECIPE_FILE, METRICS_FILE):
            if (run / name).exists():
                Store(self._url, error=CheckpointError).write(name, (run / name).read_bytes())
        store = _checkpoint_store(self._url)
        there, checkpoint = _steps(store), folder_of_step(run, now)
        if now not in there:
            store.put(checkpoint, checkpoint.name, STATE_FILE)
        # By steps, since the run folder may lack what another machine kept.
        for old in trainer.config.retired({*there, now}, now):
            store.delete(folder_of_step(run, old).name, STATE_FILE)


def _checkpoint_store(url: str) -> Store:
    return Store(f"{url}/checkpoints", error=CheckpointError)


def _steps(store: Store) -> list[int]:
    """Return the steps of a store's whole checkpoints."""
    return [step_of(Path(name)) for name in store.folders(STATE_FILE) if name.startswith("step-")]
