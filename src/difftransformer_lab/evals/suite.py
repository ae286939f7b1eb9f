"""Several tasks on several models, as a preset lists them; every result is a file of its own."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from difftransformer.errors import ConfigError, DiffTransformerError, EvaluationError
from difftransformer.sources import name_of
from difftransformer.train.parallel import ALONE, Processes
from difftransformer.typed import build

from ..recipe_files import read_mapping, shipped_recipes
from ..results import TaskResult
from .evaluate import TaskSpec, check_specs, kept_or_asked
from .opening import OpenedModel, open_language_model

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The content of a preset.

    Attributes:
        tasks: The tasks, in the order of the report.
        context_tokens: Most tokens of a row, where a model's context has more; None for the model's.
    """

    name: str
    tasks: list[TaskSpec]
    context_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.context_tokens is not None and self.context_tokens < 1:
            raise ConfigError(f"context_tokens={self.context_tokens}: give at least 1")
        if not self.tasks:
            raise ConfigError("tasks: give at least one")
        check_specs(self.tasks)


def load_suite(preset: str) -> Suite:
    """Read a suite from a file or by its shipped name, and check every option."""
    document = read_mapping(preset, shipped_recipes("suites"), "a suite is a mapping with name and tasks")
    return build(Suite, document, source=preset, error=ConfigError)


def run_suite(
    suite: Suite,
    models: Sequence[str],
    folder: Path,
    *,
    opening: Callable[[str], AbstractContextManager[OpenedModel]] = open_language_model,
    processes: Processes = ALONE,
) -> tuple[dict[str, list[TaskResult]], list[tuple[str, str, str]]]:
    """Run every task on every model; results that are already in the folder are not computed again.

    A result holds as long as the model, the options and the content of the data are the same. A task that cannot be run, for
    want of its data say, does not stop the rest, and neither does a model that cannot be opened.

    Args:
        folder: Results go to FOLDER/models/MODEL/NAME.json.
        processes: All processes, each with the model. The first one writes.

    Returns:
        Results by task, in the order of the models; and task, model and reason of what was not run.
    """
    results: dict[str, list[TaskResult]] = {task.name: [] for task in suite.tasks}
    missing: list[tuple[str, str, str]] = []
    failures = []

    def leave_out(name: str, model: str, error: Exception) -> None:
        reason = str(error) if isinstance(error, DiffTransformerError) else f"{type(error).__name__}: {error}"
        logger.warning("%s: left out: %s", name, reason)
        missing.append((name, model, reason))

    for place, model in enumerate(models):
        logger.info("%s: opening", model)
        own = folder / "models" / f"{place}-{name_of(model)}"
        try:
            with opening(model) as opened:
                asked = opened.language_model
                asked.context_tokens = min(asked.context_tokens, suite.context_tokens or asked.context_tokens)
                for spec in suite.tasks:
                    try:
                        title = f"{Path(model).name}: {spec.name}"
                        result = kept_or_asked(spec, opened, own, title=title, processes=processes)
                        results[spec.name].append(result)
                    except Exception as error:  # whatever it is, it costs one task
                        if processes.count > 1 and not isinstance(error, DiffTransformerError):
                            raise  # the others have not met it
                        leave_out(spec.name, model, error)
        except DiffTransformerError as error:
            failures.append(error)
            leave_out("every task", model, error)
    if len(failures) == len(models):
        raise failures[0]
    if not any(results.values()):
        name, model, reason = missing[0]
        raise EvaluationError(f"{suite.name}: no task could be run; {name} on {model}: {reason}")
    return results, missing
