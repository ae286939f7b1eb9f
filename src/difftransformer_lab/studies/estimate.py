"""How long a study takes: by the runs that this machine has made, by some steps of each kind, or by operations."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

import torch

from difftransformer.errors import DataError
from difftransformer.model import DiffTransformerConfig, count
from difftransformer.train import build_model
from difftransformer.train.speed import keep_freed_memory, matmul_flops

from ..bench.model_work import training_work
from ..bench.timing import time_interleaved
from .design import PlannedRun, place
from .environment import environment
from .study import Study

START_SECONDS = 7.0
"""What a run's process spends before its first step, where no record says: imports, kernels, data."""
FORWARD_SHARE = 1 / 3  # of the time of a training step, by operations
MFU = 0.4
"""Share of the speed of large matrix products that training reaches, where no step is timed."""
MOST_SECONDS = 20.0
"""Steps that take longer by operations are not timed."""

Basis = Literal["earlier runs", "some steps timed now", "operations"]
BASES: tuple[Basis, ...] = get_args(Basis)
"""From the most to the least reliable one."""


@dataclass(frozen=True)
class Estimate:
    """Runs that a study asks for, those that are missing, and the time that they take.

    Attributes:
        runs: Number of runs, those of tuning included.
        missing: Number of these that are not there.
        seconds: Time until all are there, so many at once.
        longest: The longest run, by title, and its time.
        basis: What the estimate rests on (the least reliable source used).
        absent: Which data is missing, so that no run could be looked up; empty if all is there.
    """

    runs: int
    missing: int
    seconds: float
    longest: tuple[str, float] | None
    basis: Basis
    absent: str = ""


def estimate(study: Study, *, at_once: int, threads: int, device: str = "cpu") -> Estimate:
    """Estimate a study's time. Until the learning rates are chosen, every run to be reported counts as missing."""
    looked_for, absent, later = study.design.tuning, "", study.design.reported()
    try:
        looked_for = study.tuning()
        rates = study.rates()
        looked_for = [*looked_for, *study.design.reported(rates)]
        later = [] if study.design.is_tuned(rates) else later
        files = study.files(looked_for)
    except DataError as error:
        if study.design.config.source:  # without the pretrained model's folder there are no operations to count
            raise
        absent, files = str(error), [None] * len(looked_for)
    known = {(run.arm, place(run.point), run.seed) for run in looked_for}
    later = [run for run in later if (run.arm, place(run.point), run.seed) not in known]
    missing = [run for run, file in zip(looked_for, files, strict=True) if file is None] + later
    here, speed = replace(environment(device), threads=threads), functools.cache(partial(matmul_flops, device))
    by_kind: dict[str, tuple[float, Basis]] = {}
    seconds: list[float] = []
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for run in missing:
            recorded = study.store.seconds(run, here)
            if recorded is None and run.kind not in by_kind:
                by_kind[run.kind] = _by_operations(run, speed) if absent else _timed(study, run, device, speed)
            seconds.append(by_kind[run.kind][0] if recorded is None else recorded)
    finally:
        torch.set_num_threads(before)
    longest = max(zip((run.title for run in missing), seconds, strict=True), key=lambda one: one[1], default=None)
    return Estimate(
        runs=len(looked_for) + len(later),
        missing=len(missing),
        seconds=_scheduled(seconds, at_once),
        longest=longest,
        basis=max((basis for _, basis in by_kind.values()), key=BASES.index, default="earlier runs"),
        absent=absent,
    )


def _scheduled(seconds: Sequence[float], at_once: int) -> float:
    """Return the end of jobs that are started in order as soon as one of `at_once` places is free."""
    places = [0.0] * at_once
    for one in seconds:
        places[places.index(min(places))] += one
    return max(places)


def _timed(study: Study, run: PlannedRun, device: str, speed: Callable[[str], float]) -> tuple[float, Basis]:
    """Time some steps of a run's model at each of its row lengths, and count its evaluations' tokens as forward passes."""
    training, prepared = run.recipe.training, study.prepared(run)
    config = prepared.recipe.model_config(vocab_size=prepared.shards.tokenizer.vocab_size)
    if (by_operations := _by_operations(run, speed, config))[0] > START_SECONDS + training.steps * MOST_SECONDS:
        return by_operations
    model = build_model(config, 0).to(device)
    keep_freed_memory()  # as runs do
    tokens = training.batch_tokens // training.accumulation
    works = {
        str(length): training_work(model, tokens // length, length, training.precision)
        for _, length in training.context_stages
    }
    timings = time_interleaved(works, rounds=3, device=device)
    per_step = {name: training.accumulation * timing.median_seconds for name, timing in timings.items()}
    ends = [first for first, _ in training.context_stages[1:]] + [training.steps]
    steps = sum(
        max(0, min(end, training.steps) - first) * per_step[str(length)]
        for (first, length), end in zip(training.context_stages, ends, strict=True)
    )
    per_token = FORWARD_SHARE * per_step[str(training.context_tokens)] / training.batch_tokens
    asked = sum(request.shown_tokens for task in prepared.tasks.values() for request in task.requests)
    validations = training.steps / training.validate_every * training.validation_windows * training.context_tokens
    return START_SECONDS + steps + per_token * (asked + validations), "some steps timed now"


def _by_operations(
    run: PlannedRun, speed: Callable[[str], float], config: DiffTransformerConfig | None = None
) -> tuple[float, Basis]:
    """Return a run's time by its operations; without a configuration, by the one that needs no data."""
    training = run.recipe.training
    counts = count(config or run.recipe.planned_config(), context_tokens=training.context_tokens)
    operations = counts.train_flops_per_token * training.batch_tokens * training.steps
    return START_SECONDS + operations / (MFU * speed(training.precision)), "operations"
