"""The records of a study, read once, as one tidy frame: a row for each number of each run.

| column | meaning |
| --- | --- |
| arm, setting, seed, rate | which run it is; `setting` has a value of each axis, joined by "/" |
| kind | "figure" of the study, "evaluation", "curve", or "run" for sizes and times |
| figure, step, value | the number; `step` is NaN but for curves |
| n, reached | items behind a value; 1 or 0 where a curve did or did not reach the level of its figure |
| data | SHA-256 of the data; runs are compared only where it is the same |
| tuning, file | whether the run chose a learning rate, so that nothing is compared by it; file of the record |
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftransformer.errors import ResultsError

from ..results import (
    RunRecord,
    StudyArm,
    StudyFigure,
    StudyIndex,
    StudyMember,
    figure_of,
    measured,
    reached_at,
    read_document,
    read_result,
)

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

Point = tuple[str, ...]
"""A value of each axis, in the order of the axes. The empty point of a study with axes stands for the mean over them."""

RATE = ("training", "optimizer", "learning_rate")
RUN_NUMBERS = ("parameters", "train_tokens", "step_seconds", "train_seconds", "total_seconds")


@dataclass(frozen=True)
class Number:
    """A figure of one run with the number of items behind it, and the data that the run saw."""

    value: float
    n: float
    reached: float
    data: str


@dataclass(frozen=True, kw_only=True)
class Records:
    """A study with its runs.

    Attributes:
        runs: Compared runs, by arm, point and seed.
        files: File of each run, relative to the index's folder.
        tuning: Runs that chose a learning rate.
    """

    index: StudyIndex
    path: Path
    runs: dict[tuple[str, Point], dict[int, RunRecord]]
    files: dict[tuple[str, Point, int], str]
    tuning: list[tuple[StudyMember, RunRecord]] = field(default_factory=list)

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """Every number of every run, a row each; the columns are described above."""
        import pandas as pd

        compared = (
            ((arm, point, seed, run, False, self.files[arm, point, seed]), run)
            for (arm, point), by_seed in self.runs.items()
            for seed, run in by_seed.items()
        )
        tuned = (((one.arm, self.point_of(one), one.seed, run, True, one.file), run) for one, run in self.tuning)
        rows = [row for which, run in (*compared, *tuned) for row in self._rows(run, _columns(*which))]
        columns = [*_columns("", (), 0, None, False, ""), "kind", "figure", "step", "value", "n", "reached"]
        return pd.DataFrame(rows, columns=columns)

    def _rows(self, run: RunRecord, which: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for one in self.index.figures:
            if (value := figure_of(run, one)) is not None:
                items, reached = measured(run, one), math.nan
                if one.reaches is not None:
                    reached = float(reached_at(run.curves[one.curve], one) is not None)
                n = items.n if items else math.nan
                yield which | {"kind": "figure", "figure": one.label, "value": value, "n": n, "reached": reached}
        for name in RUN_NUMBERS:
            yield which | {"kind": "run", "figure": name, "value": getattr(run, name)}
        for found in run.figures:
            at = "".join(f", {key} {value}" for key, value in found.at.items())
            name = f"{found.task}: {found.name}{at}"
            yield which | {"kind": "evaluation", "figure": name, "value": found.value, "n": found.n}
        for name, curve in run.curves.items():
            for step, value in zip(curve.steps, curve.values, strict=False):  # figures refuse a curve that is broken
                yield which | {"kind": "curve", "figure": name, "step": step, "value": value}

    @cached_property
    def _numbers(self) -> dict[tuple[str, str, str], dict[int, Number]]:
        """Figures of the study by figure, arm, setting and seed."""
        numbers: dict[tuple[str, str, str], dict[int, Number]] = {}
        rows = self.frame[(self.frame["kind"] == "figure") & ~self.frame["tuning"].astype(bool)]
        columns = ("figure", "arm", "setting", "seed", "value", "n", "reached", "data")
        for figure, arm, setting, seed, *number in zip(*(rows[name].tolist() for name in columns), strict=True):
            numbers.setdefault((figure, arm, setting), {})[seed] = Number(*number)
        return numbers

    def numbers(self, figure: StudyFigure, arm: str, point: Point) -> dict[int, Number]:
        return self._numbers.get((figure.label, arm, "/".join(point)), {})

    @property
    def slug(self) -> str:
        """Name of the study and of its index, as in addresses: two indexes of a preset have two pages."""
        return f"{self.index.name}-{self.path.stem}"

    @property
    def points(self) -> list[Point]:
        return list(product(*(axis.values for axis in self.index.axes)))

    def point_of(self, member: StudyMember) -> Point:
        return tuple(member.point[axis.name] for axis in self.index.axes)

    @property
    def has_settings(self) -> bool:
        """Whether there are several points, so that figures have a mean over them."""
        return len(self.points) > 1

    @property
    def has_one_seed(self) -> bool:
        """Whether no arm has a second seed, so that nothing says how much training varies."""
        return bool(self.runs) and all(len(runs) == 1 for runs in self.runs.values())

    def places(self, point: Point) -> list[Point]:
        """Return the points behind a point: itself, or all of them where the empty one stands for their mean."""
        return [point] if point else self.points

    @property
    def reference(self) -> StudyArm:
        return self.arm(self.index.reference)

    @property
    def others(self) -> list[StudyArm]:
        return [arm for arm in self.index.arms if arm.name != self.index.reference]

    def arm(self, name: str) -> StudyArm:
        return next(arm for arm in self.index.arms if arm.name == name)

    def at(self, arm: str, point: Point) -> dict[int, RunRecord]:
        return self.runs.get((arm, point), {})

    def ended(self, arm: str, point: Point) -> dict[int, RunRecord]:
        """Return the runs of an arm at a point by seed. Diverged runs, with curves and times of a part, are left out."""
        return {seed: run for seed, run in self.at(arm, point).items() if run.diverged_after is None}

    def words(self, point: Point) -> str:
        """Return a point in words; empty without axes."""
        axes = self.index.axes
        if axes and not point:
            return f"mean over {len(self.points)} settings"
        return ", ".join(f"{axis.label or axis.name} {value}" for axis, value in zip(axes, point, strict=True))

    def every_run(self) -> Iterator[tuple[StudyArm, Point, int, RunRecord]]:
        for arm in self.index.arms:
            for point in self.points:
                for seed, run in sorted(self.at(arm.name, point).items()):
                    yield arm, point, seed, run


def read_records(path: Path | str) -> Records:
    """Read a study's index and its runs.

    Raises:
        ResultsError: A file is missing or not of its kind, or the index contradicts itself.
    """
    path = Path(path)
    index = read_result(path, StudyIndex)
    _check(index, path)
    records = Records(index=index, path=path, runs={}, files={})
    for member in index.members:
        run, point = read_result(path.parent / member.file, RunRecord), records.point_of(member)
        if member.is_tuning:
            records.tuning.append((member, run))
        else:
            records.runs.setdefault((member.arm, point), {})[member.seed] = run
            records.files[member.arm, point, member.seed] = member.file
    return records


def find_studies(path: Path | str) -> list[Path]:
    """List the study indexes at a path: a file, the folder of one study, or a folder of studies."""
    path = Path(path)
    if not path.is_dir():
        return [path]
    if (path / "results.json").exists():
        return [path / "results.json"]
    files = sorted({*path.glob("*.json"), *path.glob("*/*.json")}, key=lambda one: (one.parent, one.stem))
    return [one for one in files if one.parent.name != "runs" and read_document(one)[0] == "study"]


def _columns(arm: str, point: Point, seed: int, run: RunRecord | None, tuning: bool, file: str) -> dict[str, Any]:
    rate: Any = run.recipe if run else {}
    for key in RATE:
        rate = rate.get(key, {}) if isinstance(rate, dict) else {}
    return {
        "arm": arm,
        "setting": "/".join(point),
        "seed": seed,
        "rate": rate or math.nan,
        "tuning": tuning,
        "data": run.data_sha256 if run else "",
        "file": file,
    }


def _check(index: StudyIndex, path: Path) -> None:
    names = [arm.name for arm in index.arms]
    if index.reference not in names:
        raise ResultsError(f"{path}: the reference {index.reference!r} is not an arm; arms are {', '.join(names)}")
    if len(names) == 1:
        raise ResultsError(
            f"{path}: {names[0]!r} is the only arm, and a study compares arms; add one and write the index again"
        )
    for member in index.members:
        known = {axis.name: axis.values for axis in index.axes}
        if member.arm not in names or member.point.keys() != known.keys():
            raise ResultsError(
                f"{path}: the run {member.file} is of arm {member.arm!r} at {member.point}, which the study does not have; "
                "write the index again"
            )
