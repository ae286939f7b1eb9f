"""A study with everything that is computed from it, and the runs that it has in common with other studies."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

from ..results import Question
from .comparisons import Compared, compare
from .contrasts import Finding, Registration, questions_of, registration
from .reading import Evidence, find_studies, read_evidence
from .scaling import Scaling, scaling_of
from .tokens import TASK, Pool, Worth, gains, log2_times, pooled_runs, worth

_DIGEST = re.compile(r"-([0-9a-f]{10})$")
"""A run's file ends in a digest of what was trained and on which data, the same under any arm's name."""


@dataclass(frozen=True, kw_only=True)
class Studied:
    """A study with its comparisons, made once for all pages.

    Attributes:
        questions: The plan's questions with their contrasts; nothing for a study that explores.
        registration: Whether the plan was there before the runs; None for a study that explores.
        shared: How many of its runs each other study has too, by the other's slug.
        worths: Differences of losses in tokens, by the name of the contrast, where the reference has runs of another length.
    """

    evidence: Evidence
    rows: list[Compared]
    scaling: Scaling | None
    questions: list[tuple[Question, list[Finding]]] = field(default_factory=list)
    registration: Registration | None = None
    shared: dict[str, int] = field(default_factory=dict)
    worths: dict[str, Worth] = field(default_factory=dict)

    @property
    def findings(self) -> list[Finding]:
        return [finding for _, contrasts in self.questions for finding in contrasts]


def studied(evidence: Evidence) -> Studied:
    """Compare the arms of a study, fit its power laws if it has them, and test its plan if it has one."""
    questions = questions_of(evidence)
    findings = [finding for _, contrasts in questions for finding in contrasts]
    return Studied(
        evidence=evidence,
        rows=compare(evidence),
        scaling=scaling_of(evidence) if evidence.index.analysis == "scaling" else None,
        questions=questions,
        registration=registration(evidence, findings) if evidence.index.plan else None,
    )


def read_studies(path: Path) -> list[Studied]:
    """Read and compare the studies of a folder, or one of them.

    Raises:
        ResultsError: An index or a run cannot be read, or a plan names something that its study does not have.
    """
    return with_worths(with_shared([studied(read_evidence(one)) for one in find_studies(path)]))


def with_worths(studies: Sequence[Studied]) -> list[Studied]:
    pool = pooled_runs(one.evidence for one in studies)
    worths = (
        {finding.contrast.name: worth_of(one.evidence, pool, finding) for finding in one.findings} for one in studies
    )
    found = ({name: one for name, one in mine.items() if one} for mine in worths)
    return [replace(one, worths=mine) for one, mine in zip(studies, found, strict=True)]


def with_shared(studies: Sequence[Studied]) -> list[Studied]:
    runs = {one.evidence.slug: _identities(one.evidence) for one in studies}
    shared = []
    for one in studies:
        others = {slug: runs[one.evidence.slug] & other for slug, other in runs.items() if slug != one.evidence.slug}
        shared.append(replace(one, shared={slug: len(both) for slug, both in others.items() if both}))
    return shared


def worth_of(evidence: Evidence, pool: Pool, finding: Finding) -> Worth | None:
    """Return what a contrast of two arms' losses is worth; None for other contrasts."""
    sides = {weight: group for group, weight in finding.groups.items()}
    scale = finding.contrast.scale
    if finding.figure.task != TASK or scale not in ("plain", "doublings") or sides.keys() != {1.0, -1.0}:
        return None
    (arm, point), (other, at) = sides[1.0], sides[-1.0]
    gained = gains(pool, evidence.ended(evidence.index.reference, at), finding.figure)
    unit = fmean(gained.values()) if gained and scale == "doublings" else 1.0
    values = {seed: value * unit for seed, value in finding.values.items()}
    return worth(values, gained, log2_times(evidence, arm, other, point) if point == at else ())


def _identities(evidence: Evidence) -> set[str]:
    files = [evidence.path.parent / member.file for member in evidence.index.members]
    return {digest[1] if (digest := _DIGEST.search(file.stem)) else str(file.resolve()) for file in files}
