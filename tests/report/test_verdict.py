"""What the report says, for each way in which a comparison can end."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from difftransformer_lab.plots.seeds import smooth
from difftransformer_lab.report import tables
from difftransformer_lab.report.verdict import Verdict, verdicts
from difftransformer_lab.results import Comparison, Curve, MetricComparison, PairedDifference, Statistic


def with_metric(comparison: Comparison, a: float, b: float, **changes: Any) -> tuple[Comparison, MetricComparison]:
    """A comparison with one metric: a against b, and an interval or another part as named."""
    parts = {
        "low": None,
        "high": None,
        "interval_method": "student-t over seeds",
        "better": "lower",
        "seeds": 3,
    } | changes
    metric = MetricComparison(
        task="perplexity",
        metric=parts.get("metric", "validation loss"),
        unit=parts.get("unit", "bits/byte"),
        better=parts["better"],
        models={
            "diff": Statistic(mean=a, standard_error=None, seeds=parts["seeds"]),
            "softmax": Statistic(mean=b, standard_error=None, seeds=parts["seeds"]),
        },
        differences={
            "diff": PairedDifference(
                mean=a - b,
                low=parts["low"],
                high=parts["high"],
                confidence=0.95,
                interval_method=parts["interval_method"],
            )
        },
    )
    return dataclasses.replace(comparison, metrics=[metric], seeds=list(range(parts["seeds"]))), metric


def only(comparison: Comparison) -> Verdict:
    """The verdict on the one metric."""
    (found,) = verdicts(comparison)
    return found


def test_a_win(comparison: Comparison) -> None:
    changed, _ = with_metric(comparison, 1.234, 1.25, low=-0.030, high=-0.002)
    assert only(changed).text == (
        "DIFF reaches a lower validation loss than Transformer: 1.2340 vs 1.2500 bits/byte, "
        "difference -0.0160 [-0.0300, -0.0020] (95 % Student t over 3 seeds)."
    )


def test_a_defeat(comparison: Comparison) -> None:
    changed, _ = with_metric(comparison, 1.25, 1.234, low=0.002, high=0.030)
    found = only(changed)
    assert found.state == "second"
    assert found.text == (
        "Transformer reaches a lower validation loss than DIFF: 1.2340 vs 1.2500 bits/byte. "
        "DIFF minus Transformer: difference +0.0160 [+0.0020, +0.0300] (95 % Student t over 3 seeds)."
    )


@pytest.mark.parametrize(("low", "high"), [(-0.030, 0.002), (-0.030, 0.0), (0.0, 0.01)])
def test_no_decision(low: float, high: float, comparison: Comparison) -> None:
    changed, _ = with_metric(comparison, 1.234, 1.25, low=low, high=high)
    found = only(changed)
    assert found.state == "undecided"
    assert found.text.startswith("The validation loss of DIFF and Transformer cannot be told apart: 1.2340 vs")


@pytest.mark.parametrize(("better", "sign", "state"), [
    ("higher", 1, "first"), ("higher", -1, "second"), ("lower", 1, "second"), ("lower", -1, "first"),
])  # fmt: skip
def test_the_better_direction_decides(better: str, sign: int, state: str, comparison: Comparison) -> None:
    _, metric = with_metric(comparison, 0.5, 0.5, low=sign * 0.1 - 0.01, high=sign * 0.1 + 0.01, better=better)
    assert tables.outcome(metric.differences["diff"], metric.better) == state


def test_one_seed_with_a_bootstrap_is_labelled_and_limited(comparison: Comparison) -> None:
    changed, _ = with_metric(
        comparison, 1.2, 1.3, low=-0.2, high=-0.05, interval_method="bootstrap over evaluation documents", seeds=1
    )
    text = only(changed).text
    assert "(95 % bootstrap over evaluation documents)" in text
    assert "another training seed may differ" in text
    assert "Student" not in text


def test_one_seed_without_an_interval_has_no_winner(comparison: Comparison) -> None:
    changed, _ = with_metric(comparison, 1.2, 1.3, interval_method="none", seeds=1)
    found = only(changed)
    assert found.state == "unknown"
    assert found.text == (
        "The validation loss has no interval, so neither model can be called better: "
        "DIFF 1.2000, Transformer 1.3000 bits/byte, difference -0.1000."
    )


def test_every_evaluation_has_its_sentences(make: Callable[..., Comparison]) -> None:
    loss, seen, unseen, answer = verdicts(make())
    assert (loss.state, seen.state, unseen.state) == ("first", "first", "first")
    assert "a lower validation loss than Transformer" in loss.text
    assert "bits/byte" in loss.text
    assert "a higher needle accuracy (seen cities) than Transformer" in seen.text
    assert "a higher needle accuracy (unseen cities) than Transformer" in unseen.text
    assert answer.subject == "signed attention on the answer"
    assert len(verdicts(make(needle=False, allocation=False))) == 1
    assert [found.state for found in verdicts(make(advantage=-0.05, allocation=False))] == ["second"] * 3
    assert [found.state for found in verdicts(make(models=("diff",), needle=False))] == ["unknown"]


def test_each_of_several_models_is_set_beside_the_last(make: Callable[..., Comparison]) -> None:
    found = verdicts(make(models=("diff", "diff_v2", "softmax"), needle=False, allocation=False))
    assert [("DIFF " in one.text, "DIFF V2" in one.text) for one in found] == [(True, False), (True, True)]
    assert all("Transformer" in one.text for one in found)


def test_small_differences_keep_their_digits() -> None:
    assert tables.decimals_for([1.25, 1.26]) == 4
    assert tables.decimals_for([1.25, 1.26], half_width=0.00012) == 5
    assert tables.decimals_for([12345.6]) == 0
    assert tables.decimals_for([0.0]) == 4
    assert tables.fixed(-0.00001, 4, "+") == "+0.0000"
    assert [tables.significant(value) for value in (12345.6, 462.0, 0.00012345, None)] == [
        "12346", "462.0", "0.0001234", ""
    ]  # fmt: skip


def test_smoothing_is_a_moving_mean() -> None:
    curve = Curve(steps=[0, 1, 2, 3, 4], values=[0.0, 3.0, 6.0, 0.0, 9.0])
    assert smooth(curve, 3).values == pytest.approx([1.5, 3.0, 3.0, 5.0, 4.5])
    assert smooth(curve, 1) == curve
    assert smooth(curve, 7) == curve
