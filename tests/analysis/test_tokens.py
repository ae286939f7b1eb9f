"""Differences of losses in tokens, against hand-made numbers: a reference of two lengths and arms of a known difference."""

import dataclasses
import math

import pytest
from scipy import stats

from difftransformer_lab.analysis import analyse
from difftransformer_lab.analysis.contrasts import gains, pooled_runs, worth
from difftransformer_lab.analysis.study import together
from difftransformer_lab.analysis.tables import findings_table
from difftransformer_lab.results import Contrast, CostRow, Question, StudyAxis, Term
from tests.support.simulated_study import LOSS, planned, record, study

SEEDS = range(2000, 2006)
WOBBLE = dict(zip(SEEDS, (0.01, -0.01, 0.02, -0.02, 0.005, -0.005), strict=True))
LOSSES = {"v2": 1.97, "half": 2.3, "softmax": 2.0}
MODEL = {"attention_type": "softmax"}


def contrast(plus, minus):
    terms = [Term(arms=[plus], weight=1.0), Term(arms=[minus], weight=-1.0)]
    words = {"name": f"{plus} minus {minus}", "above": "It is higher.", "below": "It is lower."}
    return Contrast(figure=LOSS.label, terms=terms, seeds=6, **words)


def evidence(data="0" * 64, **parts):
    """V2 is better by 0.03 on average and takes 1.1 times as long; the twin's half-length run is worse by 0.3."""

    def make(arm, point, seed):
        loss = LOSSES[arm] + (WOBBLE[seed] if arm == "v2" else 0.0)
        tokens, seconds = 3_000_000 if arm == "half" else 6_000_000, 110.0 if arm == "v2" else 100.0
        run = record([LOSS], {LOSS.label: loss}, arm=arm, seed=seed, tokens=tokens, seconds=seconds, data=data)
        model = {"attention_type": "diff_v2"} if arm == "v2" else MODEL | ({"sink": None} if arm == "half" else {})
        training = {"seed": seed, "optimizer": {"learning_rate": 0.01}}
        return dataclasses.replace(run, recipe={"model": model, "training": training})

    plan = planned([Question(question="Is it better?", contrasts=[contrast("v2", "softmax")])])
    return study(list(LOSSES), [LOSS], 6, make, first_seed=2000, plan=plan, **parts)


def percent(doublings):
    return 100 * (2**doublings - 1)


def test_a_difference_in_tokens_and_at_equal_time_is_that_of_the_known_losses():
    (found,) = together([analyse(evidence())])
    worths = found.worths["v2 minus softmax"]
    assert worths.gain == pytest.approx(0.3)
    values = [-0.03 + one for one in WOBBLE.values()]
    half = stats.t.ppf(0.975, 5) * stats.sem(values) / 0.3  # the gain is the same in every seed
    assert (worths.tokens.mean, worths.tokens.low, worths.tokens.high) == pytest.approx(
        (-0.1, -0.1 - half, -0.1 + half)
    )
    assert worths.time.mean == pytest.approx(-0.1 + math.log2(1.1))
    assert worths.time.high - worths.time.low == pytest.approx(2 * half)
    said = f"{percent(-0.1):+.1f} % [{percent(-0.1 - half):+.1f}, {percent(-0.1 + half):+.1f}]"
    (row,) = findings_table(found).folded()
    assert said in row
    assert any(cell.startswith(f"{percent(-0.1 + math.log2(1.1)):+.1f} % [") for cell in row)


def test_the_length_nearest_to_half_is_taken_from_any_study_of_the_same_seeds_data_and_model():
    whole, elsewhere = evidence(), evidence(data="1" * 64)
    runs, figure = whole.at("softmax", ()), LOSS
    quarter = {
        seed: dataclasses.replace(run, train_tokens=1_500_000, figures=[dataclasses.replace(run.figures[0], value=2.8)])
        for seed, run in runs.items()
    }
    alone = dataclasses.replace(whole, runs={("softmax", ()): runs})
    with_quarter = dataclasses.replace(whole, runs={("softmax", ()): quarter})
    assert gains(pooled_runs([alone, elsewhere]), runs, figure) == {}
    assert gains(pooled_runs([alone, with_quarter]), runs, figure) == pytest.approx(dict.fromkeys(SEEDS, 0.4))
    assert gains(pooled_runs([whole, with_quarter]), runs, figure) == pytest.approx(dict.fromkeys(SEEDS, 0.3))
    assert gains(pooled_runs([alone, with_quarter]), quarter, figure) == pytest.approx(dict.fromkeys(SEEDS, 0.4))


def test_without_a_gain_or_times_that_compare_nothing_is_said():
    differences = {seed: -0.03 + wobble for seed, wobble in WOBBLE.items()}
    assert worth(differences, {}) is None
    assert worth(differences, dict.fromkeys(SEEDS, -0.1)) is None
    assert worth(differences, dict.fromkeys(SEEDS, 0.3)).time is None
    (other,) = together([analyse(evidence(axes=[StudyAxis(name="start", values=["one"])]))])
    assert other.worths["v2 minus softmax"].gain == pytest.approx(0.3)


def test_times_that_were_measured_in_turns_come_before_those_of_the_runs():
    sizes = {"parameters": 1, "weights_and_kv_bytes_4k": 1, "weights_and_kv_bytes_64k": 1}
    costs = [
        CostRow(model=arm, label=arm, train_step_seconds=s, **sizes) for arm, s in (("v2", 0.12), ("softmax", 0.1))
    ]
    (found,) = together([analyse(evidence(costs=costs))])
    one = found.worths["v2 minus softmax"]
    assert one.time.mean - one.tokens.mean == pytest.approx(math.log2(1.2))
