"""How often intervals of 95 % hold the true value, by simulation: ours and those that were not chosen.

python -m tests.support.interval_coverage docs/results/intervals.json
"""

import json
import sys
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import scipy
from scipy.special import ndtr, ndtri, stdtrit

from difftransformer_lab.evals.scores import proportion
from difftransformer_lab.statistics import item_difference, wilson_interval

SIZES = (5, 10, 20, 100)
DRAWS = 999
SHAPES: dict[str, tuple[Callable[[np.random.Generator, int], np.ndarray], float]] = {
    "normal": (lambda rng, n: rng.normal(size=n), 0.0),
    "exponential": (lambda rng, n: rng.exponential(size=n), 1.0),
    "lognormal, sigma 0.5": (lambda rng, n: rng.lognormal(0, 0.5, n), float(np.exp(0.125))),
    "lognormal, sigma 1": (lambda rng, n: rng.lognormal(0, 1, n), float(np.exp(0.5))),
    "Student t, 3 df": (lambda rng, n: rng.standard_t(3, n), 0.0),
}
PAIRED = {"0.7 and 0.5": (0.7, 0.5), "0.5 and 0.5": (0.5, 0.5), "0.9 and 0.8": (0.9, 0.8), "0.3 and 0.05": (0.3, 0.05)}
"""Probabilities of a right answer of two models, independent given the item."""

Interval = tuple[float, float]


def others(values: np.ndarray, rng: np.random.Generator) -> dict[str, Interval]:
    """Return intervals that were not chosen: percentile bootstrap, BCa, Student's t, studentised bootstrap by itself."""
    n, mean, error = len(values), float(values.mean()), float(values.std(ddof=1) / len(values) ** 0.5)
    if error == 0:
        return dict.fromkeys(("percentile", "BCa", "Student t", "studentised"), (mean, mean))
    drawn = values[rng.integers(n, size=(DRAWS, n))]
    means, errors = drawn.mean(1), drawn.std(1, ddof=1) / n**0.5
    spread = errors > 1e-9 * error
    half = float(stdtrit(n - 1, 0.975)) * error
    ratio = np.quantile((means - mean)[spread] / errors[spread], [0.975, 0.025])
    bias = ndtri(np.clip((means < mean).mean() + (means == mean).mean() / 2, 1 / DRAWS, 1 - 1 / DRAWS))
    residuals = values - mean  # for a mean the jackknife's acceleration is its skewness / (6 sqrt(n))
    acceleration = (residuals**3).sum() / (6 * (residuals**2).sum() ** 1.5)
    z = bias + ndtri([0.025, 0.975])
    return {
        "percentile": tuple(np.quantile(means, [0.025, 0.975])),
        "BCa": tuple(np.quantile(means, ndtr(bias + z / (1 - acceleration * z)))),
        "Student t": (mean - half, mean + half),
        "studentised": tuple(mean - ratio * error),
    }


def ours(a: np.ndarray, b: np.ndarray) -> Interval:
    """The interval of the package."""
    found = item_difference(a.tolist(), b.tolist(), [1.0] * len(a), seed=0, resamples=DRAWS)
    return (-np.inf, np.inf) if found.low is None else (found.low, found.high)


@cache
def _ours_paired(only_a: int, only_b: int, n: int) -> Interval:
    a, b = np.zeros(n), np.zeros(n)
    a[:only_a], b[only_a : only_a + only_b] = 1, 1
    return ours(a, b)


def holds(interval: Interval, truth: float) -> bool:
    """Whether an interval holds the true value, up to rounding."""
    return interval[0] - 1e-9 <= truth <= interval[1] + 1e-9


def shape_coverage(shape: str, n: int, replicates: int, compare: bool = True) -> dict[str, float]:
    """Return the share of intervals that hold the true mean, by method."""
    draw, truth = SHAPES[shape]
    rng, held = np.random.default_rng([n, list(SHAPES).index(shape)]), {}
    for _ in range(replicates):
        values = draw(rng, n)
        intervals = {"chosen": ours(values, np.zeros(n))}
        intervals |= others(values, rng) if compare else {}
        for name, interval in intervals.items():
            held[name] = held.get(name, 0) + holds(interval, truth)
    return {name: count / replicates for name, count in held.items()}


def paired_coverage(pair: str, n: int, replicates: int, compare: bool = True) -> dict[str, float]:
    """Return the share of intervals that hold the true difference of two models' shares of right answers."""
    p, q = PAIRED[pair]
    rng, held = np.random.default_rng([n, list(PAIRED).index(pair)]), {}
    for _ in range(replicates):
        a, b = rng.random(n) < p, rng.random(n) < q
        intervals = {"chosen": _ours_paired(int((a & ~b).sum()), int((b & ~a).sum()), n)}
        intervals |= others(a.astype(float) - b, rng) if compare else {}
        for name, interval in intervals.items():
            held[name] = held.get(name, 0) + holds(interval, p - q)
    return {name: count / replicates for name, count in held.items()}


def clustered_coverage(p: float, documents: int, replicates: int) -> dict[str, float]:
    """Five answers a document, whose share of right ones follows a beta distribution (an intraclass correlation of 1/3)."""
    rng, held = np.random.default_rng([documents, round(100 * p)]), {"chosen": 0, "answers as independent": 0}
    units = np.repeat(np.arange(documents), 5).tolist()
    for _ in range(replicates):
        right = rng.random((documents, 5)) < rng.beta(2 * p, 2 * (1 - p), (documents, 1))
        row = proportion("accuracy", right.ravel().tolist(), {}, units=units)
        held["chosen"] += holds((row.low, row.high), p)
        held["answers as independent"] += holds(wilson_interval(int(right.sum()), right.size), p)
    return {name: count / replicates for name, count in held.items()}


def main(path: str, replicates: int = 2_000) -> None:
    """Write the table."""
    simulations: dict[str, Callable[[int], dict[str, float]]] = {}
    for shape in SHAPES:
        simulations[f"mean, {shape}"] = partial(shape_coverage, shape, replicates=replicates)
    for pair in PAIRED:
        simulations[f"right by two models, {pair}"] = partial(paired_coverage, pair, replicates=replicates)
    for p in (0.5, 0.9):
        simulations[f"right in documents, {p}"] = partial(clustered_coverage, p, replicates=replicates)
    rows = []
    for n, (name, simulation) in product(SIZES, simulations.items()):
        rows.append({"data": name, "n": n, "coverage": simulation(n)})
        print(rows[-1], flush=True)
    command = f"python -m tests.support.interval_coverage {path}"
    versions = {"numpy": np.__version__, "scipy": scipy.__version__}
    result = {"command": command, "nominal": 0.95, "replicates": replicates, "versions": versions, "rows": rows}
    document = {"kind": "interval coverage", "version": 1, "result": result}
    Path(path).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:2])
