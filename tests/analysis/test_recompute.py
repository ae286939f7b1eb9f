"""`tests/recompute.py`, which shares no code with the package, finds the same contrasts in the committed records."""

import json

import numpy as np
import pytest

from difftransformer_lab.analysis import read_studies
from difftransformer_lab.results import Contrast, Question, StudyAxis, Term
from difftransformer_lab.statistics import MOST_EXACT_SEEDS
from tests import recompute
from tests.support.simulated_study import LOSS, planned, record, save, study

COMMITTED = sorted(
    path for path in recompute.STUDIES.glob("*/*.json") if json.loads(path.read_text("utf-8"))["result"].get("plan")
)


def compare(path):
    """Check a study's contrasts, and return how many have all of their seeds."""
    (found,) = [one for one in read_studies(path.parent) if one.records.path.name == path.name]
    again = recompute.recompute(json.loads(path.read_text("utf-8"))["result"], path.parent)
    findings = {one.contrast.name: one for one in found.findings}
    assert findings.keys() == again.keys()
    drawn = {
        name
        for name, one in findings.items()
        if one.difference and one.difference.interval_method.startswith("sign flip") and one.seeds > MOST_EXACT_SEEDS
    }
    for name, expected in again.items():
        one = findings[name]
        assert (one.seeds, one.state) == (expected.seeds, expected.state)
        if expected.effect is None:
            continue
        assert one.effect == pytest.approx(expected.effect, rel=1e-9)
        # Of many seeds the package draws 199,999 patterns; all are counted here. Tolerances: five standard errors of drawing.
        bounds = {"abs": (one.high - one.low) / 120} if one.contrast.name in drawn else {"rel": 1e-7}
        assert (one.low, one.high) == pytest.approx((expected.low, expected.high), **bounds)
        # A p-value that is drawn may change the factor by which Holm's rule multiplies another one.
        p_value = {"abs": 5 * (10 * expected.p / 199_999) ** 0.5 + 1e-4} if drawn else {"rel": 1e-7}
        assert one.p == pytest.approx(expected.p, **p_value)
    return sum(expected.effect is not None for expected in again.values())


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_committed_studies(path):
    index = json.loads(path.read_text("utf-8"))["result"]
    assert compare(path) > 0 or len(index["members"]) < index["planned"]


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_rates_of_committed_studies(path):
    """Which `recompute` reads in the index; the reported runs have them."""
    index = json.loads(path.read_text("utf-8"))["result"]
    for rate, (best, means) in zip(index["rates"], recompute.chosen_rates(index, path.parent), strict=True):
        assert best == rate["learning_rate"]
        assert means == pytest.approx(dict(rate["tried"]), rel=1e-9)
        for member in index["members"]:
            if (
                not member["is_tuning"]
                and member["arm"] == rate["arm"]
                and rate["point"].items() <= member["point"].items()
            ):
                run = json.loads((path.parent / member["file"]).read_text("utf-8"))["result"]
                assert run["recipe"]["training"]["optimizer"]["learning_rate"] == best


def test_doublings(tmp_path):
    """Which a plan asks for whose runs are not committed: of the reference, whichever arm is taken away."""
    draw = np.random.default_rng(0)

    def make(arm, point, seed):
        loss = 3.0 + 0.1 * (point == ("half",)) - 0.02 * (arm == "diff") + draw.normal(0, 0.01)
        tokens = 3_000_000 if point == ("half",) else 6_000_000
        return record([LOSS], {LOSS.label: loss}, arm=arm, seed=seed, tokens=tokens)

    contrasts = [
        Contrast(
            name=f"diff minus {other}, in doublings", figure=LOSS.label, first_seed=0, seeds=12, scale="doublings",
            terms=[
                Term(arms=[arm], weight=weight, at={"length": "full"}) for arm, weight in (("diff", 1), (other, -1))
            ],
            smallest=0.15, above="Above.", below="Below.", within="Within.",
        )
        for other in ("twin", "wide")
    ]  # fmt: skip
    axis = StudyAxis(name="length", values=["full", "half"], label="length")
    plan = planned([Question(question=one.name, contrasts=[one]) for one in contrasts])
    simulated = study(["diff", "wide", "twin"], [LOSS], 12, make, axes=[axis], plan=plan)
    assert compare(save(simulated, tmp_path)) == 2


def test_sign_flips_on_a_grid():
    """Which many seeds need, against all patterns of few."""
    for seed in range(5):
        values = np.random.default_rng(seed).normal(0.3, 1, 16)
        for centre in (0.0, 0.2):
            on_grid = recompute.flipped_on_a_grid(values - centre)
            assert on_grid == pytest.approx(recompute.flipped(values, centre), abs=1e-3)
