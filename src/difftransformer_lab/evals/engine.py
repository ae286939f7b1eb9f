"""Run a task: ask a model its requests, keep every answer on disk as it comes, and score the answers."""

import logging
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftransformer.errors import CheckpointError, EvaluationError
from difftransformer.jsonl import DamagedLine, RowWriter, read_rows
from difftransformer.progress import report

from ..results import Grid, ItemScore, Measurement, TaskResult
from .requests import Answers, LanguageModel, plain_sha256, requests_sha256

if TYPE_CHECKING:
    from difftransformer.train.parallel import Processes

logger = logging.getLogger(__name__)
_SYNC_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What a task makes of the answers: measurements, each item's contribution to them, and grids for the picture.

    `run_task` takes out what is not a finite number, and names it in `gaps`.
    """

    measurements: list[Measurement]
    items: list[ItemScore]
    grids: list[Grid] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)


class Task(ABC):
    """One evaluation, with its data drawn and turned into requests.

    Attributes:
        requests: What is asked: objects with a property `shown_tokens` and a method `asked` (see `requests.Loss`). A function
            of the options, the data and the tokenizer only, so that every model with that tokenizer gets the same requests.
        data_name: Name of the data, for the result.
        choices: Sentences: what the paper leaves open and how it was settled, and where the task departs from the paper.
    """

    requests: Sequence[Any]
    data_name: str
    choices: Sequence[str]
    rules = 1
    """Raised when the same answers are scored to other figures, so that earlier results are not taken for new ones."""

    def scored_by(self) -> Any:
        """Return, as JSON, what the answers are scored by beside the requests and the options, such as the right answers."""
        return None

    def answer(self, model: Any, requests: Sequence[Any]) -> Answers:
        """Ask a model some of the requests. A task that runs by itself or needs more than a `LanguageModel` overrides this."""
        answers: Answers = model.answer(requests)
        return answers

    def parts(self, model: Any) -> list[list[int]] | None:
        """Return the places of the requests that a model is asked together, such as a batch; None if it is the same.

        They depend on the requests and the model alone, and so does every answer, down to rounding.
        """
        divide = getattr(model, "parts", None)
        return None if divide is None else divide(self.requests)

    def judge(self, answers: Sequence[Any]) -> Sequence[Any]:
        """Prepare the answers for `score`, one value for each answer. A task whose judging takes long overrides this."""
        return answers

    @abstractmethod
    def score(self, answers: Sequence[Any]) -> Scores:
        """Compute the figures from the judged answers, which are in the order of the requests."""

    def is_whole(self, result: TaskResult) -> bool:
        """Whether a stored result is kept, since nothing is missing that another call could add."""
        return True


def task_sha256(task: Task) -> str:
    """Return the fingerprint of a task: of what it asks and of what it scores the answers by."""
    scoring = ["scored by", task.rules, task.scored_by()]
    return plain_sha256(chain((request.asked() for request in task.requests), [scoring]))


def run_task(
    model: LanguageModel,
    task: Task,
    *,
    journal: Path | None = None,
    identity: str = "",
    replace_others: bool = False,
    processes: "Processes | None" = None,
) -> Scores:
    """Answer a task's requests and score them.

    Several processes take turns: in each, every process asks its model one part of the requests (`Task.parts`), and the first
    one saves the answers of all.

    Progress is reported (see `difftransformer.progress`): in tokens after every answer and, while a batch is computed, after
    each layer of a model that can be watched (`CausalLanguageModel.watched`); then by a long judging.

    Args:
        journal: File of answers. Requests that it answers are not asked again; new answers are appended as they come.
        identity: Fingerprint of the model: a journal of another model is refused.
        replace_others: Whether to begin again, instead, where the journal belongs to another model or to other requests; the
            old one is kept with `.old` after its name.
        processes: This process and the others, which all call the function and get the scores; None for a single one. The
            first one keeps the journal, judges and scores.

    Raises:
        EvaluationError: The task has no requests, or the model cannot answer one.
        CheckpointError: The journal is damaged, or belongs to another model or to other requests.
    """
    if not task.requests:
        raise EvaluationError(f"{task.data_name}: nothing to ask; give more data")
    costs = [request.shown_tokens for request in task.requests]
    broadcast = (lambda make: make()) if processes is None else processes.broadcast
    header = {"answers_of": f"{identity} {requests_sha256(task.requests)}"} if journal is not None else {}
    kept: list[RowWriter] = []

    def known_answers() -> dict[int, Any]:
        answers: dict[int, Any] = {}
        if journal is not None:
            kept.append(_opened(journal, answers, header, replace_others))
        return answers

    answers = broadcast(known_answers)
    done, total = sum(costs[index] for index in answers), sum(costs)
    ahead, shown = 0.0, done  # tokens that were computed but not answered yet; what was reported last
    report(done, total)

    def computed(tokens: float) -> None:
        nonlocal ahead, shown
        ahead += tokens
        if (reached := min(total - 1, int(done + ahead))) > shown:
            shown = reached
            report(shown, total)

    watched = getattr(model, "watched", lambda tell: nullcontext())
    with ExitStack() as opened:
        for file in kept:
            opened.enter_context(closing(file))
        opened.enter_context(watched(computed))
        several = processes if processes is not None and processes.count > 1 else None
        for index, answer in _in_turns(model, task, answers, several):
            for file in kept:
                if not answers:  # so that a run that failed at once blocks no later one
                    file.write(header)
                file.write({"request": index, "answer": answer})
            answers[index] = answer
            done, ahead = done + costs[index], max(0.0, ahead - costs[index])
            shown = max(shown, done)
            report(shown, total)
    return broadcast(lambda: _defined(task.score(task.judge([answers[index] for index in range(len(costs))]))))


def answers_of(journal: Path) -> tuple[str, str] | None:
    """Return the fingerprints of the model and of the requests that a file of answers belongs to, None if it says none."""
    try:
        first = next(read_rows(journal), None) if journal.exists() else None
    except DamagedLine:  # which is said when the file is opened
        return None
    model, _, requests = str(first[0].get("answers_of", "")).rpartition(" ") if first else ("", "", "")
    return (model, requests) if requests else None


def _in_turns(
    model: LanguageModel, task: Task, answers: dict[int, Any], processes: "Processes | None"
) -> Iterator[tuple[int, Any]]:
    """Yield the places and answers of the requests that `answers` lacks.

    A part that lacks one answer is asked whole, so that each answer is the same to the bit however often the
    evaluation was stopped, and on any number of processes.
    """
    left = [index for index in range(len(task.requests)) if index not in answers]
    parts = task.parts(model)
    if parts is None:
        parts = [left] if processes is None else [[index] for index in left]
    missing, costs = set(left), [request.shown_tokens for request in task.requests]
    parts = [part for part in parts if not missing.isdisjoint(part)]

    def ask(part: list[int]) -> Iterator[tuple[int, Any]]:
        for place, answer in task.answer(model, [task.requests[index] for index in part]):
            if part[place] in missing:
                yield part[place], answer

    if processes is None:
        for part in parts:
            yield from ask(part)
        return
    # In a turn all processes have about the same to do.
    parts.sort(key=lambda part: -sum(costs[index] for index in part))
    for turn in range(0, len(parts), processes.count):
        own: list[tuple[int, Any]] = []
        failure = None
        try:
            for part in parts[turn + processes.rank : turn + processes.rank + 1]:
                own.extend(ask(part))
        except EvaluationError as error:  # met here alone, and said to all
            failure = error
        answers_of_all = processes.gathered((own, failure))
        for answers_of_one, _ in answers_of_all:
            yield from answers_of_one
        for _, failed in answers_of_all:
            if failed is not None:
                processes.fail(failed)


def _opened(journal: Path, answers: dict[int, Any], header: dict[str, str], replace_others: bool) -> RowWriter:
    """Open a file of answers and read those that it has; see `run_task`."""
    try:
        rows = list(read_rows(journal)) if journal.exists() else []
        for line, (row, _) in enumerate(rows[1:], start=2):
            if not isinstance(row.get("request"), int) or "answer" not in row:
                raise DamagedLine(line)
    except DamagedLine as damage:
        raise CheckpointError(
            f"{journal}: line {damage.line} is damaged; delete {'the file' if damage.line == 1 else 'the line'} to ask "
            "again what it answered"
        ) from None
    if rows and rows[0][0] != header:
        if not replace_others:
            raise CheckpointError(
                f"{journal}: holds answers of another model or to other questions; choose another --out, or delete the file"
            )
        old, rows = journal.replace(journal.with_name(f"{journal.name}.old")), []
        logger.warning(
            "%s: holds answers of another model or to other questions; every question is asked again, and they are kept in %s",
            journal,
            old.name,
        )
    answers |= {row["request"]: row["answer"] for row, _ in rows[1:]}
    journal.parent.mkdir(parents=True, exist_ok=True)
    return RowWriter(journal, keep_bytes=rows[-1][1] if answers else 0, sync_seconds=_SYNC_SECONDS)


def _defined(scores: Scores) -> Scores:
    """Take out what is not a finite number, and name it in `gaps`."""
    measured = [row for row in scores.measurements if _is_finite(row.value, row.standard_error, row.low, row.high)]
    grids = [grid for grid in scores.grids if _is_finite(*chain.from_iterable(grid.values))]
    broken = {item.name for item in scores.items if not _is_finite(item.score, item.weight)}
    gaps = list(scores.gaps)
    for given, kept in ((scores.measurements, measured), (scores.grids, grids)):
        there, whole = Counter(row.name for row in kept), Counter(row.name for row in given)
        for name, places in whole.items():
            if lost := places - there[name]:
                gaps.append(f"{name} is undefined" + (f" in {lost} of {places} places" if places > 1 else ""))
    items = [item for item in scores.items if item.name not in broken]
    return replace(scores, measurements=measured, items=items, grids=grids, gaps=list(dict.fromkeys(gaps)))


def _is_finite(*values: float | None) -> bool:
    return all(value is None or math.isfinite(value) for value in values)
