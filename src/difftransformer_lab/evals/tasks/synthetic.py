"""Answers to synthetic tasks: associative recall, with and without noise.

These are MQAR of Zoology (arXiv:2312.04927) and tasks of MAD (arXiv:2403.17844), on examples that were held out. Examples are
token ids, so the model must have been trained on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from difftransformer.data.synthetic import IGNORED, PREFIX, TASKS, Examples, draw_examples, synthetic_task
from difftransformer.errors import ConfigError

from ...plots import bars, select
from ...results import ItemScore, Measurement, TaskResult
from ..engine import Scores, Task
from ..prompts.texts import TaskContext
from ..registry import TaskKind, at_least, refused, register
from ..requests import Predictions
from ..scores import proportion, unit_scores

_CHOICES = [
    "Every scored token is a trial, which is right if it has the highest logit given all tokens before it, answers included.",
    "Accuracy is the share of right trials; MAD's own is a mean over token ids. Standard errors are over examples.",
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Accuracy on a synthetic task.

    Attributes:
        task: mqar, recall or noisy-recall; by default the task that the run was trained on, with its options and its seed.
        options: Options of the task, in place of its own or the run's.
        variations: Further options, each asked about by itself, such as [{noise_share: 0.2}, {noise_share: 0.4}].
        examples: Largest number of examples of each setting.
        seed: Seed of the examples of a named task. Those of the run's task have the seed of its data.
    """

    task: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    variations: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    examples: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, "examples")
        at_least(self, 0, "seed")
        if not self.variations:
            raise refused(self, "variations", "give options of at least one, or leave it out")
        if self.task is not None and self.task not in TASKS:
            raise refused(self, "task", f"choose one of {', '.join(TASKS)}")
        if self.task is None and self.seed:
            raise refused(self, "seed", "the examples of the run's task have the seed of its data; name a task")


class SyntheticTask(Task):
    def __init__(self, options: Options, context: TaskContext) -> None:
        source, own, seed = _asked_about(options, context)
        self.data_name, self.choices = source.removeprefix(PREFIX), _CHOICES
        self._sets: list[tuple[dict[str, Any], Examples]] = []
        for variation in options.variations:
            task = synthetic_task(source, own | variation)
            if task.vocab_size > context.tokenizer.vocab_size:
                raise ConfigError(
                    f"{source} has {task.vocab_size} token ids, and the model's vocabulary {context.tokenizer.vocab_size}; "
                    "ask a model that was trained on this task, or give options.vocab_size"
                )
            for one in draw_examples(task, seed, training=False):
                few = Examples(one.inputs[: options.examples], one.targets[: options.examples], one.at)
                self._sets.append(({**one.at, **variation}, few))
        self.requests = [
            Predictions(tuple(inputs.tolist()), tuple(np.flatnonzero(targets != IGNORED).tolist()))
            for _, examples in self._sets
            for inputs, targets in zip(examples.inputs, examples.targets, strict=True)
        ]

    def scored_by(self) -> Any:
        return [targets[targets != IGNORED].tolist() for _, one in self._sets for targets in one.targets]

    def score(self, answers: Sequence[Any]) -> Scores:
        """Compute the accuracy in each setting, and over all where there are several."""
        measurements: list[Measurement] = []
        items: list[ItemScore] = []
        left, everything = iter(answers), []
        for at, examples in self._sets:
            marks, units = [], []
            for index, targets in enumerate(examples.targets):
                right = (targets[targets != IGNORED] == np.array(next(left))).tolist()
                marks += right
                units += [f"example {index}"] * len(right)
            measurements.append(proportion("accuracy", marks, at, units=units))
            items += unit_scores(f"accuracy {_words(at)}", marks, units)
            everything.append((marks, [f"{_words(at)}, {unit}" for unit in units]))
        if len(everything) > 1:
            marks, units = (list(chain.from_iterable(column)) for column in zip(*everything, strict=True))
            measurements.insert(0, proportion("accuracy", marks, {}, units=units))
        return Scores(measurements=measurements, items=items)


def _asked_about(options: Options, context: TaskContext) -> tuple[str, dict[str, Any], int]:
    if options.task is not None:
        return PREFIX + options.task, options.options, options.seed
    data = None if context.data is None else context.data()
    if data is None or not data.source.startswith(PREFIX):
        raise ConfigError("task: the model's run was not trained on a synthetic task; name one, with its options")
    return data.source, data.options | options.options, data.split_seed


def _words(at: dict[str, Any]) -> str:
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in at.items())


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw the accuracy in each setting, a bar for each model."""
    rows = [row for result in results for row in select(result, "accuracy") if row.at]
    # What differs between settings names them.
    keys = [key for key in dict.fromkeys(chain.from_iterable(row.at for row in rows))
            if len({str(row.at.get(key)) for row in rows}) > 1]  # fmt: skip

    def name(row: Measurement) -> str:
        return _words({key: row.at[key] for key in keys if key in row.at}).replace(", ", "\n") or "accuracy"

    def find(result: TaskResult, group: str) -> list[Measurement]:
        return [row for row in select(result, "accuracy") if row.at and name(row) == group]

    figure = bars(results, list(dict.fromkeys(map(name, rows))), find, form=".2f")
    figure.axes[0].set(ylim=(0, 1.08), ylabel="accuracy")
    examples = " and ".join(sorted({f"{result.data.requests:,}" for result in results}))
    caption = f"Share of right answers in {examples} held-out examples of {results[0].data.name}; black lines: 95 % intervals."
    return "Synthetic task", caption, figure


register(TaskKind(name="synthetic", doc=__doc__, options=Options, make=SyntheticTask, draw=draw))
