"""difftransformer eval TASK MODEL... and eval SUITE MODEL...: one task or several, on any saved models.

A task's own flags are the fields of its options.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftransformer.errors import ConfigError
from difftransformer.sources import check_model, name_of
from difftransformer.typed import WeightsDtype

from ..evals.tasks import registered_tasks
from .arguments import check_positive
from .console import resumable, show, show_next, show_table, told_gaps
from .members import run_together
from .progress import evaluation_progress

if TYPE_CHECKING:
    from difftransformer.train.parallel import Processes

    from ..results import TaskResult

LONGEST_NAME = 100  # characters of a folder's name
ARGUMENTS = {
    "models": {
        "nargs": "+",
        "help": "Run folder (its newest checkpoint), checkpoint, folder of any causal language model that transformers opens "
        "without custom code, .gguf file, or owner/name on the Hugging Face hub. Several are compared on one page.",
    }
}


def declare(verb: str) -> type | None:
    """Return the dataclass of the task's own flags; a suite has none."""
    kind = registered_tasks().get(verb.removeprefix("eval "))
    return None if kind is None else kind.options


def run(
    models: list[str],
    out: str | None = None,
    device: str = "cpu",
    dtype: WeightsDtype = "auto",
    context_tokens: int | None = None,
    batch_tokens: int = 16_384,
    prefix_caching: bool = True,
    accelerate: bool = True,
    processes: int | None = None,
    *,
    verb: str,
    options: Any = None,
) -> int:
    """Run a task or a suite on one or more models.

    Args:
        out: Folder for results, where an interrupted evaluation continues. By default evals/MODEL for one task on one model,
            else reports/NAME-MODEL-MODEL, with a page.
        device: cpu or cuda.
        dtype: Dtype of the weights; auto keeps the one in which they were saved.
        context_tokens: Maximum number of tokens of a row; the model's positions by default.
        batch_tokens: Maximum number of tokens of a batch.
        prefix_caching: Whether to compute a common prefix of several prompts only once.
        accelerate: Whether to compute the attention of a DiffLlama with this package's kernels.
        processes: Number of processes of this machine, which divide the questions; torchrun starts more machines.
        verb: The command.
        options: Options of the task; None for a suite.
    """
    name = verb.removeprefix("eval ")
    if name == "ask":
        models, options = _with_questions(models, options)

    def check() -> None:
        check_positive(batch_tokens=batch_tokens, context_tokens=context_tokens)
        if len(set(models)) < len(models):
            raise ConfigError("a model is given twice; give each model once")
        if options is not None and len(models) == 1:
            check_model(models[0])

    def evaluate(crew: "Processes") -> int:
        from ..evals.evaluate import TaskSpec, evaluate_task, kept_apart
        from ..evals.opening import open_language_model
        from ..evals.suite import Suite, load_suite, run_suite

        opening = partial(
            open_language_model,
            device=device,
            dtype=dtype,
            batch_tokens=batch_tokens,
            context_tokens=context_tokens,
            prefix_caching=prefix_caching,
            accelerated=accelerate,
        )
        if options is None:
            suite = load_suite(name)
        else:
            suite = Suite(name=name, tasks=[TaskSpec(task=name, options=dataclasses.asdict(options))])
        with resumable("stopped; every answer is saved"):
            if options is not None and len(models) == 1:
                folder = Path(out) if out else Path("evals", name_of(models[0]))
                with opening(models[0]) as opened, crew.locked(folder), evaluation_progress():
                    spec, task = kept_apart(suite.tasks[0], opened, folder, crew)
                    result = evaluate_task(spec, opened, folder, task=task, title=name, processes=crew)
                return _show_one(result, folder / spec.name, verb, models[0]) if crew.is_first else 0
            folder = Path(out or Path("reports", "-".join([suite.name, *map(name_of, models)])[:LONGEST_NAME]))
            with crew.locked(folder), evaluation_progress():
                results, missing = run_suite(suite, models, folder, opening=opening, processes=crew)
        return _show_all(suite.name, results, missing, models, folder, verb) if crew.is_first else 0

    return run_together(evaluate, device, processes, check)


def _with_questions(models: list[str], options: Any) -> tuple[list[str], Any]:
    """Move the file of questions, given after the models, into the options."""
    if options.questions:
        return models, options
    *models, questions = models
    if not models or not questions.endswith(".jsonl"):
        raise ConfigError("give models and a file of questions: eval ask MODEL questions.jsonl")
    return models, dataclasses.replace(options, questions=questions)


def _show_one(result: "TaskResult", stem: Path, verb: str, model: str) -> int:
    from ..analysis.tasks import corrected_pairs, measurement_table, pairs_table, task_pairs, write_picture

    name = result.task
    show_table(measurement_table([result], brief=True))
    if (paired := pairs_table(name, corrected_pairs({name: task_pairs([result])})[name])) is not None:
        show_table(paired)
    gaps = list(result.gaps)
    try:
        if (picture := write_picture([result], stem.parent / f"{stem.name}.svg")) is not None:
            show(f"Figure: {picture}")
    except OSError:  # such as a full disk
        raise
    except Exception as error:  # such as from undefined figures, which leave too little to draw
        gaps.append(f"the figure: {error!r}")
    show(f"Results: {stem.parent / f'{stem.name}.json'}")
    if not gaps:
        show_next("maps", model)
    return told_gaps(verb, gaps)


def _show_all(
    name: str,
    by_task: "dict[str, list[TaskResult]]",
    missing: list[tuple[str, str, str]],
    models: list[str],
    folder: Path,
    verb: str,
) -> int:
    from ..analysis.page import suite_page, write_page
    from ..analysis.tasks import measurement_table

    for results in filter(None, by_task.values()):
        show_table(measurement_table(results, brief=True))
    page = suite_page(name, by_task, missing, models)
    show(f"Report: {write_page(page, folder)}")
    if not page.gaps:
        show_next("maps", models[0])
    return told_gaps(verb, page.gaps)
