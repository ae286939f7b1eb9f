"""Who says whether an answer keeps to its document, and the file of what was said.

Verdicts are kept one JSON line each, written to disk as they come, under a fingerprint of the judge and of all that it saw: an
answer is judged once, a stopped judging goes on, and a person can read why.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ...errors import CheckpointError
from ..engine import Progress, no_progress
from ..journal import DamagedJournal, Journal

_DOCUMENT_CHARACTERS = 400


@dataclass(frozen=True, kw_only=True)
class Case:
    """An answer to judge. The question is None where the answer is a summary."""

    set_name: str
    item: str
    document: str
    question: str | None
    reference: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Judgment:
    """A verdict and why."""

    faithful: bool
    reasoning: str


class OutOfBudget(Exception):
    """A judge's limit of spending is reached, or it cannot be asked any more."""


class Unjudged(Exception):
    """A judge gave no verdict on one answer."""


class Judge(Protocol):
    """Whoever gives verdicts.

    Attributes:
        name: What it is, for the result.
        identity: Everything that its verdict depends on besides the case.
        rules: Sentences: how it decides.
    """

    name: str
    identity: str
    rules: Sequence[str]

    def judge(self, case: Case) -> Judgment:
        """A verdict.

        Raises:
            Unjudged: none on this case.
            OutOfBudget: none on any other case either.
        """
        ...


def judge_all(
    judge: Judge, cases: Sequence[Case], file: Path, progress: Progress = no_progress
) -> tuple[list[Judgment | None], list[str]]:
    """A verdict on every case, from the file where it is there; None where there is none, with the reasons.

    Raises:
        CheckpointError: the file holds something else.
    """
    verdicts: list[Judgment | None] = []
    reasons: list[str] = []
    with Judgments(file) as kept:
        stopped = False
        for place, case in enumerate(cases):
            progress(place, len(cases), "judging")
            key = fingerprint(judge, case)
            found = kept.known.get(key)
            if found is None and not stopped:
                try:
                    found = judge.judge(case)
                    kept.add(key, judge, case, found)
                except Unjudged as reason:
                    reasons.append(str(reason))
                except OutOfBudget as reason:
                    reasons.append(str(reason))
                    stopped = True
            verdicts.append(found)
    progress(len(cases), len(cases), "judging")
    return verdicts, list(dict.fromkeys(reasons))


def fingerprint(judge: Judge, case: Case) -> str:
    """Of a judge and what it is shown."""
    seen = [judge.identity, case.document, case.question, case.reference, case.answer]
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


class Judgments:
    """The file of verdicts. A line that a kill cut short is dropped, all whole ones count.

    Raises:
        CheckpointError: the file is no file of judgments.
    """

    def __init__(self, path: Path) -> None:
        self.known: dict[str, Judgment] = {}
        try:
            self._journal = Journal(path, self._take)
        except DamagedJournal as damage:
            raise CheckpointError(
                f"{path}: line {damage.line} is no judgment; name another file with --judgments"
            ) from None

    def __enter__(self) -> "Judgments":
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()

    def _take(self, row: Any) -> None:
        verdict = {"faithful": True, "hallucinated": False}[row["verdict"]]
        self.known[row["key"]] = Judgment(faithful=verdict, reasoning=row["reasoning"])

    def add(self, key: str, judge: Judge, case: Case, verdict: Judgment) -> None:
        """Write a verdict; it survives a loss of power at once."""
        row = {
            "set": case.set_name,
            "item": case.item,
            "question": case.question,
            "answer": case.answer,
            "verdict": "faithful" if verdict.faithful else "hallucinated",
            "reasoning": verdict.reasoning,
            "reference": case.reference,
            "document_begins": case.document[:_DOCUMENT_CHARACTERS],
            "judge": judge.name,
            "key": key,
        }
        self._journal.add(row)
        self.known[key] = verdict
