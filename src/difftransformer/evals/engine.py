"""Run a task: ask a model its requests, keep every answer on disk as it comes, and score the answers."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from ..errors import CheckpointError, EvaluationError
from ..results import Grid, ItemScore, Measurement
from .journal import DamagedJournal, Journal
from .requests import Answers, LanguageModel, requests_sha256

_SYNC_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a task makes of the answers: measurements, each item's contribution to them, and grids for the picture."""

    measurements: list[Measurement]
    items: list[ItemScore]
    grids: list[Grid] = field(default_factory=list)


class Progress(Protocol):
    """A callback for progress: `done` of `total` tokens while the model answers, or of `stage`'s own items later."""

    def __call__(self, done: int, total: int, stage: str = "") -> None:
        """Called after every item."""
        ...


def no_progress(done: int, total: int, stage: str = "") -> None:
    """A `Progress` that shows nothing."""


class Task(ABC):
    """One evaluation, with its data drawn and turned into requests.

    Attributes:
        requests: What is asked: dataclasses with a property `shown_tokens`. A function of the options, the data and the
            tokenizer only, so that every model with that tokenizer gets the same requests.
        data_name: Name of the data, for the result.
        choices: Sentences: what the paper leaves open and how it was settled, and where the task departs from the paper.
    """

    requests: Sequence[Any]
    data_name: str
    choices: Sequence[str]

    def answer(self, model: Any, requests: Sequence[Any]) -> Answers:
        """Ask a model some of the requests. A task that runs by itself or needs more than a `LanguageModel` overrides this."""
        found: Answers = model.answer(requests)
        return found

    def judge(self, answers: Sequence[Any], progress: Progress) -> Sequence[Any]:
        """Prepare the answers for `score`, one value for each answer. A task whose judging takes long overrides this."""
        return answers

    @abstractmethod
    def score(self, answers: Sequence[Any]) -> Scores:
        """Compute the figures from the judged answers, which are in the order of the requests."""


def run_task(
    model: LanguageModel,
    task: Task,
    *,
    journal: Path | None = None,
    identity: str = "",
    progress: Progress = no_progress,
) -> Scores:
    """Answer a task's requests and score them.

    Args:
        model: The model to ask.
        task: The evaluation.
        journal: File of answers. Requests that it answers are not asked again; new answers are appended as they come.
        identity: Fingerprint of the model: a journal of another model is refused.
        progress: Called with the tokens asked and the tokens in total after every answer and, while a batch is computed, after
            each layer of a model that can be watched (`CausalLanguageModel.watched`); then by a long judging.

    Raises:
        EvaluationError: The task has no requests, or the model cannot answer one.
        CheckpointError: The journal belongs to another model or to other requests.
    """
    if not task.requests:
        raise EvaluationError(f"{task.data_name}: nothing to ask; give more data")
    costs = [request.shown_tokens for request in task.requests]
    answers: dict[int, Any] = {}

    def take(row: Any) -> None:
        answers[row["request"]] = row["answer"]

    try:
        header = {"answers_of": f"{identity} {requests_sha256(task.requests)}"}
        kept = Journal(journal, take, header=header, sync_seconds=_SYNC_SECONDS) if journal else None
    except DamagedJournal:
        raise CheckpointError(
            f"{journal}: holds answers of another model or to other questions, or is damaged; choose another --out, or "
            "delete the file"
        ) from None
    left = [index for index in range(len(costs)) if index not in answers]
    done, total = sum(costs) - sum(costs[index] for index in left), sum(costs)
    ahead, shown = 0.0, done  # tokens that were computed but not answered yet; what progress was told last
    progress(done, total)

    def computed(tokens: float) -> None:
        nonlocal ahead, shown
        ahead += tokens
        if (reached := min(total - 1, int(done + ahead))) > shown:
            shown = reached
            progress(shown, total)

    watched = getattr(model, "watched", lambda tell: nullcontext())
    with kept or nullcontext(), watched(computed):
        for place, answer in task.answer(model, [task.requests[index] for index in left]):
            index = left[place]
            answers[index] = answer
            if kept:
                kept.add({"request": index, "answer": answer})
            done, ahead = done + costs[index], max(0.0, ahead - costs[index])
            shown = max(shown, done)
            progress(shown, total)
    return task.score(task.judge([answers[index] for index in range(len(costs))], progress))
