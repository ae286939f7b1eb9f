"""Run a study: choose learning rates, train and evaluate what is missing, and write an index of what is there."""

import hashlib
import json
import logging
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from difftransformer.data import Shards, prepare_shards
from difftransformer.errors import ConfigError, EvaluationError
from difftransformer.families.upcycle import upcycle_folder
from difftransformer.files import locked, write_text_atomically
from difftransformer.hub import folder_sha256, source_folder

from ..environment import check_committed, command_line, environment, foreign_cpu_share
from ..evals.engine import Task
from ..results import (
    ChosenRate,
    CostRow,
    RunRecord,
    StudyFigure,
    StudyIndex,
    StudyMember,
    figure_of,
    figures_there,
    headline_figures,
    kept_result,
    read_result,
    write_result,
)
from .costs import time_steps
from .design import UPCYCLED, Design, PlannedRun, place
from .evaluation import EVALUATIONS, draw_tasks
from .jobs import Job, run_jobs
from .plan import registered
from .recipe import Recipe
from .records import OwnRuns, RunStore, portable, run_record
from .run import is_done, share_stable_part, start_run

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """A run's recipe with the folders of this machine, its data, and its tasks.

    `data_sha256` covers the tokens, and the pretrained model if the run starts from one.
    """

    recipe: Recipe
    shards: Shards
    tasks: Mapping[str, Task]
    data_sha256: str


class Study:
    """A study at one of its sizes, with the records that are there.

    Args:
        results: Folder of all studies' records, such as docs/results/studies; or the folder of this study `alone`.
        alone: Whether the study shares no records, and keeps its own beside its runs (see `OwnRuns`).
        source: The pretrained model of a study that starts from one: a folder, a .gguf file, or owner/name on the hub.
        models: Folder for the models made of it.

    Raises:
        ConfigError: The study needs a source and has none, or has one and needs none.
    """

    def __init__(
        self,
        design: Design,
        results: Path,
        *,
        alone: bool = False,
        source: str | None = None,
        models: Path = Path("models"),
    ) -> None:
        wanted = design.config.source
        if bool(wanted) != (source is not None):
            needed = f"starts from {wanted}; name its folder, .gguf file or owner/name" if wanted else "needs none"
            raise ConfigError(f"--source {source}: the study {design.config.name} {needed}")
        self.design, self._alone = design, alone
        self._source, self._models = source, models
        self.store = (OwnRuns if alone else RunStore)(results)
        self._prepared: dict[str, Prepared] = {}

    @property
    def index_file(self) -> Path:
        return self.store.index_file(self.design)

    def prepared(self, run: PlannedRun) -> Prepared:
        """Prepare a run's data and tasks; runs with equal ones share them."""
        recipe = self._on_this_machine(run.recipe)
        training, evaluation = recipe.training, [asdict(spec) for spec in recipe.evaluation]
        lengths = training.context_tokens, training.validation_windows, recipe.planned_config().max_position_embeddings
        asked = [asdict(recipe.data), evaluation, lengths]  # all that `draw_tasks` reads
        key = json.dumps(asked, default=str)
        if key not in self._prepared:
            shards = prepare_shards(recipe.data)
            self._prepared[key] = Prepared(recipe, shards, draw_tasks(recipe, shards), self._data_sha256(shards))
        return replace(self._prepared[key], recipe=recipe)

    def _on_this_machine(self, recipe: Recipe) -> Recipe:
        """Replace upcycled models by their folders, which are made if missing."""
        if self._source is None:
            return recipe
        made = {}
        for named in (recipe.data.tokenizer, str(recipe.start_from)):  # all arms share the first
            to = named.removeprefix(UPCYCLED).partition(" ")[0]
            made[named] = self._models / to
            note = self._models / f"{to}.source"
            if not made[named].exists():
                logger.info("making %s of %s", made[named], self._source)
                self._models.mkdir(parents=True, exist_ok=True)
                write_text_atomically(note, self._source_sha256)
                with source_folder(self._source) as pretrained:
                    upcycle_folder(pretrained, made[named], to=to)
            elif not note.exists() or note.read_text(encoding="utf-8") != self._source_sha256:
                raise ConfigError(
                    f"{made[named]}: was made of another model than {self._source}, or by an earlier release; choose "
                    "another --out"
                )
        data = replace(recipe.data, tokenizer=str(made[recipe.data.tokenizer]))
        return replace(recipe, start_from=str(made[str(recipe.start_from)]), data=data)

    @cached_property
    def _source_sha256(self) -> str:
        assert self._source is not None
        with source_folder(self._source) as pretrained:
            return folder_sha256(pretrained)

    def _data_sha256(self, shards: Shards) -> str:
        fingerprint = shards.manifest.fingerprint
        if self._source is None:
            return fingerprint
        return hashlib.sha256(f"{fingerprint} {self._source_sha256}".encode()).hexdigest()

    def files(self, runs: Sequence[PlannedRun]) -> list[Path | None]:
        """Return the file of each run's record; None if it is missing.

        All arms of a seed, or all rates of an arm while rates are chosen, must have the same data: this machine's, or another's
        if its records are complete.
        """
        groups: dict[tuple[object, ...], list[PlannedRun]] = {}
        for run in runs:
            groups.setdefault(_on_same_data(run), []).append(run)
        data = {}
        for key, group in groups.items():
            known = [self.store.data_of(run) for run in group]
            everywhere = set.intersection(*known)
            is_certain = not any(known) or (len(everywhere) == 1 and self._source is None)
            if is_certain:  # without preparing data, which takes long
                data[key] = min(everywhere, default="")
                continue
            here = self.prepared(group[0]).data_sha256
            data[key] = here if here in everywhere or not everywhere else min(everywhere)
        return [self.store.find(run, data[_on_same_data(run)]) for run in runs]

    def tuning(self) -> list[PlannedRun]:
        """Return the runs that choose learning rates, including extensions beyond the edge (`TuningConfig.extensions`)."""
        runs = list(self.design.tuning)
        for _ in range(self.design.preset.tuning.extensions):
            beyond = [run for one in self._best(runs) for run in self.design.tuning_beyond(one)]
            if not beyond:
                break
            runs += beyond
        return runs

    def rates(self) -> list[ChosenRate]:
        """Return the learning rate with the best mean figure, for each arm with all its tuning runs.

        The first figure decides, and at a tie, as where all answers are right, the next primary figure. A rate at which a run
        diverged is not chosen.

        Raises:
            EvaluationError: A run diverged at every rate of an arm, or a record lacks a figure.
        """
        return self._best(self.tuning())

    def _best(self, runs: Sequence[PlannedRun]) -> list[ChosenRate]:
        if not runs:
            return []
        files = self.files(runs)
        first, *others = self.design.figures
        figures = [first, *(figure for figure in others if not figure.secondary)]
        unfinished = {run.arm for run, file in zip(runs, files, strict=True) if file is None}
        by_place: dict[tuple[str, str], dict[float, list[list[float]]]] = {}
        points: dict[str, Mapping[str, str]] = {}
        for run, file in zip(runs, files, strict=True):
            if file is None or run.arm in unfinished:
                continue
            record = self.store.read(file)
            values = [(figure, figure_of(record, figure)) for figure in figures]
            lacking = [figure.label for figure, value in values if value is None]
            if lacking and record.diverged_after is None:
                raise EvaluationError(f"{file}: has no {lacking[0]}, by which learning rates are chosen")
            signed = [
                math.inf if value is None else value if figure.better == "lower" else -value for figure, value in values
            ]
            points[place(run.point)] = run.point
            of_arm = by_place.setdefault((run.arm, place(run.point)), {})
            of_arm.setdefault(run.recipe.training.optimizer.learning_rate, []).append(signed)
        sign, chosen = 1 if first.better == "lower" else -1, []
        for (arm, where), tried in by_place.items():
            means = {rate: [fmean(one) for one in zip(*runs, strict=True)] for rate, runs in sorted(tried.items())}
            first_means = [
                (rate, sign * first_mean if math.isfinite(first_mean) else None)
                for rate, (first_mean, *_) in means.items()
            ]
            best = min(means, key=means.__getitem__)
            if not math.isfinite(means[best][0]):
                raise EvaluationError(
                    f"{arm}: a run diverged at each of the learning rates {', '.join(f'{rate:g}' for rate in means)}; "
                    "add lower ones to tuning.learning_rates"
                )
            chosen.append(ChosenRate(arm=arm, point=dict(points[where]), learning_rate=best, tried=first_means))
        return chosen

    def planned(self) -> int:
        """Count the runs that the study asks for, as far as known before every rate is chosen."""
        tuning = self.tuning()
        return len(tuning) + self._reported(self._best(tuning))

    def _reported(self, rates: Sequence[ChosenRate]) -> int:
        return len(self.design.reported(rates if self.design.is_tuned(rates) else None))

    def write_index(self, **beside: Any) -> StudyIndex:
        """Write the index of the study: its design and the runs that are there; `beside` are further fields."""
        config, design, tuning = self.design.config, self.design, self.tuning()
        rates = self._best(tuning)
        runs = [*tuning, *design.reported(rates)]
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
            about=self.design.about,
            analysis=config.analysis,
            reference=config.reference,
            arms=self.design.described_arms(),
            axes=self.design.described_axes(),
            figures=design.figures or self._headlines(members),
            members=members,
            planned=len(tuning) + self._reported(rates),
            rates=rates,
            command=command_line() if self._alone else design.command,
            plan=None if design.plan is None else registered(design.preset.plan, design.plan),
            changes=design.preset.changes,
            correction=design.preset.correction,
            **beside,
        )
        write_result(index, self.index_file)
        return index

    def _headlines(self, members: Sequence[StudyMember]) -> list[StudyFigure]:
        """Return the headline figures of the tasks, from the first record that is there."""
        if not members:
            return []
        return headline_figures(read_result(self.index_file.parent / members[0].file, RunRecord).evaluations)

    def train(
        self, folder: Path, *, at_once: int, device: str = "cpu", only: Collection[str] | None = None
    ) -> StudyIndex:
        """Train and evaluate every run that is missing, watched by `jobs.watched_by`; each leaves its record when it ends.

        Args:
            at_once: Number of runs that train at the same time; each gets an equal share of the threads.
            only: Arms to train; all by default.

        Raises:
            EvaluationError: a run has not all figures that are planned.
            ConfigError: a plan's runs would be of code that no commit holds (see `check_committed`).
            DiffTransformerError: a run failed, or a task is impossible; its message.
            Interrupted: a signal; every run has saved a checkpoint.
        """
        design = self.design
        wanted = design.arms if only is None else only
        before = None if self._alone else kept_result(self.index_file, StudyIndex)
        if before and _changes(before.command) != _changes(design.command):
            logger.warning("%s: replaces the index of %s, whose runs stay", self.index_file, before.command)

        has_trained = False

        def train(runs: Iterable[PlannedRun]) -> bool:
            nonlocal has_trained
            trained = self._train([run for run in runs if run.arm in wanted], folder, at_once, device)
            has_trained |= trained
            return trained

        for arms in ([], *design.arms_in_turn()):  # what needs no tuning decides soonest
            while train(run for run in self.tuning() if run.arm in arms):
                pass  # until no best rate lies at an edge, or no extension is left
            train(design.reported(self.rates()))
        for one in self.rates():
            if one.is_at_edge:
                where = f" at {place(one.point)}" if one.point else ""
                text = "%s%s: the best learning rate, %g, is at the edge of those tried"
                logger.info(text, one.arm, where, one.learning_rate)
        if only is None:
            self._check_figures()
        if before is not None and before.costs and not has_trained:
            return self.write_index(costs=before.costs, costs_foreign_cpu_share=before.costs_foreign_cpu_share)
        if design.plan is None or all(contrast.scale != "doublings" for contrast in design.plan.contrasts):
            return self.write_index()
        share = foreign_cpu_share()
        costs = self._step_times(max(1, torch.get_num_threads() // at_once), device)
        return self.write_index(costs=costs, costs_foreign_cpu_share=share())

    def _step_times(self, threads: int, device: str) -> list[CostRow]:
        """Time a step of each arm that has its rate, in turns: runs of a study may be days apart, and machines differ."""
        logger.info("timing steps of all arms in turns, for losses at equal time; some minutes")
        runs = {run.arm: run for run in reversed(self.design.reported(self.rates()))}  # the first of each arm
        recipes = {arm: self.prepared(run).recipe for arm, run in runs.items()}
        labels = {arm.name: arm.label for arm in self.design.described_arms()}
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            shards = self.prepared(next(iter(runs.values()))).shards
            return time_steps(recipes, shards, labels=labels, device=device)
        finally:
            torch.set_num_threads(before)

    def _check_figures(self) -> None:
        """Check that each figure is in some run that ended; records of earlier studies may lack one."""
        files = self.files(self.design.reported(self.rates()))
        records = [self.store.read(file) for file in files if file is not None]
        ended = [record for record in records if record.diverged_after is None]
        for figure in self.design.figures if ended else ():
            if all(figure_of(record, figure) is None for record in ended):
                there = figures_there(ended[0], figure)
                raise EvaluationError(f"no run has the figure {figure.label!r}; change figures; runs have {there}")

    def _train(self, runs: Sequence[PlannedRun], folder: Path, at_once: int, device: str) -> bool:
        """Train the missing runs. Return whether there were any."""
        missing = {run.identity: run for run, file in zip(runs, self.files(runs), strict=True) if file is None}
        if not missing:
            return False
        for run in self.design.tuning:  # an impossible task of a later turn is refused now
            self.prepared(run)
        if self.design.plan is not None:
            check_committed()
        threads = max(1, torch.get_num_threads() // at_once)
        here = replace(environment(device), threads=threads)
        jobs: list[Job] = []
        by_folder: dict[Path, PlannedRun] = {}

        def keep(job: Job) -> None:
            run = by_folder[job.folder]
            prepared = self.prepared(run)
            made = job.folder, prepared.recipe, prepared.tasks, prepared.shards
            how: dict[str, Any] = {"seconds": job.seconds, "device": device, "threads": threads}
            record = run_record(*made, **how, whole=not self.design.figures, has_diverged=job.has_diverged)
            if record.diverged_after is not None:
                logger.warning("%s diverged after step %d and has no figures", job.label, record.diverged_after)
            elif lacking := self.design.lacking(run, record):
                raise EvaluationError(
                    f"{job.label}: has no figure {lacking[0].label!r}, which the study plans; it has "
                    f"{figures_there(record, lacking[0])}; change figures, or the options of its task: "
                    f"{job.folder / EVALUATIONS} holds what was found"
                )
            record = replace(record, recipe=portable(run.recipe), data_sha256=prepared.data_sha256)
            self.store.add(run, record)
            self.write_index()

        def alike(data_sha256: str) -> Iterator[Path]:
            """Folders of this study's runs with the same code and machine in their records."""
            for run in (*self.tuning(), *self.design.reported(self.rates())):
                file = self.store.find(run, data_sha256)
                if file is not None and self.store.read(file).environment == here:
                    yield self.store.run_folder(run, folder)

        def share(where: Path, prepared: Prepared) -> None:
            with locked(where, wait=True):
                share_stable_part(where, prepared.recipe, prepared.shards, alike(prepared.data_sha256))

        for run in missing.values():
            where = self.store.run_folder(run, folder)
            prepared = self.prepared(run)
            with locked(where, wait=True):  # a run of a study that was killed ends soon
                start_run(where, prepared.recipe)
            by_folder[where] = run
            job = Job(
                label=run.title,
                folder=where,
                shards=prepared.shards.folders,
                steps=run.recipe.training.steps,
                flops=prepared.recipe.train_flops,
                threads=threads,
                device=device,
                prepare=partial(share, where, prepared),
                done=is_done(where, prepared.recipe, prepared.tasks),
                may_diverge=not self._alone,
            )
            if job.done:  # it ended, and the study was killed before it could keep the record
                keep(job)
            jobs.append(job)
        left = sum(not job.done for job in jobs)
        logger.info("training %d runs, %d at a time; threads for each: %d", left, at_once, threads)
        run_jobs(jobs, at_once=at_once, on_done=keep)
        return True


def _changes(command: str) -> str:
    return command.partition(" --set ")[2]


def _on_same_data(run: PlannedRun) -> tuple[object, ...]:
    """Return the key of runs that are compared with one another."""
    return run.seed, place(run.point), run.arm if run.is_tuning else None
