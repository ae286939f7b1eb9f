"""Run one task on one model and write its result."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from difftransformer.data import DataConfig, prepare_shards
from difftransformer.errors import ConfigError
from difftransformer.progress import titled
from difftransformer.train.parallel import ALONE, Processes
from difftransformer.train.run_summary import RECIPE_FILE
from difftransformer.typed import build
from difftransformer_lab.evals.opening import OpenedModel

from ..evals.engine import Task, run_task, task_sha256
from ..evals.prompts.texts import TaskContext
from ..evals.tasks import task_kind
from ..results import DataIdentity, TaskResult, kept_result, write_result
from .environment import command_line, environment, now
from .recipe import TaskSpec, load_recipe

logger = logging.getLogger(__name__)


def context_of(model: OpenedModel) -> TaskContext:
    """Return what tasks are drawn for: a model of a run knows the text that the run held out."""
    path, asked = Path(model.identity.name), model.language_model
    recipe = (path.parent.parent if path.parent.name == "checkpoints" else path) / RECIPE_FILE
    context = TaskContext(tokenizer=asked.tokenizer, context_tokens=asked.context_tokens)
    if not recipe.is_file():
        return context

    def data() -> DataConfig:
        return load_recipe(recipe).data

    return dataclasses.replace(context, validation=lambda: prepare_shards(data()).tokens("validation"), data=data)


def evaluate_task(
    name: str,
    options: Any,
    model: OpenedModel,
    folder: Path,
    *,
    task: Task | None = None,
    label: str | None = None,
    title: str | None = None,
    replace_others: bool = False,
    processes: Processes = ALONE,
) -> TaskResult:
    """Run a task on a model and write FOLDER/LABEL.json; FOLDER/LABEL.answers.jsonl keeps the answers as they come.

    Args:
        folder: Folder of the results; requests that it already answers are not asked again.
        label: Name of the files; the task's name by default. A folder may hold several results of one task.
        replace_others: Whether to replace answers of another model or to other questions (see `run_task`).
        processes: This process and the others that take part, each with the model. The first one writes.

    Raises:
        ConfigError: There is no such task.
        DataError: The task's data cannot be read, or does not fit the model.
        EvaluationError: The model cannot answer.
        CheckpointError: The folder holds damaged answers, or those of another model or to other questions.
    """
    label = label or name
    if task is None:
        logger.info("%s: reading data", label)
        task = _drawn(name, options, model, processes)
    with titled(title or label):
        scores = run_task(
            model.language_model,
            task,
            journal=folder / f"{label}.answers.jsonl",
            identity=model.identity.fingerprint,
            replace_others=replace_others,
            processes=processes,
        )
    result = TaskResult(
        task=name,
        model=model.identity,
        data=DataIdentity(name=task.data_name, sha256=task_sha256(task), requests=len(task.requests)),
        options=dataclasses.asdict(options),
        choices=list(task.choices),
        seed=int(getattr(options, "seed", 0)),
        command=command_line(),
        created=now(),
        environment=environment(str(model.language_model.model.device)),
        measurements=scores.measurements,
        items=scores.items,
        grids=scores.grids,
        gaps=scores.gaps,
    )
    if processes.is_first:
        write_result(result, folder / f"{label}.json")
    return result


def _drawn(name: str, options: Any, model: OpenedModel, processes: Processes) -> Task:
    task: Task = processes.rank0_first(lambda: task_kind(name).make(options, context_of(model)))
    return task


def kept_or_asked(
    spec: TaskSpec,
    model: OpenedModel,
    folder: Path,
    task: Task | None = None,
    *,
    title: str | None = None,
    processes: Processes = ALONE,
) -> TaskResult:
    """Return the result that is in the folder, if data, options and model are still the same, or else ask the model."""
    options = spec.built()
    drawn = task or _drawn(spec.task, options, model, processes)
    kept = processes.broadcast(lambda: stored_result(folder / f"{spec.name}.json", spec.task, options, drawn))
    if kept is not None and kept.model.fingerprint == model.identity.fingerprint:
        return kept
    logger.info("%s: evaluating", title or spec.name)
    return evaluate_task(
        spec.task,
        options,
        model,
        folder,
        task=drawn,
        label=spec.name,
        title=title,
        replace_others=True,
        processes=processes,
    )


def stored_result(path: Path, name: str, options: Any, task: Task) -> TaskResult | None:
    """Return the result in a file if it has the figures of this task on its data as they are now, else None."""
    result = kept_result(path, TaskResult)
    if result is None or result.task != name or result.data.sha256 != task_sha256(task):
        return None
    try:  # options that are new since then have their defaults
        asked = build(type(options), result.options, source=str(path), error=ConfigError)
    except ConfigError:
        return None
    return result if asked == options else None
