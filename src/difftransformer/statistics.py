"""Statistics of a comparison, in plain Python and numpy: no torch, no scipy.

Three rules, kept everywhere in the package:

* An interval over training is Student t over per-seed paired differences (`paired_difference`). One seed gives no such
  interval, and nothing else may pass for it.
* An interval over evaluation documents is a paired bootstrap (`bootstrap_difference`), and is always labelled so: it
  says how far another sample of documents might move the figure, and nothing about another training seed.
* A proportion has a Wilson interval (`wilson_interval`).
"""

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

from difftransformer.errors import EvaluationError, ShapeError
from difftransformer.results import PairedDifference, Statistic

CONFIDENCE = 0.95
RESAMPLES = 10_000

_RESAMPLED_UNITS_AT_ONCE = 1 << 20
"""Documents drawn in one numpy call of the bootstrap: bounds its memory to about 40 MB."""


def wilson_interval(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a proportion (E. B. Wilson 1927).

    The set of p with `|successes/trials - p| <= z sqrt(p (1 - p) / trials)`; it stays inside [0, 1] and has positive
    width at 0 and at `trials` successes, where the textbook interval has none.

    Args:
        successes: trials that succeeded, 0 to `trials`.
        trials: independent trials; 0 gives (0, 1), which is all that is known then.
        confidence: coverage, between 0 and 1.

    Returns:
        (low, high).

    Raises:
        EvaluationError: counts that are no counts, or a confidence outside (0, 1).
    """
    _check_confidence(confidence)
    if not 0 <= successes <= trials:
        raise EvaluationError(
            f"wilson_interval: {successes} successes of {trials} trials; need 0 <= successes <= trials"
        )
    if trials == 0:
        return 0.0, 1.0
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    proportion = successes / trials
    shrink = 1 + z * z / trials
    centre = (proportion + z * z / (2 * trials)) / shrink
    half = z / shrink * math.sqrt(proportion * (1 - proportion) / trials + z * z / (4 * trials * trials))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return low, high


@functools.lru_cache(maxsize=256)
def student_t_quantile(p: float, df: float) -> float:
    """The number t with P(T <= t) = p for Student's t with `df` degrees of freedom.

    Inverts, by bisection to the last bit, `P(|T| > t) = I_x(df/2, 1/2)` with `x = df / (df + t^2)`, where I is the
    regularised incomplete beta function by its continued fraction (DLMF 8.17.22).

    Args:
        p: probability, strictly between 0 and 1.
        df: degrees of freedom, positive; `math.inf` gives the normal quantile.

    Raises:
        EvaluationError: p or df outside its range.
    """
    if not 0 < p < 1:
        raise EvaluationError(f"student_t_quantile: p is {p}; need 0 < p < 1")
    if not df > 0:
        raise EvaluationError(f"student_t_quantile: df is {df}; need df > 0")
    if math.isinf(df):
        return NormalDist().inv_cdf(p)
    if p == 0.5:
        return 0.0
    tail = min(p, 1 - p)

    def is_below(t: float) -> bool:
        """Whether t lies below the answer; uses the tail or the centre, whichever is computed without cancellation."""
        x, y = df / (df + t * t), t * t / (df + t * t)
        if tail < 0.25:
            return _incomplete_beta(df / 2, 0.5, x, y) > 2 * tail
        return _incomplete_beta(0.5, df / 2, y, x) < 1 - 2 * tail

    low, high = 0.0, 1.0
    while is_below(high):
        low, high = high, 2 * high
        if math.isinf(high * high):
            raise EvaluationError(f"student_t_quantile: p = {p} with df = {df} lies beyond the floating-point range")
    while low < (middle := (low + high) / 2) < high:
        if is_below(middle):
            low = middle
        else:
            high = middle
    return math.copysign(high, p - 0.5)


def mean_and_standard_error(values: Sequence[float]) -> Statistic:
    """Mean over seeds and its standard error, `s / sqrt(n)` with s from n - 1; None with one seed.

    Raises:
        EvaluationError: no values.
    """
    count = len(values)
    if count == 0:
        raise EvaluationError("mean_and_standard_error: no values; give at least one seed's")
    mean = math.fsum(values) / count
    if count == 1:
        return Statistic(mean=mean, standard_error=None, seeds=1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Statistic(mean=mean, standard_error=math.sqrt(variance / count), seeds=count)


def paired_difference(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> PairedDifference:
    """Mean of a - b over seeds, with Student's t interval of the per-seed differences.

    Args:
        a: one value a seed.
        b: the other model's values, for the same seeds in the same order.
        confidence: coverage of the interval.

    Returns:
        The difference; with one seed `low` and `high` are None and the method is "none".

    Raises:
        ShapeError: a and b differ in length.
        EvaluationError: they are empty, or the confidence lies outside (0, 1).
    """
    _check_confidence(confidence)
    if len(a) != len(b):
        raise ShapeError(f"paired_difference: {len(a)} values against {len(b)}; give one of each for every seed")
    statistic = mean_and_standard_error([x - y for x, y in zip(a, b, strict=True)])
    if statistic.standard_error is None:
        return PairedDifference(mean=statistic.mean, low=None, high=None, confidence=confidence, interval_method="none")
    half = student_t_quantile(0.5 + confidence / 2, statistic.seeds - 1) * statistic.standard_error
    return PairedDifference(
        mean=statistic.mean,
        low=statistic.mean - half,
        high=statistic.mean + half,
        confidence=confidence,
        interval_method="student-t over seeds",
    )


def bootstrap_difference(
    a_units: Sequence[float],
    b_units: Sequence[float],
    a_weights: Sequence[float],
    b_weights: Sequence[float] | None = None,
    *,
    seed: int,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> PairedDifference:
    """Difference of two ratios of sums, with a percentile bootstrap interval over paired evaluation documents.

    The figure is `sum(a_units)/sum(a_weights) - sum(b_units)/sum(b_weights)`: nats over tokens, nats over bytes, or
    right answers over questions. Each resample draws whole documents with replacement, the same ones for both models.

    Args:
        a_units: one number a document, such as its summed loss in nats under model A.
        b_units: the same documents under model B, in the same order.
        a_weights: one number a document, such as its tokens.
        b_weights: the same for model B; unset = `a_weights`.
        seed: seed of the draws: the same seed gives the same interval.
        resamples: how many sets of documents are drawn.
        confidence: coverage of the interval.

    Returns:
        The difference, labelled "bootstrap over evaluation documents"; one document gives no interval (method "none").

    Raises:
        ShapeError: the sequences differ in length.
        EvaluationError: no documents, weights that are not positive, or no resamples.
    """
    _check_confidence(confidence)
    lengths = {len(a_units), len(b_units), len(a_weights), len(a_weights if b_weights is None else b_weights)}
    if len(lengths) != 1:
        raise ShapeError(
            f"bootstrap_difference: sequences of lengths {sorted(lengths)}; give one number a document in each"
        )
    (count,) = lengths
    if count == 0 or resamples < 1:
        raise EvaluationError(
            f"bootstrap_difference: {count} documents and {resamples} resamples; need at least one of each"
        )
    columns = np.array([a_units, a_weights, b_units, a_weights if b_weights is None else b_weights], dtype=np.float64)
    if not (columns[[1, 3]] > 0).all():
        raise EvaluationError("bootstrap_difference: a document's weight is not positive; leave out empty documents")

    def difference(sums: np.ndarray) -> np.ndarray:
        return np.asarray(sums[0] / sums[1] - sums[2] / sums[3])

    mean = float(difference(columns.sum(axis=1)))
    if count == 1:
        return PairedDifference(mean=mean, low=None, high=None, confidence=confidence, interval_method="none")
    generator = np.random.default_rng(seed)
    batch = max(1, _RESAMPLED_UNITS_AT_ONCE // count)
    drawn = np.empty(resamples)
    for start in range(0, resamples, batch):
        stop = min(start + batch, resamples)
        documents = generator.integers(count, size=(stop - start, count))
        drawn[start:stop] = difference(np.stack([column[documents].sum(axis=1) for column in columns]))
    low, high = np.quantile(drawn, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return PairedDifference(
        mean=mean,
        low=float(low),
        high=float(high),
        confidence=confidence,
        interval_method="bootstrap over evaluation documents",
    )


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise EvaluationError(f"confidence is {confidence}; need 0 < confidence < 1, such as 0.95")


def _incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """Regularised incomplete beta function I_x(a, b); `y` is 1 - x, given apart to keep its digits near x = 1."""
    if x <= 0:
        return 0.0
    if y <= 0:
        return 1.0
    if x > (a + 1) / (a + b + 2):
        return 1.0 - _incomplete_beta(b, a, y, x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log(y)
    return math.exp(log_front) / a / _beta_continued_fraction(a, b, x)


def _beta_continued_fraction(a: float, b: float, x: float) -> float:
    """`1 + d1/(1 + d2/(1 + ...))` of DLMF 8.17.22, from the front by the modified Lentz method."""
    tiny = 1e-300
    value, c, d = 1.0, 1.0, 0.0
    for n in range(1, 100_000):
        m = n // 2
        if n % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1.0 / ((1.0 + term * d) or tiny)
        c = (1.0 + term / c) or tiny
        value *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return value
