"""Statistics of a comparison. Nothing here needs torch.

Five rules hold everywhere in the package:

* An interval over training runs is Student's t over the per-seed paired differences (`paired_difference`). With one seed
  there is no such interval, and no other interval takes its place.
* A contrast that a study planned is decided by the exact sign-flip test of 10 or more paired differences (`sign_flip`), by
  Student's t of fewer, or by Welch's test where its groups are independent (`welch`).
* An interval over evaluation items is made by `item_difference` and is always labelled as one. It says how much the figure
  would vary over samples of items. It says nothing about another training seed.
* A proportion has a Wilson interval (`wilson_interval`). Where several answers share a document, the document is the unit
  (`effective_trials`).
* Several differences on a page are judged by p-values after Holm's correction (`holm`).

`docs/evaluation.md` shows how often these intervals cover. scipy is imported inside the functions that use it,
because the import is slow.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist

import numpy as np

from difftransformer.errors import EvaluationError

from .results import IntervalMethod, PairedDifference, Statistic

CONFIDENCE = 0.95
POWER = 0.8
RESAMPLES = 9_999
FEW_ITEMS = 20
"""Below this number of items an interval of skewed scores may cover less often than it says, and pages say so."""

_RESAMPLED_ITEMS_AT_ONCE = 1 << 20
"""Items drawn in one numpy call of the bootstrap; this bounds its memory to about 40 MB."""

_ROUNDING = 1e-12

MOST_EXACT_SEEDS = 20
"""Up to this number of seeds all 2^n sign patterns are counted; above it, patterns are drawn."""

_DRAWN_PATTERNS = 199_999


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion (E. B. Wilson 1927).

    The interval is the set of p with `|successes/trials - p| <= z sqrt(p (1 - p) / trials)`. It stays inside [0, 1] and
    has positive width even at 0 and at `trials` successes, where the normal approximation has none.

    Args:
        successes: Number of successful trials, from 0 to `trials`. Both numbers are fractions where trials are effective
            ones (`effective_trials`).
        trials: Number of independent trials; 0 gives (0, 1).

    Returns:
        (low, high).
    """
    if trials == 0:
        return 0.0, 1.0
    z, failures = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2), trials - successes
    middle = successes + z * z / 2
    half = z * math.sqrt(successes * failures / trials + z * z / 4)
    low = 0.0 if successes == 0 else (middle - half) / (trials + z * z)
    high = 1.0 if failures == 0 else (middle + half) / (trials + z * z)
    return low, high


def effective_trials(successes: Sequence[float], trials: Sequence[float]) -> float:
    """Return how many independent trials are worth as much as answers that share documents.

    The number is p (1 - p) / SE^2, with the standard error over documents and Student's t for few of them (E. L. Korn and
    B. I. Graubard, Survey Methodology 24, 1998). It is at most the number of answers, and at least what remains where all
    answers of a document agree: the number of documents if these have equally many answers.

    Args:
        successes: Right answers of each document.
        trials: Answers of each document, at least 1.
    """
    from scipy.special import stdtrit

    count, total = len(trials), math.fsum(trials)
    least = total**2 / math.fsum(n * n for n in trials)
    p, error = ratio(successes, trials)
    if not error:
        return total if 0 < p < 1 and error is not None else least
    quantile = 0.5 + CONFIDENCE / 2
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
    quotient = math.fsum(values) / total
    if count == 1:
        return quotient, None
    squares = math.fsum((value - quotient * weight) ** 2 for value, weight in zip(values, weights, strict=True))
    return quotient, math.sqrt(squares * count / (count - 1)) / total


def mean_and_standard_error(values: Sequence[float]) -> Statistic:
    """Return the mean over seeds and its standard error, `s / sqrt(n)` with s from n - 1, or None with one seed."""
    mean, error = ratio(values, [1.0] * len(values))
    return Statistic(mean=mean, standard_error=error, seeds=len(values))


def paired_difference(a: Sequence[float], b: Sequence[float]) -> PairedDifference:
    """Return the mean of a - b over seeds, with Student's t interval and test of the per-seed differences.

    Args:
        a: One value per seed.
        b: Values of the other model for the same seeds, in the same order.

    Returns:
        The difference. With one seed, and where all seeds differ by the same amount, `low` and `high` are None and the
        method is "none"; the p-value is 1 where a and b are equal in every seed, as at a ceiling, and None otherwise.
    """
    statistic = mean_and_standard_error([x - y for x, y in zip(a, b, strict=True)])
    mean, error = statistic.mean, statistic.standard_error
    rounding = _ROUNDING * max(map(abs, [*a, *b]))
    if error is None or error <= rounding:
        return replace(_no_interval(mean), p_value=None if error is None or abs(mean) > rounding else 1.0)
    return _student(mean, error, statistic.seeds - 1, "student-t over seeds")


def sign_flip(differences: Sequence[float]) -> PairedDifference:
    """Return the mean of paired differences with the sign-flip test of its being 0 and the interval of the same test.

    If the differences are independent and symmetric about their centre, each may have had the other sign. The centre is then
    equally likely to lie in any of the gaps that the means of all non-empty subsets of the differences leave on the line
    (J. A. Hartigan, Journal of the American Statistical Association 64, 1969). So of n differences the test of the centre c
    against larger values has the p-value `(1 + number of subset means <= c) / 2^n`; twice the smaller side is the two-sided
    p-value, and the interval, which ends at two of the subset means, holds exactly the values that are not rejected.

    The test is exact up to `MOST_EXACT_SEEDS` differences. Of more, a sample of subsets that is drawn once and for all takes
    the place of all of them, which keeps the level of the test.

    Args:
        differences: One difference per seed.

    Returns:
        The difference. `low` and `high` are None below 6 differences, too few for 95 %.
        They are None as well where all differences are 0, with a p-value of 1.
    """
    values = np.asarray(differences, dtype=np.float64)
    mean = float(values.mean())
    if not values.any():
        return replace(_no_interval(0.0), p_value=1.0)
    means = np.sort(_subset_means(values))
    patterns = len(means) + 1
    # Subsets whose mean is 0 but for rounding count on both sides, as the mean itself would.
    means[np.abs(means) <= _ROUNDING * np.abs(values).max()] = 0.0
    below, above = np.searchsorted(means, 0.0, side="right"), patterns - 1 - np.searchsorted(means, 0.0, side="left")
    p_value = min(1.0, 2 * (1 + float(min(below, above))) / patterns)
    difference = replace(_no_interval(mean), interval_method="sign flip over seeds", p_value=p_value)
    # Rounded up by a hair, so that 1 - 0.95 leaves the tail that 0.05 has.
    outside = math.floor((1 - CONFIDENCE) / 2 * patterns * (1 + _ROUNDING))
    if not outside:
        return difference
    return replace(difference, low=float(means[outside - 1]), high=float(means[-outside]))


def welch(groups: Sequence[Sequence[float]], weights: Sequence[float]) -> PairedDifference:
    """Return a weighted sum of the means of independent groups, with the interval and the test of B. L. Welch (1947).

    Every group has a variance of its own. The degrees of freedom are Satterthwaite's. For two groups with the weights 1 and -1
    this is Welch's t test.

    Args:
        groups: The values of each group, at least two in each.
        weights: The weight of each group's mean.

    Returns:
        The sum. Where no group varies, `low` and `high` are None and the method is "none".
    """
    pairs = list(zip(groups, weights, strict=True))
    mean = math.fsum(weight * math.fsum(group) / len(group) for group, weight in pairs)
    parts = [weight**2 * float(np.var(group, ddof=1)) / len(group) for group, weight in pairs]
    variance = math.fsum(parts)
    if math.sqrt(variance) <= _ROUNDING * max(abs(weight * value) for group, weight in pairs for value in group):
        return _no_interval(mean)
    freedom = variance**2 / math.fsum(part**2 / (len(group) - 1) for part, group in zip(parts, groups, strict=True))
    return _student(mean, math.sqrt(variance), freedom, "welch over seeds")


def ratio_of_means(a: Mapping[int, float], b: Mapping[int, float]) -> PairedDifference:
    """Return mean(a) / mean(b) over seeds, with the interval of E. C. Fieller (1954) and Student's t test of its being 0.

    The interval holds the r for which mean(a) - r mean(b) cannot be told from 0. Values of one seed vary together, those of
    different seeds independently; the degrees of freedom are those of the smaller group.

    Args:
        a: Values by seed.
        b: Values by seed, of the same seeds or others.

    Returns:
        The ratio. `low` and `high` are None where b has fewer than two seeds, or a mean that cannot be told from 0.
    """
    from scipy.special import stdtr, stdtrit

    (first, a_error), (second, b_error) = (ratio([*one.values()], [1.0] * len(one)) for one in (a, b))
    if a_error is None or b_error is None or not second:
        return _no_interval(first / second if second else math.nan)
    shared = sorted(a.keys() & b.keys())
    both = float(np.cov([a[one] for one in shared], [b[one] for one in shared])[0, 1]) if len(shared) > 1 else 0.0
    both *= len(shared) / (len(a) * len(b))
    freedom = min(len(a), len(b)) - 1
    t = float(stdtrit(freedom, 0.5 + CONFIDENCE / 2))
    # The bounds solve square r^2 - 2 middle r + rest = 0.
    square, middle, rest = second**2 - (t * b_error) ** 2, first * second - t * t * both, first**2 - (t * a_error) ** 2
    if square <= 0 or not a_error:
        return _no_interval(first / second)
    half = math.sqrt(middle**2 - square * rest)
    low, high, p_value = (
        (middle - half) / square,
        (middle + half) / square,
        2 * float(stdtr(freedom, -abs(first) / a_error)),
    )
    whole = _no_interval(first / second)
    return replace(whole, low=low, high=high, interval_method="fieller over seeds", p_value=p_value)


def sum_of(a: PairedDifference, b: PairedDifference) -> PairedDifference:
    """Return the sum of two independent estimates; its interval is made of theirs (G. Y. Zou and A. Donner 2008).

    An estimate without an interval counts as known exactly, and the sum has none where `a` has none.
    """
    total = replace(a, mean=a.mean + b.mean, p_value=None)
    if a.low is None or a.high is None:
        return total
    low, high = (0.0 if one is None else one - b.mean for one in (b.low, b.high))
    return replace(
        total, low=total.mean - math.hypot(a.mean - a.low, low), high=total.mean + math.hypot(a.high - a.mean, high)
    )


def log_odds(successes: float, trials: float) -> float:
    """Return log((k + 1/2) / (n - k + 1/2)) of k right answers of n, finite at 0 and at n (J. B. S. Haldane 1956)."""
    return math.log((successes + 0.5) / (trials - successes + 0.5))


def item_difference(
    a_scores: Sequence[float],
    b_scores: Sequence[float],
    a_weights: Sequence[float],
    b_weights: Sequence[float] | None = None,
    *,
    seed: int,
    resamples: int = RESAMPLES,
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

    Returns:
        The difference; `interval_method` names the method. One item gives no interval (method "none").

    Raises:
        EvaluationError: A weight is not positive.
    """
    columns = (a_scores, a_weights, b_scores, a_weights if b_weights is None else b_weights)
    a, a_sizes, b, b_sizes = np.array(columns, dtype=np.float64)
    count = len(a)
    if not (a_sizes > 0).all() or not (b_sizes > 0).all():
        raise EvaluationError("item_difference: an item's weight is not positive; leave out empty items")
    first, second = a.sum() / a_sizes.sum(), b.sum() / b_sizes.sum()
    mean = float(first - second)
    if count == 1:
        return _no_interval(mean)
    difference = replace(_no_interval(mean), interval_method="mid-p over items")
    counted = _counted(a, a_sizes) and _counted(b, b_sizes)
    if counted and max(a_sizes.max(), b_sizes.max()) == 1:
        low, high, p_value = _paired_binary(int((a > b).sum()), int((a < b).sum()), count)
        return replace(difference, low=low, high=high, p_value=p_value)
    # Residuals of both ratios: the mean of `rows` is the difference, and their variance that of its linear approximation.
    rows = mean + (a - first * a_sizes) / a_sizes.mean() - (b - second * b_sizes) / b_sizes.mean()
    if np.ptp(rows) <= _ROUNDING * max(abs(first), abs(second)):
        if not counted:
            return _no_interval(mean)
        other = 1 - (1 - CONFIDENCE) ** (1 / count)
        low, high, p_value = mean - other * (1 + mean), mean + other * (1 - mean), (1 + abs(mean)) ** -count
        return replace(difference, low=low, high=high, p_value=p_value)
    low, high, p_value = _studentised(rows, seed, resamples)
    if counted:
        low, high = max(-1.0, low), min(1.0, high)
    return replace(difference, low=low, high=high, p_value=p_value, interval_method="studentised over items")


def detectable(seeds: int) -> float:
    """Return the smallest true effect that a paired comparison over seeds shows with a probability of 0.8.

    The effect is in standard deviations of the per-seed paired differences. It belongs to the two-sided t test at level 0.05,
    from the noncentral t distribution (J. Cohen, Statistical Power Analysis for the Behavioral Sciences, 1988, chapter 2). It
    is infinite for fewer than two seeds, which show nothing.
    """
    if seeds < 2:
        return math.inf
    from scipy.special import nctdtrinc, stdtrit

    bound = -float(stdtrit(seeds - 1, (1 - CONFIDENCE) / 2))
    # The other tail is left out: where the power is above the level it adds next to nothing.
    return float(nctdtrinc(seeds - 1, 1 - POWER, bound)) / math.sqrt(seeds)


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


def _no_interval(mean: float) -> PairedDifference:
    return PairedDifference(mean=mean, low=None, high=None, confidence=CONFIDENCE, interval_method="none")


def _student(mean: float, error: float, freedom: float, method: IntervalMethod) -> PairedDifference:
    """Return a mean with Student's t interval and test."""
    from scipy.special import stdtr, stdtrit

    half = float(stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * error
    p_value = 2 * float(stdtr(freedom, -abs(mean) / error))
    whole = _no_interval(mean)
    return replace(whole, low=mean - half, high=mean + half, interval_method=method, p_value=p_value)


def _subset_means(values: np.ndarray) -> np.ndarray:
    if len(values) > MOST_EXACT_SEEDS:
        chosen = np.random.default_rng(0).integers(2, size=(_DRAWN_PATTERNS, len(values)), dtype=np.int8)
        chosen = chosen[chosen.any(axis=1)]
        return np.asarray(chosen @ values / chosen.sum(axis=1))
    sums, sizes = np.zeros(1), np.zeros(1)
    for value in values:
        sums, sizes = np.concatenate([sums, sums + value]), np.concatenate([sizes, sizes + 1])
    return np.asarray(sums[1:] / sizes[1:])


def _counted(scores: np.ndarray, weights: np.ndarray) -> bool:
    """Whether scores are numbers of right answers among `weights`."""
    whole = (scores == scores.round()).all() and (weights == weights.round()).all()
    return bool(whole and (scores >= 0).all() and (scores <= weights).all())


def _studentised(rows: np.ndarray, seed: int, resamples: int) -> tuple[float, float, float]:
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
    tail, kept = (1 - CONFIDENCE) / 2, len(ratios)
    student = float(stdtrit(count - 1, 1 - tail))
    outside = min(max(math.floor(tail * (kept + 1)), 1), max(kept, 1))
    left, right = (-ratios[outside - 1], ratios[kept - outside]) if kept else (student, student)
    t = mean / error
    beyond = int((ratios >= t).sum() if t > 0 else (ratios <= t).sum())
    p_value = min(1.0, 2 * max(float(stdtr(count - 1, -abs(t))), (beyond + 1) / (kept + 1)))
    return mean - max(student, float(right)) * error, mean + max(student, float(left)) * error, p_value


def _paired_binary(only_a: int, only_b: int, count: int) -> tuple[float, float, float]:
    """Return low, high and p-value of the difference of two paired proportions.

    The p-value comes from McNemar's mid-p test (M. W. Fagerland et al., BMC Medical Research Methodology 13, 2013). The
    interval holds the differences that a mid-p test of `only_a - only_b` does not reject, with the share of discordant
    items at its maximum-likelihood value for each difference (T. Tango, Statistics in Medicine 17, 1998). It holds zero
    wherever McNemar's test does not reject zero.

    Args:
        only_a: Items that model A alone has right.
        only_b: Items that model B alone has right.
        count: All items.
    """
    from scipy.optimize import brentq
    from scipy.special import bdtr

    surplus, tail = only_a - only_b, (1 - CONFIDENCE) / 2
    size = 1 << (2 * count + 1).bit_length()
    unit = np.exp(-2j * np.pi * np.arange(size) / size)
    places = np.arange(-count, count + 1)

    def excess(difference: float, side: int) -> float:
        """Mid-p of a count at least as far to this side as `surplus`, minus the tail."""
        linear = (2 * count - surplus) * difference - only_a - only_b
        square = max(0.0, linear**2 + 8 * count * only_b * difference * (1 - difference))
        b = max(0.0, -difference, (math.sqrt(square) - linear) / (4 * count))
        a = max(0.0, b + difference)
        chances = np.fft.ifft((a * unit + b / unit + (1 - a - b)) ** count).real[places % size]
        return float(chances[side * (places - surplus) > 0].sum() + chances[surplus + count] / 2 - tail)

    def bound(side: int) -> float:
        if surplus == -side * count:
            return float(-side)
        return float(brentq(excess, -side * (1 - 1e-12), surplus / count, args=(side,), xtol=1e-10))

    low, high = bound(1), bound(-1)
    discordant, fewer = only_a + only_b, min(only_a, only_b)
    p_value = 1.0
    if surplus:
        exactly = float(bdtr(fewer, discordant, 0.5)) - (float(bdtr(fewer - 1, discordant, 0.5)) if fewer else 0.0)
        p_value = min(1.0, 2 * float(bdtr(fewer, discordant, 0.5)) - exactly)
    if p_value > 1 - CONFIDENCE:
        low, high = min(low, 0.0), max(high, 0.0)
    return low, high, p_value
