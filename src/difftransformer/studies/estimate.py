"""How long a study takes, from the runs that this machine has made, or from some steps of each kind."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..bench.timing import time_interleaved
from ..bench.work import training_work
from ..train import build_model
from ..train.heap import keep_freed_memory
from .design import PlannedRun
from .environment import environment
from .study import Study

START_SECONDS = 7.0
"""What a run's process spends before its first step, where no record says: imports, kernels, data."""
FORWARD_SHARE = 1 / 3  # of the time of a training step, by operations


@dataclass(frozen=True)
class Estimate:
    """Runs that a study asks for, those that are missing, and the time that they take.

    Attributes:
        runs: Number of runs, those of tuning included.
        missing: Number of these that are not there.
        seconds: Time until all are there, so many at once.
        longest: The longest run, by title, and its time.
        is_measured: Whether any time was measured on this machine now, where no record says.
    """

    runs: int
    missing: int
    seconds: float
    longest: tuple[str, float] | None
    is_measured: bool


def estimate(study: Study, *, at_once: int, threads: int, device: str = "cpu") -> Estimate:
    """Estimate a study's time. Until the learning rates are chosen, every run to be reported counts as missing.

    Args:
        study: The study.
        at_once: Number of runs that train at the same time.
        threads: Threads of each.
        device: cpu or cuda.
    """
    tuning, rates = study.design.tuning, study.rates()
    reported = study.design.reported() if rates is None else study.reported(rates)
    looked_for = tuning if rates is None else [*tuning, *reported]
    missing = [run for run, file in zip(looked_for, study.files(looked_for), strict=True) if file is None]
    if rates is None:
        missing += reported
    here = replace(environment(device), threads=threads)
    measured: dict[str, float] = {}
    seconds = []
    for run in missing:
        known = study.store.seconds(run, here)
        if known is None and run.kind not in measured:
            measured[run.kind] = _measured_seconds(study, run, threads, device)
        seconds.append(measured[run.kind] if known is None else known)
    longest = max(zip((run.title for run in missing), seconds, strict=True), key=lambda one: one[1], default=None)
    return Estimate(len(tuning) + len(reported), len(missing), _scheduled(seconds, at_once), longest, bool(measured))


def _scheduled(seconds: Sequence[float], at_once: int) -> float:
    """Return the end of jobs that are started in order as soon as one of `at_once` places is free."""
    places = [0.0] * at_once
    for one in seconds:
        places[places.index(min(places))] += one
    return max(places)


def _measured_seconds(study: Study, run: PlannedRun, threads: int, device: str) -> float:
    """Time some steps of a run's model at each of its row lengths, and count its evaluations' tokens as forward passes."""
    prepared, training = study.prepared(run), run.recipe.training
    config = prepared.recipe.model_config(vocab_size=prepared.shards.tokenizer.vocab_size)
    model = build_model(config, 0).to(device)
    keep_freed_memory()  # as runs do
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        works: dict[str, Any] = {
            str(length): training_work(model, training.batch_tokens // length, length, training.precision)
            for length in {length for _, length in training.context_stages}
        }
        timings = time_interleaved(works, rounds=3, warmup=1, device=device)
    finally:
        torch.set_num_threads(before)
    ends = [first for first, _ in training.context_stages[1:]] + [training.steps]
    steps = sum(
        max(0, min(end, training.steps) - first) * timings[str(length)].median_seconds
        for (first, length), end in zip(training.context_stages, ends, strict=True)
    )
    per_token = FORWARD_SHARE * timings[str(training.context_tokens)].median_seconds / training.batch_tokens
    asked = sum(request.shown_tokens for task in prepared.tasks.values() for request in task.requests)
    validations = training.steps / training.validate_every * training.validation_windows * training.context_tokens
    return START_SECONDS + steps + per_token * (asked + validations)
