"""Run a study: choose learning rates, train and evaluate what is missing, and write an index of what is there."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import torch

from ..data import Shards, prepare_shards
from ..errors import EvaluationError
from ..evals.engine import Task
from ..files import locked
from ..results import ChosenRate, RunRecord, StudyIndex, StudyMember, read_result, write_result
from ..results.evidence import figure_of
from .design import Design, PlannedRun, place
from .evaluation import draw_tasks
from .jobs import Job, run_jobs
from .records import RunStore, run_record
from .run import is_done, start_run

Log = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """The data and the tasks of a run."""

    shards: Shards
    tasks: Mapping[str, Task]


class Study:
    """A study at one of its sizes, with the records that are there.

    Args:
        design: What is asked for.
        results: Folder of all studies' records, such as docs/results/studies.
        log: Called with what is being done.
    """

    def __init__(self, design: Design, results: Path, log: Log = lambda text: None) -> None:
        self.design, self.results, self._log = design, results, log
        self.store = RunStore(results, log)
        self._prepared: dict[str, Prepared] = {}

    @property
    def index_file(self) -> Path:
        """The file of the study's index."""
        return self.results / self.design.config.name / f"{self.design.name}.json"

    def prepared(self, run: PlannedRun) -> Prepared:
        """Return a run's data and tasks, which runs of the same request share."""
        recipe = run.recipe
        asked = [asdict(recipe.data), [asdict(spec) for spec in recipe.evaluation], recipe.training.context_tokens]
        key = json.dumps(asked, default=str)
        if key not in self._prepared:
            shards = prepare_shards(recipe.data, log=self._log)
            self._prepared[key] = Prepared(shards, draw_tasks(recipe, shards))
        return self._prepared[key]

    def files(self, runs: Sequence[PlannedRun]) -> list[Path | None]:
        """Return the file of each run's record, None for those that are missing.

        All arms of a seed are read from records on the same data: those of this machine, or of another if none is missing
        there.
        """
        groups: dict[tuple[object, ...], list[PlannedRun]] = {}
        for run in runs:
            groups.setdefault((run.seed, run.is_tuning, place(run.point)), []).append(run)
        data = {}
        for key, group in groups.items():
            here = self.prepared(group[0]).shards.manifest.fingerprint
            everywhere = set.intersection(*(self.store.data_of(run) for run in group))
            data[key] = here if here in everywhere or not everywhere else min(everywhere)
        return [self.store.find(run, data[run.seed, run.is_tuning, place(run.point)]) for run in runs]

    def rates(self) -> list[ChosenRate] | None:
        """Return the learning rate with the best mean figure for each arm; None while a tuning run is missing."""
        runs = self.design.tuning
        files = self.files(runs)
        figure = self.design.config.figures[0]
        sign = 1 if figure.better == "lower" else -1
        found: dict[tuple[str, str], dict[float, list[float]]] = {}
        points: dict[str, Mapping[str, str]] = {}
        for run, file in zip(runs, files, strict=True):
            if file is None:
                return None
            value = figure_of(read_result(file, RunRecord), figure)
            if value is None:
                raise EvaluationError(f"{file}: has no {figure.label}, by which learning rates are chosen")
            points[place(run.point)] = run.point
            of_arm = found.setdefault((run.arm, place(run.point)), {})
            of_arm.setdefault(run.recipe.training.optimizer.learning_rate, []).append(value)
        chosen = []
        for (arm, where), tried in found.items():
            means = [(rate, fmean(values)) for rate, values in sorted(tried.items())]
            best = min(means, key=lambda pair: sign * pair[1])[0]
            chosen.append(ChosenRate(arm=arm, point=dict(points[where]), learning_rate=best, tried=means))
        return chosen

    def reported(self, rates: Sequence[ChosenRate]) -> list[PlannedRun]:
        """Return the runs that are compared, at the chosen rates."""
        return self.design.reported({(one.arm, place(one.point)): one.learning_rate for one in rates})

    def write_index(self) -> StudyIndex:
        """Write what the study asks for and which of its runs are there."""
        config, rates = self.design.config, self.rates()
        runs = [*self.design.tuning, *([] if rates is None else self.reported(rates))]
        members = [
            StudyMember(
                arm=run.arm,
                point=dict(run.point),
                seed=run.seed,
                is_tuning=run.is_tuning,
                file=os.path.relpath(file, self.index_file.parent),
            )
            for run, file in zip(runs, self.files(runs), strict=True)
            if file is not None
        ]
        index = StudyIndex(
            name=config.name,
            preset=self.design.name,
            question=config.question,
            about=config.about,
            analysis=config.analysis,
            reference=config.reference,
            arms=self.design.described_arms(),
            axes=self.design.described_axes(),
            figures=config.figures,
            members=members,
            planned=len(self.design.tuning) + len(self.design.reported()),
            rates=rates or [],
            command=f"difftransformer study {config.name} --preset {self.design.name}",
        )
        write_result(index, self.index_file)
        return index

    def train(
        self,
        folder: Path,
        *,
        at_once: int,
        device: str = "cpu",
        progress: Callable[[Sequence[Job]], None] = lambda jobs: None,
    ) -> StudyIndex:
        """Train and evaluate every run that is missing; each leaves its record as soon as it ends.

        Args:
            folder: Folder for the runs' checkpoints.
            at_once: Number of runs that train at the same time; each gets an equal share of the threads.
            device: cpu or cuda.
            progress: Called again and again with the jobs while they run.

        Raises:
            DiffTransformerError: a run failed, or a task is impossible; its message.
            FolderInUse: another process is working on a run.
            Interrupted: a signal; every run has saved a checkpoint.
        """
        self._train(self.design.tuning, folder, at_once, device, progress)
        rates = self.rates()
        assert rates is not None
        for one in rates:
            if len(one.tried) > 1 and one.learning_rate in (one.tried[0][0], one.tried[-1][0]):
                self._log(f"{one.arm}: the best learning rate, {one.learning_rate:g}, is at the edge of those tried")
        self._train(self.reported(rates), folder, at_once, device, progress)
        return self.write_index()

    def _train(
        self,
        runs: Sequence[PlannedRun],
        folder: Path,
        at_once: int,
        device: str,
        progress: Callable[[Sequence[Job]], None],
    ) -> None:
        missing = {run.identity: run for run, file in zip(runs, self.files(runs), strict=True) if file is None}
        if not missing:
            return
        threads = max(1, torch.get_num_threads() // at_once)
        jobs: list[Job] = []
        by_folder: dict[Path, PlannedRun] = {}

        def keep(job: Job) -> None:
            run = by_folder[job.folder]
            prepared = self.prepared(run)
            record = run_record(
                job.folder,
                run.recipe,
                prepared.tasks,
                prepared.shards,
                seconds=job.seconds,
                device=device,
                threads=threads,
            )
            self.store.add(run, record)
            self.write_index()

        with ExitStack() as locks:
            for asked, run in missing.items():
                prepared = self.prepared(run)
                where = folder / "runs" / f"{run.arm}-seed{run.seed}-{asked[:10]}"
                lock = locks.enter_context(locked(where))
                start_run(where, run.recipe)
                by_folder[where] = run
                job = Job(
                    label=run.title,
                    folder=where,
                    shards=prepared.shards.folders,
                    steps=run.recipe.training.steps,
                    threads=threads,
                    device=device,
                    lock=lock,
                    done=is_done(where, run.recipe, prepared.tasks, self._log),
                )
                if job.done:  # it ended, and the study was killed before it could keep the record
                    keep(job)
                jobs.append(job)
            self._log(
                f"training {sum(not job.done for job in jobs)} runs, {at_once} at a time with {threads} threads each"
            )
            run_jobs(jobs, at_once=at_once, progress=progress, on_done=keep)
