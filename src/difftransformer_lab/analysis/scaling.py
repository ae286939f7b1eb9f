"""Power laws over model sizes and training tokens, and how much less of either an arm needs for the reference's loss.

The law is L = a N^-b + c. For each exponent b of a grid, a and c are those of least squares, so that no fit can fail to
converge. Intervals are of a bootstrap over seeds: residuals of the runs around the mean of their setting are drawn with
replacement, the same seed for both arms, and enlarged by sqrt(n / (n - 1)) for the mean that was estimated from them.
"""

import math
from dataclasses import dataclass

import numpy as np

from difftransformer.errors import ResultsError

from ..results import StudyArm, StudyAxis, StudyFigure
from ..statistics import CONFIDENCE, mean_and_standard_error
from .compare import paired_seeds
from .frame import Point, Records

DRAWS = 2_000
EXPONENTS = np.geomspace(0.02, 2.0, 200)
LEAST_SETTINGS = 3


@dataclass(frozen=True)
class PowerLaw:
    """L = a N^-b + c, fitted to each row of losses: arrays of shape (draws,)."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray

    def at(self, n: np.ndarray) -> np.ndarray:
        """Return the losses at each n (S,), of shape (draws, S)."""
        return self.a[:, None] * n ** -self.b[:, None] + self.c[:, None]

    def inverse(self, loss: np.ndarray) -> np.ndarray:
        """Return the n at which each law has a loss (draws,); infinite where it never falls as low."""
        with np.errstate(divide="ignore", invalid="ignore"):
            needed = ((loss - self.c) / self.a) ** (-1 / self.b)
        return np.where(loss > self.c, needed, np.inf)


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How much of an axis an arm needs for the reference's loss, as a share of what the reference has.

    Attributes:
        share: 0 and infinity where the loss lies beyond the arm's smallest and largest setting.
        outside: Whether the share is extrapolated, or is not known for that reason.
    """

    share: float
    low: float
    high: float
    outside: bool


@dataclass(frozen=True, kw_only=True)
class Need:
    """What an arm needs to reach the reference's loss at one setting.

    Attributes:
        fit: By the fitted power laws.
        raw: By linear interpolation of the mean losses over log n.
    """

    axis: StudyAxis
    arm: StudyArm
    n: float
    fit: Amount
    raw: Amount


@dataclass(frozen=True, kw_only=True)
class Trend:
    """An arm's losses over one axis, at the largest value of the other, with the law fitted to their means.

    Attributes:
        n: Parameters or tokens (S,).
        error: Standard error (S,), zero with one seed.
        exponents: Interval of b.
    """

    axis: StudyAxis
    arm: StudyArm
    n: np.ndarray
    loss: np.ndarray
    error: np.ndarray
    law: PowerLaw
    exponents: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Scaling:
    figure: StudyFigure
    trends: list[Trend]
    needs: list[Need]
    gaps: list[str]


def fit_power_law(n: np.ndarray, losses: np.ndarray) -> PowerLaw:
    """Fit L = a N^-b + c by least squares, with a and c at least 0.

    Args:
        n: Parameters or tokens, (S,), positive.
        losses: A row for each fit, (draws, S).
    """
    scaled, mean = n / n[-1], losses.mean(1)
    best = np.full(len(losses), np.inf)
    a, b, c = (np.zeros(len(losses)) for _ in range(3))
    for exponent in EXPONENTS:
        x = scaled**-exponent
        deviation = x - x.mean()
        slope = np.maximum(losses @ deviation / (deviation @ deviation), 0.0)
        constant = mean - slope * x.mean()
        slope = np.where(constant < 0, losses @ x / (x @ x), slope)
        constant = np.maximum(constant, 0.0)
        residual = ((losses - slope[:, None] * x - constant[:, None]) ** 2).sum(1)
        better = residual < best
        best, b = np.where(better, residual, best), np.where(better, exponent, b)
        a, c = np.where(better, slope, a), np.where(better, constant, c)
    return PowerLaw(a * n[-1] ** b, b, c)


def interpolate(n: np.ndarray, losses: np.ndarray, loss: np.ndarray) -> np.ndarray:
    """Return the n at which each row of losses (draws, S) falls to a loss (draws,), linear in log n.

    The result is 0 where the loss at the smallest n is lower already, and infinity where no loss is as low.
    """
    crossings = np.full(len(losses), np.inf)
    for left in reversed(range(len(n) - 1)):
        high, low = losses[:, left], losses[:, left + 1]
        crosses = (low <= loss) & (loss <= high)
        share = np.divide(high - loss, high - low, out=np.zeros_like(loss), where=crosses & (high > low))
        crossings = np.where(crosses, n[left] * (n[left + 1] / n[left]) ** share, crossings)
    return np.where(losses[:, 0] < loss, 0.0, crossings)


def scaling_of(records: Records) -> Scaling:
    """Fit the losses of every arm over size, at the most tokens, and over tokens, at the largest size."""
    trends: list[Trend] = []
    needs: list[Need] = []
    gaps: list[str] = []
    for name in ("size", "tokens"):
        axis = next((axis for axis in records.index.axes if axis.name == name), None)
        if axis is None:
            raise ResultsError(f"{records.path}: a study of scaling has the axes size and tokens, but no {name} here")
        seen: set[str] = set()
        for arm in records.others:
            paired = _paired(records, axis, arm)
            if (count := len(paired.values)) < LEAST_SETTINGS:
                gaps.append(f"{arm.label} over {axis.label or name}: {count} settings have paired runs; a law needs 3")
                continue
            draws = paired.draws()
            for column, one in enumerate((arm, records.reference)):
                if one.name not in seen:
                    trends.append(_trend(paired, draws, axis, one, column))
                    seen.add(one.name)
            needs += _needs(paired, draws, axis, arm)
    return Scaling(figure=records.index.figures[0], trends=trends, needs=needs, gaps=gaps)


@dataclass(frozen=True)
class _Paired:
    """Losses of an arm (column 0) and the reference (column 1) at each setting: n (S, 2), and (seeds, 2) each."""

    n: np.ndarray
    values: list[np.ndarray]

    @property
    def means(self) -> np.ndarray:
        return np.array([values.mean(0) for values in self.values])

    def draws(self) -> np.ndarray:
        residuals = [
            (values - values.mean(0)) * math.sqrt(len(values) / (len(values) - 1))
            for values in self.values
            if len(values) > 1
        ]
        if not residuals:
            return np.repeat(self.means[None], DRAWS, axis=0)
        pool, generator = np.concatenate(residuals), np.random.default_rng(0)
        noise = [pool[generator.integers(len(pool), size=(DRAWS, len(values)))].mean(1) for values in self.values]
        return self.means + np.stack(noise, axis=1)


def _paired(records: Records, axis: StudyAxis, arm: StudyArm) -> _Paired:
    figure, reference = records.index.figures[0], records.index.reference
    largest = [one.values[-1] for one in records.index.axes]
    place = records.index.axes.index(axis)
    settings = []
    for name in axis.values:
        point: Point = (*largest[:place], name, *largest[place + 1 :])
        runs = records.ended(arm.name, point), records.ended(reference, point)
        own, others = (records.numbers(figure, name, point) for name in (arm.name, reference))
        seeds = [seed for seed in paired_seeds(records, arm.name, reference, point) if seed in own and seed in others]
        rows = [[own[seed].value, others[seed].value] for seed in seeds]
        if rows:
            first = [next(iter(by_seed.values())) for by_seed in runs]
            n = [run.parameters if axis.name == "size" else run.train_tokens for run in first]
            settings.append((n, np.array(rows, dtype=np.float64)))
    settings.sort(key=lambda setting: setting[0])
    sizes = np.array([n for n, _ in settings], dtype=np.float64).reshape(-1, 2)
    return _Paired(sizes, [values for _, values in settings])


def _trend(paired: _Paired, draws: np.ndarray, axis: StudyAxis, arm: StudyArm, column: int) -> Trend:
    n, loss = paired.n[:, column], paired.means[:, column]
    errors = [mean_and_standard_error(values[:, column].tolist()).standard_error or 0.0 for values in paired.values]
    exponents = _interval(fit_power_law(n, draws[:, :, column]).b)
    law = fit_power_law(n, loss[None])
    return Trend(axis=axis, arm=arm, n=n, loss=loss, error=np.array(errors), law=law, exponents=exponents)


def _needs(paired: _Paired, draws: np.ndarray, axis: StudyAxis, arm: StudyArm) -> list[Need]:
    every = np.concatenate([paired.means[None], draws])  # the first row is the estimate, the others make its interval
    mine, other = paired.n.T
    law, reference = fit_power_law(mine, every[:, :, 0]), fit_power_law(other, every[:, :, 1])
    levels = reference.at(other)
    needs = []
    for place, n in enumerate(other):
        fit = _amount(law.inverse(levels[:, place]), n, mine)
        raw = _amount(interpolate(mine, every[:, :, 0], every[:, place, 1]), n, mine)
        needs.append(Need(axis=axis, arm=arm, n=float(n), fit=fit, raw=raw))
    return needs


def _amount(needed: np.ndarray, n: float, measured: np.ndarray) -> Amount:
    low, high = _interval(needed[1:] / n)
    outside = not measured[0] <= needed[0] <= measured[-1]
    return Amount(share=float(needed[0] / n), low=low, high=high, outside=bool(outside))


def _interval(values: np.ndarray) -> tuple[float, float]:
    """Return the percentile interval; values may be infinite."""
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, tail, method="lower"), np.quantile(values, 1 - tail, method="higher")
    return float(low), float(high)
