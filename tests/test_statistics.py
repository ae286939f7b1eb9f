"""Statistics against published tables, closed forms, exact enumeration and brute force."""

import itertools
import math
import time
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats

from difftransformer.errors import EvaluationError
from difftransformer_lab import statistics
from difftransformer_lab.results import PairedDifference
from difftransformer_lab.statistics import (
    detectable,
    effective_trials,
    holm,
    holm_differences,
    item_difference,
    log_odds,
    mean_and_standard_error,
    paired_difference,
    ratio_of_means,
    sign_flip,
    sum_of,
    welch,
    wilson_interval,
)
from tests.support.interval_coverage import clustered_coverage, paired_coverage, shape_coverage

# Two-sided 95 % and 99 % points (p = 0.975, 0.995) as every textbook's table prints them, to three decimals.
T_TABLE = {
    1: (12.706, 63.657), 2: (4.303, 9.925), 3: (3.182, 5.841), 4: (2.776, 4.604), 5: (2.571, 4.032), 9: (2.262, 3.250),
    10: (2.228, 3.169), 20: (2.086, 2.845), 30: (2.042, 2.750), 60: (2.000, 2.660), 120: (1.980, 2.617),
}  # fmt: skip


@pytest.mark.parametrize("df", T_TABLE)
def test_intervals_match_the_published_table(df: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(df).normal(size=df + 1)
    for confidence, expected in zip((0.95, 0.99), T_TABLE[df], strict=True):
        monkeypatch.setattr(statistics, "CONFIDENCE", confidence)
        found = paired_difference(list(values), [0.0] * (df + 1))
        standard_error = values.std(ddof=1) / math.sqrt(df + 1)
        assert (found.high - found.low) / 2 / standard_error == pytest.approx(expected, abs=5.1e-4)
        assert (found.high + found.low) / 2 == pytest.approx(values.mean())


# R. G. Newcombe, Statistics in Medicine 17 (1998), Table I, method 3 (score without continuity correction).
@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_matches_published_values(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5.1e-5)


def test_wilson_bounds_solve_the_score_equation() -> None:
    for trials in (1, 7, 50):
        z = NormalDist().inv_cdf(0.975)
        for successes in range(trials + 1):
            low, high = wilson_interval(successes, trials)
            assert 0 <= low <= successes / trials <= high <= 1
            for bound in (low, high):
                if 0 < bound < 1:
                    error = z * math.sqrt(bound * (1 - bound) / trials)
                    assert abs(successes / trials - bound) == pytest.approx(error)


def test_wilson_without_trials_knows_nothing_and_refuses_impossible_counts() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    for successes, trials in ((-1, 5), (6, 5)):
        with pytest.raises(ValueError, match="math domain error"):
            wilson_interval(successes, trials)


def test_mean_and_standard_error() -> None:
    statistic = mean_and_standard_error([2.0, 4.0, 9.0])
    assert (statistic.mean, statistic.seeds) == (5.0, 3)
    assert statistic.standard_error == pytest.approx(math.sqrt(13 / 3))
    assert mean_and_standard_error([2.5]).standard_error is None


def test_the_p_value_over_seeds_is_that_of_the_paired_t_test() -> None:
    a, b = [1.0, 2.5, 3.0, 1.0], [0.5, 2.0, 3.5, -1.0]
    assert paired_difference(a, b).p_value == pytest.approx(scipy.stats.ttest_rel(a, b).pvalue)
    assert paired_difference(a, b[::-1]).p_value == pytest.approx(scipy.stats.ttest_rel(a, b[::-1]).pvalue)
    with pytest.raises(ValueError, match="shorter"):
        paired_difference([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("a", "b", "mean", "p_value"),
    [
        ([1.0], [1.5], -0.5, None),
        ([1.0] * 3, [0.0] * 3, 1.0, None),
        ([1.0, 0.5, 1.0], [1.0, 0.5, 1.0], 0.0, 1.0),
        # The same but for rounding: 0.3 - 0.1 is not 0.6 - 0.4, nor 0.1 + 0.2 the float 0.3.
        ([0.3, 0.6], [0.1, 0.4], ((0.3 - 0.1) + (0.6 - 0.4)) / 2, None),
        ([0.1 + 0.2, 0.5], [0.3, 0.5], (0.1 + 0.2 - 0.3) / 2, 1.0),
    ],
)
def test_one_seed_and_seeds_that_differ_by_the_same_amount_have_no_interval(a, b, mean, p_value) -> None:
    found = paired_difference(a, b)
    assert (found.mean, found.low, found.high) == (mean, None, None)
    assert (found.p_value, found.interval_method) == (p_value, "none")


def test_an_item_difference_is_a_ratio_of_sums_over_the_same_items() -> None:
    a, b, weights = [10.0, 40.0, 5.0], [12.0, 44.5, 5.0], [10.0, 20.0, 5.0]
    found = item_difference(a, b, weights, seed=3)
    assert found.interval_method == "studentised over items"
    assert found.mean == pytest.approx(55 / 35 - 61.5 / 35)
    assert found.low < found.mean < found.high


def test_each_bound_is_the_farther_of_student_t_and_the_studentised_bootstrap(monkeypatch) -> None:
    """All 5^5 resamples of ratios with unequal weights, in a second implementation; at 80 %, where 5^5 are enough."""
    monkeypatch.setattr(statistics, "CONFIDENCE", 0.8)
    rng = np.random.default_rng(0)
    a, b, weights = rng.exponential(3, 5), rng.normal(1, 0.2, 5), rng.uniform(1, 2, 5)
    mean = (a.sum() - b.sum()) / weights.sum()
    residuals = 5 * ((a - b) - mean * weights) / weights.sum()
    picks = np.array(list(itertools.product(residuals, repeat=5)))
    picks = picks[np.ptp(picks, axis=1) > 1e-9]
    ratios = picks.mean(1) / picks.std(1, ddof=1)
    error = np.std(residuals, ddof=1)
    t = scipy.stats.t(4).ppf(0.9) * error / math.sqrt(5)
    low, high = mean - np.quantile(ratios, 0.9) * error, mean - np.quantile(ratios, 0.1) * error
    found = item_difference(list(a), list(b), list(weights), seed=1, resamples=40_000)
    assert (found.low, found.high) == pytest.approx((min(low, mean - t), max(high, mean + t)), abs=0.03)


@pytest.mark.parametrize("shift", [-1.2, -0.6, 0.0, 0.5, 1.0])
def test_an_interval_without_zero_is_a_small_p_value(shift: float) -> None:
    rng = np.random.default_rng(round(10 * shift) + 50)
    for _ in range(20):
        values = rng.exponential(size=12) - 1 + shift
        found = item_difference(list(values), [0.0] * 12, [1.0] * 12, seed=0, resamples=499)
        assert (found.low > 0 or found.high < 0) == (found.p_value <= 0.05)


def test_an_item_difference_repeats_itself_whatever_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    a, b, weights = list(rng.normal(3, 1, 40)), list(rng.normal(3, 1, 40)), [1.0] * 40
    found = item_difference(a, b, weights, seed=7)
    assert found == item_difference(a, b, weights, seed=7)
    assert found != item_difference(a, b, weights, seed=8)
    monkeypatch.setattr("difftransformer_lab.statistics._RESAMPLED_ITEMS_AT_ONCE", 1000)
    assert found == item_difference(a, b, weights, seed=7)


def test_an_item_difference_is_quick_on_many_items() -> None:
    start = time.perf_counter()
    item_difference([1.0, 2.0] * 500, [2.0, 1.5] * 500, [1.0] * 1000, seed=0)
    item_difference([1.0, 0.0] * 5000, [0.0, 0.0] * 5000, [1.0] * 10_000, seed=0)
    assert time.perf_counter() - start < 20


def test_what_has_no_difference_over_items_is_refused() -> None:
    with pytest.raises(ValueError, match="inhomogeneous"):
        item_difference([1.0], [1.0, 2.0], [1.0], seed=0)
    with pytest.raises(EvaluationError, match="not positive"):
        item_difference([1.0, 2.0], [1.0, 2.0], [1.0, 0.0], seed=0)
    assert item_difference([3.0], [1.0], [2.0], seed=0).interval_method == "none"


def right_and_wrong(only_a: int, only_b: int, n: int) -> PairedDifference:
    a = [1.0] * only_a + [0.0] * (n - only_a)
    b = [0.0] * only_a + [1.0] * only_b + [0.0] * (n - only_a - only_b)
    return item_difference(a, b, [1.0] * n, seed=0)


# M. W. Fagerland, S. Lydersen, P. Laake (2013), Table 6 (airway hyper-responsiveness), and counts by hand.
@pytest.mark.parametrize(("only_a", "only_b", "n", "p"), [
    (1, 7, 21, 0.0391), (5, 0, 9, 1 / 32), (0, 4, 4, 1 / 16), (2, 2, 7, 1.0), (0, 0, 5, 1.0), (3, 2, 5, 22 / 32),
])  # fmt: skip
def test_paired_answers_have_mcnemars_mid_p(only_a: int, only_b: int, n: int, p: float) -> None:
    found = right_and_wrong(only_a, only_b, n)
    assert found.interval_method == "mid-p over items"
    assert found.p_value == pytest.approx(p, abs=5e-5)


@pytest.mark.parametrize(("only_a", "only_b", "n"), [(1, 7, 21), (3, 1, 10), (0, 0, 8), (6, 0, 6), (2, 9, 14)])
def test_the_bounds_of_paired_answers_leave_a_tail_of_a_fortieth(only_a: int, only_b: int, n: int) -> None:
    """The mid-p at each bound from all outcomes, with the discordant share at a likelihood maximum that a search finds."""
    found = right_and_wrong(only_a, only_b, n)
    outcomes = [(i, j, n - i - j) for i in range(n + 1) for j in range(n + 1 - i)]
    differences = np.array([i - j for i, j, _ in outcomes])

    def chances(difference: float, b: float) -> np.ndarray:
        p = np.clip([b + difference, b, 1 - 2 * b - difference], 1e-300, 1)
        return scipy.stats.multinomial.pmf(outcomes, n, p / p.sum())

    observed = outcomes.index((only_a, only_b, n - only_a - only_b))
    for bound, side in ((found.low, 1), (found.high, -1)):
        if bound == -side:
            assert only_a - only_b == -side * n
            continue
        least, most = max(0.0, -bound), (1 - bound) / 2
        best = scipy.optimize.minimize_scalar(
            lambda b, at=bound: -math.log(chances(at, b)[observed] + 1e-300), bounds=(least, most), method="bounded",
            options={"xatol": 1e-10},
        ).x  # fmt: skip
        table = chances(bound, best)
        beyond = table[side * (differences - (only_a - only_b)) > 0].sum()
        assert beyond + table[differences == only_a - only_b].sum() / 2 == pytest.approx(0.025, abs=1e-4)


def test_paired_answers_never_have_zero_width_and_agree_with_their_p_value() -> None:
    for n in (2, 5, 9):
        for only_a, only_b in itertools.product(range(n + 1), repeat=2):
            if only_a + only_b > n:
                continue
            found = right_and_wrong(only_a, only_b, n)
            assert -1 <= found.low <= (only_a - only_b) / n <= found.high <= 1
            assert found.high - found.low > 0.05
            assert (found.low <= 0 <= found.high) == (found.p_value > 0.05)
            turned = right_and_wrong(only_b, only_a, n)
            assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low), abs=1e-6)


def test_documents_that_all_differ_alike_have_an_interval_for_those_that_were_not_seen() -> None:
    """Of n documents without an exception, (1 - share)^n is 0.05 at the largest plausible share of exceptions."""
    share = 1 - 0.05 ** (1 / 6)
    found = item_difference([5.0] * 6, [5.0] * 6, [5.0] * 6, seed=0)
    assert (found.low, found.high, found.p_value) == (pytest.approx(-share), pytest.approx(share), 1.0)
    found = item_difference([5.0] * 6, [4.0] * 6, [5.0] * 6, seed=0)
    assert (found.low, found.high) == pytest.approx((0.2 - 1.2 * share, 0.2 + 0.8 * share))
    losses = item_difference([5.5] * 6, [4.0] * 6, [5.0] * 6, seed=0)
    assert (losses.low, losses.high, losses.p_value, losses.interval_method) == (None, None, None, "none")


def test_effective_trials_count_documents_where_their_answers_agree() -> None:
    assert effective_trials([5, 5, 0, 5], [5, 5, 5, 5]) == pytest.approx(4)
    assert effective_trials([5, 5, 5], [5, 5, 5]) == pytest.approx(3)
    assert effective_trials([2], [5]) == pytest.approx(1)
    assert effective_trials([3, 3, 3], [5, 5, 5]) == 15
    rng = np.random.default_rng(0)
    right = rng.binomial(5, 0.6, 4000)
    assert effective_trials(right.tolist(), [5] * 4000) == pytest.approx(20_000, rel=0.06)


def test_effective_trials_of_few_documents_have_the_width_of_student_t() -> None:
    right = [3, 5, 6, 4, 7, 5, 8, 4, 6, 2]
    error = np.std([count / 10 for count in right], ddof=1) / math.sqrt(10)
    expected = 0.5 * 0.5 / error**2 * (1.959964 / T_TABLE[9][0]) ** 2  # 56 of 100 answers
    assert effective_trials(right, [10] * 10) == pytest.approx(expected, rel=1e-3)


def test_items_that_all_differ_alike_have_the_p_value_of_items_of_another_kind() -> None:
    """Were the mean zero, a share m / (1 + m) of items had to differ by -1, and none of n items did."""
    found = item_difference([3.0] * 5, [1.0] * 5, [4.0] * 5, seed=0)
    share = 0.5 / (1 + 0.5)
    assert found.mean == pytest.approx(0.5)
    assert found.p_value == pytest.approx(scipy.stats.binom(5, share).pmf(0))


def test_a_difference_of_shares_has_no_interval_beyond_one() -> None:
    found = item_difference([10.0, 10.0, 9.0, 10.0], [0.0, 0.0, 1.0, 0.0], [10.0] * 4, seed=0)
    assert found.mean == pytest.approx(38 / 40)
    assert found.low < found.mean < found.high == 1
    assert item_difference([1.0, 0.0, 0.0, 0.0], [10.0, 9.0, 10.0, 10.0], [10.0] * 4, seed=0).low == -1


def test_each_model_has_weights_of_its_own() -> None:
    a, b, a_tokens, b_tokens = [10.0, 40.0, 5.0], [12.0, 44.5, 5.0], [10.0, 20.0, 5.0], [8.0, 25.0, 6.0]
    assert item_difference(a, b, a_tokens, b_tokens, seed=3).mean == pytest.approx(55 / 35 - 61.5 / 39)


def test_holm_is_the_closed_test_of_bonferroni() -> None:
    """An adjusted value is the largest, over all sets of hypotheses with this one, of the set's size times its smallest p."""
    p_values = [0.004, 0.3, 0.011, 0.03, 0.011, 0.9]
    sets = [s for size in range(1, 7) for s in itertools.combinations(range(6), size)]
    expected = [max(min(1, len(s) * min(p_values[i] for i in s)) for s in sets if k in s) for k in range(6)]
    assert holm(p_values) == pytest.approx(expected)
    assert holm([None, 0.04, None]) == [None, 0.04, None]
    assert holm([]) == []


def test_one_loss_in_two_units_is_one_comparison() -> None:
    a, b = [1.0, 2.0, 4.0, 5.0], [0.0, 1.1, 3.0, 4.1]
    loss, other = paired_difference(a, b), paired_difference([2.0, 3.0, 4.0], [2.2, 2.9, 4.4])
    bits = replace(loss, p_value=loss.p_value * 1.5)
    found = holm_differences([loss, bits, other], ["loss", "loss", "accuracy"])
    assert [one.comparisons for one in found] == [2] * 3
    assert [one.p_holm for one in found] == [2 * bits.p_value] * 2 + [other.p_value]


def test_of_twenty_null_figures_over_seeds_few_pages_claim_a_difference() -> None:
    rng, pages, claimed = np.random.default_rng(2), 300, 0
    for _ in range(pages):
        figures = [paired_difference(list(x), list(y)) for x, y in rng.normal(size=(20, 2, 4))]
        found = holm_differences(figures, range(20))
        claimed += any(one.p_holm <= 0.05 for one in found)
    assert claimed <= scipy.stats.binom(pages, 0.05).ppf(0.999)


@pytest.mark.slow
def test_intervals_over_items_cover_as_often_as_they_say() -> None:
    """A small version of docs/results/intervals.json, with room for the error of the simulation."""
    replicates = 300
    room = 3.5 * math.sqrt(0.05 * 0.95 / replicates)
    for n, shape in itertools.product((5, 10, 20, 100), ("exponential", "normal", "Student t, 3 df")):
        assert 0.93 - room < shape_coverage(shape, n, replicates, compare=False)["chosen"] < 0.98 + room, (n, shape)
    for n, pair in itertools.product((5, 20, 100), ("0.7 and 0.5", "0.5 and 0.5")):
        assert paired_coverage(pair, n, replicates, compare=False)["chosen"] > 0.93 - room, (n, pair)
    for documents in (10, 100):
        assert clustered_coverage(0.5, documents, replicates)["chosen"] > 0.93 - room


def one_sided(values: list[float], centre: float) -> tuple[float, float]:
    """P-values of the centre against larger and against smaller values, by all sign patterns of the deviations from it."""
    deviations = [value - centre for value in values]
    sums = [
        math.fsum(sign * one for sign, one in zip(signs, deviations, strict=True))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    found = math.fsum(deviations)
    return sum(one >= found - 1e-9 for one in sums) / len(sums), sum(one <= found + 1e-9 for one in sums) / len(sums)


@pytest.mark.parametrize("count", [2, 5, 6, 7, 9])
def test_a_sign_flip_is_that_of_all_sign_patterns_and_its_interval_holds_what_it_does_not_reject(count: int) -> None:
    rng = np.random.default_rng(count)
    for shift in (0.0, 0.8, 3.0):
        values = list(rng.normal(shift, 1, count))
        found = sign_flip(values)
        assert found.p_value == pytest.approx(min(1.0, 2 * min(one_sided(values, 0.0))))
        reference = scipy.stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=np.inf)
        assert found.p_value == pytest.approx(reference.pvalue)
        if count < 6:
            assert (found.low, found.high) == (None, None)
            assert found.p_value > 0.05
            continue
        step = 1e-6
        for bound, inside in ((found.low, 1), (found.high, -1)):
            assert 2 * min(one_sided(values, bound + inside * step)) > 0.05
            assert 2 * min(one_sided(values, bound - inside * step)) <= 0.05


def test_a_sign_flip_and_its_interval_agree_on_zero_with_ties() -> None:
    found = sign_flip([0.0] * 12)
    assert (found.mean, found.low, found.high, found.p_value, found.interval_method) == (0.0, None, None, 1.0, "none")
    rng = np.random.default_rng(0)
    for _ in range(100):
        values = rng.integers(-3, 8, int(rng.integers(6, 10))) * 0.1  # many subsets have a mean of 0 but for rounding
        found = sign_flip(values)
        expected = min(1.0, 2 * min(one_sided(list(values), 0.0)))
        assert found.p_value == pytest.approx(expected)
        if values.any():
            assert (found.low <= 0 <= found.high) == (found.p_value > 0.05)
            mirrored = sign_flip(-values)
            assert (mirrored.low, mirrored.high) == pytest.approx((-found.high, -found.low))


@pytest.mark.parametrize("count", [21, 40])
def test_many_seeds_draw_sign_patterns_close_to_all_of_them(count: int) -> None:
    """Of many normal differences the sign flip is close to Student's t, whose interval it must then have but for the draws."""
    for seed in range(3):
        values = np.random.default_rng(seed).normal(0.3, 1, count)
        found, student = sign_flip(values), scipy.stats.ttest_1samp(values, 0)
        assert found == sign_flip(values)
        assert found.p_value == pytest.approx(student.pvalue, rel=0.15, abs=0.003)
        interval = student.confidence_interval()
        half = (interval.high - interval.low) / 2
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high), abs=0.1 * half)


@pytest.mark.parametrize("shape", ["normal", "heavy", "two modes"])
def test_intervals_of_sign_flips_cover_the_centre_of_symmetric_differences(shape: str) -> None:
    rng, repeats, covered = np.random.default_rng(5), 1500, 0
    for _ in range(repeats):
        match shape:
            case "normal":
                values = rng.normal(1, 1, 10)
            case "heavy":
                values = 1 + rng.standard_t(2, 10)
            case _:
                values = 1 + rng.choice([-1, 1], 10) + rng.normal(0, 0.05, 10)
        found = sign_flip(values)
        covered += found.low <= 1 <= found.high
    exact = 1 - 2 * math.floor(0.025 * 2**10) / 2**10  # 0.951: the level that 10 seeds have
    assert covered / repeats == pytest.approx(exact, abs=3 * math.sqrt(0.05 * 0.95 / repeats))


def test_welchs_test_is_scipys() -> None:
    rng = np.random.default_rng(0)
    for sizes in ((5, 5), (8, 20), (2, 3)):
        a, b = rng.normal(0, 1, sizes[0]), rng.normal(1, 3, sizes[1])
        found, expected = welch([a, b], [1.0, -1.0]), scipy.stats.ttest_ind(a, b, equal_var=False)
        interval = expected.confidence_interval()
        assert found.p_value == pytest.approx(expected.pvalue)
        assert (found.mean, found.low, found.high) == pytest.approx((a.mean() - b.mean(), interval.low, interval.high))
    one = welch([a], [2.0])
    assert one.p_value == pytest.approx(scipy.stats.ttest_1samp(a, 0).pvalue)


def test_welchs_intervals_of_a_contrast_of_four_groups_cover_it() -> None:
    rng, repeats, covered = np.random.default_rng(1), 4000, 0
    weights, spreads, sizes = [1.0, -1.0, -0.5, 0.5], [1.0, 0.2, 3.0, 0.5], [8, 6, 12, 5]
    for _ in range(repeats):
        groups = [rng.normal(place, spread, size) for place, spread, size in zip(range(4), spreads, sizes, strict=True)]
        found = welch(groups, weights)
        covered += found.low <= 0 - 1 - 1 + 1.5 <= found.high
    assert covered / repeats == pytest.approx(0.95, abs=0.012)


def test_welch_says_what_it_cannot_do() -> None:
    for first, second in ((1.0, 2.0), (0.1, 0.3)):  # the mean of three times 0.1 is not the float 0.1
        assert welch([[first] * 3, [second] * 3], [1.0, -1.0]).interval_method == "none"
    with pytest.raises(ValueError, match="shorter"):
        welch([[1.0, 2.0], [1.0, 2.0]], [1.0])


def test_log_odds_are_finite_and_odd() -> None:
    for trials in (1, 7, 400):
        for right in range(0, trials + 1, max(1, trials // 7)):
            share = (right + 0.5) / (trials + 1)
            assert log_odds(right, trials) == pytest.approx(scipy.special.logit(share))
            assert log_odds(trials - right, trials) == pytest.approx(-log_odds(right, trials))
    with pytest.raises(ValueError, match="math domain error"):
        log_odds(5, 4)


def test_a_textbook_sample_size() -> None:
    """For d = 0.5, two-sided 5 % and 80 % power a paired t test needs 34 pairs (J. Cohen; G*Power 3.1)."""
    assert detectable(34) < 0.5 < detectable(33)
    assert detectable(1) == math.inf  # one seed detects nothing
    assert all(0 < detectable(seeds) < math.inf for seeds in (60, 30, 8, 3, 2))


@pytest.mark.parametrize("seeds", [2, 3, 5, 8])
def test_the_detectable_effect_has_the_power_of_a_t_test(seeds: int) -> None:
    """The power by integration over the variance: t is beyond the bound if Z + shift > bound * sqrt(V / df)."""
    shift = detectable(seeds) * math.sqrt(seeds)
    bound = scipy.stats.t.isf(0.05 / 2, seeds - 1)
    quantiles = (np.arange(200_000) + 0.5) / 200_000
    deviations = np.sqrt(scipy.stats.chi2.ppf(quantiles, seeds - 1) / (seeds - 1))
    power = scipy.stats.norm.sf(bound * deviations - shift) + scipy.stats.norm.cdf(-bound * deviations - shift)
    assert power.mean() == pytest.approx(0.8, abs=2e-3)


def test_the_bounds_of_a_ratio_are_where_a_paired_t_test_is_at_its_level() -> None:
    rng = np.random.default_rng(4)
    b = 0.3 + rng.normal(0, 0.03, 8)
    a = -0.03 + 0.4 * (b - 0.3) + rng.normal(0, 0.01, 8)
    found = ratio_of_means(dict(enumerate(a)), dict(enumerate(b)))
    assert found.mean == pytest.approx(a.mean() / b.mean())
    for bound in (found.low, found.high):
        assert scipy.stats.ttest_1samp(a - bound * b, 0).pvalue == pytest.approx(0.05)
    assert found.low < found.mean < found.high
    assert found.p_value == pytest.approx(scipy.stats.ttest_1samp(a, 0).pvalue)


def test_the_bounds_of_a_ratio_of_independent_and_of_partly_shared_seeds() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.normal(0.1, 0.05, 12), rng.normal(0.3, 0.02, 8)
    t = scipy.stats.t.ppf(0.975, 7)
    for first, covariance in ((0, 12 * [0]), (6, None)):
        found = ratio_of_means(dict(enumerate(a)), dict(zip(range(12 - first, 20 - first), b, strict=True)))
        # A seed counts with its own weight in each mean, so the variance of mean(a) - r mean(b) is a sum over seeds.
        shared = np.cov(a[6:], b[:6])[0, 1] * 6 / (12 * 8) if covariance is None else 0.0
        for r in (found.low, found.high):
            variance = a.var(ddof=1) / 12 + r * r * b.var(ddof=1) / 8 - 2 * r * shared
            assert abs(a.mean() - r * b.mean()) == pytest.approx(t * math.sqrt(variance))


def test_a_ratio_to_what_may_be_zero_has_no_interval() -> None:
    near = ratio_of_means(dict(enumerate([1.0, 2.0, 3.0])), dict(enumerate([-1.0, 1.0, 0.5])))
    assert (near.low, near.high, near.interval_method) == (None, None, "none")
    assert ratio_of_means({0: 1.0}, {0: 2.0}).mean == 0.5
    assert math.isnan(ratio_of_means({0: 1.0}, {0: 0.0}).mean)


def test_the_interval_of_a_sum_is_the_root_of_squares_of_half_widths() -> None:
    a = PairedDifference(
        mean=1.0, low=0.4, high=1.6, confidence=0.95, interval_method="fieller over seeds", p_value=0.1
    )
    b = replace(a, mean=2.0, low=1.2, high=2.8)
    found = sum_of(a, b)
    assert (found.mean, found.low, found.high, found.p_value) == (3.0, 2.0, 4.0, None)
    known = sum_of(a, replace(b, low=None, high=None))
    assert (known.mean, known.low, known.high) == pytest.approx((3.0, 2.4, 3.6))
    assert sum_of(replace(a, low=None, high=None), b).low is None
