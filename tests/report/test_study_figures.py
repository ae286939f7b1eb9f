"""The figures of a study: what is drawn, and where."""

import dataclasses

import numpy as np
import pytest

from difftransformer_lab.report import study_figures
from difftransformer_lab.results import Curve
from tests.support.simulated_study import LOSS, record, study


@pytest.fixture
def canvases(monkeypatch):
    """The canvases that were drawn, without making pictures of them; a drawing is its caption."""
    drawn = []

    def finish(name, title, caption, canvas, png):
        drawn.append(canvas)
        return caption

    monkeypatch.setattr(study_figures, "finish", finish)
    return drawn


def test_a_run_that_diverged_is_left_out_of_curves_and_named(canvases):
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
    for draw in (study_figures.draw_losses, study_figures.draw_lambda):
        assert draw(evidence).endswith(" Left out, since diverged: diff, seed 0, after step 137.")
    losses, lambdas = (canvas.axes[0].lines for canvas in canvases)
    ends = [line.get_xydata()[-1].tolist() for line in losses]
    assert ends == [[300, 2.0], [300, 2.0], [300, 2.5], [300, 2.5]]  # the twin's three seeds, and two of DIFF
    assert np.allclose(lambdas[0].get_xydata(), [[100, 0.2], [200, 0.3], [300, 0.55]])
