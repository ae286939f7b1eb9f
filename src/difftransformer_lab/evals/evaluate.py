"""One task with its options, asked of one model; the result is written, and kept while model, options and data are the same."""

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from difftransformer.data import DataConfig, prepare_shards
from difftransformer.data.shards import TokenStream
from difftransformer.errors import ConfigError, EvaluationError
from difftransformer.progress import titled
from difftransformer.sources import RECIPE_FILE, where_begun
from difftransformer.train.parallel import ALONE, Processes
from difftransformer.typed import build

from ..environment import command_line, environment, now
from ..recipe_files import read_recipe
from ..results import DataIdentity, TaskResult, kept_result, write_result
from .engine import Task, answers_of, run_task, task_sha256
from .opening import OpenedModel
from .prompts.texts import TaskContext
from .requests import TooLong, plain_sha256, requests_sha256
from .tasks import task_kind

logger = logging.getLogger(__name__)

LENGTHENING = ("lengths", "length", "window", "questions", "shots", "prompt_file", "task_options", "max_new_tokens")
"""Options of tasks that make prompts or answers long, where a task has them."""


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """A task with its options, in a recipe or a suite.

    Attributes:
        task: Name of the task.
        label: Name in the report and of its files; the task's name by default.
        options: Fields of the task's Options; the rest keep their defaults.
    """

    task: str
    label: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.label or self.task

    def built(self) -> Any:
        """Return the task's options.

        Raises:
            ConfigError: no such task, or options that it does not take.
        """
        try:
            cls = task_kind(self.task).options
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from None
        return build(cls, self.options, source="", key=self.name, error=ConfigError)


def check_specs(specs: Sequence[TaskSpec]) -> None:
    """Refuse two tasks of one name, names that cannot name files, and unknown options."""
    for name, times in Counter(spec.name for spec in specs).items():
        if times > 1:
            raise ConfigError(f"{name!r} is given twice; give labels")
        if not re.fullmatch(r"[\w.-]+( [\w.-]+)*", name):
            raise ConfigError(f"label {name!r}: it names files; use letters, digits, points, hyphens and spaces")
    for spec in specs:
        spec.built()


def context_of(model: OpenedModel) -> TaskContext:
    """Make the context of tasks. A model in a run's folder knows the text that the run held out."""
    path, asked = Path(model.identity.name), model.language_model
    recipe = (path.parent.parent if path.parent.name == "checkpoints" else path) / RECIPE_FILE
    bound = getattr(asked, "bound", None)
    context = TaskContext(tokenizer=asked.tokenizer, context_tokens=asked.context_tokens, bound=bound)
    if not recipe.is_file():
        return context

    def data() -> DataConfig:
        config: DataConfig = build(DataConfig, read_recipe(recipe).get("data"), source=f"{recipe}", error=ConfigError)
        return config

    def held_out() -> TokenStream:
        with chdir(where_begun(recipe.parent)):
            return prepare_shards(data()).tokens("validation")

    return dataclasses.replace(context, validation=held_out, data=data)


def evaluate_task(
    spec: TaskSpec,
    model: OpenedModel,
    folder: Path,
    *,
    task: Task | None = None,
    title: str | None = None,
    replace_others: bool = False,
    processes: Processes = ALONE,
) -> TaskResult:
    """Run a task on a model and write FOLDER/NAME.json; FOLDER/NAME.answers.jsonl keeps the answers as they come.

    Args:
        folder: Folder of the results; requests that it already answers are not asked again.
        task: The task, if it has been drawn.
        title: Title of the progress; the task's name by default.
        replace_others: Whether to replace answers of another model or to other questions (see `run_task`).
        processes: All processes that take part, each with the model. The first one writes.

    Raises:
        ConfigError: There is no such task.
        DataError: The task's data cannot be read, or does not fit the model.
        EvaluationError: The model cannot answer.
        CheckpointError: The folder holds damaged answers, or those of another model or to other questions.
    """
    options = spec.built()
    if task is None:
        logger.info("%s: reading data", spec.name)
        task = _drawn(spec, model, processes)
    try:
        with titled(title or spec.name):
            scores = run_task(
                model.language_model,
                task,
                journal=folder / f"{spec.name}.answers.jsonl",
                identity=model.identity.fingerprint,
                replace_others=replace_others,
                processes=processes,
            )
    except TooLong as error:
        named = (f"--{name.replace('_', '-')}" for name in LENGTHENING if hasattr(options, name))
        raise EvaluationError(f"{error}; shorten {' or '.join(named) or 'the prompts'}") from None
    result = TaskResult(
        task=spec.task,
        model=model.identity,
        data=DataIdentity(name=task.data_name, sha256=task_sha256(task), requests=len(task.requests)),
        options=dataclasses.asdict(options),
        choices=list(task.choices),
        seed=int(getattr(options, "seed", 0)),
        command=command_line(),
        created=now(),
        environment=environment(str(model.language_model.model.device)),
        **vars(scores),
    )
    if processes.is_first:
        write_result(result, folder / f"{spec.name}.json")
    return result


def kept_apart(spec: TaskSpec, model: OpenedModel, folder: Path, processes: Processes = ALONE) -> tuple[TaskSpec, Task]:
    """Draw a task, and label it if the folder has a result or answers of another model or with other options under its name.

    The label depends on the model, the options and the questions, so the same command finds its own result again.
    """
    task = _drawn(spec, model, processes)

    def label() -> str:
        own, options = (model.identity.fingerprint, requests_sha256(task.requests)), dataclasses.asdict(spec.built())
        path = folder / f"{spec.name}.json"
        kept, answers = kept_result(path, TaskResult), answers_of(folder / f"{spec.name}.answers.jsonl")
        is_other = (answers or own) != own or (kept is not None and kept.model.fingerprint != own[0])
        if not is_other and (kept is None or stored_result(path, spec, task) or kept.options == options):
            return spec.label
        name = f"{spec.name}-{plain_sha256([options, *own]).partition(':')[2][:8]}"
        text = "%s: %s has a result of another model or with other options; this one is %s.json"
        logger.info(text, folder, spec.name, name)
        return name

    return dataclasses.replace(spec, label=processes.broadcast(label)), task


def _drawn(spec: TaskSpec, model: OpenedModel, processes: Processes) -> Task:
    task: Task = processes.rank0_first(lambda: task_kind(spec.task).make(spec.built(), context_of(model)))
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
    """Return the result that is in the folder, if data, options and model are still the same, or else ask the model.

    A result that lacks verdicts of a judge is made again, from the answers that are there.
    """
    drawn = task or _drawn(spec, model, processes)
    kept = processes.broadcast(lambda: stored_result(folder / f"{spec.name}.json", spec, drawn))
    if kept is not None and kept.model.fingerprint == model.identity.fingerprint and drawn.is_whole(kept):
        return kept
    logger.info("%s: evaluating", title or spec.name)
    return evaluate_task(spec, model, folder, task=drawn, title=title, replace_others=True, processes=processes)


def stored_result(path: Path, spec: TaskSpec, task: Task) -> TaskResult | None:
    """Return the result in a file if task, options and data have not changed since; else None."""
    result, options = kept_result(path, TaskResult), spec.built()
    if result is None or result.task != spec.task or result.data.sha256 != task_sha256(task):
        return None
    try:  # options that are new since then have their defaults
        asked = build(type(options), result.options, source=str(path), error=ConfigError)
    except ConfigError:
        return None
    return result if asked == options else None
