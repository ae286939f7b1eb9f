"""The records of finished runs: one JSON file each, found again by what was trained and evaluated on which data."""

import dataclasses
import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from difftransformer.data import Shards
from difftransformer.errors import DiffTransformerError, ResultsError
from difftransformer.model import count
from difftransformer.train import read_metrics
from difftransformer.train.metrics import METRICS_FILE, StepMetrics, read_lines
from difftransformer.typed import ASIDE, plain

from ..environment import environment, now
from ..evals.engine import Task
from ..results import Curve, RunFigure, RunRecord, TaskResult, headlines, kept_result, read_result, write_result
from ..results.curves import spikes
from .design import TRAINING, Design, PlannedRun, place
from .recipe import Recipe, identity, recipe_from
from .run import BEGAN_FILE, run_results

logger = logging.getLogger(__name__)
RUNS = "runs"
CURVE_POINTS = 50
_SEED = re.compile(r"-seed(\d+)-")
MOST_PLACES = 3  # figures that are taken at more places than this are details, such as needles by depth and length


class RunStore:
    """All records below a folder, such as docs/results/studies: studies that ask for the same run share it.

    Files are read when a run of their seed, which their names hold, is looked up.

    Args:
        folder: The folder; each study has a subfolder of its own name with `runs/`. A file that cannot be read is named in a
            warning; it is not used, and not removed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[tuple[str, str], Path] = {}
        self._records: dict[Path, RunRecord] = {}
        self._unread: dict[str, list[Path]] = {}
        for path in self._there():
            named = _SEED.search(path.stem)
            self._unread.setdefault(named[1] if named else "", []).append(path)

    def _read_all(self, *seeds: str) -> None:
        """Read, once, the files of these seeds and files without a seed in their name."""
        for path in (path for seed in (*seeds, "") for path in self._unread.pop(seed, ())):
            try:
                record = read_result(path, RunRecord)
                recipe = recipe_from(record.recipe, source=str(path))
            except (ResultsError, DiffTransformerError) as error:
                logger.warning("%s is not used: %s", path, error)
                continue
            self._found.setdefault((identity(recipe), record.data_sha256), path)

    def _there(self) -> Sequence[Path]:
        return sorted(self.folder.glob(f"*/{RUNS}/*.json"))

    def index_file(self, design: Design) -> Path:
        return self.folder / design.config.name / f"{design.name}.json"

    def run_folder(self, run: PlannedRun, out: Path) -> Path:
        return out / RUNS / f"{run.arm}-seed{run.seed}-{run.identity[:10]}"

    def record_file(self, run: PlannedRun, data_sha256: str) -> Path:
        digest = hashlib.sha256(f"{run.identity} {data_sha256}".encode()).hexdigest()[:10]
        words = [run.arm, place(run.point), "tuning" if run.is_tuning else "", f"seed{run.seed}", digest]
        return self.folder / run.recipe.name / RUNS / f"{'-'.join(word for word in words if word)}.json"

    def find(self, run: PlannedRun, data_sha256: str) -> Path | None:
        self._read_all(str(run.seed))
        return self._found.get((run.identity, data_sha256))

    def read(self, path: Path) -> RunRecord:
        """Read a record, once: choosing learning rates asks for the same records after every run."""
        if path not in self._records:
            self._records[path] = read_result(path, RunRecord)
        return self._records[path]

    def data_of(self, run: PlannedRun) -> set[str]:
        self._read_all(str(run.seed))
        asked = run.identity
        return {data for known, data in self._found if known == asked}

    def add(self, run: PlannedRun, record: RunRecord) -> Path:
        path = self.record_file(run, record.data_sha256)
        self._write(record, path)
        self._records.pop(path, None)
        self._found[run.identity, record.data_sha256] = path
        return path

    def _write(self, record: RunRecord, path: Path) -> None:
        write_result(record, path)


class OwnRuns(RunStore):
    """The records of `compare` and `upcycle --train`, each in its run's folder, with results.json beside them.

    No record is used that was there before. It is made again from the run's folder, in which evaluations are checked against
    their text, and it stays as it is if nothing has changed but when and where it was made.
    """

    def _there(self) -> Sequence[Path]:
        return []

    def index_file(self, design: Design) -> Path:
        return self.folder / "results.json"

    def run_folder(self, run: PlannedRun, out: Path) -> Path:
        return out / RUNS / f"{run.arm}-seed{run.seed}"

    def record_file(self, run: PlannedRun, data_sha256: str) -> Path:
        return self.run_folder(run, self.folder) / "record.json"

    def _write(self, record: RunRecord, path: Path) -> None:
        old = kept_result(path, RunRecord)
        made = {name: getattr(old, name) for name in ("created", "environment", "total_seconds")} if old else {}
        if old is None or dataclasses.replace(record, **made) != old:
            write_result(record, path)


def run_record(
    folder: Path,
    recipe: Recipe,
    tasks: Mapping[str, Task],
    shards: Shards,
    *,
    seconds: float,
    device: str,
    threads: int,
    whole: bool = False,
    has_diverged: bool = False,
) -> RunRecord:
    """Make the record of a finished run from its folder.

    Args:
        seconds: Time that its process took; 0 if that is unknown, since it was stopped in between.
        whole: Whether to keep the whole results of the tasks too.
        has_diverged: Whether training ended early, so that no task was asked.
    """
    steps, validations = read_metrics(folder / METRICS_FILE)
    step_seconds = float(np.median(np.diff([0.0, *(line.seconds for line in steps)])))
    config = recipe.model_config(vocab_size=shards.tokenizer.vocab_size) if recipe.model else None
    results = {} if has_diverged else run_results(folder, recipe, tasks)
    identities = [result.model.parameters for result in results.values()]
    curves = {
        **_curves(validations),
        "train_loss_nats": _binned(steps, "loss_nats", np.mean),
        "gradient_norm": _binned(steps, "gradient_norm", np.max),
    }
    asked: dict[str, list[tuple[int, float]]] = {}
    for row in read_lines(folder / METRICS_FILE):
        for name, value in row.get("evaluation", {}).items():
            asked.setdefault(name, []).append((row["step"], value))
    for layer in range(len(steps[-1].lambdas)):
        asked[f"lambda {layer}"] = [(line.step, lam) for line in steps if (lam := line.lambdas[layer]) is not None]
    curves |= {name: _thinned(points) for name, points in asked.items() if points}
    return RunRecord(
        recipe=portable(recipe),
        data_sha256=shards.manifest.fingerprint,
        created=now(),
        began=began.read_text(encoding="utf-8") if (began := folder / BEGAN_FILE).exists() else "",
        environment=dataclasses.replace(environment(device), threads=threads),
        parameters=identities[0] if identities else count(config).parameters if config else 0,
        train_tokens=steps[-1].tokens,
        train_seconds=steps[-1].seconds,
        step_seconds=step_seconds,
        total_seconds=max(seconds, steps[-1].seconds),
        figures=[
            *(figure for name, result in results.items() for figure in run_figures(name, result)),
            *_training_figures(steps),
        ],
        curves=curves,
        evaluations=results if whole else {},
        diverged_after=steps[-1].step if has_diverged else None,
    )


def portable(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain data, without what belongs to this machine or to other commands."""
    return {"name": recipe.name, **plain(recipe, without=[ASIDE])}


def run_figures(task: str, result: TaskResult) -> Iterator[RunFigure]:
    """Yield the figures of a task's result that a record keeps."""
    leading = headlines(result)
    for row in result.measurements:
        is_short = len(row.at) <= MOST_PLACES and not re.search("depth|head|layer", " ".join(row.at))
        if row in leading or (is_short and (not row.detail or row.name == "nll by position")):
            same = {name: getattr(row, name) for name in ("name", "unit", "better", "at", "value", "n")}
            yield RunFigure(task=task, **same)


def _training_figures(steps: Sequence[StepMetrics]) -> list[RunFigure]:
    """Return figures of the training itself; the curves keep too few points for them."""
    norms = [line.gradient_norm for line in steps]
    figures = {"gradient spikes": float(len(spikes(norms))), "largest gradient norm": max(norms)}
    same: dict[str, Any] = {"task": TRAINING, "unit": "", "better": "lower", "at": {}, "n": len(steps)}
    return [RunFigure(name=name, value=value, **same) for name, value in figures.items()]


def _curves(lines: Sequence[object]) -> dict[str, Curve]:
    names = [field.name for field in dataclasses.fields(lines[0])] if lines else []  # type: ignore[arg-type]
    curves = {}
    for name in names:
        points = [(line.step, value) for line in lines if (value := getattr(line, name)) is not None]  # type: ignore[attr-defined]
        if name != "step" and points and all(isinstance(value, (int, float)) for _, value in points):
            curves[name] = _thinned(points)
    return curves


def _thinned(points: Sequence[tuple[int, float]]) -> Curve:
    """Return at most 50 points of a curve, the last one among them."""
    kept = points[:: -math.ceil(len(points) / CURVE_POINTS)][::-1]
    return Curve(steps=[step for step, _ in kept], values=[_short(value) for _, value in kept])


def _binned(steps: Sequence[StepMetrics], name: str, reduce: Callable[[Sequence[float]], float]) -> Curve:
    """Return a metric of every step in at most 50 bins of equal width, each at its last step."""
    parts = np.array_split(np.arange(len(steps)), min(CURVE_POINTS, len(steps)))
    return Curve(
        steps=[steps[part[-1]].step for part in parts],
        values=[_short(float(reduce([getattr(steps[index], name) for index in part]))) for part in parts],
    )


def _short(value: float) -> float:
    return float(f"{value:.6g}")
