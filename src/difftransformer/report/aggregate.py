"""What figures and tables draw from: runs pooled over seeds, in numpy, with nothing of their looks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from difftransformer.errors import ResultsError
from difftransformer.results import Cities, Comparison, Curve, Form, RunResult, Segment
from difftransformer.statistics import CONFIDENCE, mean_and_standard_error, paired_difference, wilson_interval

FORMS: tuple[Form, ...] = ("signed", "absolute", "positive")
SEGMENTS: tuple[Segment, ...] = ("first", "before", "answer", "after", "query")
NOISE: tuple[Segment, ...] = ("before", "after")
"""The context around the answer: "noise" in the paper's Table 3 is the sum of the two."""

CITIES: tuple[Cities, ...] = ("seen", "unseen")


@dataclass(frozen=True)
class Band:
    """A curve over x: the mean over seeds, and the smallest and largest seed."""

    x: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    seeds: int


@dataclass(frozen=True)
class DifferenceBand:
    """models[0] minus models[1] over x: each seed, the mean and, from two seeds on, Student's t interval."""

    x: np.ndarray
    per_seed: np.ndarray
    mean: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None


@dataclass(frozen=True, order=True)
class NeedleSetting:
    """One column of a needle map: context length, needles hidden (N) and asked for (R)."""

    length_tokens: int
    needles: int
    asked: int

    @property
    def name(self) -> str:
        """The paper's short form, such as N4R2."""
        return f"N{self.needles}R{self.asked}"


@dataclass(frozen=True)
class Proportion:
    """Right answers pooled over seeds."""

    correct: int
    trials: int

    @property
    def accuracy(self) -> float:
        """Share of right answers; nan without trials."""
        return self.correct / self.trials if self.trials else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's interval."""
        return wilson_interval(self.correct, self.trials)


NeedleKey = tuple[Cities, NeedleSetting, float]


def runs_of(comparison: Comparison, model: str) -> list[RunResult]:
    """The runs of a model, by seed."""
    return sorted((run for run in comparison.runs if run.model == model), key=lambda run: run.seed)


def paired_runs(comparison: Comparison) -> list[tuple[RunResult, RunResult]]:
    """Runs of models[0] and models[1] that share a seed; empty where there is no second model."""
    if len(comparison.models) < 2:
        return []
    first, second = ({run.seed: run for run in runs_of(comparison, model.model)} for model in comparison.models[:2])
    return [(first[seed], second[seed]) for seed in sorted(first.keys() & second.keys())]


def common_values(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """The steps that every curve has, and a row of values for each curve.

    Raises:
        ResultsError: a curve whose steps and values differ in number.
    """
    tables: list[dict[int, float]] = []
    for curve in curves:
        if len(curve.steps) != len(curve.values):
            raise ResultsError(
                f"a curve has {len(curve.steps)} steps but {len(curve.values)} values; run the command again"
            )
        tables.append(dict(zip(curve.steps, curve.values, strict=True)))
    steps = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    values = np.array([[table[step] for step in steps] for table in tables], dtype=np.float64)
    return np.array(steps, dtype=np.float64), values.reshape(len(tables), len(steps))


def smooth(curve: Curve, window: int) -> Curve:
    """Centred moving mean over `window` points (an odd number); at the ends over the points that are there."""
    if window <= 1 or len(curve.values) < window:
        return curve
    kernel = np.ones(window)
    values = np.convolve(curve.values, kernel, mode="same")
    counts = np.convolve(np.ones(len(curve.values)), kernel, mode="same")
    return Curve(steps=curve.steps, values=[float(value) for value in values / counts])


def band(curves: Sequence[Curve]) -> Band | None:
    """Mean, smallest and largest over seeds at the steps that all seeds have; None where there are none."""
    steps, values = common_values(curves)
    if steps.size == 0:
        return None
    return Band(x=steps, mean=values.mean(0), low=values.min(0), high=values.max(0), seeds=len(curves))


def difference_band(comparison: Comparison, curve_of: Callable[[RunResult], Curve]) -> DifferenceBand | None:
    """models[0] minus models[1], seed by seed; None where no seed has both, or they share no step."""
    pairs = paired_runs(comparison)
    steps, values = common_values([curve_of(run) for pair in pairs for run in pair])
    if steps.size == 0:
        return None
    per_seed = values[0::2] - values[1::2]
    zeros = [0.0] * len(pairs)
    intervals = [paired_difference(list(column), zeros, CONFIDENCE) for column in per_seed.T]
    bounds = [(i.low, i.high) for i in intervals if i.low is not None and i.high is not None]
    low, high = np.array(bounds).T if bounds else (None, None)
    return DifferenceBand(x=steps, per_seed=per_seed, mean=per_seed.mean(0), low=low, high=high)


def position_curve(run: RunResult) -> Curve:
    """Loss by position as a curve over bucket starts (positions counted from 0)."""
    buckets = sorted(run.nll.by_position, key=lambda bucket: bucket.start_tokens)
    return Curve(
        steps=[bucket.start_tokens for bucket in buckets], values=[bucket.nll_nats_per_token for bucket in buckets]
    )


def position_edges(comparison: Comparison) -> dict[int, int]:
    """Bucket start -> bucket end, over all runs."""
    return {bucket.start_tokens: bucket.end_tokens for run in comparison.runs for bucket in run.nll.by_position}


def pooled_needles(runs: Sequence[RunResult]) -> dict[NeedleKey, Proportion]:
    """Right answers of each needle cell, summed over seeds."""
    pooled: dict[NeedleKey, Proportion] = {}
    for run in runs:
        for cell in run.needle.cells if run.needle else []:
            key = (cell.cities, NeedleSetting(cell.length_tokens, cell.needles, cell.asked), cell.depth)
            old = pooled.get(key, Proportion(0, 0))
            pooled[key] = Proportion(old.correct + cell.correct, old.trials + cell.trials)
    return pooled


@dataclass(frozen=True)
class Share:
    """A share of attention over seeds. `error` is over seeds, or with one seed over documents (None where unknown)."""

    mean: float
    error: float | None


def allocation_share(runs: Sequence[RunResult], form: Form, depth: float, segments: Sequence[Segment]) -> Share | None:
    """Share that falls on some segments together, averaged over the seeds that measured it; None where none did."""
    sums: list[float] = []
    errors: list[float] = []
    for run in runs:
        found = [
            share
            for share in (run.allocation.shares if run.allocation else [])
            if share.form == form and share.depth == depth and share.segment in segments
        ]
        if len(found) == len(segments):
            sums.append(sum(share.share for share in found))
            errors.append(found[0].standard_error)
    if not sums:
        return None
    statistic = mean_and_standard_error(sums)
    if statistic.standard_error is not None:
        return Share(statistic.mean, statistic.standard_error)
    return Share(statistic.mean, errors[0] if len(segments) == 1 else None)


def allocation_depths(comparison: Comparison) -> list[float]:
    """Every answer depth at which some run measured allocation, from start to end."""
    return sorted({share.depth for run in comparison.runs if run.allocation for share in run.allocation.shares})


def lambda_table(runs: Sequence[RunResult]) -> tuple[np.ndarray, np.ndarray] | None:
    """Lambda over training: steps (S,) and values (seeds, S, layers); None for a model without lambda.

    Raises:
        ResultsError: a run whose `lambda_values` is not one row of layers for each of its `lambda_steps`.
    """
    runs = [run for run in runs if run.lambda_values]
    if not runs:
        return None
    layers = len(runs[0].lambda_values[0])
    for run in runs:
        if len(run.lambda_values) != len(run.lambda_steps) or any(len(row) != layers for row in run.lambda_values):
            raise ResultsError(
                f"{run.run}: lambda_values must hold one row of {layers} layers for each of {len(run.lambda_steps)} "
                "lambda_steps; run the command again"
            )
    if layers == 0:
        return None
    by_layer = [
        common_values([Curve(steps=run.lambda_steps, values=[row[layer] for row in run.lambda_values]) for run in runs])
        for layer in range(layers)
    ]
    steps = by_layer[0][0]
    return (steps, np.stack([values for _, values in by_layer], axis=-1)) if steps.size else None
