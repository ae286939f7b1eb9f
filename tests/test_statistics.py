"""Statistics against published tables, closed forms, exact enumeration and brute force."""

import itertools
import math
import time
from statistics import NormalDist

import numpy as np
import pytest

from difftransformer.errors import EvaluationError, ShapeError
from difftransformer.statistics import (
    bootstrap_difference,
    mean_and_standard_error,
    paired_difference,
    wilson_interval,
)

# Two-sided 95 % and 99 % points (p = 0.975, 0.995) as every textbook's table prints them, to three decimals.
T_TABLE = {
    1: (12.706, 63.657),
    2: (4.303, 9.925),
    3: (3.182, 5.841),
    4: (2.776, 4.604),
    5: (2.571, 4.032),
    9: (2.262, 3.250),
    10: (2.228, 3.169),
    20: (2.086, 2.845),
    30: (2.042, 2.750),
    60: (2.000, 2.660),
    120: (1.980, 2.617),
}


@pytest.mark.parametrize("df", T_TABLE)
def test_intervals_match_the_published_table(df: int) -> None:
    values = np.random.default_rng(df).normal(size=df + 1)
    for confidence, expected in zip((0.95, 0.99), T_TABLE[df], strict=True):
        found = paired_difference(list(values), [0.0] * (df + 1), confidence)
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
    for trials, confidence in itertools.product((1, 7, 50), (0.8, 0.95, 0.99)):
        z = NormalDist().inv_cdf(0.5 + confidence / 2)
        for successes in range(trials + 1):
            low, high = wilson_interval(successes, trials, confidence)
            assert 0 <= low <= successes / trials <= high <= 1
            for bound in (low, high):
                if 0 < bound < 1:
                    error = z * math.sqrt(bound * (1 - bound) / trials)
                    assert abs(successes / trials - bound) == pytest.approx(error)


def test_wilson_without_trials_knows_nothing_and_refuses_impossible_counts() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)
    for successes, trials in ((-1, 5), (6, 5)):
        with pytest.raises(EvaluationError, match="successes"):
            wilson_interval(successes, trials)
    with pytest.raises(EvaluationError, match="confidence"):
        wilson_interval(1, 2, 1.0)


def test_mean_and_standard_error() -> None:
    statistic = mean_and_standard_error([2.0, 4.0, 9.0])
    assert (statistic.mean, statistic.seeds) == (5.0, 3)
    assert statistic.standard_error == pytest.approx(math.sqrt(13 / 3))
    assert mean_and_standard_error([2.5]).standard_error is None
    with pytest.raises(EvaluationError, match="no values"):
        mean_and_standard_error([])


def test_paired_difference_is_student_t_over_differences() -> None:
    # Differences 1, 2, 3: mean 2, s = 1, half width 4.30265 / sqrt(3).
    found = paired_difference([11.0, 22.0, 33.0], [10.0, 20.0, 30.0])
    assert found.interval_method == "student-t over seeds"
    assert found.mean == 2.0
    assert (found.low, found.high) == pytest.approx((2 - 2.4841377, 2 + 2.4841377))


def test_paired_difference_uses_the_pairing() -> None:
    a, b = [1.0, 5.0, 9.0], [0.9, 4.9, 8.9]
    assert paired_difference(a, b).low > 0.0999
    assert paired_difference(a, b[::-1]).low < 0


def test_paired_difference_with_one_seed_has_no_interval() -> None:
    found = paired_difference([1.0], [1.5])
    assert (found.mean, found.low, found.high, found.interval_method) == (-0.5, None, None, "none")


def test_paired_difference_refuses_unpaired_values() -> None:
    with pytest.raises(ShapeError, match="2 values against 1"):
        paired_difference([1.0, 2.0], [1.0])


def test_student_t_intervals_cover_as_often_as_they_say() -> None:
    rng = np.random.default_rng(5)
    values = rng.normal(0.3, 1.0, size=(4000, 3))
    covered = sum(
        found.low <= 0.3 <= found.high for found in (paired_difference(list(row), [0.0] * 3) for row in values)
    )
    assert covered / 4000 == pytest.approx(0.95, abs=0.015)


def test_bootstrap_is_a_ratio_of_sums_over_the_same_documents() -> None:
    a, b, weights = [10.0, 40.0, 5.0], [12.0, 44.0, 5.0], [10.0, 20.0, 5.0]
    found = bootstrap_difference(a, b, weights, seed=3)
    assert found.interval_method == "bootstrap over evaluation documents"
    assert found.mean == pytest.approx(55 / 35 - 61 / 35)
    # Every document is better under a, or equal; so is every resample, which pairing alone assures.
    assert found.high <= 0


def test_bootstrap_matches_the_exact_distribution_of_few_documents() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(3, 1, 5), rng.normal(3, 1, 5)
    wa, wb = rng.uniform(1, 2, 5), rng.uniform(1, 2, 5)
    every = [
        a[list(pick)].sum() / wa[list(pick)].sum() - b[list(pick)].sum() / wb[list(pick)].sum()
        for pick in itertools.product(range(5), repeat=5)
    ]
    found = bootstrap_difference(list(a), list(b), list(wa), list(wb), seed=1, resamples=40_000, confidence=0.8)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(every, [0.1, 0.9])), abs=0.02)


def test_bootstrap_repeats_itself_whatever_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    a, b, weights = list(rng.normal(3, 1, 40)), list(rng.normal(3, 1, 40)), [1.0] * 40
    found = bootstrap_difference(a, b, weights, seed=7)
    assert found == bootstrap_difference(a, b, weights, seed=7)
    assert found != bootstrap_difference(a, b, weights, seed=8)
    monkeypatch.setattr("difftransformer.statistics._RESAMPLED_UNITS_AT_ONCE", 1000)
    assert found == bootstrap_difference(a, b, weights, seed=7)


def test_bootstrap_is_quick_on_many_documents() -> None:
    start = time.perf_counter()
    bootstrap_difference([1.0, 2.0] * 500, [2.0, 1.0] * 500, [1.0] * 1000, seed=0)
    assert time.perf_counter() - start < 20


def test_bootstrap_refuses_what_it_cannot_resample() -> None:
    with pytest.raises(ShapeError, match="lengths"):
        bootstrap_difference([1.0], [1.0, 2.0], [1.0], seed=0)
    with pytest.raises(EvaluationError, match="0 documents"):
        bootstrap_difference([], [], [], seed=0)
    with pytest.raises(EvaluationError, match="not positive"):
        bootstrap_difference([1.0, 2.0], [1.0, 2.0], [1.0, 0.0], seed=0)
    assert bootstrap_difference([3.0], [1.0], [2.0], seed=0).interval_method == "none"
