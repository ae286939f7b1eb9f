"""The figures of a study: what is drawn, and where."""

import dataclasses
import itertools

import numpy as np
import pytest

from difftransformer_lab.analysis import analyse, figures
from difftransformer_lab.results import Curve, RunFigure, StudyArm, StudyAxis, StudyFigure
from tests.support.simulated_study import LOSS, record, study

SHARE = StudyFigure(label="accuracy", task="needle", name="accuracy", better="higher", unit="share")


@pytest.fixture
def canvases(monkeypatch):
    """The canvases that were drawn, without making pictures of them; a drawing is its caption."""
    drawn = []

    def finish(name, title, caption, canvas, png):
        drawn.append(canvas)
        return caption

    monkeypatch.setattr(figures, "finish", finish)
    return drawn


def test_a_run_that_diverged_is_left_out_of_curves(canvases):
    steps = [100, 200, 300]

    def make(arm, point, seed):
        curves = {
            name: Curve(steps=steps, values=[3.0, 2.0, 1.0 + seed])
            for name in ("train_loss_nats", "validation_loss_nats")
        }
        if arm == "diff":
            curves["lambda 0"] = Curve(steps=steps, values=[0.2, 0.3, 0.4 + seed / 10])
        run = record([LOSS], {LOSS.label: 1.0 + seed}, arm=arm, seed=seed, curves=curves)
        if (arm, seed) != ("diff", 0):
            return run
        cut = {name: Curve(steps=[100], values=curve.values[:1]) for name, curve in curves.items()}
        return dataclasses.replace(run, diverged_after=137, figures=[], curves=cut)

    evidence = study(["diff", "twin"], [LOSS], 3, make)
    for draw in (figures.draw_losses, figures.draw_lambda):
        draw(evidence)
    losses, lambdas = (canvas.axes[0].lines for canvas in canvases)
    ends = [line.get_xydata()[-1].tolist() for line in losses]
    assert ends == [[300, 2.0], [300, 2.0], [300, 2.5], [300, 2.5]]  # the twin's three seeds, and two of DIFF
    assert np.allclose(lambdas[0].get_xydata(), [[100, 0.2], [200, 0.3], [300, 0.55]])


def transfer(widths, numbers):
    """Three arms over widths and rates, of which the second one is the best for a share and the worst for a loss."""
    rates = StudyAxis(name="rate", values=["low", "middle", "high"], numbers=numbers)
    values = {"low": 0.3, "middle": 0.9, "high": 0.5}
    axes = [StudyAxis(name="width", values=widths), rates]
    return analyse(
        study(
            ["diff", "v2", "twin"],
            [SHARE],
            1,
            lambda arm, point, seed: record([SHARE], {SHARE.label: values[point[1]]}, arm=arm),
            axes=axes,
        )
    )


def test_rings_of_rates_lie_on_the_best_one_and_no_width_is_left_out(canvases):
    widths = [str(2**place) for place in range(4, 13)]
    figures.draw_transfer((found := transfer(widths, [0.001, 0.002, 0.004])).records, found.rows)
    (canvas,) = canvases
    assert [text.get_text() for text in canvas.legends[0].texts] == [f"width {width}" for width in widths]
    shown = canvas.axes[:3]
    assert [ax.get_visible() for ax in canvas.axes] == [True, True, True, False]
    for ax in shown:
        rings = [line.get_xydata()[0].tolist() for line in ax.lines if len(line.get_xdata()) == 1]
        assert rings == [[0.002, 0.9]] * len(widths)


def test_rates_that_are_no_numbers_are_not_drawn_over_an_axis(canvases):
    found = transfer(["16", "32"], None)
    assert figures.draw_transfer(found.records, found.rows) is None


def test_values_of_an_axis_are_drawn_in_the_order_of_their_numbers(canvases):
    axes = [StudyAxis(name="size", values=["m", "s", "l"], numbers=[2.0, 1.0, 3.0])]
    evidence = study(
        ["diff", "twin"], [LOSS], 1, lambda arm, point, seed: record([LOSS], {LOSS.label: 2.0}, arm=arm), axes=axes
    )
    figures.draw_axes(evidence, analyse(evidence).rows, LOSS)
    assert [container.lines[0].get_xdata().tolist() for container in canvases[0].axes[0].containers] == [
        [1.0, 2.0, 3.0]
    ] * 2


def test_only_seeds_on_the_same_data_are_drawn(canvases):
    """Seed 0 of DIFF saw other data: alone it would hide the effect of the others."""

    def make(arm, point, seed):
        loss = 2.0 + (arm == "twin") * (0.1 + 0.2 * (seed == 2)) + 9.0 * (arm == "diff" and seed == 0)
        return record([LOSS], {LOSS.label: loss}, arm=arm, seed=seed, data=f"{arm == 'diff' and seed == 0:064d}")

    found = analyse(study(["diff", "twin"], [LOSS], 4, make))
    figures.draw_arms(found.records, found.rows)
    (dots,) = (line for line in canvases[0].axes[0].lines if line.get_marker() == "o" and line.get_alpha())
    assert sorted(dots.get_xdata()) == pytest.approx([-0.3, -0.1, -0.1])


def test_losses_by_position_are_those_of_one_task(canvases):
    def make(arm, point, seed):
        same = {"name": "nll by position", "unit": "nats/token", "better": "lower", "n": 1}
        more = [
            RunFigure(task=task, at={"start": start, "end": start + 8}, value=value + (arm == "diff"), **same)
            for task, value in (("perplexity", 1.0), ("other", 5.0)) for start in (0, 8)
        ]  # fmt: skip
        more.append(RunFigure(task="other", at={"start": 16, "end": 24}, value=9.0, **same))
        return record([LOSS], {LOSS.label: 2.0}, arm=arm, seed=seed, more=more)

    figures.draw_positions(study(["diff", "twin"], [LOSS], 2, make))
    assert canvases[0].axes[0].lines[0].get_xydata().tolist() == [[4.0, 1.0], [12.0, 1.0]]


def test_long_labels_of_panels_side_by_side_do_not_overlap(monkeypatch):
    """As they are drawn, in pixels."""
    canvases = []
    monkeypatch.setattr(figures, "finish", lambda *given: canvases.append(given[3]))
    arms = [
        StudyArm(name="diff", label="DIFF with a headwise norm, and lambda learned for each layer by itself"),
        StudyArm(name="v2", label="DIFF V2"),
        StudyArm(name="twin", label="the Transformer with as many parameters and heads"),
    ]
    measures = [
        StudyFigure(label=f"retrieval, unseen cities in long texts, {i}", task="t", name=f"{i}") for i in range(4)
    ]
    rng = np.random.default_rng(0)
    values = lambda: {one.label: rng.normal() for one in measures}  # noqa: E731
    evidence = study(arms, measures, 3, lambda arm, point, seed: record(measures, values(), arm=arm, seed=seed))
    figures.draw_arms(evidence, analyse(evidence).rows)
    canvas = canvases[0]
    canvas.draw_without_rendering()
    for texts in (
        [ax.xaxis.label for ax in canvas.axes],
        [ax.title if ax.title.get_text() else ax._left_title for ax in canvas.axes],
    ):
        boxes = [text.get_window_extent() for text in texts]
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    ticks = [label.get_window_extent() for label in canvas.axes[0].get_yticklabels()]
    assert ticks[0].y0 > ticks[1].y1
    assert canvas.axes[0].get_window_extent().x0 < canvas.bbox.width / 4
