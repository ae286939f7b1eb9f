"""The planned contrasts of a confirming study: their values by seed, their tests, and whether the plan came before the runs.

A contrast is tested only once all of its seeds are there, and only if every contrast before it in its question was decided. Of
paired values, 10 or more are decided by the sign-flip test and fewer by Student's t; `test: welch` takes Welch's. Below
`FEWEST_SEEDS` nothing is decided. Contrasts that a plan names under `holm` wait for no other. Their p-values are corrected for
their number, where those that are not there yet count as 1.

A question's first contrast errs in at most 5 % of studies. So does a whole sequence, as long as only lying above or below
opens the way to the next contrast: of an effect that is not there, the way is opened in 5 % of studies. Where a contrast was
decided to lie within its smallest effect, the next one is a test of its own at 5 %, and both together err in up to 10 %.

Losses of different scales do not compare in nats, so a difference of losses is also divided by what the reference's own loss
falls with each doubling of its tokens, from its runs of another length on the same seeds and data. A difference of d doublings
is a change of 2^d - 1 in the tokens for the same loss. An arm whose step takes r times as long sees 1/r of the tokens in the
same time, and loses log2(r) doublings.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    utc,
)
from ..statistics import (
    holm,
    log_odds,
    mean_and_standard_error,
    paired_difference,
    ratio_of_means,
    sign_flip,
    sum_of,
    welch,
)
from ..table import date_words
from .compare import in_direction, timed_seeds
from .frame import Number, Point, Records

TASK = "perplexity"
"""The evaluation whose figures are losses per token or byte."""

Pool = Mapping[str, Sequence[RunRecord]]
"""Runs by what runs of different lengths have in common (see `pooled_runs`)."""

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
    def effect(self) -> float | None:
        return self.difference.mean if self.difference else None

    @property
    def low(self) -> float | None:
        return self.difference.low if self.difference else None

    @property
    def high(self) -> float | None:
        return self.difference.high if self.difference else None

    @property
    def seeds(self) -> int:
        return len(self.values)

    @property
    def p(self) -> float | None:
        """The p-value of the test that decides; after Holm's correction where the plan asks for it."""
        if self.difference is None:
            return None
        return self.difference.p_value if self.difference.p_holm is None else self.difference.p_holm

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
        low, high, smallest = self.low, self.high, self.contrast.smallest
        if low is None or high is None or smallest is None:
            return False
        return -smallest < low and high < smallest

    @property
    def is_material(self) -> bool:
        """Whether the whole interval lies beyond the smallest effect that matters, on one side of zero."""
        low, high, smallest = self.low, self.high, self.contrast.smallest
        if low is None or high is None or smallest is None:
            return False
        return low > smallest or high < -smallest

    @property
    def meaning(self) -> str:
        """The plan's sentence for the state; empty where nothing is decided."""
        meanings = {"above": self.contrast.above, "below": self.contrast.below, "within": self.contrast.within}
        words = meanings.get(self.state, "").rstrip(".")
        if self.state not in ("above", "below") or not self.is_small | self.is_material:
            return words
        return f"{words}, by {'less' if self.is_small else 'more'} than {self.contrast.smallest:g} {self.unit}".rstrip()


@dataclass(frozen=True, kw_only=True)
class Worth:
    """A difference of losses in doublings of the reference's tokens; negative where fewer tokens are needed.

    Attributes:
        gain: What the reference's loss falls with each doubling of its tokens, in the unit of the figure.
        time: The same difference at equal time; None where no times can be compared.
    """

    gain: float
    tokens: PairedDifference
    time: PairedDifference | None


def questions_of(records: Records) -> list[tuple[Question, list[Finding]]]:
    """Return the plan's questions with their tested contrasts; nothing for a study that explores.

    Raises:
        ResultsError: A contrast names something that the study does not have.
    """
    if records.index.plan is None:
        return []
    plan = records.index.plan.plan
    tested = {contrast.name: _tested(records, contrast) for contrast in plan.contrasts}
    together = [tested[name] for name in plan.holm]
    p_values = [
        1.0 if one.difference is None or one.difference.p_value is None else one.difference.p_value for one in together
    ]
    for one, p_holm in zip(together, holm(p_values), strict=True):
        if one.difference is not None:
            difference = replace(one.difference, p_holm=p_holm, comparisons=len(together))
            tested[one.contrast.name] = replace(one, difference=difference)
    return [
        (question, _in_sequence([tested[one.name] for one in question.contrasts], plan.holm))
        for question in plan.questions
    ]


def why_not_registered(records: Records, tested: list[Finding]) -> str:
    """Return why the plan was not committed before every run of these contrasts began, in a sentence; empty if it was.

    The sentence names the first run that is older than the plan's commit.
    """
    plan = records.index.plan
    assert plan is not None
    if not plan.commit or not plan.committed:
        return f"{plan.file} is in no commit with this content."
    committed = utc(plan.committed)
    runs = dict(pair for one in tested for pair in _used(records, one))
    used = {file: run.start for file, run in runs.items()}
    older = [(began, file) for file, began in used.items() if began <= committed]
    if not older:
        return ""
    began, file = min(older)
    dates = f"{file} began on {date_words(began)} UTC, and the plan's commit is of {date_words(committed)} UTC"
    return f"{dates}; {len(older)} of the {len(used)} runs are older than it."


def _in_sequence(tested: list[Finding], together: list[str]) -> list[Finding]:
    findings, is_open = [], True
    for one in tested:
        if one.difference is not None:
            is_tested = is_open or one.contrast.name in together
            one = replace(one, state=_state(one.contrast, one.difference) if is_tested else "not tested")
        is_open = is_open and one.state in DECIDED
        findings.append(one)
    return findings


def _tested(records: Records, contrast: Contrast) -> Finding:
    """Return a contrast with its test, and no state yet."""
    figure, index = _known(records, contrast), records.index
    lower_is_better = index.figures[0].better == "lower"
    groups = groups_of(contrast, index.axes, index.rates, lower_is_better=lower_is_better) or {}
    columns = {seed: _column(records, contrast, figure, groups, seed) for seed in contrast.every_seed}
    there = {seed: column for seed, column in columns.items() if column}
    values = {
        seed: math.fsum(column[group] * weight for group, weight in groups.items()) for seed, column in there.items()
    }
    gained = _gained(records, figure, groups) if contrast.scale == "doublings" else {}
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


def _gained(records: Records, figure: StudyFigure, groups: dict[Group, float]) -> dict[int, float]:
    """Return what the reference's figure falls with each doubling, at the setting of what is taken away."""
    (point,) = [point for (_, point), weight in groups.items() if weight < 0] or [()]
    return gains(pooled_runs([records]), records.ended(records.index.reference, point), figure)


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
    records: Records, contrast: Contrast, figure: StudyFigure, groups: dict[Group, float], seed: int
) -> dict[Group, float]:
    """Return the figure of each group at a seed; empty if one is missing, or the arms of a setting saw other data."""
    column: dict[Group, float] = {}
    seen: dict[Point, str] = {}
    for arm, point in groups:
        number = records.numbers(figure, arm, point).get(seed)
        value = None if number is None else _scaled(number, contrast)
        if number is None or value is None or not math.isfinite(value):
            return {}
        if seen.setdefault(point, number.data) != number.data:
            return {}
        column[arm, point] = value
    return column


def _scaled(number: Number, contrast: Contrast) -> float | None:
    """Return a number on the contrast's scale; None for the logarithm of what is not above zero."""
    if contrast.scale == "log odds":
        return None if math.isnan(number.n) else log_odds(number.value * number.n, int(number.n))
    if contrast.scale == "log":
        return math.log(number.value) if number.value > 0 else None
    return number.value


def _known(records: Records, contrast: Contrast) -> StudyFigure:
    """Return a contrast's figure, and check that the study has whatever the contrast names."""
    index = records.index
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
            f"{records.path}: the contrast {contrast.name!r} names the {kind} {name!r}, and the study has {allowed}; "
            "correct the plan and write the index again"
        )
    return figures[contrast.figure]


def _used(records: Records, one: Finding) -> Iterator[tuple[str, RunRecord]]:
    for seed, (arm, point) in product(one.contrast.every_seed, one.groups):
        run = records.at(arm, point).get(seed)
        if run is not None:
            yield records.files[arm, point, seed], run


def pooled_runs(studies: Iterable[Records]) -> Pool:
    """Return the runs of several studies by their seed, data, model and optimizer."""
    pool: dict[str, list[RunRecord]] = {}
    for records in studies:
        for _, _, seed, run in records.every_run():
            pool.setdefault(_alike(seed, run), []).append(run)
    return pool


def gains(pool: Pool, runs: Mapping[int, RunRecord], figure: StudyFigure) -> dict[int, float]:
    """Return what a figure falls with each doubling of the tokens, by seed, from runs of another length, if there are any.

    Of several other lengths, the one nearest to half of the tokens is taken.
    """
    found: dict[float, dict[int, float]] = {}
    for seed, run in runs.items():
        for other in pool.get(_alike(seed, run), ()):
            end, there = figure_of(run, figure), figure_of(other, figure)
            if other.train_tokens != run.train_tokens and end is not None and there is not None:
                doublings = math.log2(run.train_tokens / other.train_tokens)
                found.setdefault(doublings, {})[seed] = (there - end) / doublings
    return found[min(found, key=lambda doublings: abs(doublings - 1))] if found else {}


def worth_of(records: Records, pool: Pool, finding: Finding) -> Worth | None:
    """Return what a contrast of two arms' losses is worth; None for other contrasts."""
    sides = {weight: group for group, weight in finding.groups.items()}
    scale = finding.contrast.scale
    if finding.figure.task != TASK or scale not in ("plain", "doublings") or sides.keys() != {1.0, -1.0}:
        return None
    (arm, point), (other, at) = sides[1.0], sides[-1.0]
    if arm == other == records.index.reference:  # its gain itself
        return None
    gained = gains(pool, records.ended(records.index.reference, at), finding.figure)
    unit = fmean(gained.values()) if gained and scale == "doublings" else 1.0
    values = {seed: value * unit for seed, value in finding.values.items()}
    return worth(values, gained, log2_times(records, arm, other, point) if point == at else ())


def worth(
    differences: Mapping[int, float], gained: Mapping[int, float], log2_times: Sequence[float] = ()
) -> Worth | None:
    """Return differences of losses in doublings; None where the gain of a doubling is not known or not above zero.

    Args:
        differences: An arm's loss minus another's, by seed.
        gained: What the reference's loss falls with each doubling, by seed (`gains`).
        log2_times: Logarithms to base 2 of the ratio of their times for a step; a single one counts as exact.
    """
    if not differences or not gained or (gain := mean_and_standard_error([*gained.values()]).mean) <= 0:
        return None
    tokens = ratio_of_means(differences, gained)
    slower = paired_difference(log2_times, [0.0] * len(log2_times)) if log2_times else None
    return Worth(gain=gain, tokens=tokens, time=sum_of(tokens, slower) if slower else None)


def log2_times(records: Records, arm: str, other: str, point: Point) -> list[float]:
    """Return the logarithms to base 2 of the ratio of two arms' times for a step: measured in turns, else of their runs."""
    seconds = {row.model: row.train_step_seconds for row in records.index.costs}
    if (first := seconds.get(arm)) and (second := seconds.get(other)):
        return [math.log2(first / second)]
    seeds = timed_seeds(records, arm, other, point)
    pairs = ((records.at(arm, point)[seed], records.at(other, point)[seed]) for seed in seeds)
    return [math.log2(own.step_seconds / others.step_seconds) for own, others in pairs]


def _alike(seed: int, run: RunRecord) -> str:
    parts = (run.recipe.get("model") or {}, run.recipe.get("training", {}).get("optimizer") or {})
    stated = [{key: value for key, value in part.items() if value is not None} for part in parts]
    # records of other versions state other defaults
    return json.dumps([seed, run.data_sha256, *stated], sort_keys=True)
