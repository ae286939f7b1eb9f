"""Statistics of a comparison. Nothing here needs torch.

Three rules hold everywhere in the package:

* An interval over training runs is Student's t over the per-seed paired differences (`paired_difference`). With one seed
  there is no such interval, and no other interval takes its place.
* An interval over evaluation documents is a paired bootstrap (`bootstrap_difference`) and is always labelled as one. It
  says how much the figure would vary over samples of documents. It says nothing about another training seed.
* A proportion has a Wilson interval (`wilson_interval`).

scipy is imported inside the functions that use it, because the import is slow.
"""

import math
from collections.abc import Sequence

import numpy as np

from difftransformer.errors import EvaluationError, ShapeError
from difftransformer.results import PairedDifference, Statistic

CONFIDENCE = 0.95
RESAMPLES = 10_000

_RESAMPLED_UNITS_AT_ONCE = 1 << 20
"""Documents drawn in one numpy call of the bootstrap; this bounds its memory to about 40 MB."""


def wilson_interval(successes: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion (E. B. Wilson 1927).

    The interval is the set of p with `|successes/trials - p| <= z sqrt(p (1 - p) / trials)`. It stays inside [0, 1] and
    has positive width even at 0 and at `trials` successes, where the normal approximation has none.

    Args:
        successes: Number of successful trials, from 0 to `trials`.
        trials: Number of independent trials; 0 gives (0, 1).
        confidence: Coverage of the interval, between 0 and 1.

    Returns:
        (low, high).

    Raises:
        EvaluationError: The counts are impossible, or the confidence lies outside (0, 1).
    """
    _check_confidence(confidence)
    if not 0 <= successes <= trials:
        raise EvaluationError(
            f"wilson_interval: {successes} successes of {trials} trials; need 0 <= successes <= trials"
        )
    if trials == 0:
        return 0.0, 1.0
    from scipy.stats import binomtest

    interval = binomtest(successes, trials).proportion_ci(confidence, method="wilson")
    return float(interval.low), float(interval.high)


def mean_and_standard_error(values: Sequence[float]) -> Statistic:
    """Return the mean over seeds and its standard error, `s / sqrt(n)` with s from n - 1, or None with one seed.

    Raises:
        EvaluationError: There are no values.
    """
    count = len(values)
    if count == 0:
        raise EvaluationError("mean_and_standard_error: no values; give the value of at least one seed")
    mean = math.fsum(values) / count
    if count == 1:
        return Statistic(mean=mean, standard_error=None, seeds=1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Statistic(mean=mean, standard_error=math.sqrt(variance / count), seeds=count)


def paired_difference(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> PairedDifference:
    """Return the mean of a - b over seeds, with Student's t interval of the per-seed differences.

    Args:
        a: One value per seed.
        b: Values of the other model for the same seeds, in the same order.
        confidence: Coverage of the interval, between 0 and 1.

    Returns:
        The difference. With one seed `low` and `high` are None and the method is "none".

    Raises:
        ShapeError: a and b differ in length.
        EvaluationError: a and b are empty, or the confidence lies outside (0, 1).
    """
    _check_confidence(confidence)
    if len(a) != len(b):
        raise ShapeError(f"paired_difference: {len(a)} values against {len(b)}; give one of each for every seed")
    statistic = mean_and_standard_error([x - y for x, y in zip(a, b, strict=True)])
    if statistic.standard_error is None:
        return PairedDifference(mean=statistic.mean, low=None, high=None, confidence=confidence, interval_method="none")
    from scipy.special import stdtrit

    half = float(stdtrit(statistic.seeds - 1, 0.5 + confidence / 2)) * statistic.standard_error
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
    """Return the difference of two ratios of sums, with a percentile bootstrap interval over paired documents.

    The figure is `sum(a_units)/sum(a_weights) - sum(b_units)/sum(b_weights)`, for example nats per token, nats per byte,
    or correct answers per question. Each resample draws whole documents with replacement, the same ones for both models.

    Args:
        a_units: One number per document, such as its summed loss in nats under model A.
        b_units: The same documents under model B, in the same order.
        a_weights: One number per document, such as its number of tokens.
        b_weights: The same for model B; defaults to `a_weights`.
        seed: Seed of the draws. The same seed gives the same interval.
        resamples: Number of resamples.
        confidence: Coverage of the interval, between 0 and 1.

    Returns:
        The difference, labelled "bootstrap over evaluation documents". One document gives no interval (method "none").

    Raises:
        ShapeError: The sequences differ in length.
        EvaluationError: There are no documents or no resamples, or a weight is not positive.
    """
    _check_confidence(confidence)
    lengths = {len(a_units), len(b_units), len(a_weights), len(a_weights if b_weights is None else b_weights)}
    if len(lengths) != 1:
        raise ShapeError(
            f"bootstrap_difference: sequences of lengths {sorted(lengths)}; give one number per document in each"
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
