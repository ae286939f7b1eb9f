"""Pictures of many-shot classification and of order: what is drawn is what was measured."""

import pytest

from difftransformer_lab.analysis.tasks import draw_task
from difftransformer_lab.evals.tasks import icl, order
from difftransformer_lab.results import ItemScore, Measurement
from tests.support.task_results import task_result


def share(name, value, at, n=10):
    return Measurement(name=name, unit="share", value=value, standard_error=0.1, n=n, at=at)


@pytest.fixture
def shots():
    def one(name, counts):
        rows = [share("accuracy", 0.3 + 0.1 * place, {"demonstrations": n}) for place, n in enumerate(counts)]
        return task_result("icl", name, [*rows, share("chance", 0.25, {}, 4)], data="trec", items=100, draws=1)

    return one


def test_accuracy_by_demonstrations(shots):
    results = [shots("a/one", [6, 12, 24]), shots("a/two", [6, 12])]
    _, caption, figure = icl.draw(results)
    (ax,) = figure.axes
    lines = [
        line.get_xydata().tolist()
        for line in ax.lines
        if len(line.get_xydata()) in (2, 3) and line.get_marker() != "None"
    ]
    assert [[x for x, _ in line] for line in lines] == [[6, 12, 24], [6, 12]]
    assert [y for _, y in lines[0]] == pytest.approx([0.3, 0.4, 0.5])
    assert 0.25 in {line.get_ydata()[0] for line in ax.lines}
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["6", "12", "24"]
    assert [text.get_text() for text in figure.legends[0].texts] == ["one", "two"]
    assert caption.startswith("Labels of 100 test items of trec, decoded")
    assert draw_task(results).svg.startswith("<?xml")


def test_no_demonstrations_have_a_place(shots):
    _, _, figure = icl.draw([shots("one", [0, 6, 7, 96])])
    (ax,) = figure.axes
    assert ax.get_xlim()[0] == 0
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0", "6", "96"]  # 7 would stand on 6
    assert ax.get_xscale() == "symlog"


def test_orders_and_the_floor():
    at = {"format": "alternating", "shots": 2, "demonstrations": 12}

    def one(name, values, floor):
        rows = [share("accuracy", value, {"order": place}) for place, value in enumerate(values)]
        summary = [
            share("mean accuracy", sum(values) / 3, at),
            share("best minus worst", max(values) - min(values), at, 3),
            share("best minus worst, binomial floor", floor, at, 3),
        ]
        items = [ItemScore(name="accuracy", item=f"item {m}", score=3.0, weight=3.0) for m in range(30)]
        return task_result("order", name, [*rows, *summary], scores=items, data="trec")

    results = [one("one", [0.5, 0.9, 0.7], 0.2), one("two", [0.8, 0.8, 0.8], 0.1)]
    _, caption, figure = order.draw(results)
    strips, margins = figure.axes
    marks = [line.get_ydata().tolist() for line in strips.lines if len(line.get_ydata()) == 3]
    assert marks == [[0.5, 0.9, 0.7], [0.8, 0.8, 0.8]]
    assert [bar.get_height() for bar in margins.patches] == pytest.approx([0.4, 0.0])
    assert [path.get_segments()[0][0][1] for path in margins.collections] == [0.2, 0.1]
    band = strips.patches[0].get_extents().transformed(strips.transData.inverted())
    assert (band.y0, band.y1) == pytest.approx((0.6, 0.8))
    assert caption.startswith("30 test items of trec behind the same 12 demonstrations in 3 alternating orders")
    assert draw_task(results).svg.startswith("<?xml")
