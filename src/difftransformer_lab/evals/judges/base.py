"""Interface of judges, which decide whether an answer is faithful to its document, and the file of their verdicts.

Each verdict is written to disk at once as a JSON line, under a fingerprint of the judge and of everything it was shown. An
answer is judged only once, an interrupted run continues, and a person can read the reasons.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from difftransformer.errors import CheckpointError
from difftransformer.files import locked
from difftransformer.jsonl import DamagedLine, RowWriter, read_rows
from difftransformer.progress import report

_DOCUMENT_CHARACTERS = 400


@dataclass(frozen=True)
class Case:
    """An answer to judge. The question is None if the answer is a summary."""

    set_name: str
    item: str
    document: str
    question: str | None
    reference: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Judgment:
    faithful: bool
    reasoning: str


class OutOfBudget(Exception):
    """The judge has reached a spending limit or is unreachable."""


class Unjudged(Exception):
    """The judge gave no verdict on one answer."""


class Judge(Protocol):
    """Interface of a judge.

    Attributes:
        name: Name of the judge, for results.
        identity: Everything that a verdict depends on besides the case.
        rules: Sentences that describe how the judge decides.
    """

    name: str
    identity: str
    rules: Sequence[str]

    def judge(self, case: Case) -> Judgment:
        """Return a verdict.

        Raises:
            Unjudged: There is no verdict on this case.
            OutOfBudget: There will be no verdict on any other case either.
        """
        ...


def judge_all(judge: Judge, cases: Sequence[Case], file: Path) -> tuple[list[Judgment | None], list[str]]:
    """Judge all cases whose verdicts are not in the file yet, after another process that adds to the file.

    Returns:
        The verdict on each case, or None for a case without one, and the reasons for missing verdicts.

    Raises:
        CheckpointError: The file holds something else.
    """
    known: dict[str, Judgment] = {}
    reasons: list[str] = []
    with locked(file.parent, name=f".{file.name}.lock", wait=True):
        try:
            there = list(read_rows(file)) if file.exists() else []
            for line, (row, _) in enumerate(there, start=1):
                is_judged = row.get("verdict") in ("faithful", "hallucinated") and isinstance(row.get("key"), str)
                if not is_judged or "reasoning" not in row:
                    raise DamagedLine(line)
                known[row["key"]] = Judgment(faithful=row["verdict"] == "faithful", reasoning=row["reasoning"])
        except DamagedLine as damage:
            raise CheckpointError(
                f"{file}: line {damage.line} is not a judgment; choose another with --judgments"
            ) from None
        keys = [fingerprint(judge, case) for case in cases]
        with closing(RowWriter(file, keep_bytes=there[-1][1] if there else 0, sync_seconds=0.0)) as rows:
            for place, (key, case) in enumerate(zip(keys, cases, strict=True)):
                report(place, len(cases), "judging")
                if key in known:
                    continue
                try:
                    known[key] = judge.judge(case)
                    rows.write(_row(key, judge, case, known[key]))
                except Unjudged as reason:
                    reasons.append(str(reason))
                except OutOfBudget as reason:
                    reasons.append(str(reason))
                    break
    report(len(cases), len(cases), "judging")
    return [known.get(key) for key in keys], list(dict.fromkeys(reasons))


def fingerprint(judge: Judge, case: Case) -> str:
    """Return the SHA-256 of a judge and of everything it is shown of a case."""
    seen = [judge.identity, case.document, case.question, case.reference, case.answer]
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def _row(key: str, judge: Judge, case: Case, verdict: Judgment) -> dict[str, Any]:
    return {
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
