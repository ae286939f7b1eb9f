"""One task on one model: asked, scored, written down."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..data import prepare_shards
from ..evals.runner import requests_sha256, run_task
from ..evals.task import Task, Watch, unwatched
from ..evals.tasks import load_task
from ..evals.texts import Setting
from ..results import DataIdentity, TaskResult, write_result
from ..train.run_summary import RECIPE_FILE
from .environment import command_line, environment, now
from .opening import OpenedModel
from .recipe import load_recipe


def setting_of(model: OpenedModel) -> Setting:
    """Return what tasks are drawn for: a model of a run knows the text that the run held out."""
    path = Path(model.identity.name)
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    recipe = run / RECIPE_FILE
    return Setting(
        tokenizer=model.language_model.tokenizer,
        context_tokens=model.language_model.context_tokens,
        validation=(lambda: prepare_shards(load_recipe(recipe).data).tokens("validation"))
        if recipe.is_file()
        else None,
    )


def evaluate_task(
    name: str,
    options: Any,
    model: OpenedModel,
    folder: Path,
    *,
    task: Task | None = None,
    label: str | None = None,
    device: str = "cpu",
    watch: Watch = unwatched,
    say: Callable[[str], None] = lambda text: None,
) -> TaskResult:
    """Run a task on a model and write FOLDER/LABEL.json; answers are kept in FOLDER/LABEL.answers.jsonl as they come.

    Args:
        name: One of `evals.tasks.TASKS`.
        options: The task's `Options`.
        model: The opened model.
        folder: Folder for results; answers that are there count.
        task: The task, where it has been drawn already.
        label: Name of the files in place of the task's, where a folder holds several results of one task.
        device: Device of the model, for the result.
        watch: Called with the tokens asked and in all, then with the progress of a long scoring.
        say: Called with what is being done.

    Raises:
        DataError: the task's data cannot be read, or does not fit the model.
        EvaluationError: the model cannot answer.
        CheckpointError: the folder holds answers of another model or to other questions.
    """
    label = label or name
    if task is None:
        say(f"{label}: reading data")
        task = load_task(name, options, setting_of(model))
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
        options=dataclasses.asdict(options),
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
