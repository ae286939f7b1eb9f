"""Tasks of lm-eval (the evaluation harness) on any saved model.

The paper's seven tasks, zero-shot and with 5 shots, are in its Tables 1 and 8 (arXiv:2410.05258). Each lm-eval task is one
request, so an interrupted evaluation continues with the next task. The figures equal those of lm-eval's own command on the same
model, up to the rounding of attention kernels.
"""

import difflib
import importlib.metadata
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from difftransformer.data.records import errors_only, files_sha256
from difftransformer.errors import ConfigError, DiffTransformerError, EvaluationError

from ...results import ItemScore, Measurement
from ..engine import Scores, Task
from ..prompts.texts import TaskContext
from ..registry import TaskKind, at_least, refused, register
from ..requests import Answers

RANDOM_SEED = 1234  # the default of lm-eval
PAPER_TASKS = "arc_challenge,arc_easy,boolq,hellaswag,openbookqa,piqa,winogrande"
LENGTHS = {"ruler": [2**power for power in range(12, 18)], "babilong": [0, *(2**power for power in range(10, 18))]}
"""Suites whose prompts have a length that is chosen, each with the lengths that lm-eval has; the first is the default."""
_CHOICES = [
    "The paper states neither which metric of a task it reads (acc or acc_norm) nor which release of the harness; all metrics "
    "are given here."
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tasks of lm-eval.

    Attributes:
        tasks: Names of tasks or groups, separated by commas; the paper's seven by default.
        shots: Examples before a question, with one run for each number, such as [0,5]; the task's own number by default.
        lengths: Prompt lengths in tokens of ruler (4096 to 131072) and babilong (0 for the facts alone, 1024 to 131072), with
            one run for each; the shortest by default.
        include_path: Folder with your own tasks as YAML files; lm-eval's own are read only if this folder lacks a task.
        limit: Number of documents of each task, from the first; all by default.
        batch_size: Rows of a forward pass.
        seed: Seed of Python, numpy, torch and the choice of examples.
    """

    tasks: str = PAPER_TASKS
    shots: list[int] | None = None
    lengths: list[int] | None = None
    include_path: str | None = None
    limit: int | None = None
    batch_size: int = 1
    seed: int = RANDOM_SEED

    def __post_init__(self) -> None:
        if not self.names:
            raise ConfigError("--tasks is empty; name tasks of lm-eval, separated by commas")
        at_least(self, 1, "limit", "batch_size")
        at_least(self, 0, "shots", "seed")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ConfigError(f"--include-path {self.include_path}: no such folder; name one with tasks as YAML files")
        for name in self.names if self.lengths is not None else ():
            allowed = LENGTHS.get(suite_of(name), [])
            if not self.lengths or not set(self.lengths) <= set(allowed):
                choice = f"choose among {', '.join(map(str, allowed))}"
                raise refused(self, "lengths", f"{name}: {choice if allowed else 'it has no lengths; leave them out'}")

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.tasks.split(",") if name.strip()]


@dataclass(frozen=True)
class Harness:
    """One task of lm-eval with one number of shots. The answer: `run_harness`.

    `release` is lm-eval's, and `files` the SHA-256 of the files in `include_path`. `length` is the prompts' length in tokens,
    where it is chosen, and `bound` the most tokens of a row, where those are fewer than the model's positions.
    """

    name: str
    shots: int | None
    limit: int | None
    include_path: str | None
    batch_size: int
    seed: int
    release: str = ""
    files: str = ""
    length: int | None = None
    bound: int | None = None

    @property
    def shown_tokens(self) -> int:
        """Progress counts tasks, not tokens."""
        return 1

    def asked(self) -> list[Any]:
        asked = ["lm-eval", self.release, self.files, self.name, self.shots, self.limit, self.seed]
        asked += [] if self.length is None else [self.length]
        return asked + ([] if self.bound is None else ["bound", self.bound])


class HarnessTask(Task):
    def __init__(self, options: Options, context: TaskContext) -> None:
        for module in ("lm_eval", "accelerate"):  # which lm-eval needs for a model of transformers
            if importlib.util.find_spec(module) is None:
                raise EvaluationError(f"{module} is not installed; pip install 'difftransformer[eval]'")
        with errors_only("lm_eval"):  # without a log of the defaults that it fills in
            _task_index(options.names, options.include_path)
        release = importlib.metadata.version("lm_eval")
        self.data_name = f"lm-eval {release}"
        self.choices = [f"Scored by lm-eval {release}.", *_CHOICES]
        own = Path(options.include_path).rglob("*") if options.include_path is not None else ()
        files = files_sha256(path for path in own if path.is_file() and path.suffix != ".pyc")
        shots: list[int | None] = [*options.shots] if options.shots else [None]
        asked = options.limit, options.include_path, options.batch_size, options.seed
        one = Harness("", None, *asked, release, files, bound=context.bound)
        self.requests = [
            replace(one, name=name, shots=number, length=length)
            for number in shots
            for name in options.names
            for length in options.lengths or LENGTHS.get(suite_of(name), [None])[:1]
        ]
        longest = max(request.length or 0 for request in self.requests)
        if longest > context.prompt_tokens:
            raise EvaluationError(
                f"prompts of {longest} tokens do not fit into the model's context of {context.prompt_tokens}; choose shorter "
                "--lengths or a model with a longer context"
            )

    def answer(self, model: Any, requests: Sequence[Harness]) -> Answers:
        if getattr(model, "is_divided", False):
            raise EvaluationError("lm-eval cannot ask a model that processes divide; omit --divide-weights")
        for index, request in enumerate(requests):
            whole = replace(request, batch_size=1) if model.is_whole else request  # lm-eval pads the rows of a batch
            with model.independently():
                yield index, run_harness(model.model, model.hf_tokenizer, whole)

    def score(self, answers: Sequence[Any]) -> Scores:
        return Scores(
            measurements=[Measurement(**row) for answer in answers for row in answer["measurements"]],
            items=[ItemScore(**row) for answer in answers for row in answer["items"]],
        )


def suite_of(task: str) -> str:
    """Return the suite to which a task or group of lm-eval belongs by its name, such as ruler for niah_single_1."""
    return "ruler" if task.startswith("niah_") else task.partition("_")[0]


def run_harness(network: Any, tokenizer: Any, request: Harness) -> dict[str, Any]:
    """Run one task of lm-eval on a model and its tokenizer, both as transformers opens them.

    Returns:
        Fields of `Measurement` and, where a metric is a mean over documents, of `ItemScore`.

    Raises:
        EvaluationError: The data of the task cannot be read, or the model cannot do what the task asks.
    """
    import torch

    with errors_only("lm_eval"), torch.inference_mode(), TemporaryDirectory() as folder:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM

        sizes = {"batch_size": request.batch_size, "max_length": request.bound}
        model = HFLM(pretrained=network, tokenizer=tokenizer, backend="causal", **sizes)
        try:
            manager = _task_index([request.name], request.include_path, _metadata(request, tokenizer, folder))
            results = simple_evaluate(
                model=model,
                tasks=[request.name],
                task_manager=manager,
                num_fewshot=request.shots,
                limit=request.limit,
                log_samples=True,
                **{f"{kind}random_seed": request.seed for kind in ("", "numpy_", "torch_", "fewshot_")},
            )
        except ImportError as error:
            missing = error.__cause__ or error.__context__ or error
            suite = suite_of(request.name)
            advice = f"pip install 'lm-eval[{suite}]'" if suite in ("ruler", "longbench") else "install it"
            raise EvaluationError(f"{request.name}: {missing}; {advice}") from error
        except DiffTransformerError:
            raise
        except Exception as error:  # of a task's code and data
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise EvaluationError(f"{request.name}: cannot be run ({reason}); check its data and settings") from error
    measurements, items = _measurements(results, request.length), _items(results, request.shots, request.length)
    return {"measurements": measurements, "items": items}


def _metadata(request: Harness, tokenizer: Any, folder: str) -> dict[str, Any] | None:
    """Return what a suite with lengths makes its prompts by: the length, and a copy of the tokenizer that names no code."""
    if request.length is None:
        return None
    tokenizer.save_pretrained(folder)
    path = Path(folder, "tokenizer_config.json")
    kept = {key: value for key, value in json.loads(path.read_text("utf-8")).items() if key != "auto_map"}
    path.write_text(json.dumps(kept), "utf-8")
    is_ruler = suite_of(request.name) == "ruler"
    return {"tokenizer": folder, "max_seq_lengths": [request.length] if is_ruler else f"{request.length // 1024}k"}


def _task_index(tasks: Sequence[str], include_path: str | None, metadata: dict[str, Any] | None = None) -> Any:
    """Return an index of lm-eval tasks. Its own has thousands of files, so it is read only if a task is not in include_path."""
    from lm_eval.tasks import TaskManager

    if include_path is not None:
        local = TaskManager(include_path=include_path, include_defaults=False)
        if all(task in local.all_tasks for task in tasks):
            return local
    manager = TaskManager(include_path=include_path, metadata=metadata)
    for task in tasks:
        if task not in manager.all_tasks:
            near = difflib.get_close_matches(task, manager.all_tasks, n=1)
            hint = f"did you mean {near[0]}?" if near else "see lm-eval ls tasks, or name a folder with --include-path"
            raise ConfigError(f"--tasks {task}: no such task or group; {hint}")
    return manager


def _measurements(results: dict[str, Any], length: int | None = None) -> list[dict[str, Any]]:
    """Convert the results of lm-eval, whose keys are "metric,filter" and "metric_stderr,filter".

    RULER names a metric by a length; metrics of lengths that were not asked hold -1.
    """
    rows = []
    for task, values in {**results["results"], **results.get("groups", {})}.items():
        for key, value in values.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            if metric.isdecimal() and int(metric) != length:
                continue
            error = values.get(f"{metric}_stderr,{chosen}")
            better = {True: "higher", False: "lower", None: None}[results["higher_is_better"].get(task, {}).get(metric)]
            at = {"task": task, "version": str(results["versions"].get(task, "")), "shots": results["n-shot"].get(task)}
            at |= {} if length is None else {"length_tokens": length}
            rows.append(
                {
                    "name": "accuracy" if metric.isdecimal() else metric,
                    "unit": _UNITS.get(metric, "share"),
                    "value": float(value),
                    "standard_error": float(error) if isinstance(error, (int, float)) else None,
                    "n": results["n-samples"].get(task, {}).get("effective", 0),
                    "better": better,
                    "at": at if chosen == "none" else at | {"filter": chosen},
                }
            )
    return rows


_UNITS = {
    "bits_per_byte": "bits/byte",
    "byte_perplexity": "per byte",
    "word_perplexity": "per word",
    "perplexity": "per answer",
}


def _items(results: dict[str, Any], shots: int | None, length: int | None = None) -> list[dict[str, Any]]:
    """Return the scores of single documents, where a metric is the mean of one number for each document.

    A perplexity is none: lm-eval keeps the log-likelihood of each document beside it. A document answers once for each filter,
    number of shots and length, so these are in the name of the figure.
    """
    rows = []
    for task, samples in results.get("samples", {}).items():
        for sample in samples:
            for metric in sample.get("metrics", []):
                score, is_asked = sample.get(metric), not metric.isdecimal() or int(metric) == length
                if isinstance(score, (bool, int, float)) and is_asked and metric not in _UNITS:
                    how = [] if shots is None else [f"{shots} shots"]
                    how += [] if length is None else [f"{length} tokens"]
                    how += [] if sample["filter"] == "none" else [sample["filter"]]
                    name = ", ".join([f"{metric} {task}", *how])
                    rows.append({"name": name, "item": f"document {sample['doc_id']}", "score": float(score)})
    return rows


register(TaskKind(name="harness", doc=__doc__, options=Options, make=HarnessTask))
