"""lm-eval on a model that is open. It is imported when it is used."""

import difflib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import ConfigError, EvaluationError
from .task import Harness


def run_harness(network: Any, tokenizer: Any, request: Harness) -> dict[str, Any]:
    """One lm-eval task on a model that is open.

    Args:
        network: A causal language model of transformers' form.
        tokenizer: Its tokenizer, as transformers gives it.
        request: Which task.

    Returns:
        Fields of `Measurement` and, where a metric is a mean over documents, of `ItemScore`.

    Raises:
        EvaluationError: the task's data cannot be read, or the task asks what the model cannot do.
    """
    with errors_alone():
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        manager = task_index([request.name], request.include_path)
        model = HFLM(pretrained=network, tokenizer=tokenizer, backend="causal", batch_size=request.batch_size)
        seed = request.seed
        try:
            found = simple_evaluate(
                model=model,
                tasks=[request.name],
                task_manager=manager,
                num_fewshot=request.shots,
                limit=request.limit,
                log_samples=True,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError) as error:
            raise EvaluationError(
                f"{request.name}: cannot be run ({_one_line(error)}); check the task's data and settings"
            ) from error
    return {"measurements": _measurements(found), "items": _items(found)}


def task_index(tasks: Sequence[str], include_path: str | None) -> Any:
    """lm-eval's index of tasks. Its own has thousands of files, so it is read only where a task is not in include_path."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        local = TaskManager(include_path=include_path, include_defaults=False)
        if all(task in local.all_tasks for task in tasks):
            return local
    manager = TaskManager(include_path=include_path)
    for task in tasks:
        if task not in manager.all_tasks:
            near = difflib.get_close_matches(task, manager.all_tasks, n=1)
            hint = f"did you mean {near[0]}?" if near else "see lm-eval ls tasks, or name a folder with --include_path"
            raise ConfigError(f"--tasks {task}: no such task or group; {hint}")
    return manager


def _measurements(found: dict[str, Any]) -> list[dict[str, Any]]:
    """lm-eval's keys are "metric,filter", and "metric_stderr,filter" beside them."""
    rows = []
    for task, values in {**found["results"], **found.get("groups", {})}.items():
        for key, value in values.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = values.get(f"{metric}_stderr,{chosen}")
            better = {True: "higher", False: "lower", None: None}[found["higher_is_better"].get(task, {}).get(metric)]
            at = {"task": task, "version": str(found["versions"].get(task, "")), "shots": found["n-shot"].get(task)}
            rows.append(
                {
                    "name": metric,
                    "unit": _UNITS.get(metric, "share"),
                    "value": float(value),
                    "standard_error": float(error) if isinstance(error, (int, float)) else None,
                    "n": found["n-samples"].get(task, {}).get("effective", 0),
                    "better": better,
                    "at": at if chosen == "none" else at | {"filter": chosen},
                }
            )
    return rows


_UNITS = {
    "bits_per_byte": "bits/byte",
    "byte_perplexity": "per byte",
    "word_perplexity": "per word",
    "perplexity": "per token",
}


def _items(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Scores of single documents, where a metric is one number a document."""
    rows = []
    for task, samples in found.get("samples", {}).items():
        shots = found["n-shot"].get(task)
        for sample in samples:
            for metric in sample.get("metrics", []):
                score = sample.get(metric)
                if isinstance(score, (bool, int, float)):
                    item = f"{task}/{shots}/{sample['filter']}/{sample['doc_id']}"
                    rows.append({"name": f"{metric} {task}", "item": item, "score": float(score)})
    return rows


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


@contextmanager
def errors_alone() -> Iterator[None]:
    """Quieten lm-eval's log, which tells every default that it fills in, and git, which it asks about the working folder."""
    from lm_eval import evaluator

    logger, ask = logging.getLogger("lm_eval"), evaluator.get_git_commit_hash
    before = logger.level
    logger.setLevel(logging.ERROR)
    evaluator.get_git_commit_hash = lambda: None
    try:
        yield
    finally:
        logger.setLevel(before)
        evaluator.get_git_commit_hash = ask
