"""Pictures of what is seen from inside a model: bars of the right height, curves of the right points, a panel a map."""

from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from difftransformer_lab.analysis.tasks import draw_task, measurement_table
from difftransformer_lab.evals.tasks import allocation, maps, outliers, quantized
from difftransformer_lab.results import Grid, Measurement
from tests.support.task_results import task_result


def measured(name, value, **at):
    return Measurement(name=name, unit="share", value=value, standard_error=0.1, n=5, at=at)


def drawn(module, results):
    title, caption, figure = module.draw(results)
    assert title
    assert caption
    assert isinstance(figure, Figure)
    assert draw_task(results).svg.startswith("<?xml")
    return figure


def allocated(model, values):
    rows = [
        measured("attention share", value, depth=depth, form=form, segment=segment)
        for depth in (0.0, 1.0)
        for form in ("signed", "absolute", "positive")
        for segment, value in values.items()
    ]
    grid = Grid(name="g", at={"form": "absolute", "segment": "answer", "depth": 0.0}, values=[[0.2, 0.4], [0.1]])
    return task_result("allocation", model, rows, grids=[grid], documents=5, needles=2)


def test_allocation_stacks_to_one_with_negative_shares_below():
    values = {"first": 0.2, "before": -0.1, "answer": 0.7, "after": -0.2, "query": 0.4}
    figure = drawn(allocation, [allocated("a", values), allocated("b", values)])
    axes = [ax for ax in figure.axes if "signed" in ax.get_title(loc="left")]
    assert [ax.get_title(loc="left") for ax in axes] == ["a: signed", "b: signed"]
    bars = [bar for container in axes[0].containers for bar in container]
    assert [bar.get_height() for bar in bars] == pytest.approx([value for value in values.values() for _ in range(2)])
    assert max(bar.get_y() + bar.get_height() for bar in bars) == pytest.approx(1.3)
    assert min(bar.get_y() + bar.get_height() for bar in bars) == pytest.approx(-0.3)


def test_outliers_draw_ranks_and_median():
    def one(model, scale):
        rows = [
            measured(kind, scale / rank, rank=rank)
            for kind in ("attention logits", "hidden states")
            for rank in (3, 1, 2)
        ]
        rows += [measured(kind, 0.5 * scale, rank="median") for kind in ("attention logits", "hidden states")]
        return task_result("outliers", model, rows, tokens=400_000)

    figure = drawn(outliers, [one("a", 6.0), one("b", 12.0)])
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["attention logits", "hidden states"]
    curve, median, other, _ = figure.axes[0].lines
    assert curve.get_xydata().tolist() == [[1, 6], [2, 3], [3, 2]]
    assert median.get_ydata() == [3, 3]
    assert other.get_ydata().tolist() == [12, 6, 4]


def test_quantized_draws_the_tasks_main_figure_from_many_bits_to_few():
    def one(model):
        rows = []
        for granularity in ("row", "head"):
            for bits, value in ((4, 0.2), (8, 0.6), (16, 0.9)):
                rows.append(measured("accuracy", value, bits=bits, granularity=granularity))
        rows.append(replace(measured("accuracy", 0.1, bits=16, granularity="row", depth=0.5), detail=True))
        return task_result("quantized", model, rows, weights="int8", activations="none")

    figure = drawn(quantized, [one("a")])
    assert [ax.get_title(loc="left") for ax in figure.axes] == ["a step for each row", "a step for each head"]
    for ax in figure.axes:
        assert ax.lines[0].get_xydata().tolist() == [[0, 0.9], [1, 0.6], [2, 0.2]]
        assert [label.get_text() for label in ax.get_xticklabels()] == ["16", "8", "4"]


def test_quantized_draws_a_row_for_each_place():
    rows = [
        measured(name, value, task=task, version="1", shots=5, bits=bits, granularity="row")
        for bits in (4, 16)
        for task, value in (("piqa", 0.3), ("boolq", 0.7))
        for name in ("acc", "acc_norm")
    ]
    figure = quantized.draw([task_result("quantized", "a", rows, weights="none", activations="none")])[2]
    titles = [f"{task}, 5 shots, a step for each row" for task in ("piqa", "boolq")]
    assert [ax.get_title(loc="left") for ax in figure.axes] == titles
    assert [ax.lines[0].get_ydata().tolist() for ax in figure.axes] == [[0.3, 0.3], [0.7, 0.7]]


def test_a_short_table_leaves_details_out_and_counts_each_models_items():
    rows = [measured("acc_norm", 0.5), replace(measured("acc_norm", 0.25, depth=0.5), detail=True)]
    models = [
        task_result("harness", name, [replace(row, n=count) for row in rows]) for name, count in (("a", 1000), ("b", 7))
    ]
    whole, brief = (measurement_table(models, brief=brief) for brief in (False, True))
    assert [row[0] for row in whole.rows] == ["acc_norm, share"] * 2
    assert [row[-1] for row in brief.rows] == ["1,000 / 7"]
    assert brief.rows[0][1:3] == ["0.5 ± 0.1"] * 2


def mapped(model, differential, heads=2):
    grids = [Grid(name=name, at={}, values=[[0.1, 0.3], [0.5, 0.1]]) for name in ("negative weight", "near zero")]
    kinds = ("A1", "A2", "A1 - lambda A2") if differential else ("A",)
    if differential:
        grids += [
            Grid(name=name, at={}, values=[[0.2, 0.2], [0.8, 0.8]]) for name in ("lambda", "near zero in A1 alone")
        ]
    for layer in (0, 1):
        for head in range(heads):
            for kind in kinds:
                at = {"layer": layer, "head": head, "map": kind}
                grids.append(Grid(name="map", at=at, values=[[1.0], [0.75, -0.25]], labels=["<s>", "\n word"]))
    return task_result("maps", model, [], grids=grids)


def test_maps_draw_a_panel_for_each():
    def panels(figure):
        shown = (ax for part in figure.subfigs for ax in part.axes if ax.get_visible())
        return [title for ax in shown if (title := ax.get_title() or ax.get_title(loc="left"))]

    one = panels(drawn(maps, [mapped("a", True)]))
    assert one[:3] == ["lambda", "negative weight", "near zero"]
    assert len(one) == 3 + 2 * 2 * 3
    both = panels(maps.draw([mapped("a", True), mapped("b", False)])[2])
    assert both[3] == "layer 0, head 0: A1 - lambda A2"
    assert len(both) == 3 + 2 * 2 * 2
    assert panels(maps.draw([mapped("b", False)])[2])[:2] == ["negative weight", "near zero"]


@pytest.mark.parametrize(("heads", "rows"), [
    (1, [3] * 2),
    (4, [4] * 6),
    *(pytest.param(heads, [3] * 2 * heads, marks=pytest.mark.slow) for heads in (2, 3, 6)),
])  # fmt: skip
def test_maps_fill_their_rows_and_name_their_axes(heads, rows):
    figure = maps.draw([mapped("a", True, heads)])[2]
    places = [ax for ax in figure.subfigs[1].axes if ax.get_ylabel() != "weight"]
    assert all(ax.get_visible() for ax in places)
    assert [sum(ax.get_subplotspec().rowspan.start == row for ax in places) for row in range(len(rows))] == rows
    assert {ax.get_xlabel() for ax in places} == {"key"}
    first = [ax for ax in places if ax.get_subplotspec().colspan.start == 0]
    assert {ax.get_ylabel() for ax in first} == {"query"}


def test_maps_of_two_models_leave_no_half_row_empty():
    for figure in maps.draw([mapped("a", True, 2), mapped("b", False, 3)])[2].subfigs[1:]:
        places = [ax for ax in figure.axes if ax.get_ylabel() != "weight"]
        assert sum(not ax.get_visible() for ax in places) == 0
