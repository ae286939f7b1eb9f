"""Ask a model a task's requests, with every answer kept on disk as it comes, so that nothing is asked twice."""

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, EvaluationError
from .task import LanguageModel, Request, Scores, Task, tokens_of

Watch = Callable[[int, int], None]
_SYNC_SECONDS = 5.0


def run_task(
    model: LanguageModel,
    task: Task,
    *,
    journal: Path | None = None,
    identity: str = "",
    watch: Watch = lambda done, total: None,
) -> Scores:
    """Answer a task's requests and score them.

    Args:
        model: Whatever answers.
        task: The experiment.
        journal: File of answers; those in it are not asked again, new ones are added as they come.
        identity: Of the model: answers of another one are refused.
        watch: Told tokens asked and tokens in all, after every answer.

    Raises:
        EvaluationError: the task has no requests, or the model cannot answer one.
        CheckpointError: the journal is of another model or of other requests.
    """
    if not task.requests:
        raise EvaluationError(f"{task.data_name}: nothing to ask; give more data")
    costs = [tokens_of(request) for request in task.requests]
    kept = Journal(journal, f"{identity} {requests_sha256(task.requests)}") if journal else None
    answers: dict[int, Any] = dict(kept.answers) if kept else {}
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
    return task.score([answers[index] for index in range(len(costs))])


def requests_sha256(requests: Sequence[Request]) -> str:
    """Fingerprint of requests: of every token that is shown and every option that is given."""
    digest = hashlib.sha256()
    for request in requests:
        document = [type(request).__name__, dataclasses.asdict(request)]
        digest.update(json.dumps(document, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()


class Journal:
    """Answers on disk, one JSON line each behind a first line that says whose they are.

    A line that a kill cut short is dropped, all whole ones count.

    Args:
        path: The file; made if it is missing.
        identity: Of model and requests.

    Raises:
        CheckpointError: the file is of another model or of other requests, or is no journal.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self.answers: dict[int, Any] = {}
        head = json.dumps({"answers_of": identity})
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = 0
        if path.exists():
            for number, line in enumerate(path.read_bytes().splitlines(keepends=True)):
                if not line.endswith(b"\n"):
                    break
                if number == 0:
                    if line.decode(errors="replace").strip() != head:
                        raise CheckpointError(
                            f"{path}: holds answers of another model or to other questions; choose another --out, or "
                            "delete the file"
                        )
                else:
                    try:
                        row = json.loads(line)
                        self.answers[row["request"]] = row["answer"]
                    except (ValueError, KeyError, TypeError):
                        break
                whole += len(line)
        self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 - closed by close()
        self._file.truncate(whole)
        self._file.seek(whole)
        if whole == 0:
            self._file.write(head.encode() + b"\n")
        self._file.flush()
        self._synced = time.monotonic()

    def add(self, index: int, answer: Any) -> None:
        """Write an answer; it survives this process at once, and a loss of power within seconds."""
        self._file.write(json.dumps({"request": index, "answer": answer}).encode() + b"\n")
        self._file.flush()
        if time.monotonic() - self._synced > _SYNC_SECONDS:
            os.fsync(self._file.fileno())
            self._synced = time.monotonic()

    def close(self) -> None:
        """Write everything to disk."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
