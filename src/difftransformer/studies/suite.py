"""Several tasks on several models, as a preset lists them; every result is a file of its own."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, DiffTransformerError, ResultsError
from ..evals.engine import Progress
from ..hub import OpenedModel, open_language_model
from ..model.dtypes import WeightsDtype
from ..results import TaskResult, read_result
from ..typed import build
from .recipe import TaskSpec, check_specs, read_mapping, shipped_recipes
from .tasks import evaluate_task


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The content of a preset.

    Attributes:
        name: Name for the report's title.
        tasks: The tasks, in the order of the report.
    """

    name: str
    tasks: list[TaskSpec]

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("tasks: give at least one")
        check_specs(self.tasks)


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A task that was not run on a model, and why."""

    name: str
    model: str
    reason: str


def load_suite(preset: str) -> Suite:
    """Read a suite from a file, or one of this package by its name, and check every option.

    Raises:
        ConfigError: There is no such file, task or option.
    """
    document = read_mapping(preset, shipped_recipes("suites"), "a suite is a mapping with name and tasks")
    return build(Suite, document, source=preset, error=ConfigError)


def run_suite(
    suite: Suite,
    models: Sequence[str],
    folder: Path,
    *,
    device: str = "cpu",
    dtype: WeightsDtype = "auto",
    batch_tokens: int = 16_384,
    accelerated: bool = True,
    progress_bar: Callable[[str], AbstractContextManager[Progress]],
    log: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, list[TaskResult]], list[Missing]]:
    """Run every task on every model; results that are already in the folder are not computed again.

    A task that cannot be run, such as one whose data is not available, does not stop the others.

    Args:
        suite: The tasks.
        models: Models that `open_language_model` accepts.
        folder: Results go to FOLDER/models/MODEL/NAME.json.
        device: cpu or cuda.
        dtype: Dtype of the weights.
        batch_tokens: Most tokens of a batch.
        accelerated: See `open_language_model`.
        progress_bar: Opens a progress bar with a label.
        log: Called with lines about what is going on.

    Returns:
        Results by task, in the order of the models, and the tasks that were not run.
    """
    found: dict[str, list[TaskResult]] = {task.name: [] for task in suite.tasks}
    missing = []
    for place, model in enumerate(models):
        log(f"{model}: opening")
        with open_language_model(
            model, device=device, dtype=dtype, batch_tokens=batch_tokens, accelerated=accelerated
        ) as opened:
            own = folder / "models" / f"{place}-{Path(model).name}"
            for task in suite.tasks:
                try:
                    result = _found(own / f"{task.name}.json", task, opened)
                    if result is None:
                        with progress_bar(f"{Path(model).name}: {task.name}") as progress:
                            result = evaluate_task(
                                task.task,
                                task.built(),
                                opened,
                                own,
                                label=task.name,
                                device=device,
                                progress=progress,
                                log=log,
                            )
                    found[task.name].append(result)
                except DiffTransformerError as error:
                    log(f"{task.name}: left out: {error}")
                    missing.append(Missing(name=task.name, model=model, reason=str(error)))
    return found, missing


def _found(path: Path, task: TaskSpec, model: OpenedModel) -> TaskResult | None:
    try:
        result = read_result(path, TaskResult)
    except ResultsError:
        return None
    # As JSON stores them, without tuples.
    asked = dataclasses.asdict(task.built())
    same = result.model.fingerprint == model.identity.fingerprint
    return result if same and result.options == asked and result.task == task.task else None
