"""The claims of the paper's abstract, each with a state that is computed from the studies.

Only a contrast of a registered plan says anything for or against a claim. It is *for* the claim if it was decided to lie on
the claim's side of zero, *against* it on the other side, *small* if it was decided to be smaller than the smallest effect that
its plan looks for, *confounded* if something else explains what was decided, and *open* if its test decided nothing. What
studies found that explore is shown while no contrast is decided, and gives no state but "explored, not confirmed".
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import yaml  # type: ignore[import-untyped]

from difftransformer.errors import ResultsError
from difftransformer.typed import build

from .answers import NEEDS, decimals, effect_words, explored_words, share_words
from .comparisons import row_of
from .contrasts import DECIDED, Finding, Registration
from .questions import finding_words
from .studied import Studied
from .tokens import worth_words

FILE = Path(__file__).parent / "claims.yaml"

ClaimState = Literal[
    "reproduced here",
    "reproduced in part",
    "opposite",
    "mixed",
    "no difference as large as the paper's",
    "open",
    "tested, not decided",
    "explored, not confirmed",
    "not tested with enough power",
    "planned, not decided",
    "no contrast of its own",
    "not run yet",
    "not testable here",
]
Vote = Literal[
    "for", "against", "small", "open", "planned", "explored", "too little power", "beside", "not run", "confounded"
]


@dataclass(frozen=True, kw_only=True)
class Named:
    """A contrast of a confirming study, by its name in the plan. `confounded` says what else explains what it decides."""

    study: str
    contrast: str
    confounded: str = ""


@dataclass(frozen=True, kw_only=True)
class ClaimTest(Named):
    """A contrast that tests a claim. `favours` is the side of zero that is for the claim."""

    favours: Literal["above", "below"]


@dataclass(frozen=True, kw_only=True)
class Explored:
    """What an exploring study found: an arm against the reference on a figure (by its label), or its need for size or tokens.

    `weak` says why the study had too little power, if it had.
    """

    study: str
    arm: str
    figure: str = ""
    need: Literal["", "size", "tokens"] = ""
    weak: str = ""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim of the paper.

    Attributes:
        paper: What the paper reports for it.
        tests: Contrasts that test it.
        beside: Contrasts that say what an effect is due to, and neither for nor against the claim.
        explored: What exploring studies found about it, told while no contrast is decided.
        not_testable: Why no study of this size can test it, and at which size one could.
        not_run: What has to be run to test it, told while no run of that is there.
    """

    claim: str
    paper: str
    tests: list[ClaimTest] = field(default_factory=list)
    beside: list[Named] = field(default_factory=list)
    explored: list[Explored] = field(default_factory=list)
    not_testable: str = ""
    not_run: str = ""


@dataclass(frozen=True, kw_only=True)
class Evident:
    """What a study says about a claim, in words, with its vote, and in tokens where that is known."""

    study: Studied
    words: str
    vote: Vote
    tokens: str = ""


@dataclass(frozen=True, kw_only=True)
class Judged:
    claim: Claim
    state: ClaimState
    evident: list[Evident]


def read_claims(path: Path = FILE) -> list[Claim]:
    plain = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [build(Claim, one, source=str(path), error=ResultsError) for one in plain]


def judge(claims: Sequence[Claim], studies: Sequence[Studied]) -> list[Judged]:
    return [_judged(claim, studies) for claim in claims]


def _judged(claim: Claim, studies: Sequence[Studied]) -> Judged:
    evident = [one for named in (*claim.tests, *claim.beside) for one in _planned(named, studies)]
    if not {one.vote for one in evident} & {"for", "against", "small", "confounded"}:
        evident += [one for explored in claim.explored for one in _explored(explored, studies)]
    return Judged(claim=claim, state=_state(claim, {one.vote for one in evident}), evident=evident)


def _state(claim: Claim, votes: set[Vote]) -> ClaimState:
    if claim.not_testable:
        return "not testable here"
    if "for" in votes:
        return "mixed" if "against" in votes else "reproduced in part" if "small" in votes else "reproduced here"
    rest: dict[Vote, ClaimState] = {
        "against": "opposite",
        "small": "no difference as large as the paper's",
        "confounded": "open",
        "open": "tested, not decided",
        "explored": "explored, not confirmed",
        "too little power": "not tested with enough power",
        "planned": "planned, not decided",
        "beside": "no contrast of its own",
    }
    return next((state for vote, state in rest.items() if vote in votes), "not run yet")


def _planned(named: Named, studies: Sequence[Studied]) -> Iterator[Evident]:
    for study in studies:
        for finding in study.findings if study.evidence.index.name == named.study else ():
            if finding.contrast.name == named.contrast:
                assert study.registration is not None
                vote = _vote(study.registration, finding, named)
                words = ". ".join(filter(None, (finding_words(finding, study.registration), named.confounded)))
                tokens = worth_words(study.worths.get(finding.contrast.name))
                yield Evident(study=study, words=words, vote=vote, tokens=tokens)


def _vote(registration: Registration, finding: Finding, named: Named) -> Vote:
    if not finding.values:
        return "not run"
    if not isinstance(named, ClaimTest):
        return "beside"
    if not registration.is_registered:
        return "planned"
    if finding.state in DECIDED and named.confounded:
        return "confounded"
    if finding.state in DECIDED and finding.is_small:
        return "small"
    if finding.state in ("above", "below"):
        return "for" if finding.state == named.favours else "against"
    others: dict[str, Vote] = {"open": "open", "too few seeds": "too little power"}
    return others.get(finding.state, "planned")


def _explored(explored: Explored, studies: Sequence[Studied]) -> Iterator[Evident]:
    for study in studies:
        index = study.evidence.index
        if index.name == explored.study and index.plan is None and (words := _explored_words(study, explored)):
            if explored.weak:
                yield Evident(study=study, words=f"{words}. {explored.weak}", vote="too little power")
            else:
                yield Evident(study=study, words=words, vote="explored")


def _explored_words(study: Studied, explored: Explored) -> str:
    """Return the effect that an exploring study found; empty if it has no pair of runs."""
    evidence = study.evidence
    if explored.need:
        needs = study.scaling.needs if study.scaling else []
        mine = [need for need in needs if need.axis.name == explored.need and need.arm.name == explored.arm]
        if not mine:
            return ""
        need = mine[-1]
        return (
            f"{need.arm.label} needs {share_words(need.fit)} of the {NEEDS[explored.need]} by the fitted power laws, "
            f"{share_words(need.raw)} by interpolation; {explored_words(evidence, explored.arm)}"
        )
    row = row_of(study.rows, explored.figure, explored.arm, ())
    if row is None or row.difference is None or row.pairs < 2 or row.is_censored:
        return ""
    effect = effect_words(row, row.figure, decimals(study.rows, row.figure))
    where = f", mean over {len(evidence.points)} settings" if evidence.has_settings else ""
    names = f"{row.arm.label} minus {evidence.reference.label}"
    return f"{explored.figure}{where}: {names} {effect}; {explored_words(evidence, explored.arm)}"
