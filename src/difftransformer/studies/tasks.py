"""One task on one model: asked, scored, written down."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from ..evals.runner import requests_sha256, run_task
from ..evals.task import Watch, unwatched
from ..evals.tasks import load_task
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
    watch: Watch = unwatched,
    say: Callable[[str], None] = lambda text: None,
) -> TaskResult:
    """Run a task on a model and write FOLDER/LABEL.json; answers are kept in FOLDER/LABEL.answers.jsonl as they come.

    Args:
        name: One of `evals.tasks.TASKS`.
        options: The task's `Options`.
        model: Opened.
        folder: Where results go; answers that are there count.
        label: Name of the files in place of the task's, where a folder holds several results of one task.
        device: Where the model is, for the record.
        watch: Told tokens asked and tokens in all, then how far a long scoring is.
        say: Told what is going on.

    Raises:
        DataError: the task's data cannot be read, or does not fit the model.
        EvaluationError: the model cannot answer.
        CheckpointError: the folder holds answers of another model or to other questions.
    """
    label = label or name
    say(f"{label}: reading data")
    task = load_task(name, options, model.language_model)
    scores = run_task(
        model.language_model,
        task,
        journal=folder / f"{label}.answers.jsonl",
        identity=model.identity.fingerprint,
        watch=watch,
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
