"""Bars and curves of hallucination, math and recall: what is drawn is what the results say."""

from dataclasses import replace

import pytest

from difftransformer_lab.analysis.tasks import draw_task
from difftransformer_lab.evals.tasks import hallucination, math, needle, recall
from difftransformer_lab.results import Measurement
from tests.support.task_results import task_result


def share(name, value, n=100, **at):
    return Measurement(
        name=name, unit="share", value=value, standard_error=0.05, n=n, at=at, low=value - 0.09, high=value + 0.08
    )


def loss(name, value):
    return Measurement(name=name, unit="nats/token", value=value, standard_error=0.1, n=9, at={})


def bars_of(figure):
    return [round(patch.get_height(), 6) for patch in figure.axes[0].patches]


def lines_of(figure):
    return [tuple(round(float(y), 6) for y in line.get_ydata()) for line in figure.axes[0].lines]


def test_hallucination_bars_and_intervals():
    rows = [share("accuracy", 0.6, set="xsum"), share("accuracy", 0.4, set="qasper")]
    one = task_result("hallucination", "runs/diff", rows, judge="overlap")
    other = task_result("hallucination", "runs/softmax", [share("accuracy", 0.5, set="qasper")], judge="overlap")
    _, caption, figure = hallucination.draw([one, other])
    assert bars_of(figure) == [0.6, 0.4, 0.5]
    assert lines_of(figure) == [(0.51, 0.68), (0.31, 0.48), (0.41, 0.58)]
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["xsum", "qasper"]
    assert "Judge: overlap." in caption
    _, caption, _ = hallucination.draw([one, replace(other, options={"judge": "openai:m"})])
    assert "Different judges, which do not compare: overlap, openai:m" in caption


def maths(name, value):
    rows = [share("accuracy", value, set="gsm8k"), share("mean accuracy", value)]
    return task_result("math", name, rows, max_new_tokens=1024)


def test_math_is_bars_of_sets():
    _, caption, figure = math.draw([maths("a", 0.25), maths("runs/x/checkpoints/step-000500", 0.5)])
    assert bars_of(figure) == [0.25, 0.5]
    assert "At most 1024 tokens" in caption


def test_recall_bars():
    rows = [loss("nll of AR-hits", 0.9), loss("nll of others", 3.3), loss("nll", 3.1), share("share of AR-hits", 0.078)]
    _, caption, figure = recall.draw([task_result("recall", "a", rows, ngram=2)])
    assert bars_of(figure) == [0.9, 3.3, 3.1]
    assert lines_of(figure)[0] == (0.8, 1.0)
    assert "7.8 % of tokens)" in caption
    hits = Measurement(name="AR-hits", unit="tokens", value=1234.0, standard_error=None, n=16384, at={})
    _, caption, _ = recall.draw([task_result("recall", "a", [*rows, hits], ngram=2)])
    assert "7.8 % of tokens: 1,234 of 16,384)" in caption


@pytest.mark.parametrize(("counts", "lines"), [([1], []), ([1, 2, 4], ["1/2", "1/4"]), ([8], ["1/8"])])
def test_needle_shows_what_copying_any_needle_gives(counts, lines):
    rows = [share("accuracy", 0.5, needles=n, asked=1, length_tokens=128, depth=d) for n in counts for d in (0.0, 1.0)]
    _, caption, figure = needle.draw([task_result("needle", "a", rows, digits=7)])
    bar = figure.axes[-1]
    assert sorted(text.get_text() for text in bar.texts) == lines
    assert {line.get_ydata()[0] for line in bar.lines} == {1 / count for count in counts if count > 1}
    assert ("1/N" in caption) == bool(lines)


@pytest.mark.parametrize("name", ["hallucination", "math", "recall"])
def test_they_are_in_the_table(name):
    rows = {
        "hallucination": [share("accuracy", 0.6, set="xsum")],
        "math": [share("accuracy", 0.6, set="gsm8k")],
        "recall": [loss("nll", 1.0)],
    }
    drawn = draw_task([task_result(name, "a", rows[name], judge="overlap", max_new_tokens=8, ngram=2)])
    assert drawn.name == name
    assert drawn.svg.startswith("<?xml")
