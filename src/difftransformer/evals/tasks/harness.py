"""Tasks of lm-eval (the evaluation harness) on any saved model.

The paper's seven, zero-shot and with 5 shots, are its Tables 1 and 8 (arXiv:2410.05258). Each lm-eval task is one request, so
an evaluation that was stopped goes on with the next task. Figures are those of lm-eval's own command on the same
model, but for the rounding of attention kernels.
"""

import importlib.metadata
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, EvaluationError
from ...results import ItemScore, Measurement
from ..lm_harness import errors_alone, task_index
from ..task import Harness, LanguageModel, Scores

RANDOM_SEED = 1234  # of lm-eval's own
PAPER_TASKS = "arc_challenge,arc_easy,boolq,hellaswag,openbookqa,piqa,winogrande"
_CHOICES = [
    "The paper says neither which metric it reads of a task (acc or acc_norm) nor which release of the harness: all are here.",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Tasks of lm-eval.

    Attributes:
        tasks: Names of tasks or groups, separated by commas; the paper's seven by default.
        shots: Examples in front of a question, one run for each number, such as [0,5]; the task's own number by default.
        include_path: Folder with tasks of your own as YAML files; where it has all that are asked for, no other is looked at.
        limit: Documents of each task, the first ones; all by default.
        batch_size: Rows of a forward pass.
        seed: Of Python, numpy, torch and the choice of examples.
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
        for option, values, least in (
            ("limit", [self.limit], 1),
            ("batch_size", [self.batch_size], 1),
            ("shots", self.shots or [], 0),
        ):
            for value in values:
                if value is not None and value < least:
                    raise ConfigError(f"--{option} {value}: give at least {least}")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ConfigError(f"--include_path {self.include_path}: no such folder; name one with tasks as YAML files")

    @property
    def names(self) -> list[str]:
        """The tasks one by one."""
        return [name.strip() for name in self.tasks.split(",") if name.strip()]


class HarnessTask:
    """A request for each task and number of shots. See `Task`."""

    def __init__(self, options: Options) -> None:
        if importlib.util.find_spec("lm_eval") is None:
            raise EvaluationError("lm-eval is not installed; pip install 'difftransformer[eval]'")
        with errors_alone():
            task_index(options.names, options.include_path)
        release = importlib.metadata.version("lm_eval")
        self.data_name = f"lm-eval {release}"
        self.choices = [f"Scored by lm-eval {release}.", *_CHOICES]
        shots: list[int | None] = [*options.shots] if options.shots else [None]
        self.requests = [
            Harness(name, number, options.limit, options.include_path, options.batch_size, options.seed)
            for number in shots
            for name in options.names
        ]

    def score(self, answers: Sequence[Any]) -> Scores:
        """The figures as lm-eval gives them."""
        return Scores(
            measurements=[Measurement(**row) for answer in answers for row in answer["measurements"]],
            items=[ItemScore(**row) for answer in answers for row in answer["items"]],
        )


def make(options: Options, model: LanguageModel) -> HarnessTask:
    """The task for a model. See `HarnessTask`.

    Raises:
        ConfigError: no such task.
        EvaluationError: lm-eval is not installed.
    """
    return HarnessTask(options)
