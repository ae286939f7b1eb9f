"""Ask a model a task's requests, with every answer kept on disk as it comes, so that nothing is asked twice."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, EvaluationError
from .journal import Journal
from .task import LanguageModel, Request, Scores, Task, Watch, Watched, tokens_of, unwatched

_SYNC_SECONDS = 5.0


def run_task(
    model: LanguageModel,
    task: Task,
    *,
    journal: Path | None = None,
    identity: str = "",
    watch: Watch = unwatched,
) -> Scores:
    """Answer a task's requests and score them.

    Args:
        model: Whatever answers.
        task: The experiment.
        journal: File of answers; those in it are not asked again, new ones are added as they come.
        identity: Of the model: answers of another one are refused.
        watch: Told tokens asked and tokens in all, after every answer; then how far a long scoring is.

    Raises:
        EvaluationError: the task has no requests, or the model cannot answer one.
        CheckpointError: the journal is of another model or of other requests.
    """
    if not task.requests:
        raise EvaluationError(f"{task.data_name}: nothing to ask; give more data")
    costs = [tokens_of(request) for request in task.requests]
    kept = Answers(journal, f"{identity} {requests_sha256(task.requests)}") if journal else None
    answers: dict[int, Any] = dict(kept.known) if kept else {}
    left = [index for index in range(len(costs)) if index not in answers]
    done, total = sum(costs) - sum(costs[index] for index in left), sum(costs)
    watch(done, total)
    try:
        for place, answer in model.answer([task.requests[index] for index in left]):
            index = left[place]
            answers[index] = answer
            if kept:
                kept.add(index, answer)
            done += costs[index]
            watch(done, total)
    finally:
        if kept:
            kept.close()
    if isinstance(task, Watched):
        task.watch = watch
    return task.score([answers[index] for index in range(len(costs))])


def requests_sha256(requests: Sequence[Request]) -> str:
    """Fingerprint of requests: of every token that is shown and every option that is given."""
    digest = hashlib.sha256()
    for request in requests:
        document = [type(request).__name__, dataclasses.asdict(request)]
        digest.update(json.dumps(document, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


class Answers:
    """Answers on disk behind a first line that says whose they are.

    Args:
        path: The file; made if it is missing.
        identity: Of model and requests.

    Raises:
        CheckpointError: the file is of another model or of other requests, or holds no answers.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.known: dict[int, Any] = {}
        self._identity, self._is_known = identity, False
        try:
            self._journal = Journal(path, self._take, sync_seconds=_SYNC_SECONDS)
        except ValueError:
            raise CheckpointError(
                f"{path}: holds answers of another model or to other questions, or is damaged; choose another --out, or "
                "delete the file"
            ) from None

    def _take(self, row: Any) -> None:
        if self._is_known:
            self.known[row["request"]] = row["answer"]
        elif row["answers_of"] != self._identity:
            raise ValueError
        self._is_known = True

    def add(self, index: int, answer: Any) -> None:
        """Write an answer; whose it is, before the first one: an evaluation that gave none is in nobody's way."""
        if not self._is_known:
            self._journal.add({"answers_of": self._identity})
            self._is_known = True
        self._journal.add({"request": index, "answer": answer})

    def close(self) -> None:
        """Write everything to disk."""
        self._journal.close()
