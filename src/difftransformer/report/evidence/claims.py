"""The claims of the paper's abstract, each with a state that is computed from the studies.

A test of a claim is one comparison of a study, over all its settings: it is *for* the claim if the arm is better than the
reference by the study's own rule (interval and Holm's correction), *against* it if it is worse, and *open* otherwise. A need
for parameters or tokens is for the claim if the intervals of fit and interpolation both lie below 1. A claim is

* reproduced here, if a test is for it and none is against it,
* opposite, if a test is against it and none is for it,
* mixed, if there are both,
* not reproduced, if all tests that were run are open,
* not run yet, if no test has two paired seeds,
* not testable at this scale, if it has no test.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml  # type: ignore[import-untyped]

from difftransformer.errors import ResultsError
from difftransformer.report.evidence.answers import settings_words
from difftransformer.report.evidence.comparisons import Compared, compare, row_of
from difftransformer.report.evidence.reading import Evidence
from difftransformer.report.evidence.scaling import Scaling, scaling_of
from difftransformer.typed import build

FILE = Path(__file__).parent / "claims.yaml"

ClaimState = Literal[
    "reproduced here", "opposite", "mixed", "not reproduced", "not run yet", "not testable at this scale"
]
Vote = Literal["for", "against", "open"]


@dataclass(frozen=True, kw_only=True)
class ClaimTest:
    """A comparison that tests a claim: an arm on a figure (by its label), or its need for size or tokens."""

    study: str
    arm: str
    figure: str = ""
    need: Literal["", "size", "tokens"] = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of the paper.

    Attributes:
        claim: The claim.
        paper: What the paper reports for it.
        tests: Comparisons that test it.
        controls: Whether to say which arms remove the effect of the first test.
        not_testable: Why there is no test.
    """

    claim: str
    paper: str
    tests: list[ClaimTest] = field(default_factory=list)
    controls: bool = False
    not_testable: str = ""


@dataclass(frozen=True, kw_only=True)
class Studied:
    """A study with its comparisons, made once for all pages."""

    evidence: Evidence
    rows: list[Compared]
    scaling: Scaling | None


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A claim with its state.

    Attributes:
        votes: Study, what was tested there, and the outcome.
        controls: Sentences on which arms keep or remove the effect.
    """

    claim: Claim
    state: ClaimState
    votes: list[tuple[Studied, str, Vote]]
    controls: str


def studied(evidence: Evidence) -> Studied:
    """Compare the arms of a study, and fit its power laws if it has them."""
    scaling = scaling_of(evidence) if evidence.index.analysis == "scaling" else None
    return Studied(evidence=evidence, rows=compare(evidence), scaling=scaling)


def read_claims(path: Path = FILE) -> list[Claim]:
    """Read the list of claims."""
    plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [build(Claim, one, source=str(path), error=ResultsError) for one in plain]


def judge(claims: Sequence[Claim], studies: Sequence[Studied]) -> list[Judged]:
    """Return the claims with their states."""
    return [_judged(claim, studies) for claim in claims]


def _judged(claim: Claim, studies: Sequence[Studied]) -> Judged:
    votes = [
        (
            study,
            _tested(study, test),
            vote,
        )
        for test in claim.tests
        for study in studies
        if study.evidence.index.name == test.study and (vote := _vote(study, test))
    ]
    found = {vote for _, _, vote in votes}
    state: ClaimState
    if not claim.tests:
        state = "not testable at this scale"
    elif not found:
        state = "not run yet"
    elif {"for", "against"} <= found:
        state = "mixed"
    elif "for" in found:
        state = "reproduced here"
    else:
        state = "opposite" if "against" in found else "not reproduced"
    controls = ""
    if claim.controls and claim.tests:
        first = claim.tests[0]
        controls = " ".join(
            control_words(one, first.arm, first.figure) for one in studies if one.evidence.index.name == first.study
        )
    return Judged(claim=claim, state=state, votes=votes, controls=controls)


def _tested(study: Studied, test: ClaimTest) -> str:
    if test.need:
        return {"size": "parameters for equal loss", "tokens": "training tokens for equal loss"}[test.need]
    if not study.evidence.has_settings:
        return test.figure
    figure = next(one for one in study.evidence.index.figures if one.label == test.figure)
    return (
        f"{test.figure}, mean over {settings_words(study.evidence, study.rows, figure, study.evidence.arm(test.arm))}"
    )


def _vote(study: Studied, test: ClaimTest) -> Vote | None:
    if test.need:
        found = [
            need
            for need in (study.scaling.needs if study.scaling else [])
            if need.axis.name == test.need and need.arm.name == test.arm
        ]
        if not found:
            return None
        return "for" if found[-1].is_less else "against" if found[-1].is_more else "open"
    row = row_of(study.rows, test.figure, test.arm, ())
    if row is None or row.difference is None or row.pairs < 2 or not row.is_primary:
        return None
    return {"better": "for", "worse": "against"}.get(row.state, "open")  # type: ignore[return-value]


def control_words(study: Studied, arm: str, figure: str) -> str:
    """Return which arms keep, reduce or remove the advantage of an arm over the reference.

    An arm *removes* the advantage if the arm in question is better than it, and it is not better than the reference. It
    *keeps* it if it is better than the reference and not told apart from the arm, or better than it. If it is better than
    the reference and worse than the arm, it *reduces* it. Of all others nothing can be said. Both comparisons are corrected
    by Holm's method, each for all comparisons of the study with that arm.
    """
    evidence = study.evidence
    label, reference = evidence.arm(arm).label, evidence.reference.label
    row = row_of(study.rows, figure, arm, ())
    if row is None or row.state != "better":
        return f"{label} has no decided advantage over {reference} here that a control could remove."
    against = compare(evidence, reference=arm)
    names: dict[str, list[str]] = {}
    for other in evidence.others:
        to_reference, to_arm = row_of(study.rows, figure, other.name, ()), row_of(against, figure, other.name, ())
        if other.name == arm or to_reference is None or to_arm is None:
            continue
        states = to_reference.state == "better", to_arm.state
        effect = {(False, "worse"): "removed", (True, "worse"): "reduced"}.get(states, "kept" if states[0] else "open")
        names.setdefault(effect, []).append(other.label)
    words = {"removed": "removed in", "reduced": "reduced in", "kept": "kept in", "open": "undecided in"}
    parts = [f"{words[effect]}: {'; '.join(names[effect])}" for effect in words if effect in names]
    return f"The advantage of {label} over {reference} is {'. It is '.join(parts)}." if parts else ""
