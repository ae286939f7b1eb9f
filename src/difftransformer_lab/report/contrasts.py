"""The planned contrasts of a confirming study: their values by seed, their tests, and whether the plan came before the runs.

A contrast is tested only once all of its seeds are there, and only if every contrast before it in its question was decided. Of
paired values, 10 or more are decided by the sign-flip test and fewer by Student's t; `test: welch` takes Welch's. Below
`FEWEST_SEEDS` nothing is decided. Contrasts that a plan names under `holm` have p-values corrected for their number, where
those that are not there yet count as 1.

A question's first contrast errs in at most 5 % of studies. So does a whole sequence, as long as only lying above or below
opens the way to the next contrast: of an effect that is not there, the way is opened in 5 % of studies. Where a contrast was
decided to lie within its smallest effect, the next one is a test of its own at 5 %, and both together err in up to 10 %.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from statistics import fmean
from typing import Literal

from difftransformer.errors import ResultsError

from ..results import (
    OWN_BEST,
    Contrast,
    Group,
    PairedDifference,
    Question,
    RunRecord,
    StudyFigure,
    figure_of,
    groups_of,
    measured,
    utc,
)
from ..statistics import holm, log_odds, paired_difference, ratio_of_means, sign_flip, welch
from .comparisons import in_direction
from .reading import Evidence, Point
from .tokens import TASK, gains, pooled_runs
from .words import date_words

FEWEST_SEEDS = 5
SIGN_FLIP_SEEDS = 10
LEVEL = 0.05

State = Literal["above", "below", "within", "open", "not tested", "incomplete", "too few seeds"]
DECIDED: tuple[State, ...] = ("above", "below", "within")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A contrast with its values, and what the plan's rule says about it.

    Attributes:
        state: Where the contrast was decided to lie; "open" if the test decided nothing.
        values: The contrast of each of its seeds that is there.
        difference: Its mean with the interval and p-value of the test that decides; None while seeds are missing.
        beside: Student's t of the same values, where another test decides.
        groups: Weight of each arm in its setting; empty while rates that choose a setting are missing.
    """

    contrast: Contrast
    figure: StudyFigure
    state: State
    values: dict[int, float]
    difference: PairedDifference | None = None
    beside: PairedDifference | None = None
    groups: dict[Group, float] = field(default_factory=dict)

    @property
    def same_direction(self) -> int:
        mean = self.difference.mean if self.difference else math.fsum(self.values.values())
        return in_direction(self.values.values(), mean)

    @property
    def unit(self) -> str:
        if self.contrast.scale != "plain":
            return "log units" if self.contrast.scale == "log" else self.contrast.scale
        return "" if self.figure.unit == "share" else self.figure.unit

    @property
    def is_small(self) -> bool:
        """Whether the whole interval lies within the smallest effect that matters, on whichever side of zero."""
        difference, smallest = self.difference, self.contrast.smallest
        if difference is None or difference.low is None or difference.high is None or smallest is None:
            return False
        return -smallest < difference.low and difference.high < smallest

    @property
    def is_material(self) -> bool:
        """Whether the whole interval lies beyond the smallest effect that matters, on one side of zero."""
        difference, smallest = self.difference, self.contrast.smallest
        if difference is None or difference.low is None or difference.high is None or smallest is None:
            return False
        return difference.low > smallest or difference.high < -smallest

    @property
    def meaning(self) -> str:
        meanings = {"above": self.contrast.above, "below": self.contrast.below, "within": self.contrast.within}
        words = meanings.get(self.state, "").rstrip(".")
        if self.state not in ("above", "below") or not self.is_small | self.is_material:
            return words
        return f"{words}, by {'less' if self.is_small else 'more'} than {self.contrast.smallest:g} {self.unit}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Registration:
    """Whether a plan was committed before every run that its contrasts use.

    Attributes:
        why_not: Why it was not, in a sentence, which names the first run that is older; empty if it was.
    """

    why_not: str = ""

    @property
    def is_registered(self) -> bool:
        return not self.why_not

    @property
    def words(self) -> str:
        return "registered" if self.is_registered else "planned, not registered"


def questions_of(evidence: Evidence) -> list[tuple[Question, list[Finding]]]:
    """Return the plan's questions with their tested contrasts; nothing for a study that explores.

    Raises:
        ResultsError: A contrast names something that the study does not have.
    """
    if evidence.index.plan is None:
        return []
    plan = evidence.index.plan.plan
    tested = {contrast.name: _tested(evidence, contrast) for contrast in plan.contrasts}
    together = [tested[name] for name in plan.holm]
    p_values = [
        1.0 if one.difference is None or one.difference.p_value is None else one.difference.p_value for one in together
    ]
    for one, p_holm in zip(together, holm(p_values), strict=True):
        if one.difference is not None:
            difference = replace(one.difference, p_holm=p_holm, comparisons=len(together))
            tested[one.contrast.name] = replace(one, difference=difference)
    return [(question, _in_sequence([tested[one.name] for one in question.contrasts])) for question in plan.questions]


def registration(evidence: Evidence, tested: list[Finding]) -> Registration:
    """Return whether the plan was committed before every run of these contrasts began."""
    plan = evidence.index.plan
    assert plan is not None
    if not plan.commit or not plan.committed:
        return Registration(why_not=f"{plan.file} is in no commit with this content.")
    committed = utc(plan.committed)
    runs = dict(pair for one in tested for pair in _used(evidence, one))
    used = {file: run.start for file, run in runs.items()}
    older = [(began, file) for file, began in used.items() if began <= committed]
    if not older:
        return Registration()
    began, file = min(older)
    dates = f"{file} began on {date_words(began)} UTC, and the plan's commit is of {date_words(committed)} UTC"
    return Registration(why_not=f"{dates}; {len(older)} of the {len(used)} runs are older than it.")


def _in_sequence(tested: list[Finding]) -> list[Finding]:
    findings, is_open = [], True
    for one in tested:
        if one.difference is not None:
            one = replace(one, state=_state(one.contrast, one.difference) if is_open else "not tested")
        is_open = one.state in DECIDED  # and so were those before it
        findings.append(one)
    return findings


def _tested(evidence: Evidence, contrast: Contrast) -> Finding:
    """Return a contrast with its test, and no state yet."""
    figure, index = _known(evidence, contrast), evidence.index
    lower_is_better = index.figures[0].better == "lower"
    groups = groups_of(contrast, index.axes, index.rates, lower_is_better=lower_is_better) or {}
    columns = {seed: _column(evidence, contrast, figure, groups, seed) for seed in contrast.every_seed}
    there = {seed: column for seed, column in columns.items() if column}
    values = {
        seed: math.fsum(column[group] * weight for group, weight in groups.items()) for seed, column in there.items()
    }
    gained = _gained(evidence, figure, groups) if contrast.scale == "doublings" else {}
    gain = 1.0 if contrast.scale != "doublings" else fmean(gained.values()) if gained else math.nan
    scaled = {seed: value / gain for seed, value in values.items()} if gain > 0 else {}
    finding = Finding(contrast=contrast, figure=figure, state="incomplete", values=scaled, groups=groups)
    if len(scaled) < contrast.seeds:
        return finding
    student = paired_difference(list(values.values()), [0.0] * len(values))
    difference = student
    if contrast.test == "welch" and contrast.seeds > 1:
        samples = [[column[group] for column in there.values()] for group in groups]
        difference = welch(samples, [*groups.values()])
    elif contrast.scale == "doublings":
        difference = student = ratio_of_means(values, gained)
    elif contrast.test == "paired" and contrast.seeds >= SIGN_FLIP_SEEDS:
        difference = sign_flip(list(values.values()))
    beside = student if difference is not student and contrast.test == "paired" else None
    return replace(finding, difference=difference, beside=beside)


def _gained(evidence: Evidence, figure: StudyFigure, groups: dict[Group, float]) -> dict[int, float]:
    """Return what the reference's figure falls with each doubling, at the setting of what is taken away."""
    (point,) = [point for (_, point), weight in groups.items() if weight < 0] or [()]
    return gains(pooled_runs([evidence]), evidence.ended(evidence.index.reference, point), figure)


def _state(contrast: Contrast, difference: PairedDifference) -> State:
    low, high, margin = difference.low, difference.high, contrast.margin
    if contrast.seeds < FEWEST_SEEDS:
        return "too few seeds"
    if low is None or high is None:
        return "open"
    p_value = difference.p_value if difference.p_holm is None else difference.p_holm
    if margin or (p_value is not None and p_value <= LEVEL):
        if low > margin:
            return "above"
        if high < -margin:
            return "below"
    if contrast.smallest is not None and -contrast.smallest < low and high < contrast.smallest:
        return "within"
    return "open"


def _column(
    evidence: Evidence, contrast: Contrast, figure: StudyFigure, groups: dict[Group, float], seed: int
) -> dict[Group, float]:
    """Return the figure of each group at a seed; empty if one is missing, or the arms of a setting saw other data."""
    runs = {group: evidence.at(*group).get(seed) for group in groups}
    column: dict[Group, float] = {}
    seen: dict[Point, str] = {}
    for (arm, point), run in runs.items():
        value = None if run is None else _value(run, figure, contrast)
        if run is None or value is None or not math.isfinite(value):
            return {}
        if seen.setdefault(point, run.data_sha256) != run.data_sha256:
            return {}
        column[arm, point] = value
    return column


def _value(run: RunRecord, figure: StudyFigure, contrast: Contrast) -> float | None:
    if contrast.scale != "log odds":
        value = figure_of(run, figure)
        if value is None or contrast.scale != "log":
            return value
        return math.log(value) if value > 0 else None
    share = measured(run, figure)
    return None if share is None else log_odds(share.value * share.n, share.n)


def _known(evidence: Evidence, contrast: Contrast) -> StudyFigure:
    """Return a contrast's figure, and check that the study has whatever the contrast names."""
    index = evidence.index
    arms = {arm.name for arm in index.arms}
    axes = {axis.name: {*axis.values, OWN_BEST} for axis in index.axes}
    figures = {figure.label: figure for figure in index.figures}
    wrong: list[tuple[str, str, str]] = []
    if contrast.figure not in figures:
        wrong.append(("figure", contrast.figure, "; ".join(figures)))
    for term in contrast.terms:
        wrong += [("arm", arm, ", ".join(sorted(arms))) for arm in term.arms if arm not in arms]
        for axis, value in term.at.items():
            if axis not in axes:
                wrong.append(("axis", axis, ", ".join(axes) or "none"))
            elif value not in axes[axis]:
                wrong.append((axis, value, ", ".join(sorted(axes[axis]))))
    if contrast.scale == "log odds" and figures.get(contrast.figure, StudyFigure(label="")).curve:
        wrong.append(("scale", "log odds", f"no counts for {contrast.figure!r}, which is read off a curve"))
    if contrast.scale == "doublings" and not (
        contrast.test == "paired"
        and figures.get(contrast.figure, StudyFigure(label="")).task == TASK
        and sorted((term.weight, len(term.arms)) for term in contrast.terms) == [(-1, 1), (1, 1)]
    ):
        wrong.append(("scale", "doublings", f"it for two arms' figures of {TASK}, paired by seed, alone"))
    for kind, name, allowed in wrong:
        raise ResultsError(
            f"{evidence.path}: the contrast {contrast.name!r} names the {kind} {name!r}, and the study has {allowed}; "
            "correct the plan and write the index again"
        )
    return figures[contrast.figure]


def _used(evidence: Evidence, one: Finding) -> Iterator[tuple[str, RunRecord]]:
    for seed, (arm, point) in product(one.contrast.every_seed, one.groups):
        run = evidence.at(arm, point).get(seed)
        if run is not None:
            yield evidence.files[arm, point, seed], run
