"""What the demo found, of one seed or many, and the sentence that says it."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import NamedTuple

from difftransformer.files import write_text_atomically

from ..environment import environment
from .live import Run
from .recall import ARMS

LEARNED = 0.9
"""Share of right answers from which on a model is said to have learned the task."""


class Summary(NamedTuple):
    """Right answers of an arm at the end of training.

    Attributes:
        label: Name of the arm.
        mean, lowest, highest: Share of right answers over all seeds.
        seeds: Number of seeds.
        learned: How many of them reached LEARNED.
        steps: Median of the steps that those took.
    """

    label: str
    mean: float
    lowest: float
    highest: float
    seeds: int
    learned: int
    steps: float | None


Curves = dict[str, list[dict[int, float]]]
"""Share of right answers by step, for each arm and seed."""


def curves_of(runs: Sequence[Run]) -> Curves:
    """Group the curves by arm."""
    return {arm: [run.curve for run in runs if run.arm == arm] for arm in ARMS}


def stored() -> Curves:
    """Read the curves that come with the package, those of `difftransformer demo --seed 100 --seeds 20`."""
    document = json.loads((files(__package__) / "result.json").read_text(encoding="utf-8"))
    return {
        arm: [dict(zip(document["steps"], shares, strict=True)) for shares in document["shares"][arm]] for arm in ARMS
    }


def summaries(curves: Curves) -> dict[str, Summary]:
    """Summarize the curves of each arm."""
    return {arm: _summary(ARMS[arm].label, some) for arm, some in curves.items()}


def _summary(label: str, curves: list[dict[int, float]]) -> Summary:
    last = [curve[max(curve)] for curve in curves]
    reached = [next(step for step, share in curve.items() if share >= LEARNED)
               for curve in curves if max(curve.values()) >= LEARNED]  # fmt: skip
    mean = sum(last) / len(last)
    return Summary(label, mean, min(last), max(last), len(last), len(reached), median(reached) if reached else None)


def sentence(found: dict[str, Summary]) -> str:
    """Say how many answers of each arm are right."""
    return ", ".join(
        f"{one.label} {one.mean:.0%}" + (f" ({one.lowest:.0%} to {one.highest:.0%})" if one.seeds > 1 else "")
        for one in found.values()
    )


def write(runs: Sequence[Run], folder: Path) -> Path:
    """Write all curves to results.json in `folder`, and return its path."""
    curves = curves_of(runs)
    document = {
        "seeds": sorted({run.seed for run in runs}),
        "steps": list(runs[0].curve),
        "shares": {arm: [[round(share, 4) for share in one.values()] for one in some] for arm, some in curves.items()},
        "environment": asdict(environment()),
    }
    path = folder / "results.json"
    write_text_atomically(path, json.dumps(document) + "\n")
    return path
