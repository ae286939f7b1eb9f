"""A study with everything that is computed from its records, and the runs that it has in common with other studies."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..results import Question
from .compare import Compared, compare
from .contrasts import Finding, Worth, pooled_runs, questions_of, why_not_registered, worth_of
from .frame import Records, find_studies, read_records
from .scaling import Scaling, scaling_of

_DIGEST = re.compile(r"-([0-9a-f]{10})$")
"""A run's file ends in a digest of what was trained and on which data, the same under any arm's name."""


@dataclass(frozen=True, kw_only=True)
class StudyAnalysis:
    """A study with its findings.

    Attributes:
        rows: Every figure of every arm beside the reference, explored and not decided.
        questions: The plan's questions with their contrasts; nothing for a study that explores.
        why_not_registered: Why the plan was not there before the runs, in a sentence; empty if it was, or there is no plan.
        shared: How many of its runs each other study has too, by the other's slug.
        worths: Differences of losses in tokens, by the name of the contrast, where the reference has runs of another length.
    """

    records: Records
    rows: list[Compared]
    scaling: Scaling | None
    questions: list[tuple[Question, list[Finding]]] = field(default_factory=list)
    why_not_registered: str = ""
    shared: dict[str, int] = field(default_factory=dict)
    worths: dict[str, Worth] = field(default_factory=dict)

    @property
    def findings(self) -> list[Finding]:
        return [finding for _, contrasts in self.questions for finding in contrasts]


def analyse(records: Records) -> StudyAnalysis:
    """Compare the arms of a study, fit its power laws if it has them, and test its plan if it has one."""
    questions = questions_of(records)
    findings = [finding for _, contrasts in questions for finding in contrasts]
    return StudyAnalysis(
        records=records,
        rows=compare(records),
        scaling=scaling_of(records) if records.index.analysis == "scaling" else None,
        questions=questions,
        why_not_registered=why_not_registered(records, findings) if records.index.plan else "",
    )


def read_studies(path: Path) -> list[StudyAnalysis]:
    """Read and analyse the studies of a folder, or one of them.

    Raises:
        ResultsError: An index or a run cannot be read, or a plan names something that its study does not have.
    """
    return together([analyse(read_records(one)) for one in find_studies(path)])


def together(studies: Sequence[StudyAnalysis]) -> list[StudyAnalysis]:
    """Add what several studies say together: differences in tokens, and shared runs."""
    pool = pooled_runs(one.records for one in studies)
    runs = {one.records.slug: _identities(one.records) for one in studies}
    joined = []
    for one in studies:
        found = {finding.contrast.name: worth_of(one.records, pool, finding) for finding in one.findings}
        mine = runs[one.records.slug]
        common = {slug: len(mine & other) for slug, other in runs.items() if slug != one.records.slug}
        worths = {name: worth for name, worth in found.items() if worth}
        joined.append(replace(one, worths=worths, shared={slug: count for slug, count in common.items() if count}))
    return joined


def _identities(records: Records) -> set[str]:
    files = [records.path.parent / member.file for member in records.index.members]
    return {digest[1] if (digest := _DIGEST.search(file.stem)) else str(file.resolve()) for file in files}
