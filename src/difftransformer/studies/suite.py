"""Several experiments on several models: a preset says which, and every result stays on disk by itself."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError, DiffTransformerError, ResultsError
from ..evals.task import Watch
from ..results import TaskResult, read_result
from ..typed import build
from .opening import OpenedModel, opened_model
from .recipe import TaskSpec, check_specs, read_mapping, shipped_recipes
from .tasks import evaluate_task


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What a preset holds.

    Attributes:
        name: For the report's title.
        tasks: The experiments, in the order of the report.
    """

    name: str
    tasks: list[TaskSpec]

    def __post_init__(self) -> None:
        if not self.tasks:
            raise ConfigError("tasks: give at least one")
        check_specs(self.tasks)


@dataclass(frozen=True, kw_only=True)
class Missing:
    """An experiment that was not run on a model, and why."""

    name: str
    model: str
    reason: str


def load_suite(preset: str) -> Suite:
    """Read a suite, or one that is shipped by its name; every option is checked.

    Raises:
        ConfigError: no such file, or a task or an option that does not exist.
    """
    document = read_mapping(preset, shipped_recipes("suites"), "a suite is a mapping with name and tasks")
    return build(Suite, document, source=preset, error=ConfigError)


def run_suite(
    suite: Suite,
    models: Sequence[str],
    folder: Path,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    batch_tokens: int = 16_384,
    accelerated: bool = True,
    progress: Callable[[str], AbstractContextManager[Watch]],
    say: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, list[TaskResult]], list[Missing]]:
    """Run every experiment on every model; what is in the folder already is not run again.

    An experiment that cannot be run, such as one whose data is out of reach, does not stop the others.

    Args:
        suite: Which experiments.
        models: What `opened_model` takes.
        folder: Results go to FOLDER/models/MODEL/NAME.json.
        device: cpu or cuda.
        dtype: Of the weights.
        batch_tokens: Most tokens of rows side by side.
        accelerated: See `opened_model`.
        progress: Makes a bar of a label.
        say: Told what is going on.

    Returns:
        Results by experiment, in the order of the models; and what was not run.
    """
    found: dict[str, list[TaskResult]] = {task.name: [] for task in suite.tasks}
    missing = []
    for place, model in enumerate(models):
        say(f"{model}: opening")
        with opened_model(
            model, device=device, dtype=dtype, batch_tokens=batch_tokens, accelerated=accelerated
        ) as opened:
            own = folder / "models" / f"{place}-{Path(model).name}"
            for task in suite.tasks:
                try:
                    result = _found(own / f"{task.name}.json", task, opened)
                    if result is None:
                        with progress(f"{Path(model).name}: {task.name}") as watch:
                            result = evaluate_task(
                                task.task,
                                task.built(),
                                opened,
                                own,
                                label=task.name,
                                device=device,
                                watch=watch,
                                say=say,
                            )
                    found[task.name].append(result)
                except DiffTransformerError as error:
                    say(f"{task.name}: left out: {error}")
                    missing.append(Missing(name=task.name, model=model, reason=str(error)))
    return found, missing


def _found(path: Path, task: TaskSpec, model: OpenedModel) -> TaskResult | None:
    try:
        result = read_result(path, TaskResult)
    except ResultsError:
        return None
    # As JSON has it: no tuples.
    asked = dataclasses.asdict(task.built())
    same = result.model.fingerprint == model.identity.fingerprint
    return result if same and result.options == asked and result.task == task.task else None
