"""Several experiments on several models: a preset says which, and every result stays on disk by itself."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, DiffTransformerError, ResultsError
from ..evals.task import Watch
from ..evals.tasks import TASKS, options_class
from ..hub import OpenedModel, open_language_model
from ..model.dtypes import WeightsDtype
from ..results import TaskResult, read_result
from ..typed import build
from .recipe import read_mapping, shipped_recipes
from .tasks import evaluate_task


@dataclass(frozen=True, kw_only=True)
class SuiteTask:
    """One experiment of a suite.

    Attributes:
        task: One of `evals.tasks.TASKS`.
        label: Its name in the report, and of its files; the task's by default.
        options: Fields of the task's Options; the others keep their defaults.
    """

    task: str
    label: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The label, or the task."""
        return self.label or self.task

    def built(self) -> Any:
        """The task's options.

        Raises:
            ConfigError: no such task, or options that it does not take.
        """
        if self.task not in TASKS:
            raise ConfigError(f"{self.name}: no task {self.task!r}; choose one of {', '.join(TASKS)}")
        return build(options_class(self.task), self.options, source=self.name, error=ConfigError)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """What a preset holds.

    Attributes:
        name: For the report's title.
        tasks: The experiments, in the order of the report.
    """

    name: str
    tasks: list[SuiteTask]

    def __post_init__(self) -> None:
        twice = [name for name, count in Counter(task.name for task in self.tasks).items() if count > 1]
        if not self.tasks or twice:
            raise ConfigError(f"tasks: {twice[0]!r} stands twice; give labels" if twice else "tasks: give at least one")
        for task in self.tasks:
            if not re.fullmatch(r"[\w.-]+( [\w.-]+)*", task.name):
                raise ConfigError(
                    f"label {task.name!r}: it names files; use letters, digits, points, hyphens and spaces"
                )


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
    suite = build(Suite, document, source=preset, error=ConfigError)
    for task in suite.tasks:
        task.built()
    return suite


def run_suite(
    suite: Suite,
    models: Sequence[str],
    folder: Path,
    *,
    device: str = "cpu",
    dtype: WeightsDtype = "auto",
    batch_tokens: int = 16_384,
    accelerated: bool = True,
    progress: Callable[[str], AbstractContextManager[Watch]],
    say: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, list[TaskResult]], list[Missing]]:
    """Run every experiment on every model; what is in the folder already is not run again.

    An experiment that cannot be run, such as one whose data is out of reach, does not stop the others.

    Args:
        suite: Which experiments.
        models: What `open_language_model` takes.
        folder: Results go to FOLDER/models/MODEL/NAME.json.
        device: cpu or cuda.
        dtype: Of the weights.
        batch_tokens: Most tokens of rows side by side.
        accelerated: See `open_language_model`.
        progress: Makes a bar of a label.
        say: Told what is going on.

    Returns:
        Results by experiment, in the order of the models; and what was not run.
    """
    found: dict[str, list[TaskResult]] = {task.name: [] for task in suite.tasks}
    missing = []
    for place, model in enumerate(models):
        say(f"{model}: opening")
        with open_language_model(
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


def _found(path: Path, task: SuiteTask, model: OpenedModel) -> TaskResult | None:
    try:
        result = read_result(path, TaskResult)
    except ResultsError:
        return None
    # As JSON has it: no tuples.
    asked = dataclasses.asdict(task.built())
    same = result.model.fingerprint == model.identity.fingerprint
    return result if same and result.options == asked and result.task == task.task else None
