"""Statistics of studies against planted truth: runs drawn from a known effect and a known noise of seeds."""

import dataclasses
import math
from datetime import timedelta
from itertools import product

import numpy as np
import pytest
from scipy import stats

from difftransformer.errors import ResultsError
from difftransformer_lab.analysis import analyse, read_records
from difftransformer_lab.analysis.compare import compare, in_direction, row_of, timed_seeds
from difftransformer_lab.analysis.page import study_page
from difftransformer_lab.analysis.scaling import fit_power_law, interpolate, scaling_of
from difftransformer_lab.analysis.tables import (
    HELD_OUT,
    brief_table,
    costs_table,
    equal_time_differences,
    figures_table,
)
from difftransformer_lab.results import Curve, StudyAxis, StudyFigure, figure_of, write_result
from tests.support.simulated_study import LOSS, record, save, study

SEEDS = 5
NOISE = 0.01
SHARE = StudyFigure(label="accuracy", task="recall", name="accuracy", better="higher", unit="share")
STEPS = StudyFigure(label="steps to 90 %", curve="validation_accuracy", reaches=0.9, unit="steps")
ARMS = ["diff", "diff_v2", "wide", "softmax"]


def losses(effects, rng):
    """A study in which arms differ from the reference by `effects`, and seeds by a common and an own part."""
    common = rng.normal(0, 5 * NOISE, SEEDS)

    def make(arm, point, seed):
        loss = 2.0 + effects.get(arm, 0.0) + common[seed] + rng.normal(0, NOISE / math.sqrt(2))
        return record([LOSS], {LOSS.label: loss}, arm=arm, seed=seed)

    return study(ARMS, [LOSS], SEEDS, make)


def test_differences_are_those_of_a_paired_t_test():
    evidence = losses({"diff": -0.01}, np.random.default_rng(1))
    rows = compare(evidence)
    own, other = (list(row_of(rows, LOSS.label, arm, ()).values.values()) for arm in ("diff", "softmax"))
    row, expected = row_of(rows, LOSS.label, "diff", ()), stats.ttest_rel(own, other)
    assert row.difference.p_value == pytest.approx(expected.pvalue)
    interval = expected.confidence_interval()
    assert (row.difference.low, row.difference.high) == pytest.approx((interval.low, interval.high))
    differences = np.subtract(own, other)
    assert row.same_direction == sum(differences * differences.mean() > 0)
    assert row.excludes_zero == (expected.pvalue < 0.05)


def test_a_figure_that_no_run_has_is_in_no_table():
    found = analyse(study(["diff", "twin"], [SHARE], 2, lambda arm, point, seed: record([], {}, arm=arm, seed=seed)))
    assert found.rows == brief_table(found).rows == []
    assert "arms" not in [section.slug for section in study_page(found).sections]


def test_runs_on_other_data_are_not_paired():
    evidence = losses({}, np.random.default_rng(2))
    runs = evidence.runs["diff", ()]
    runs[0] = dataclasses.replace(runs[0], data_sha256="1" * 64)
    del runs[1]
    row = row_of(compare(evidence), LOSS.label, "diff", ())
    assert (len(row.values), row.pairs) == (4, 3)


def shares(values):
    """A study of the accuracies of each arm."""

    def make(arm, point, seed):
        return record([SHARE], {SHARE.label: values[arm][seed]}, arm=arm)

    return study(list(values), [SHARE], 3, make)


def test_arms_at_a_ceiling_are_equal_and_have_no_interval():
    values = {"diff": [1.0, 1.0, 1.0], "wide": [0.9, 0.7, 0.6], "softmax": [1.0, 1.0, 1.0]}
    evidence = shares(values)
    rows = compare(evidence)
    row = row_of(rows, SHARE.label, "diff", ())
    assert (row.excludes_zero, row.difference.low, row.same_direction) == (False, None, 3)
    assert figures_table(evidence, rows, [SHARE], "share", "").folded()[0] == [
        "diff",
        "3",
        "1.00 ± 0.00",
        "+0.00",
        "3 of 3",
    ]


def test_seeds_are_counted_in_the_direction_of_their_mean():
    found = [in_direction(values, sum(values)) for values in ([1, 2, -1], [-1, 0, -2], [0, 0], [1, -1, 0])]
    assert found == [2, 2, 2, 1]


def test_a_share_has_no_interval_beyond_one():
    values = {"diff": [1.0, 0.9, 0.2], "softmax": [0.0, 0.1, 0.1]}
    row = row_of(compare(shares(values)), SHARE.label, "diff", ())
    assert stats.ttest_rel(values["diff"], values["softmax"]).confidence_interval().high > 1
    assert row.difference.high == 1.0


@pytest.mark.parametrize(("curve", "name", "level", "step"), [
    (Curve(steps=[100, 200, 300], values=[0.1, 0.8, 1.0]), "validation_accuracy", 0.9, 250.0),
    (Curve(steps=[100, 200], values=[0.95, 0.99]), "validation_accuracy", 0.9, 100.0),
    (Curve(steps=[100, 200], values=[0.1, 0.2]), "validation_accuracy", 0.9, 200.0),
    (Curve(steps=[100, 200, 300], values=[3.0, 1.0, 2.7]), "validation_loss_nats", 2.5, 125.0),
    (Curve(steps=[100, 200], values=[3.0, 2.9]), "validation_loss_nats", 2.5, 200.0),
])  # fmt: skip
def test_steps_to_a_level(curve, name, level, step):
    figure = StudyFigure(label="steps", curve=name, reaches=level)
    assert figure_of(record([], {}, arm="diff", curves={name: curve}), figure) == step


def test_a_level_that_nothing_reaches_has_no_mean_and_no_difference():
    ends = {"diff": 0.5, "diff_v2": 1.0, "softmax": 0.5}

    def make(arm, point, seed):
        curve = Curve(steps=[500, 1000 + seed], values=[0.0, ends[arm]])
        return record([], {}, arm=arm, curves={"validation_accuracy": curve})

    evidence = study(list(ends), [STEPS], 3, make)
    rows = compare(evidence)
    cells = {row[0]: row[1:] for row in figures_table(evidence, rows, [STEPS], "steps", "").folded()}
    assert cells["diff"] == ["3", "not reached", "not reached", "", "3 of 3"]
    assert cells["softmax"][1] == "not reached"
    assert cells["diff_v2"][1] == "950.90 ± 0.52"  # 90 % of the way from step 500 to 1000, 1001, 1002
    assert cells["diff_v2"][2].startswith("-50.10 ")  # minus 1001


def test_runs_that_reach_the_level_are_counted_over_all_settings():
    def make(arm, point, seed):
        end = 1.0 if arm == "diff" and point == ("b",) and seed else 0.5
        return record([], {}, arm=arm, curves={"validation_accuracy": Curve(steps=[500, 1000], values=[0.0, end])})

    evidence = study(["diff", "softmax"], [STEPS], 3, make, axes=[StudyAxis(name="noise", values=["a", "b"])])
    rows = compare(evidence)
    assert [(row.arm.name, row.point, row.reached, row.runs, row.is_censored) for row in rows] == [
        ("diff", (), 2, 6, False), ("softmax", (), 0, 6, False), ("diff", ("a",), 0, 3, True),
        ("softmax", ("a",), 0, 3, False), ("diff", ("b",), 2, 3, False), ("softmax", ("b",), 0, 3, False),
    ]  # fmt: skip
    assert row_of(rows, STEPS.label, "softmax", ()).statistic.mean == 1000
    table = figures_table(evidence, rows, [STEPS], "steps", "").folded()  # 950 where it is reached, else 1000
    assert [(row[1], row[3], row[-1]) for row in table[:2]] == [
        ("diff", "983 ± 8", "4 of 6"),
        ("softmax", "not reached", "6 of 6"),
    ]


def test_an_arm_is_compared_where_the_reference_alone_reaches_the_level():
    def make(arm, point, seed):
        end = 1.0 if arm == "softmax" else 0.5
        return record([], {}, arm=arm, curves={"validation_accuracy": Curve(steps=[500, 1000], values=[0.0, end])})

    rows = compare(study(["diff", "softmax"], [STEPS], 3, make))
    assert [(row.arm.name, row.reached, row.is_censored) for row in rows] == [("diff", 0, False), ("softmax", 3, False)]


def test_means_over_settings_are_paired_seed_by_seed():
    axis = StudyAxis(name="noise", values=["0", "0.4"], numbers=[0.0, 0.4])
    rng = np.random.default_rng(3)
    drawn = {place: rng.normal() for place in product(("diff", "softmax"), axis.values, range(4))}

    def make(arm, point, seed):
        return record([LOSS], {LOSS.label: drawn[arm, *point, seed]}, arm=arm)

    evidence = study(["diff", "softmax"], [LOSS], 4, make, axes=[axis])
    del evidence.runs["diff", ("0.4",)][3]  # its seed has no mean over settings
    rows = compare(evidence)
    own, other = (
        [(drawn[arm, "0", seed] + drawn[arm, "0.4", seed]) / 2 for seed in range(3)] for arm in ("diff", "softmax")
    )
    row = row_of(rows, LOSS.label, "diff", ())
    assert row.pairs == 3
    assert row.difference.p_value == pytest.approx(stats.ttest_rel(own, other).pvalue)


def test_an_axis_of_one_value_adds_no_comparison():
    def make(arm, point, seed):
        curve = Curve(steps=[1, 2], values=[0.0, 1.0 + seed * (arm == "diff")])
        return record([], {}, arm=arm, curves={"validation_accuracy": curve})

    rows = compare(study(["diff", "softmax"], [STEPS], 3, make, axes=[StudyAxis(name="noise", values=["0"])]))
    found = [(row.arm.name, row.point, row.reached, row.pairs) for row in rows]
    assert found == [("diff", (), 3, 3), ("softmax", (), 3, 0)]


SIZES = StudyAxis(name="size", values=["s", "m", "l", "xl"], numbers=[0.3e6, 1e6, 3e6, 8e6])
TOKENS = StudyAxis(name="tokens", values=["few", "some", "many"], numbers=[5e6, 2e7, 8e7])


def scaling_study(rng, factor=1.6, noise=0.004, seeds=3):
    """The arm has the loss of a reference with `factor` times its parameters."""

    def make(arm, point, seed):
        size, tokens = (
            axis.numbers[axis.values.index(value)] for axis, value in zip((SIZES, TOKENS), point, strict=True)
        )
        n = size * (factor if arm == "diff" else 1.0)
        loss = 1.5 + 12 * n**-0.25 + 40 * tokens**-0.3 + rng.normal(0, noise)
        return record([LOSS], {LOSS.label: loss}, arm=arm, parameters=int(size), tokens=int(tokens))

    return study(["diff", "softmax"], [LOSS], seeds, make, axes=[SIZES, TOKENS], analysis="scaling")


def test_a_power_law_without_noise_is_recovered():
    n = np.array(SIZES.numbers)
    law = fit_power_law(n, (1.5 + 12 * n**-0.25)[None])
    assert law.b[0] == pytest.approx(0.25, abs=0.01)
    assert law.c[0] == pytest.approx(1.5, abs=0.03)
    assert law.inverse(np.array([1.5 + 12 * 2e6**-0.25]))[0] == pytest.approx(2e6, rel=0.01)
    flat = fit_power_law(n, np.array([[2.0, 2.0, 2.0, 2.0], [1.0, 2.0, 3.0, 4.0]]))  # nothing falls
    assert np.isfinite(flat.at(n)).all()


def test_interpolation_is_numpys_and_says_what_is_out_of_range():
    n, losses_ = np.array([1e5, 1e6, 1e7]), np.array([[3.0, 2.0, 1.5]] * 4)
    found = interpolate(n, losses_, np.array([2.5, 1.75, 3.5, 1.0]))
    assert found[:2] == pytest.approx(np.exp(np.interp([-2.5, -1.75], [-3, -2, -1.5], np.log(n))))
    assert found[2:].tolist() == [0.0, math.inf]
    nearly_flat = np.array([[3.0, 3.0 - 1e-12, 1.5]])
    with np.errstate(all="raise"):
        assert interpolate(n, nearly_flat, np.array([1.6])) == pytest.approx(1e6 * 10 ** (1.4 / 1.5))


def test_the_planted_share_of_parameters_is_found():
    evidence = scaling_study(np.random.default_rng(0), noise=0.0)
    scaling = scaling_of(evidence)
    by_size = [need for need in scaling.needs if need.axis.name == "size"]
    assert [need.fit.share for need in by_size] == pytest.approx([1 / 1.6] * 4, rel=0.03)
    assert [need.raw.share for need in by_size[1:]] == pytest.approx([1 / 1.6] * 3, rel=0.06)
    assert by_size[0].raw.share == 0.0  # below the smallest arm
    assert [need.fit.outside for need in by_size] == [True, False, False, False]
    worse = scaling_of(scaling_study(np.random.default_rng(0), factor=1 / 1.6, noise=0.0))
    assert worse.needs[3].raw.share == math.inf
    assert [need.fit.outside for need in worse.needs[:4]] == [False, False, False, True]


def test_intervals_of_a_share_are_of_the_bootstrap_of_residuals():
    """Of two seeds, whose residuals are smaller than their noise by the square root of 2; here with numpy's interpolation."""
    evidence = scaling_study(np.random.default_rng(2), seeds=2, noise=0.008)
    need = [one for one in scaling_of(evidence).needs if one.axis.name == "size"][-1]
    runs = [[evidence.at(arm, (size, "many")) for arm in ("diff", "softmax")] for size in SIZES.values]
    losses = np.array([[[figure_of(one[seed], LOSS) for one in arms] for seed in (0, 1)] for arms in runs])
    means = losses.mean(1)
    pool = ((losses - means[:, None]) * math.sqrt(2)).reshape(-1, 2)
    rng, logs, shares = np.random.default_rng(7), np.log(SIZES.numbers), []
    for _ in range(20_000):
        drawn = means + pool[rng.integers(len(pool), size=(4, 2))].mean(1)
        assert (np.diff(drawn[:, 0]) < 0).all()
        shares.append(np.exp(np.interp(-drawn[-1, 1], -drawn[:, 0], logs) - logs[-1]))
    expected = np.quantile(shares, [0.025, 0.975])
    assert [need.raw.low, need.raw.high] == pytest.approx(expected, abs=0.05 * (expected[1] - expected[0]))


@pytest.mark.slow
def test_intervals_of_the_share_of_parameters_cover_it():
    rng, fit, raw, repeats = np.random.default_rng(5), 0, 0, 60
    for _ in range(repeats):
        need = next(one for one in reversed(scaling_of(scaling_study(rng)).needs) if one.axis.name == "size")
        fit += need.fit.low <= 1 / 1.6 <= need.fit.high
        raw += need.raw.low <= 1 / 1.6 <= need.raw.high
    for covered in (fit, raw):
        assert stats.binomtest(covered, repeats, 0.95).pvalue > 0.001


def test_a_run_that_diverged_says_nothing_of_tokens_and_times():
    """DIFF's first run at the last setting ended early: its tokens and minutes are those of a part."""
    whole = scaling_study(np.random.default_rng(0), noise=0.0)
    key = ("diff", ("xl", "many"))
    cut = {"diverged_after": 9, "figures": [], "train_tokens": 5, "train_seconds": 1.0, "step_seconds": 1.0}
    first = dataclasses.replace(whole.runs[key][0], **cut)
    evidence = dataclasses.replace(whole, runs=whole.runs | {key: whole.runs[key] | {0: first}})
    trends = {(one.axis.name, one.arm.name): one.n.tolist() for one in scaling_of(evidence).trends}
    assert trends["tokens", "diff"] == trends["tokens", "softmax"] == TOKENS.numbers
    row = costs_table(evidence).rows[0]
    assert row[4:7] == ["1.00", f"{100 / 60:.3g}", "1.00"]
    assert float(row[7]) == pytest.approx(len(SIZES.values) * len(TOKENS.values) * 3 * 120 / 3600, rel=5e-3)
    none = {
        key: {seed: dataclasses.replace(run, **cut) for seed, run in runs.items()} for key, runs in whole.runs.items()
    }
    assert costs_table(dataclasses.replace(whole, runs=none)).rows[0][5] == "diverged"


def test_no_axes_no_scaling():
    with pytest.raises(ResultsError, match="no size here"):
        scaling_of(losses({}, np.random.default_rng(0)))


def test_a_study_is_read_back_from_its_files(tmp_path):
    rng = np.random.default_rng(0)
    evidence = losses({"diff": 0.1}, rng)
    path = save(evidence, tmp_path)
    assert compare(read_records(path)) == compare(evidence)
    members = [dataclasses.replace(member, arm="nobody") for member in evidence.index.members]
    write_result(dataclasses.replace(evidence.index, members=members), path)
    with pytest.raises(ResultsError, match="of arm 'nobody'"):
        read_records(path)
    alone = [arm for arm in evidence.index.arms if arm.name == evidence.index.reference]
    write_result(dataclasses.replace(evidence.index, arms=alone), path)
    with pytest.raises(ResultsError, match="is the only arm"):
        read_records(path)
    write_result(dataclasses.replace(evidence.index, reference="nobody"), path)
    with pytest.raises(ResultsError, match="the reference 'nobody' is not an arm"):
        read_records(path)


def test_tuning_runs_are_in_no_comparison(tmp_path):
    evidence = losses({}, np.random.default_rng(0))
    members = [dataclasses.replace(member, is_tuning=member.seed == 0) for member in evidence.index.members]
    path = save(dataclasses.replace(evidence, index=dataclasses.replace(evidence.index, members=members)), tmp_path)
    assert {row.pairs for row in compare(read_records(path)) if row.difference} == {SEEDS - 1}


def test_times_are_compared_between_machines_of_one_kind_within_an_hour():
    """DIFF's seed 1 ran on another processor, and seed 2 two hours later.

    The loss falls by 1 over the run, and DIFF's steps take 1.25 of the time.
    """

    def make(arm, point, seed):
        curves = {HELD_OUT: Curve(steps=[1, 3000], values=[3.0, 2.0])}
        run = record([LOSS], {LOSS.label: 2.0}, arm=arm, seed=seed, seconds=100.0 + 25 * (arm == "diff"), curves=curves)
        if (arm, seed) == ("diff", 1):
            return dataclasses.replace(run, environment=dataclasses.replace(run.environment, processor="Another CPU"))
        if (arm, seed) == ("diff", 2):
            return dataclasses.replace(run, began=(run.start + timedelta(hours=2)).isoformat())
        return run

    timed = study(["diff", "softmax"], [LOSS], 3, make)
    (difference,) = equal_time_differences(timed, timed.index.arms[0])
    assert difference == pytest.approx(1 / 5, rel=1e-3)  # a fifth of DIFF's steps is missing
    assert timed_seeds(timed, "diff", "softmax", ()) == [0]
    parameters, step, run = (costs_table(timed).rows[0][place] for place in (2, 4, 6))
    assert (parameters, step, run) == ("1.00", "1.25", "1.25")
