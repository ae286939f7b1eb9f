"""Studies whose truth is known: records of runs drawn from an effect and a noise of seeds, without any training."""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from difftransformer_lab.analysis import Records
from difftransformer_lab.results import (
    Curve,
    Question,
    RegisteredPlan,
    RunFigure,
    RunRecord,
    StudyArm,
    StudyAxis,
    StudyFigure,
    StudyIndex,
    StudyMember,
    StudyPlan,
    write_result,
)
from tests.support.environment import ENVIRONMENT

LOSS = StudyFigure(label="held-out loss", task="perplexity", name="nll", unit="nats/token")

Values = Callable[[str, tuple[str, ...], int], dict[str, float]]
"""Figures by label for an arm, a point and a seed."""


def record(
    figures: Sequence[StudyFigure],
    values: dict[str, float],
    *,
    arm: str,
    seed: int = 0,
    parameters: int = 500_000,
    tokens: int = 6_000_000,
    seconds: float = 100.0,
    curves: dict[str, Curve] | None = None,
    more: Sequence[RunFigure] = (),
    data: str = "0" * 64,
    created: str = "2026-01-02T03:04:05+00:00",
) -> RunRecord:
    """Return a run with the given figures."""
    measured = [
        RunFigure(
            task=one.task, name=one.name, unit=one.unit, better=one.better, at=one.at, value=values[one.label], n=100
        )
        for one in figures
        if not one.curve and one.label in values
    ]
    return RunRecord(
        recipe={"name": "simulated", "model": {"attention_type": arm, "hidden_size": 128}, "training": {"seed": seed}},
        data_sha256=data, created=created, environment=ENVIRONMENT, parameters=parameters, train_tokens=tokens,
        train_seconds=seconds, step_seconds=seconds / 3000, total_seconds=1.2 * seconds, figures=[*measured, *more],
        curves=curves or {},
    )  # fmt: skip


def study(
    arms: Sequence[str | StudyArm],
    figures: Sequence[StudyFigure],
    seeds: int | dict[str, int],
    make: Callable[[str, tuple[str, ...], int], RunRecord],
    *,
    axes: Sequence[StudyAxis] = (),
    first_seed: int = 0,
    **parts: Any,
) -> Records:
    """Return a study whose last arm is the reference, with `make` called for every run."""
    arms = [arm if isinstance(arm, StudyArm) else StudyArm(name=arm, label=arm) for arm in arms]
    runs: dict[Any, dict[int, RunRecord]] = {}
    members, files = [], {}
    for arm in arms:
        for point in product(*(axis.values for axis in axes)):
            count = seeds if isinstance(seeds, int) else seeds[arm.name]
            for seed in range(first_seed, first_seed + count):
                runs.setdefault((arm.name, point), {})[seed] = make(arm.name, point, seed)
                file = f"runs/{'-'.join([arm.name, *point])}-seed{seed}.json"
                place = dict(zip([axis.name for axis in axes], point, strict=True))
                members.append(StudyMember(arm=arm.name, point=place, seed=seed, file=file))
                files[arm.name, point, seed] = file
    words = {"name": "simulated", "preset": "laptop", "question": "Is there an effect?", "about": "Simulated."}
    words |= {"analysis": "arms", "reference": arms[-1].name, "command": "difftransformer study simulated"}
    lists = {"arms": arms, "axes": list(axes), "figures": list(figures), "members": members, "rates": []}
    index = StudyIndex(**words | lists | {"planned": len(members)} | parts)
    return Records(index=index, path=Path("simulated/laptop.json"), runs=runs, files=files)


def planned(
    questions: Sequence[Question], *, commit: str = "c" * 40, at: str = "2026-01-01T00:00:00Z"
) -> RegisteredPlan:
    """Return a plan of the simulated study, committed a day before its runs."""
    plan = StudyPlan(study="simulated", preset="laptop", about="Why it is so.", questions=list(questions))
    return RegisteredPlan(plan=plan, file="plans/simulated.yaml", sha256="5" * 64, commit=commit, committed=at)


def save(evidence: Records, folder: Path) -> Path:
    """Write a study's index and runs below a folder, and return the index."""
    place = folder / evidence.index.name
    for (arm, point, seed), file in evidence.files.items():
        write_result(evidence.runs[arm, point][seed], place / file)
    return write_result(evidence.index, place / f"{evidence.index.preset}.json")


def falling(
    start: float, end: float, steps: int, rng: np.random.Generator, noise: float = 0.0, points: int = 40
) -> Curve:
    """Return a curve that falls (or rises) from start towards end over training."""
    x = np.linspace(steps / points, steps, points).astype(int)
    y = end + (start - end) * np.exp(-5 * x / steps) + rng.normal(0, noise, points)
    return Curve(steps=x.tolist(), values=[round(float(v), 5) for v in y])


def without(evidence: Records, arm: str, seed: int) -> Records:
    """Return the study without an arm's runs of a seed."""
    runs = {
        key: {s: run for s, run in found.items() if (key[0], s) != (arm, seed)} for key, found in evidence.runs.items()
    }
    return dataclasses.replace(evidence, runs=runs)
