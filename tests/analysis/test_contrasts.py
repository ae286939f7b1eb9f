"""Plans of studies: contrasts against hand computation and scipy, verdicts against planted truth, registration by dates."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from scipy import stats

from difftransformer.errors import ResultsError
from difftransformer_lab.analysis import analyse
from difftransformer_lab.analysis.contrasts import questions_of
from difftransformer_lab.analysis.tables import effect_text, findings_table
from difftransformer_lab.results import (
    OWN_BEST,
    ChosenRate,
    Contrast,
    Curve,
    Question,
    StudyAxis,
    StudyFigure,
    Term,
    figure_of,
)
from tests.support.simulated_study import LOSS, planned, record, study

NOISE = 0.01
ARMS = ["diff", "v2", "softmax"]
START = StudyAxis(name="start", values=["normal", "scaled"])
SIZE = StudyAxis(name="size", values=["1M", "3M"])
SHARE = StudyFigure(label="accuracy", task="recall", name="accuracy", better="higher", unit="share")
MEANINGS = {"above": "DIFF has the higher loss.", "below": "DIFF has the lower loss.", "within": "They are as good."}


def contrast(name="DIFF minus Transformer", plus=("diff",), minus=("softmax",), at=None, **parts):
    """A contrast of two arms, or of two groups of arms."""
    terms = [Term(arms=list(plus), weight=1.0, at=at or {}), Term(arms=list(minus), weight=-1.0, at=at or {})]
    return Contrast(**{"name": name, "figure": LOSS.label, "terms": terms, "seeds": 12} | MEANINGS | parts)


def confirming(values, contrasts, seeds=12, first_seed=2000, figure=LOSS, axes=(), at="2026-01-01T00:00:00Z", **parts):
    """A study with a plan of one question; `values(arm, point, seed)` is the figure."""

    def make(arm, point, seed):
        return record([figure], {figure.label: values(arm, point, seed)}, arm=arm, seed=seed)

    plan = planned([Question(question="Is DIFF better?", contrasts=list(contrasts))], at=at)
    given = {"first_seed": first_seed, "axes": axes, "plan": plan} | parts
    return study(ARMS, [figure], seeds, make, **given)


def drawn(effects, seed=3, seeds=12, first=2000):
    """Figures with a planted effect of each arm, and seeds with a common and an own part."""
    rng = np.random.default_rng(seed)
    common = dict(zip(range(first, first + seeds), rng.normal(2, 0.1, seeds), strict=True))
    places = itertools.product(ARMS, common)
    table = {(arm, at): common[at] + effects.get(arm, 0.0) + rng.normal(0, NOISE / math.sqrt(2)) for arm, at in places}
    return lambda arm, point, at: table[arm, at]


def findings(evidence):
    """The contrasts of the study's only question."""
    ((_, found),) = questions_of(evidence)
    return found


def test_a_contrast_is_the_weighted_sum_of_means_at_its_settings():
    """(DIFF - softmax at normal) - (mean of DIFF and V2 - softmax at scaled), for size 3M, seed by seed."""
    rng = np.random.default_rng(0)
    settings = itertools.product(START.values, SIZE.values)
    table = {place: rng.normal() for place in itertools.product(ARMS, settings, range(2000, 2006))}
    terms = [
        Term(arms=["diff"], weight=1.0, at={"size": "3M"}), Term(arms=["softmax"], weight=-1.0, at={"size": "3M"}),
        Term(arms=["diff", "v2"], weight=-1.0, at={"size": "3M", "start": "scaled"}),
        Term(arms=["softmax"], weight=1.0, at={"size": "3M", "start": "scaled"}),
    ]  # fmt: skip
    evidence = confirming(lambda *at: table[at], [contrast(terms=terms, seeds=6)], seeds=6, axes=[START, SIZE])
    (found,) = findings(evidence)
    for seed, value in found.values.items():
        at = {place: table[place[0], (place[1], "3M"), seed] for place in itertools.product(ARMS, START.values)}
        first = at["diff", "normal"] - at["softmax", "normal"]
        second = (at["diff", "scaled"] + at["v2", "scaled"]) / 2 - at["softmax", "scaled"]
        assert value == pytest.approx(first - second)
    expected = stats.ttest_1samp(list(found.values.values()), 0)
    assert found.difference.p_value == pytest.approx(expected.pvalue)
    assert (found.difference.low, found.difference.high) == pytest.approx(tuple(expected.confidence_interval()))


@pytest.mark.parametrize("better", ["lower", "higher"])
def test_own_best_is_where_each_arm_was_best_while_rates_were_chosen(better):
    """DIFF is best with the scaled start, softmax with the normal one; at 3M nothing was tuned."""
    sign = 1 if better == "lower" else -1
    tried = {
        ("diff", "normal"): [(1e-3, 3.0), (2e-3, 2.5)], ("diff", "scaled"): [(1e-3, 2.0), (2e-3, 2.8)],
        ("softmax", "normal"): [(1e-3, 2.1), (2e-3, 2.0)], ("softmax", "scaled"): [(1e-3, 2.2), (2e-3, 2.3)],
    }  # fmt: skip
    rates = []
    for (arm, start), values in tried.items():
        best, _ = min(values, key=lambda one: one[1])
        signed = [(rate, sign * value) for rate, value in values]
        rates.append(ChosenRate(arm=arm, point={"start": start, "size": "1M"}, learning_rate=best, tried=signed))
    figure = dataclasses.replace(LOSS, better=better)
    each = contrast(at={"start": OWN_BEST, "size": "3M"}, seeds=6)
    parts = {"seeds": 6, "axes": [START, SIZE], "figure": figure}
    code = {"normal": 1.0, "scaled": 10.0, "1M": 0.0, "3M": 100.0}

    def values(arm, point, seed):
        return sum(code[one] for one in point) + (0.5 if arm == "diff" else 0.0) + seed * 1e-6

    (found,) = findings(confirming(values, [each], rates=rates, **parts))
    assert set(found.groups) == {("diff", ("scaled", "3M")), ("softmax", ("normal", "3M"))}
    assert list(found.values.values()) == pytest.approx([9.5] * 6)
    (found,) = findings(confirming(values, [each], rates=rates[1:], **parts))
    assert ("diff", ("scaled", "3M")) in found.groups  # the only start that has a rate
    (found,) = findings(confirming(values, [each], rates=rates[2:], **parts))
    assert (found.state, found.groups, found.values) == ("incomplete", {}, {})


def test_own_best_looks_at_the_size_at_which_rates_were_chosen():
    def rate(start, size, value):
        return ChosenRate(arm="diff", point={"start": start, "size": size}, learning_rate=1e-3, tried=[(1e-3, value)])

    rates = [rate("normal", "1M", 1.0), rate("scaled", "1M", 2.0), rate("normal", "3M", 2.0), rate("scaled", "3M", 1.0)]
    for size, best in (("1M", "normal"), ("3M", "scaled")):
        term = Term(arms=["diff"], weight=1.0, at={"start": OWN_BEST, "size": size})
        evidence = confirming(lambda *_: 0.0, [contrast(terms=[term])], rates=rates, axes=[START, SIZE])
        assert set(findings(evidence)[0].groups) == {("diff", (best, size))}


def test_only_planned_seeds_count_and_no_verdict_comes_early():
    values = drawn({"diff": -1.0}, seeds=40, first=1990)
    early = confirming(values, [contrast()], seeds=21, first_seed=1990)
    (found,) = findings(early)
    assert (found.state, len(found.values), found.difference) == ("incomplete", 11, None)
    assert findings_table(analyse(early)).folded()[0][3:5] == ["11 of 12", ""]
    (found,) = findings(confirming(values, [contrast()], seeds=40, first_seed=1990))
    assert list(found.values) == list(range(2000, 2012))
    assert found.state == "below"
    (found,) = findings(confirming(values, [contrast()], seeds=5, first_seed=1990))
    assert (found.state, found.seeds, found.effect, found.p) == ("incomplete", 0, None, None)


def test_a_seed_on_other_data_does_not_count():
    evidence = confirming(drawn({}), [contrast()])
    runs = evidence.runs["diff", ()]
    runs[2003] = dataclasses.replace(runs[2003], data_sha256="1" * 64)
    (found,) = findings(evidence)
    assert found.state == "incomplete"
    assert 2003 not in found.values


@pytest.mark.parametrize(("effect", "parts", "state"), [
    (-0.1, {}, "below"), (0.1, {}, "above"), (0.1, {"margin": 0.05}, "above"), (-0.1, {"margin": 0.05}, "below"),
    (0.1, {"margin": 0.1}, "open"), (0.0, {"smallest": 0.05}, "within"), (0.0, {}, "open"),
    (0.02, {"margin": 0.1, "smallest": 0.05}, "within"), (-0.1, {"seeds": 4}, "too few seeds"),
    (-0.1, {"seeds": 5}, "below"), (-0.1, {"test": "welch"}, "open"),  # the common part of a seed is noise to it
    (-1.0, {"test": "welch"}, "below"),
])  # fmt: skip
def test_the_verdict_is_where_the_interval_lies(effect, parts, state):
    (found,) = findings(confirming(drawn({"diff": effect}), [contrast(**parts)]))
    assert found.state == state


@pytest.mark.parametrize(
    ("effect", "smallest", "words"),
    [
        (-0.1, 0.2, "Lower, by less than 0.2 nats/token"),
        (-0.1, 0.05, "Lower, by more than 0.05 nats/token"),
        (-0.1, 0.1, "Lower"),
        (0.0, 0.2, "The same"),
        (0.0, None, ""),
    ],
)
def test_an_effect_below_the_smallest_that_matters_says_so(effect, smallest, words):
    parts = {"above": "Higher.", "below": "Lower.", "within": "The same.", "smallest": smallest}
    (finding,) = findings(confirming(drawn({"diff": effect}), [contrast(**parts)]))
    assert finding.meaning == words


def test_contrasts_under_holm_are_tested_together_and_nothing_is_decided_before_its_seeds_are_there():
    pair = [contrast(), contrast(name="V2 minus Transformer", plus=("v2",))]
    plan = planned([Question(question=f"{one.name}?", contrasts=[one]) for one in pair])
    together = dataclasses.replace(plan, plan=dataclasses.replace(plan.plan, holm=[one.name for one in pair]))

    def tested(plan, seeds=12):
        values = drawn({"diff": -0.0075, "v2": -0.0075}, seed=10)
        return [one for _, (one,) in questions_of(confirming(values, [], seeds=seeds, plan=plan))]

    small, large = (one.difference.p_value for one in tested(plan))
    assert small <= 0.025 < large <= 0.05  # Bonferroni's rule would not decide the second one, and Holm's does
    found = tested(together)
    assert [one.difference.p_holm for one in found] == pytest.approx([2 * small, large])
    assert [one.state for one in found] == ["below", "below"]
    assert [one.p for one in found] == [one.difference.p_holm for one in found]
    assert [one.difference.p_holm for one in tested(plan)] == [None, None]
    assert [(one.state, one.difference) for one in tested(together, seeds=11)] == [("incomplete", None)] * 2


def test_contrasts_under_holm_wait_for_none_and_those_after_them_do():
    """Even where they are of one question."""
    pair = [contrast(), contrast(name="V2 minus Transformer", plus=("v2",))]
    for effect in np.linspace(-0.004, -0.012, 33):
        (alone, _) = findings(confirming(drawn({"diff": effect, "v2": 0.0}), pair))
        if 0.025 < alone.difference.p_value <= 0.05:
            break
    last = contrast(name="V2 minus Transformer again", plus=("v2",))
    plan = planned([Question(question="Is DIFF better?", contrasts=[*pair, last])])
    plan = dataclasses.replace(plan, plan=dataclasses.replace(plan.plan, holm=[one.name for one in pair]))
    assert alone.state == "below"
    for v2, states in ((0.0, ["open", "open", "not tested"]), (-0.1, ["below", "below", "below"])):
        found = findings(confirming(drawn({"diff": effect, "v2": v2}), pair, plan=plan))
        assert [one.state for one in found] == states
    found = findings(confirming(drawn({"diff": effect, "v2": 0.0}), pair, plan=plan))[0]
    assert found.difference.p_value <= 0.05 < found.p


def test_a_contrast_in_doublings_has_its_bounds_in_tokens():
    """The twin falls by 0.3 with its second half of the tokens; V2 is 0.03 below it, a tenth of a doubling."""
    rng = np.random.default_rng(1)
    table = {
        (arm, seed): rng.normal({"diff": 1.97, "v2": 2.3, "softmax": 2.0}[arm], 0.004)
        for arm in ARMS
        for seed in range(2000, 2012)
    }

    def make(arm, point, seed):
        tokens = 3_000_000 if arm == "v2" else 6_000_000
        run = record([LOSS], {LOSS.label: table[arm, seed]}, arm=arm, seed=seed, tokens=tokens)
        return dataclasses.replace(run, recipe={"model": {"attention_type": "diff" if arm == "diff" else "softmax"}})

    def found(smallest, **parts):
        asked = contrast(scale="doublings", smallest=smallest, **parts)
        plan = planned([Question(question="Is DIFF better?", contrasts=[asked])])
        return findings(study(ARMS, [LOSS], 12, make, first_seed=2000, plan=plan))[0]

    a, b, c = (np.array([table[arm, seed] for seed in range(2000, 2012)]) for arm in ARMS)
    one = found(0.15)
    assert one.difference.mean == pytest.approx((a - c).mean() / (b - c).mean())
    for bound in (one.difference.low, one.difference.high):
        assert stats.ttest_1samp(a - c - bound * (b - c), 0).pvalue == pytest.approx(0.05)
    assert one.difference.p_value == pytest.approx(stats.ttest_rel(a, c).pvalue)
    assert one.meaning == "DIFF has the lower loss, by less than 0.15 doublings"
    assert found(0.05).meaning == "DIFF has the lower loss, by more than 0.05 doublings"
    assert one.difference.interval_method == "fieller over seeds"
    assert [*one.values.values()] == pytest.approx((a - c) / (b - c).mean())
    with pytest.raises(ResultsError, match="scale 'doublings', and the study has it for two arms' figures"):
        found(0.1, test="welch")
    (short,) = findings(confirming(drawn({}), [contrast(scale="doublings")]))
    assert (short.state, short.values) == ("incomplete", {})


def test_the_test_follows_from_the_number_of_seeds_and_the_plan():
    for seeds, parts in ((9, {}), (10, {}), (10, {"test": "welch"})):
        values = drawn({"diff": -0.01}, seeds=seeds)
        (found,) = findings(confirming(values, [contrast(seeds=seeds, **parts)], seeds=seeds))
        a, b = ([values(arm, (), seed) for seed in range(2000, 2000 + seeds)] for arm in ("diff", "softmax"))
        differences = np.subtract(a, b)
        student = stats.ttest_rel(a, b)
        if parts:
            expected = stats.ttest_ind(a, b, equal_var=False)
        elif seeds == 9:
            expected = student
        else:
            expected = stats.permutation_test((differences,), np.mean, permutation_type="samples", n_resamples=np.inf)
            assert found.beside.p_value == pytest.approx(student.pvalue)
        assert found.difference.p_value == pytest.approx(expected.pvalue)
        assert found.same_direction == sum(differences * differences.mean() > 0)


def test_welch_counts_an_arm_that_stands_in_two_terms_once():
    """DIFF minus half of (DIFF + softmax) is half of DIFF minus softmax, with the same p-value."""
    values = drawn({"diff": -0.1})
    terms = [Term(arms=["diff"], weight=1.0), Term(arms=["diff", "softmax"], weight=-1.0)]
    whole, half = findings(
        confirming(values, [contrast(test="welch"), contrast(name="half", test="welch", terms=terms)])
    )
    assert half.difference.p_value == pytest.approx(whole.difference.p_value)
    assert half.difference.mean == pytest.approx(whole.difference.mean / 2)


def test_log_odds_and_logs():
    counts = {"diff": [100, 90, 80, 70, 99], "v2": [0] * 5, "softmax": [0, 5, 50, 60, 1]}
    odds = contrast(figure=SHARE.label, scale="log odds", seeds=5)
    (found,) = findings(confirming(lambda arm, _, at: counts[arm][at - 2000] / 100, [odds], seeds=5, figure=SHARE))
    expected = [
        math.log((k + 0.5) / (100 - k + 0.5) * (100 - m + 0.5) / (m + 0.5))
        for k, m in zip(counts["diff"], counts["softmax"], strict=True)
    ]
    assert list(found.values.values()) == pytest.approx(expected)
    few = confirming(lambda arm, _, at: counts[arm][at - 2000] / 100, [odds], seeds=5, figure=SHARE)
    for run in (run for by_seed in few.runs.values() for run in by_seed.values()):
        run.figures[0] = dataclasses.replace(run.figures[0], n=40)
    (found,) = findings(few)
    assert found.values[2001] == pytest.approx(math.log((36 + 0.5) / (4 + 0.5) * (38 + 0.5) / (2 + 0.5)))
    values = drawn({"diff": 1.0})
    (found,) = findings(confirming(values, [contrast(scale="log")]))
    assert found.values[2000] == pytest.approx(math.log(values("diff", (), 2000) / values("softmax", (), 2000)))
    assert found.unit == "log units"


SEQUENCE = [contrast("first"), contrast("second", plus=["v2"]), contrast("third", plus=["diff"], minus=["v2"])]


@pytest.mark.parametrize(("effects", "states"), [
    ({"diff": -0.2, "v2": -0.1}, ["below", "below", "below"]),
    ({"diff": -0.2}, ["below", "open", "not tested"]),
    ({"v2": -0.2}, ["open", "not tested", "not tested"]),
])  # fmt: skip
def test_contrasts_of_a_question_are_tested_in_their_order(effects, states):
    found = findings(confirming(drawn(effects, seed=4), SEQUENCE))
    assert [one.state for one in found] == states


def test_a_contrast_within_its_smallest_effect_is_decided_and_questions_do_not_wait():
    values = drawn({"v2": -0.2})
    small = contrast("first", smallest=0.1)
    assert [one.state for one in findings(confirming(values, [small, SEQUENCE[1]]))] == ["within", "below"]
    questions = [Question(question=name, contrasts=[one]) for name, one in zip("ab", SEQUENCE, strict=False)]
    evidence = confirming(values, [], plan=planned(questions))
    assert [found[0].state for _, found in questions_of(evidence)] == ["open", "below"]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [6, 12])
def test_a_question_without_effects_claims_one_in_at_most_one_of_twenty_studies(seeds):
    repeats, false = 1000, {"none": 0, "after above": 0, "after within": 0}
    sequence = [dataclasses.replace(one, seeds=seeds) for one in SEQUENCE]
    for repeat in range(repeats):
        found = findings(confirming(drawn({}, seed=repeat, seeds=seeds), sequence, seeds=seeds))
        false["none"] += any(one.state in ("above", "below") for one in found)
        found = findings(confirming(drawn({"diff": 1.0, "v2": 0.0}, seed=repeat, seeds=seeds), sequence, seeds=seeds))
        assert found[0].state == "above"
        false["after above"] += found[1].state in ("above", "below")
        small = [dataclasses.replace(one, smallest=10 * NOISE) for one in sequence]
        found = findings(confirming(drawn({}, seed=repeat, seeds=seeds), small, seeds=seeds))
        assert found[0].state != "open"
        false["after within"] += found[0].state == "within" and found[1].state in ("above", "below")
    for count in false.values():
        assert count / repeats <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeats)


@pytest.mark.slow
def test_a_planted_effect_is_found_as_often_as_a_t_test_would():
    """The power at the seeds and the effect of a textbook example, and none in the wrong direction."""
    repeats, seeds, effect = 400, 12, 0.9  # standard deviations of a difference
    states = [
        findings(confirming(drawn({"diff": -effect * NOISE}, seed=repeat, seeds=seeds), [contrast()]))[0].state
        for repeat in range(repeats)
    ]
    bound = stats.t.isf(0.025, seeds - 1)
    power = stats.nct.sf(bound, seeds - 1, effect * math.sqrt(seeds))
    assert states.count("above") == 0
    assert states.count("below") / repeats == pytest.approx(power, abs=0.07)


def test_a_plan_is_registered_only_if_every_run_began_after_its_commit():
    """Runs of 120 seconds are over at 03:04:05, so that they began at 03:02:05."""
    for at, is_registered in (("2026-01-02T03:02:04Z", True), ("2026-01-02T03:02:05+00:00", False)):
        evidence = confirming(drawn({}), [contrast()], at=at)
        assert (analyse(evidence).why_not_registered == "") == is_registered
    evidence = confirming(drawn({}), [contrast()])
    runs = evidence.runs["diff", ()]
    runs[2007] = dataclasses.replace(runs[2007], created="2025-12-31T00:00:00+00:00")
    runs[2008] = dataclasses.replace(runs[2008], created="2025-12-30T12:02:00+00:00")
    runs[2007] = dataclasses.replace(runs[2007], began="2025-12-31T12:00:00+00:00", created="2026-01-02T00:00:00+00:00")
    in_no_contrast = dataclasses.replace(runs[2000], created="2025-01-01T00:00:00+00:00")
    evidence.runs["v2", ()][2000] = in_no_contrast
    found = analyse(evidence).why_not_registered
    assert found.startswith(
        "runs/diff-seed2008.json began on 30 December 2025, 12:00 UTC, and the plan's commit is of 1 January 2026"
    )
    assert "2 of the 24 runs are older" in found
    plan = planned([Question(question="?", contrasts=[contrast()])], commit="", at="")
    found = analyse(confirming(drawn({}), [], plan=plan)).why_not_registered
    assert found == "plans/simulated.yaml is in no commit with this content."


@pytest.mark.parametrize(("parts", "named"), [
    ({"figure": "loss"}, "the figure 'loss', and the study has held-out loss"),
    ({"plus": ["dif"]}, "the arm 'dif', and the study has diff, softmax, v2"),
    ({"at": {"starts": "normal"}}, "the axis 'starts', and the study has start"),
    ({"at": {"start": "old"}}, "the start 'old', and the study has normal, own best, scaled"),
])  # fmt: skip
def test_a_plan_that_names_what_the_study_lacks_is_refused(parts, named):
    with pytest.raises(ResultsError, match=named):
        findings(confirming(lambda *_: 0.0, [contrast(**parts)], axes=[START]))


def test_a_finding_has_the_effect_and_interval_of_the_exact_test():
    steps = [-0.02, -0.018, -0.016, -0.015, -0.014, -0.013, -0.012, -0.01, -0.008, -0.006, -0.004, 0.004]
    evidence = confirming(lambda arm, _, seed: 3.0 + (steps[seed - 2000] if arm == "diff" else 0.0), [contrast()])
    (found,) = analyse(evidence).findings
    expected = stats.permutation_test((steps,), np.mean, permutation_type="samples", n_resamples=np.inf)
    subsets = (part for size in range(1, 13) for part in itertools.combinations(steps, size))
    means = sorted(sum(part) / len(part) for part in subsets)
    low, high = means[101], means[-102]  # 2.5 % of 4096 sign patterns are 102
    assert (found.effect, found.low, found.high, found.seeds) == pytest.approx((-0.011, low, high, 12))
    assert found.p == pytest.approx(expected.pvalue)
    assert effect_text(found) == f"-0.0110 nats/token [{low:.4f}, {high:.4f}]"
    assert (found.state, found.same_direction, found.meaning) == ("below", 11, "DIFF has the lower loss")
    (found,) = findings(confirming(drawn({}, seed=1), [contrast(smallest=0.001)]))
    assert (found.state, found.meaning) == ("open", "")
    (found,) = findings(confirming(drawn({"diff": -1.0}), [contrast(seeds=3)]))
    assert (found.state, found.meaning) == ("too few seeds", "")


def test_the_area_under_a_curve_is_its_mean_over_steps():
    figure = StudyFigure(label="area", curve="validation_accuracy", area=True, better="higher")
    steps, values = [100, 150, 400, 1000], [0.0, 0.5, 0.2, 1.0]
    run = record([], {}, arm="diff", curves={"validation_accuracy": Curve(steps=steps, values=values)})
    fine = np.linspace(100, 1000, 900_001)
    assert figure_of(run, figure) == pytest.approx(np.interp(fine, steps, values).mean(), abs=1e-6)
    one = record([], {}, arm="diff", curves={"validation_accuracy": Curve(steps=[7], values=[0.3])})
    assert figure_of(one, figure) == 0.3
