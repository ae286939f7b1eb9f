"""Run one task on one model and write its result."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from ..evals.engine import Progress, no_progress, run_task
from ..evals.requests import requests_sha256
from ..evals.tasks import task_kind
from ..hub import OpenedModel
from ..results import DataIdentity, TaskResult, write_result
from .environment import command_line, environment, now


def evaluate_task(
    name: str,
    options: object,
    model: OpenedModel,
    folder: Path,
    *,
    label: str | None = None,
    device: str = "cpu",
    progress: Progress = no_progress,
    log: Callable[[str], None] = lambda text: None,
) -> TaskResult:
    """Run a task on a model and write FOLDER/LABEL.json; FOLDER/LABEL.answers.jsonl keeps the answers as they come.

    Args:
        name: Name of the task.
        options: The task's `Options`.
        model: The opened model.
        folder: Folder of the results; requests that it already answers are not asked again.
        label: Name of the files; the task's name by default. A folder may hold several results of one task.
        device: The model's device, for the record.
        progress: Called with the tokens asked and the tokens in total, then by a long judging.
        log: Called with lines about what is going on.

    Raises:
        ConfigError: There is no such task.
        DataError: The task's data cannot be read, or does not fit the model.
        EvaluationError: The model cannot answer.
        CheckpointError: The folder holds answers of another model or to other questions.
    """
    label = label or name
    log(f"{label}: reading data")
    task = task_kind(name).make(options, model.language_model)
    scores = run_task(
        model.language_model,
        task,
        journal=folder / f"{label}.answers.jsonl",
        identity=model.identity.fingerprint,
        progress=progress,
    )
    result = TaskResult(
        task=name,
        model=model.identity,
        data=DataIdentity(name=task.data_name, sha256=requests_sha256(task.requests), requests=len(task.requests)),
        options=dataclasses.asdict(options),  # type: ignore[call-overload]
        choices=list(task.choices),
        seed=int(getattr(options, "seed", 0)),
        command=command_line(),
        created=now(),
        environment=environment(device),
        measurements=scores.measurements,
        items=scores.items,
        grids=scores.grids,
    )
    write_result(result, folder / f"{label}.json")
    return result
