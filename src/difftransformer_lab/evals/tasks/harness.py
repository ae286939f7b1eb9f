"""Tasks of lm-eval (the evaluation harness) on any saved model.

The paper's seven tasks, zero-shot and with 5 shots, are in its Tables 1 and 8 (arXiv:2410.05258). Each lm-eval task is one
request, so an interrupted evaluation continues with the next task. The figures are those of lm-eval's own command on the same
model, up to the rounding of attention kernels.
"""

import difflib
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from difftransformer.data.records import errors_only, files_sha256
from difftransformer.errors import ConfigError, EvaluationError

from ...results import ItemScore, Measurement
from ..engine import Scores, Task
from ..prompts.texts import Setting
from ..registry import TaskKind, at_least, register
from ..requests import Answers

RANDOM_SEED = 1234  # the default of lm-eval
PAPER_TASKS = "arc_challenge,arc_easy,boolq,hellaswag,openbookqa,piqa,winogrande"
_CHOICES = [
    "The paper states neither which metric of a task it reads (acc or acc_norm) nor which release of the harness; all metrics "
    "are given here.",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tasks of lm-eval.

    Attributes:
        tasks: Names of tasks or groups, separated by commas; the paper's seven by default.
        shots: Examples before a question, with one run for each number, such as [0,5]; the task's own number by default.
        include_path: Folder with your own tasks as YAML files; lm-eval's own are read only if this folder lacks a task.
        limit: Number of documents of each task, from the first; all by default.
        batch_size: Rows of a forward pass.
        seed: Seed of Python, numpy, torch and the choice of examples.
    """

    tasks: str = PAPER_TASKS
    shots: list[int] | None = None
    include_path: str | None = None
    limit: int | None = None
    batch_size: int = 1
    seed: int = RANDOM_SEED

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigError("--tasks is empty; name tasks of lm-eval, separated by commas")
        at_least(self, 1, "limit", "batch_size")
        at_least(self, 0, "shots")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ConfigError(f"--include-path {self.include_path}: no such folder; name one with tasks as YAML files")

    @property
    def names(self) -> list[str]:
        """Names of the tasks."""
        return [name.strip() for name in self.tasks.split(",") if name.strip()]


@dataclass(frozen=True)
class Harness:
    """One task of lm-eval with one number of shots. The answer: `run_harness`.

    `release` is that of lm-eval, and `files` the SHA-256 of the files in `include_path`.
    """

    name: str
    shots: int | None
    limit: int | None
    include_path: str | None
    batch_size: int
    seed: int
    release: str = ""
    files: str = ""

    @property
    def shown_tokens(self) -> int:
        """Progress counts tasks, not tokens."""
        return 1

    def asked(self) -> list[Any]:
        """See `requests.Loss`."""
        return ["lm-eval", self.release, self.files, self.name, self.shots, self.limit, self.seed]


class HarnessTask(Task):
    """Tasks of lm-eval, which asks the model by itself."""

    def __init__(self, options: Options, setting: Setting) -> None:
        if importlib.util.find_spec("lm_eval") is None:
            raise EvaluationError("lm-eval is not installed; pip install 'difftransformer[eval]'")
        with _quietly():
            _task_index(options.names, options.include_path)
        release = importlib.metadata.version("lm_eval")
        self.data_name = f"lm-eval {release}"
        self.choices = [f"Scored by lm-eval {release}.", *_CHOICES]
        own = Path(options.include_path).rglob("*") if options.include_path is not None else ()
        files = files_sha256(path for path in own if path.is_file() and path.suffix != ".pyc")
        shots: list[int | None] = [*options.shots] if options.shots else [None]
        self.requests = [
            Harness(name, number, options.limit, options.include_path, options.batch_size, options.seed, release, files)
            for number in shots
            for name in options.names
        ]

    def answer(self, model: Any, requests: Sequence[Harness]) -> Answers:
        """Run lm-eval on the model, a task at a time."""
        if getattr(model, "is_divided", False):
            raise EvaluationError("lm-eval cannot ask a model that processes divide; omit --divide-weights")
        for index, request in enumerate(requests):
            yield index, run_harness(model.model, model.hf_tokenizer, request)

    def score(self, answers: Sequence[Any]) -> Scores:
        """Return the figures of lm-eval."""
        return Scores(
            measurements=[Measurement(**row) for answer in answers for row in answer["measurements"]],
            items=[ItemScore(**row) for answer in answers for row in answer["items"]],
        )


def run_harness(network: Any, tokenizer: Any, request: Harness) -> dict[str, Any]:
    """Run one task of lm-eval on a model and its tokenizer, both as transformers opens them.

    Returns:
        Fields of `Measurement` and, where a metric is a mean over documents, of `ItemScore`.

    Raises:
        EvaluationError: The data of the task cannot be read, or the model cannot do what the task asks.
    """
    import torch

    with _quietly(), torch.inference_mode():
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        manager = _task_index([request.name], request.include_path)
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
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise EvaluationError(f"{request.name}: cannot be run ({reason}); check its data and settings") from error
    return {"measurements": _measurements(found), "items": _items(found, request.shots)}


def _task_index(tasks: Sequence[str], include_path: str | None) -> Any:
    """Return an index of lm-eval tasks. Its own has thousands of files, so it is read only if a task is not in include_path."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        local = TaskManager(include_path=include_path, include_defaults=False)
        if all(task in local.all_tasks for task in tasks):
            return local
    manager = TaskManager(include_path=include_path)
    for task in tasks:
        if task not in manager.all_tasks:
            near = difflib.get_close_matches(task, manager.all_tasks, n=1)
            hint = f"did you mean {near[0]}?" if near else "see lm-eval ls tasks, or name a folder with --include-path"
            raise ConfigError(f"--tasks {task}: no such task or group; {hint}")
    return manager


def _measurements(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Convert the results of lm-eval, whose keys are "metric,filter" and "metric_stderr,filter"."""
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


def _items(found: dict[str, Any], shots: int | None) -> list[dict[str, Any]]:
    """Return the scores of single documents, where a metric is one number for each document.

    A document answers once for each filter and number of shots, so these are in the name of the figure.
    """
    rows = []
    for task, samples in found.get("samples", {}).items():
        for sample in samples:
            for metric in sample.get("metrics", []):
                score = sample.get(metric)
                if isinstance(score, (bool, int, float)):
                    how = [] if shots is None else [f"{shots} shots"]
                    how += [] if sample["filter"] == "none" else [sample["filter"]]
                    name = ", ".join([f"{metric} {task}", *how])
                    rows.append({"name": name, "item": f"document {sample['doc_id']}", "score": float(score)})
    return rows


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence lm-eval's log of the defaults that it fills in, and its call of git in the working folder."""
    from lm_eval import evaluator

    ask, evaluator.get_git_commit_hash = evaluator.get_git_commit_hash, lambda: None
    try:
        with errors_only("lm_eval"):
            yield
    finally:
        evaluator.get_git_commit_hash = ask


register(TaskKind(name="harness", doc=__doc__, options=Options, make=HarnessTask))
