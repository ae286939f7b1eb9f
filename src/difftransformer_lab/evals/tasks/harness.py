"""Tasks of lm-eval, the evaluation harness, for suites and for `quantized`.

Alone, `lm_eval --model hf` runs them on exports. The paper's seven tasks, zero-shot and with 5 shots, are in its Tables 1 and 8
(arXiv:2410.05258). Each task is one request, so an interrupted evaluation continues with the next one.
"""

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from difftransformer.data.records import errors_only, files_sha256
from difftransformer.errors import ConfigError, EvaluationError

from ...results import ItemScore, Measurement
from ..engine import Scores, Task
from ..prompts.texts import TaskContext
from ..registry import TaskKind, at_least, register
from ..requests import Answers

RANDOM_SEED = 1234  # the default of lm-eval
PAPER_TASKS = "arc_challenge,arc_easy,boolq,hellaswag,openbookqa,piqa,winogrande"
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
        include_path: Folder with your own tasks as YAML files, in place of lm-eval's.
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
        at_least(self, 1, "limit", "batch_size")
        at_least(self, 0, "shots", "seed")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ConfigError(f"--include-path {self.include_path}: no such folder; name one with tasks as YAML files")


@dataclass(frozen=True)
class Harness:
    """One task of lm-eval with one number of shots. The answer: `run_harness`.

    `release` is lm-eval's, `files` the SHA-256 of the files in `include_path`, and `bound` the most tokens of a row, where
    those are fewer than the model's positions.
    """

    name: str
    shots: int | None
    limit: int | None
    include_path: str | None
    batch_size: int
    seed: int
    release: str = ""
    files: str = ""
    bound: int | None = None

    @property
    def shown_tokens(self) -> int:
        """Progress counts tasks, not tokens."""
        return 1

    def asked(self) -> list[Any]:
        asked = ["lm-eval", self.release, self.files, self.name, self.shots, self.limit, self.seed]
        return asked if self.bound is None else [*asked, "bound", self.bound]


class HarnessTask(Task):
    def __init__(self, options: Options, context: TaskContext) -> None:
        for module in ("lm_eval", "accelerate"):  # which lm-eval needs for a model of transformers
            if importlib.util.find_spec(module) is None:
                raise EvaluationError(f"{module} is not installed; pip install 'difftransformer[eval]'")
        release = importlib.metadata.version("lm_eval")
        self.data_name = f"lm-eval {release}"
        self.choices = [f"Scored by lm-eval {release}.", *_CHOICES]
        own = Path(options.include_path).rglob("*") if options.include_path is not None else ()
        files = files_sha256(path for path in own if path.is_file() and path.suffix != ".pyc")
        asked = options.limit, options.include_path, options.batch_size, options.seed, release, files, context.bound
        names = [name.strip() for name in options.tasks.split(",") if name.strip()]
        shots: list[int | None] = [*options.shots] if options.shots else [None]
        self.requests = [Harness(name, number, *asked) for number, name in product(shots, names)]

    def answer(self, model: Any, requests: Sequence[Harness]) -> Answers:
        for index, request in enumerate(requests):
            with model.independently():
                # lm-eval pads the rows of a batch.
                yield index, run_harness(model.model, model.hf_tokenizer, request, 1 if model.is_whole else None)

    def score(self, answers: Sequence[Any]) -> Scores:
        return Scores(
            measurements=[Measurement(**row) for answer in answers for row in answer["measurements"]],
            items=[ItemScore(**row) for answer in answers for row in answer["items"]],
        )


def run_harness(network: Any, tokenizer: Any, request: Harness, batch_size: int | None = None) -> dict[str, Any]:
    """Run one task of lm-eval on a model and its tokenizer, both as transformers opens them.

    Returns:
        Fields of `Measurement` and, where a metric is a mean over documents, of `ItemScore`.
    """
    import torch
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    own = request.include_path
    sizes = {"batch_size": batch_size or request.batch_size, "max_length": request.bound}
    seeds = {f"{kind}random_seed": request.seed for kind in ("", "numpy_", "torch_", "fewshot_")}
    with errors_only("lm_eval"), torch.inference_mode():
        try:
            results = simple_evaluate(
                model=HFLM(pretrained=network, tokenizer=tokenizer, backend="causal", **sizes),
                tasks=[request.name],
                task_manager=TaskManager(include_path=own, include_defaults=own is None),
                num_fewshot=request.shots,
                limit=request.limit,
                log_samples=True,
                **seeds,
            )
        except (ImportError, LookupError, OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise EvaluationError(f"{request.name}: lm-eval cannot run it ({reason}); see lm-eval ls tasks") from error
    return {"measurements": _measurements(results), "items": _items(results, request.shots)}


def _measurements(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Convert the results of lm-eval. Their keys are "metric,filter" and "metric_stderr,filter"."""
    rows = []
    for task, values in {**results["results"], **results.get("groups", {})}.items():
        at = {"task": task, "version": str(results["versions"].get(task, "")), "shots": results["n-shot"].get(task)}
        for key, value in values.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = values.get(f"{metric}_stderr,{chosen}")
            is_better = results["higher_is_better"].get(task, {}).get(metric)
            rows.append(
                {
                    "name": metric,
                    "unit": metric if is_better is False else "share",
                    "value": float(value),
                    "standard_error": float(error) if isinstance(error, (int, float)) else None,
                    "n": results["n-samples"].get(task, {}).get("effective", 0),
                    "better": {True: "higher", False: "lower", None: None}[is_better],
                    "at": at if chosen == "none" else at | {"filter": chosen},
                }
            )
    return rows


def _items(results: dict[str, Any], shots: int | None) -> list[dict[str, Any]]:
    """Return the scores of single documents for metrics that are their mean; these are better when higher.

    A document answers once for each filter and number of shots, so these are in the name of the figure.
    """
    rows = []
    for task, samples in results.get("samples", {}).items():
        better = results["higher_is_better"].get(task, {})
        for sample in samples:
            how = [] if shots is None else [f"{shots} shots"]
            how += [] if sample["filter"] == "none" else [sample["filter"]]
            for metric in sample.get("metrics", []):
                if isinstance(sample.get(metric), (bool, int, float)) and better.get(metric) is not False:
                    name, item = ", ".join([f"{metric} {task}", *how]), f"document {sample['doc_id']}"
                    rows.append({"name": name, "item": item, "score": float(sample[metric])})
    return rows


register(TaskKind(name="harness", doc=__doc__, options=Options, make=HarnessTask))
