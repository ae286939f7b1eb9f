"""Figures of training curves, on curves whose spikes, crossings and areas are known."""

import numpy as np
import pytest

from difftransformer_lab.results import Curve
from difftransformer_lab.results.curves import mean_over_steps, spikes, steps_to


def falling_norms(count=1000, seed=0):
    """A level that falls from 8 to 1 as in training, with log-normal noise of 20 %."""
    noise = np.random.default_rng(seed).normal(size=count)
    return (1 + 7 * np.exp(-np.arange(count) / 100)) * np.exp(0.2 * noise)


def test_planted_spikes_and_no_others_are_found():
    norms = falling_norms()
    assert spikes(norms.tolist()) == []
    planted = [150, 151, 152, 400, 401, 999]  # a run of spikes does not hide itself
    norms[planted] *= 8
    assert spikes(norms.tolist()) == planted
    norms[40] *= 100  # within the first window
    assert spikes(norms.tolist()) == planted


def test_spikes_by_definition_do_not_depend_on_the_scale():
    norms = falling_norms(seed=1)
    norms[::37] *= 4
    found = [i for i in range(100, 1000) if norms[i] > 3 * np.median(norms[i - 100 : i])]
    assert spikes(norms.tolist()) == spikes((1000 * norms).tolist()) == found


def test_a_lasting_change_of_level_is_a_spike_until_the_median_follows():
    assert spikes([1.0] * 200 + [5.0] * 200) == list(range(200, 250))


@pytest.mark.parametrize(
    ("threshold", "step"), [(0.0, 100), (0.1, 200), (0.5, 266.6666), (0.55, 275), (0.7, 300), (0.95, None)]
)
def test_the_first_step_at_which_a_rising_curve_is_there(threshold, step):
    curve = Curve(steps=[100, 200, 300, 400, 500], values=[0.0, 0.1, 0.7, 0.4, 0.9])
    found = steps_to(curve, threshold, rising=True)
    assert found == (None if step is None else pytest.approx(step, rel=1e-5))
    mirrored = Curve(steps=curve.steps, values=[-value for value in curve.values])
    assert steps_to(mirrored, -threshold, rising=False) == found


def test_the_mean_is_the_area_over_the_length():
    steps = np.unique(np.geomspace(10, 1000, 400).astype(int))  # more points where the curve is steep
    curve = Curve(steps=steps.tolist(), values=(1 / steps).tolist())
    assert mean_over_steps(curve) == pytest.approx(np.log(100) / 990, rel=0.001)
    assert mean_over_steps(Curve(steps=[0, 10, 40], values=[2.0, 2.0, 2.0])) == 2
    assert mean_over_steps(Curve(steps=[0, 10, 40], values=[0.0, 1.0, 1.0])) == pytest.approx(35 / 40)


def test_what_has_no_answer():
    assert spikes([]) == []
    assert steps_to(Curve(steps=[], values=[]), 1.0, rising=True) is None
    assert mean_over_steps(Curve(steps=[3], values=[1.0])) == 1.0
