"""The records of a study, read from its index and the files of its runs."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from difftransformer.errors import ResultsError

from ..results import RunRecord, StudyArm, StudyIndex, read_document, read_result

Point = tuple[str, ...]
"""A value of each axis, in the order of the axes. The empty point of a study with axes stands for the mean over them."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A study with its runs.

    Attributes:
        runs: Compared runs, by arm, point and seed. Runs that chose a learning rate are not among them.
        files: File of each of these runs, relative to the index's folder.
    """

    index: StudyIndex
    path: Path
    runs: dict[tuple[str, Point], dict[int, RunRecord]]
    files: dict[tuple[str, Point, int], str]

    @property
    def slug(self) -> str:
        """Name of the study and of its index, as in addresses: two indexes of a preset have two pages."""
        return f"{self.index.name}-{self.path.stem}"

    @property
    def points(self) -> list[Point]:
        return list(product(*(axis.values for axis in self.index.axes)))

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
        """Return the runs of an arm at a point by seed, without those that diverged: their curves and times are of a part."""
        return {seed: run for seed, run in self.at(arm, point).items() if run.diverged_after is None}

    def words(self, point: Point) -> str:
        """Return a point in words; empty without axes."""
        axes = self.index.axes
        if axes and not point:
            return f"mean over {len(self.points)} settings"
        return ", ".join(f"{axis.label or axis.name} {value}" for axis, value in zip(axes, point, strict=True))

    def starts(self, *arms: str) -> list[str]:
        """Return how the weights of these arms start, in words: one entry where all of their runs start alike.

        A run that starts from a trained model has none. A recipe without an initialization has the normal one.
        """
        starts = set()
        for arm, _, _, run in self.every_run():
            if arm.name in arms and not run.recipe.get("start_from"):
                starts.add(str(run.recipe.get("model", {}).get("initialization") or "normal"))
        return sorted(starts)

    def every_run(self) -> Iterator[tuple[StudyArm, Point, int, RunRecord]]:
        for arm in self.index.arms:
            for point in self.points:
                for seed, run in sorted(self.at(arm.name, point).items()):
                    yield arm, point, seed, run


def read_evidence(path: Path | str) -> Evidence:
    """Read a study's index and its runs.

    Raises:
        ResultsError: A file is missing or not of its kind, or the index contradicts itself.
    """
    path = Path(path)
    index = read_result(path, StudyIndex)
    _check(index, path)
    runs: dict[tuple[str, Point], dict[int, RunRecord]] = {}
    files = {}
    for member in (member for member in index.members if not member.is_tuning):
        point = tuple(member.point[axis.name] for axis in index.axes)
        runs.setdefault((member.arm, point), {})[member.seed] = read_result(path.parent / member.file, RunRecord)
        files[member.arm, point, member.seed] = member.file
    return Evidence(index=index, path=path, runs=runs, files=files)


def find_studies(path: Path | str) -> list[Path]:
    """Return the indexes of studies at a path: itself, those in a study's folder, or those in a folder of studies."""
    path = Path(path)
    if not path.is_dir():
        return [path]
    if (path / "results.json").exists():
        return [path / "results.json"]
    files = sorted({*path.glob("*.json"), *path.glob("*/*.json")}, key=lambda one: (one.parent, one.stem))
    return [one for one in files if one.parent.name != "runs" and read_document(one)[0] == "study"]


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
