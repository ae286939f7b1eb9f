"""Every figure of every arm of a study, and its paired difference to the reference, with an interval and without a verdict.

Runs are paired where seed and data are the same. Intervals are Student's t by seed; with one seed, a figure that is a sum over
items has an interval over these. Intervals are not corrected for multiple comparisons, so some exclude zero by chance; only
planned contrasts are decided (`contrasts.py`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import product

from ..results import PairedDifference, RunRecord, Statistic, StudyArm, StudyFigure
from ..statistics import mean_and_standard_error, paired_difference
from .frame import Point, Records
from .tasks import pair_of

AN_HOUR = timedelta(hours=1)
"""Most between two runs whose times are compared: shared machines of one kind differ by a third from one day to another."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One figure of one arm at one point.

    Attributes:
        point: The point; empty for the mean over all points of a study with axes.
        statistic: Mean and standard error over all seeds of the arm.
        runs: Number of the arm's runs that have the figure, at all points together where `point` is empty.
        difference: The arm minus the reference over the seeds that both have on the same data; None for the reference itself.
        differences: The difference of each seed.
        reached: Number of `runs` that reached the level of a curve; None for other figures.
        is_censored: Whether no run of the arm or of the reference reached the level, so that the difference says nothing.
    """

    figure: StudyFigure
    point: Point
    arm: StudyArm
    values: dict[int, float]
    statistic: Statistic
    runs: int
    difference: PairedDifference | None = None
    differences: dict[int, float] = field(default_factory=dict)
    reached: int | None = None
    is_censored: bool = False

    @property
    def pairs(self) -> int:
        return len(self.differences)

    @property
    def never(self) -> str:
        """Number of the runs that never reached the level of a curve; empty for other figures."""
        return "" if self.reached is None else str(self.runs - self.reached)

    @property
    def same_direction(self) -> int:
        """Number of the paired seeds in the direction of the mean (see `in_direction`)."""
        return in_direction(self.differences.values(), self.difference.mean) if self.difference else 0

    @property
    def excludes_zero(self) -> bool:
        """Whether there is an interval that does not hold zero. That is a remark, not a verdict."""
        low, high = (self.difference.low, self.difference.high) if self.difference else (None, None)
        return low is not None and high is not None and not low <= 0 <= high


def compare(records: Records) -> list[Compared]:
    """Compare every figure of every arm at every point; with several points also their means."""
    points: list[Point] = [(), *(records.points if records.has_settings else [])]
    every = product(records.index.figures, points, records.index.arms)
    compared = (_compared(records, figure, point, arm) for figure, point, arm in every)
    return [row for row in compared if row is not None]


def row_of(rows: Iterable[Compared], figure: str, arm: str, point: Point) -> Compared | None:
    wanted = (figure, arm, point)
    return next((row for row in rows if (row.figure.label, row.arm.name, row.point) == wanted), None)


def paired_seeds(records: Records, arm: str, reference: str, point: Point) -> list[int]:
    """Return the seeds at which two arms were trained to the end on the same data."""
    first, second = records.ended(arm, point), records.ended(reference, point)
    return sorted(seed for seed in first.keys() & second.keys() if first[seed].data_sha256 == second[seed].data_sha256)


def timed_seeds(records: Records, arm: str, reference: str, point: Point) -> list[int]:
    """Return the paired seeds at which both arms were timed on machines of one kind, within an hour, with as many threads."""

    def machine(run: RunRecord) -> tuple[str, str, str, int]:
        where = run.environment
        return where.processor, where.instruction_set, where.device, where.threads

    first, second = records.at(arm, point), records.at(reference, point)
    seeds = paired_seeds(records, arm, reference, point)
    return [
        seed
        for seed in seeds
        if machine(first[seed]) == machine(second[seed]) and abs(first[seed].start - second[seed].start) <= AN_HOUR
    ]


def in_direction(values: Iterable[float], mean: float) -> int:
    """Count the values on the same side of zero as their mean; zeros count if the mean is zero."""
    return sum(value * mean > 0 or value == mean == 0 for value in values)


def _compared(records: Records, figure: StudyFigure, point: Point, arm: StudyArm) -> Compared | None:
    reference = records.index.reference
    values = _values(records, figure, point, arm.name)
    if not values:
        return None
    statistic = mean_and_standard_error(list(values.values()))
    runs, reached = _runs(records, figure, point, arm.name)
    row = Compared(figure=figure, point=point, arm=arm, values=values, statistic=statistic, runs=runs, reached=reached)
    if arm.name == reference:
        return row
    others = _values(records, figure, point, reference)
    paired = (paired_seeds(records, arm.name, reference, place) for place in records.places(point))
    shared = set.intersection(*map(set, paired))
    seeds = sorted(shared & values.keys() & others.keys())
    if not seeds:
        return row
    difference = paired_difference([values[seed] for seed in seeds], [others[seed] for seed in seeds])
    if len(seeds) == 1:
        difference = _over_items(records, figure, point, arm.name, seeds[0]) or difference
    if figure.unit == "share" and difference.low is not None and difference.high is not None:
        difference = replace(difference, low=max(-1.0, difference.low), high=min(1.0, difference.high))
    return replace(
        row,
        difference=difference,
        differences={seed: values[seed] - others[seed] for seed in seeds},
        is_censored=row.reached == 0 and _runs(records, figure, point, reference)[1] == 0,
    )


def _over_items(records: Records, figure: StudyFigure, point: Point, arm: str, seed: int) -> PairedDifference | None:
    """Return the difference of one seed with its interval over items; None where the figure is no sum over the same items."""
    places = records.places(point)
    runs = (records.at(name, places[0])[seed] for name in (arm, records.index.reference))
    first, second = (run.evaluations.get(figure.task) for run in runs)
    if len(places) > 1 or figure.at or first is None or second is None:
        return None
    pair = pair_of(first, second, figure.name)
    return pair.difference if pair else None


def _values(records: Records, figure: StudyFigure, point: Point, arm: str) -> dict[int, float]:
    """Return a figure by seed. The mean over points has the seeds that were measured at every point."""
    tables = [records.numbers(figure, arm, place) for place in records.places(point)]
    seeds = sorted(set.intersection(*(set(table) for table in tables)))
    return {seed: math.fsum(table[seed].value for table in tables) / len(tables) for seed in seeds}


def _runs(records: Records, figure: StudyFigure, point: Point, arm: str) -> tuple[int, int | None]:
    """Count the runs of an arm with a figure, and the runs that reached its level; None for a figure without a level."""
    runs = [one for place in records.places(point) for one in records.numbers(figure, arm, place).values()]
    return len(runs), None if figure.reaches is None else sum(one.reached == 1 for one in runs)
