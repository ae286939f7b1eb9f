"""Statistics of a comparison. Nothing here needs torch.

Four rules hold everywhere in the package:

* An interval over training runs is Student's t over the per-seed paired differences (`paired_difference`). With one seed
  there is no such interval, and no other interval takes its place.
* An interval over evaluation items is that of `item_difference` and is always labelled as one. It says how much the figure
  would vary over samples of items. It says nothing about another training seed.
* A proportion has a Wilson interval (`wilson_interval`). Where several answers share a document, the document is the unit
  (`effective_trials`).
* Several differences on a page are judged by p-values after Holm's correction (`holm`).

`docs/evaluation.md` shows how often these intervals cover. scipy is imported inside the functions that use it, because the
import is slow.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from difftransformer.errors import EvaluationError, ShapeError
from difftransformer.results import PairedDifference, Statistic

CONFIDENCE = 0.95
RESAMPLES = 9_999
FEW_ITEMS = 20
"""Below this number of items an interval of skewed scores may cover less often than it says, and pages say so."""

_RESAMPLED_ITEMS_AT_ONCE = 1 << 20
"""Items drawn in one numpy call of the bootstrap; this bounds its memory to about 40 MB."""

_ROUNDING = 1e-12


def wilson_interval(successes: float, trials: float, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion (E. B. Wilson 1927).

    The interval is the set of p with `|successes/trials - p| <= z sqrt(p (1 - p) / trials)`. It stays inside [0, 1] and
    has positive width even at 0 and at `trials` successes, where the normal approximation has none.

    Args:
        successes: Number of successful trials, from 0 to `trials`. Both numbers are fractions where trials are effective
            ones (`effective_trials`).
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
    z, failures = NormalDist().inv_cdf(0.5 + confidence / 2), trials - successes
    middle = successes + z * z / 2
    half = z * math.sqrt(successes * failures / trials + z * z / 4)
    low = 0.0 if successes == 0 else (middle - half) / (trials + z * z)
    high = 1.0 if failures == 0 else (middle + half) / (trials + z * z)
    return low, high


def effective_trials(successes: Sequence[float], trials: Sequence[float], confidence: float = CONFIDENCE) -> float:
    """Return how many independent trials are worth as much as answers that share documents.

    The number is p (1 - p) / SE^2, with the standard error over documents and Student's t for few of them (E. L. Korn and
    B. I. Graubard, Survey Methodology 24, 1998). It is at most the number of answers, and at least what remains where all
    answers of a document agree: the number of documents if these have equally many answers.

    Args:
        successes: Right answers of each document.
        trials: Answers of each document, at least 1.
        confidence: Coverage of the interval that is made with it.
    """
    from scipy.special import stdtrit

    count, total = len(trials), math.fsum(trials)
    least = total**2 / math.fsum(n * n for n in trials)
    p, error = ratio(successes, trials)
    if not error:
        return total if 0 < p < 1 and error is not None else least
    quantile = 0.5 + confidence / 2
    few = NormalDist().inv_cdf(quantile) / float(stdtrit(count - 1, quantile))
    return min(total, max(least, p * (1 - p) * (few / error) ** 2))


def ratio(values: Sequence[float], weights: Sequence[float]) -> tuple[float, float | None]:
    """Return sum(values) / sum(weights) and its standard error, which is None for one item.

    The error is that of the residuals value - ratio * weight (W. G. Cochran, Sampling Techniques, section 6.4). For equal
    weights it is s / sqrt(n). Without any weight the ratio is undefined, NaN.
    """
    count, total = len(values), math.fsum(weights)
    if not total:
        return math.nan, None
    found = math.fsum(values) / total
    if count == 1:
        return found, None
    squares = math.fsum((value - found * weight) ** 2 for value, weight in zip(values, weights, strict=True))
    return found, math.sqrt(squares * count / (count - 1)) / total


def mean_and_standard_error(values: Sequence[float]) -> Statistic:
    """Return the mean over seeds and its standard error, `s / sqrt(n)` with s from n - 1, or None with one seed.

    Raises:
        EvaluationError: There are no values.
    """
    if not values:
        raise EvaluationError("mean_and_standard_error: no values; give the value of at least one seed")
    mean, error = ratio(values, [1.0] * len(values))
    return Statistic(mean=mean, standard_error=error, seeds=len(values))


def paired_difference(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> PairedDifference:
    """Return the mean of a - b over seeds, with Student's t interval and test of the per-seed differences.

    Args:
        a: One value per seed.
        b: Values of the other model for the same seeds, in the same order.
        confidence: Coverage of the interval, between 0 and 1.

    Returns:
        The difference. With one seed, and where all seeds differ by the same amount, `low` and `high` are None and the
        method is "none"; the p-value is 1 where a and b are equal in every seed, as at a ceiling, and None otherwise.

    Raises:
        ShapeError: a and b differ in length.
        EvaluationError: a and b are empty, or the confidence lies outside (0, 1).
    """
    _check_confidence(confidence)
    if len(a) != len(b):
        raise ShapeError(f"paired_difference: {len(a)} values against {len(b)}; give one of each for every seed")
    statistic = mean_and_standard_error([x - y for x, y in zip(a, b, strict=True)])
    mean, error = statistic.mean, statistic.standard_error
    if not error:
        return replace(_no_interval(mean, confidence), p_value=None if mean or error is None else 1.0)
    from scipy.special import stdtr, stdtrit

    half = float(stdtrit(statistic.seeds - 1, 0.5 + confidence / 2)) * error
    p_value = 2 * float(stdtr(statistic.seeds - 1, -abs(mean) / error))
    return PairedDifference(
        mean=mean,
        low=mean - half,
        high=mean + half,
        confidence=confidence,
        interval_method="student-t over seeds",
        p_value=p_value,
    )


def item_difference(
    a_scores: Sequence[float],
    b_scores: Sequence[float],
    a_weights: Sequence[float],
    b_weights: Sequence[float] | None = None,
    *,
    seed: int,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> PairedDifference:
    """Return the difference of two ratios of sums over the same items, with an interval and a test over items.

    The figure is `sum(a_scores)/sum(a_weights) - sum(b_scores)/sum(b_weights)`, for example nats per token, nats per byte,
    or right answers per question.

    * Items that are right or wrong: McNemar's mid-p test and the mid-p interval of `_paired_binary`.
    * Other scores: on each side the bound that is farther out of Student's t and of the studentised bootstrap (P. Hall,
      The Bootstrap and Edgeworth Expansion, 1992) over the items' residuals (Cochran, section 6.4). The first holds for
      heavy tails, the second for skewed scores, and each fails where the other holds. Resamples in which all items are
      equal have no studentised mean and are left out.
    * Items that all differ by the same amount: no spread can be estimated. Shares of right answers have the interval for
      items of another kind that n items did not show, other scores have none.

    Args:
        a_scores: One number per item, such as its summed loss in nats under model A.
        b_scores: The same items under model B, in the same order.
        a_weights: One number per item, such as its number of tokens.
        b_weights: The same for model B; defaults to `a_weights`.
        seed: Seed of the draws. The same seed gives the same interval.
        resamples: Number of resamples.
        confidence: Coverage of the interval, between 0 and 1.

    Returns:
        The difference; `interval_method` names the method. One item gives no interval (method "none").

    Raises:
        ShapeError: The sequences differ in length.
        EvaluationError: There are no items or no resamples, or a weight is not positive.
    """
    _check_confidence(confidence)
    columns = (a_scores, a_weights, b_scores, a_weights if b_weights is None else b_weights)
    lengths = {len(column) for column in columns}
    if len(lengths) != 1:
        raise ShapeError(f"item_difference: sequences of lengths {sorted(lengths)}; give one number per item in each")
    (count,) = lengths
    if count == 0 or resamples < 1:
        raise EvaluationError(f"item_difference: {count} items and {resamples} resamples; need at least one of each")
    a, a_sizes, b, b_sizes = np.array(columns, dtype=np.float64)
    if not (a_sizes > 0).all() or not (b_sizes > 0).all():
        raise EvaluationError("item_difference: an item's weight is not positive; leave out empty items")
    first, second = a.sum() / a_sizes.sum(), b.sum() / b_sizes.sum()
    mean = float(first - second)
    if count == 1:
        return _no_interval(mean, confidence)
    found = PairedDifference(
        mean=mean, low=None, high=None, confidence=confidence, interval_method="mid-p over items", p_value=None
    )
    counted = _counted(a, a_sizes) and _counted(b, b_sizes)
    if counted and max(a_sizes.max(), b_sizes.max()) == 1:
        low, high, p_value = _paired_binary(int((a > b).sum()), int((a < b).sum()), count, confidence)
        return replace(found, low=low, high=high, p_value=p_value)
    # Residuals of both ratios: the mean of `rows` is the difference, and their variance that of its linear approximation.
    rows = mean + (a - first * a_sizes) / a_sizes.mean() - (b - second * b_sizes) / b_sizes.mean()
    if np.ptp(rows) <= _ROUNDING * max(abs(first), abs(second)):
        if not counted:
            return _no_interval(mean, confidence)
        other = 1 - (1 - confidence) ** (1 / count)
        low, high, p_value = mean - other * (1 + mean), mean + other * (1 - mean), (1 + abs(mean)) ** -count
        return replace(found, low=low, high=high, p_value=p_value)
    low, high, p_value = _studentised(rows, seed, resamples, confidence)
    if counted:
        low, high = max(-1.0, low), min(1.0, high)
    return replace(found, low=low, high=high, p_value=p_value, interval_method="studentised over items")


def detectable(seeds: int, comparisons: int = 1, power: float = 0.8, alpha: float = 0.05) -> float:
    """Return the smallest true effect that a paired comparison over seeds shows with the given probability.

    The effect is in standard deviations of the per-seed paired differences. It is that of the two-sided t test at level
    `alpha / comparisons`, the level of the smallest p-value under Holm's correction, from the noncentral t distribution
    (J. Cohen, Statistical Power Analysis for the Behavioral Sciences, 1988, chapter 2).

    Args:
        seeds: Number of paired differences.
        comparisons: Number of comparisons that are corrected together.
        power: Probability of showing the effect, above `alpha` and below 1.
        alpha: Level of the test, between 0 and 1.

    Returns:
        The effect; infinity for fewer than two seeds, which show nothing.

    Raises:
        EvaluationError: `comparisons`, `power` or `alpha` is out of range.
    """
    if comparisons < 1 or not 0 < alpha < power < 1:
        raise EvaluationError(
            f"detectable: {comparisons} comparisons, power {power} and alpha {alpha}; need at least 1 comparison and "
            "0 < alpha < power < 1"
        )
    if seeds < 2:
        return math.inf
    from scipy.special import nctdtrinc, stdtrit

    bound = -float(stdtrit(seeds - 1, alpha / comparisons / 2))
    # The other tail is left out: where the power is above alpha it adds next to nothing.
    return float(nctdtrinc(seeds - 1, 1 - power, bound)) / math.sqrt(seeds)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return p-values adjusted for their number by S. Holm's step-down method (1979); None stays None and does not count.

    Among true null hypotheses, the probability that the smallest adjusted value is at most alpha is at most alpha.
    """
    known = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, index) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        adjusted[index] = largest
    return adjusted


def holm_differences(differences: Sequence[PairedDifference], about: Sequence[Hashable]) -> list[PairedDifference]:
    """Return the differences of one page with their p-values after Holm's correction.

    Args:
        differences: All differences of the page.
        about: What each difference is about. Those about the same thing, such as a loss in nats per token and in bits per
            byte, are one comparison with the largest of their p-values.
    """
    largest: dict[Hashable, float] = {}
    for one, what in zip(differences, about, strict=True):
        if one.p_value is not None:
            largest[what] = max(one.p_value, largest.get(what, 0.0))
    corrected = dict(zip(largest, holm(list(largest.values())), strict=True))
    return [
        one if one.p_value is None else replace(one, p_holm=corrected[what], comparisons=len(largest))
        for one, what in zip(differences, about, strict=True)
    ]


def _no_interval(mean: float, confidence: float) -> PairedDifference:
    return PairedDifference(mean=mean, low=None, high=None, confidence=confidence, interval_method="none")


def _counted(scores: np.ndarray, weights: np.ndarray) -> bool:
    """Whether scores are numbers of right answers among `weights`."""
    whole = (scores == scores.round()).all() and (weights == weights.round()).all()
    return bool(whole and (scores >= 0).all() and (scores <= weights).all())


def _studentised(rows: np.ndarray, seed: int, resamples: int, confidence: float) -> tuple[float, float, float]:
    """Return low, high and the two-sided p-value of the mean's being 0."""
    from scipy.special import stdtr, stdtrit

    count, mean = len(rows), float(rows.mean())
    centred = rows - mean
    error = float(centred.std(ddof=1)) / math.sqrt(count)
    generator = np.random.default_rng(seed)
    batch = max(1, _RESAMPLED_ITEMS_AT_ONCE // count)
    parts = []
    for start in range(0, resamples, batch):
        drawn = centred[generator.integers(count, size=(min(batch, resamples - start), count))]
        errors = drawn.std(axis=1, ddof=1) / math.sqrt(count)
        spread = errors > _ROUNDING * error
        parts.append(drawn.mean(axis=1)[spread] / errors[spread])
    ratios = np.sort(np.concatenate(parts))
    tail, kept = (1 - confidence) / 2, len(ratios)
    student = float(stdtrit(count - 1, 1 - tail))
    outside = min(max(math.floor(tail * (kept + 1)), 1), max(kept, 1))
    left, right = (-ratios[outside - 1], ratios[kept - outside]) if kept else (student, student)
    t = mean / error
    beyond = int((ratios >= t).sum() if t > 0 else (ratios <= t).sum())
    p_value = min(1.0, 2 * max(float(stdtr(count - 1, -abs(t))), (beyond + 1) / (kept + 1)))
    return mean - max(student, float(right)) * error, mean + max(student, float(left)) * error, p_value


def _paired_binary(only_a: int, only_b: int, count: int, confidence: float) -> tuple[float, float, float]:
    """Return low, high and p-value of the difference of two paired proportions.

    The p-value is that of McNemar's mid-p test (M. W. Fagerland et al., BMC Medical Research Methodology 13, 2013). The
    interval holds the differences that a mid-p test of `only_a - only_b` does not reject, with the share of discordant
    items at its maximum-likelihood value for each difference (T. Tango, Statistics in Medicine 17, 1998). It holds zero
    wherever McNemar's test does not reject zero.

    Args:
        only_a: Items that model A alone has right.
        only_b: Items that model B alone has right.
        count: All items.
        confidence: Coverage of the interval.
    """
    from scipy.optimize import brentq
    from scipy.special import bdtr

    found, tail = only_a - only_b, (1 - confidence) / 2
    size = 1 << (2 * count + 1).bit_length()
    unit = np.exp(-2j * np.pi * np.arange(size) / size)
    places = np.arange(-count, count + 1)

    def excess(difference: float, side: int) -> float:
        """Mid-p of a count at least as far to this side as `found`, minus the tail."""
        linear = (2 * count - found) * difference - only_a - only_b
        square = max(0.0, linear**2 + 8 * count * only_b * difference * (1 - difference))
        b = max(0.0, -difference, (math.sqrt(square) - linear) / (4 * count))
        a = max(0.0, b + difference)
        chances = np.fft.ifft((a * unit + b / unit + (1 - a - b)) ** count).real[places % size]
        return float(chances[side * (places - found) > 0].sum() + chances[found + count] / 2 - tail)

    def bound(side: int) -> float:
        if found == -side * count:
            return float(-side)
        return float(brentq(excess, -side * (1 - 1e-12), found / count, args=(side,), xtol=1e-10))

    low, high = bound(1), bound(-1)
    discordant, fewer = only_a + only_b, min(only_a, only_b)
    p_value = 1.0
    if found:
        exactly = float(bdtr(fewer, discordant, 0.5)) - (float(bdtr(fewer - 1, discordant, 0.5)) if fewer else 0.0)
        p_value = min(1.0, 2 * float(bdtr(fewer, discordant, 0.5)) - exactly)
    if p_value > 1 - confidence:
        low, high = min(low, 0.0), max(high, 0.0)
    return low, high, p_value


def _check_confidence(confidence: float) -> None:
    if not 0 < confidence < 1:
        raise EvaluationError(f"confidence is {confidence}; need 0 < confidence < 1, such as 0.95")
