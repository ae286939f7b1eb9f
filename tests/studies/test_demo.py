"""The stored result of `make demo-full` shows what README promises of it."""

from pathlib import Path

import pytest

from difftransformer_lab.analysis import read_records
from difftransformer_lab.statistics import wilson_interval

STORED = Path(__file__).parents[2] / "docs" / "results" / "demo.json"


@pytest.fixture(scope="module")
def result():
    return read_records(STORED)


def test_every_model_has_learnt(result):
    """More than a table of letter pairs knows."""
    (bigram,) = result.index.baselines
    runs = list(result.every_run())
    assert len(runs) == result.index.planned
    for arm, _, seed, run in runs:
        bits = next(row for row in run.evaluations["perplexity"].measurements if row.name == "bits per byte")
        assert bits.value < bigram.bits_per_byte, f"{arm.label}, seed {seed}"


def test_maps_have_right_and_wrong_answers_and_some_cells_are_above_chance(result):
    retrieved = []
    for arm in result.index.arms:
        cells = {}
        for needle in (run.evaluations["needle"] for run in result.at(arm.name, ()).values()):
            for row in needle.measurements:
                if row.name == "accuracy" and row.detail and row.at["cities"] == "seen":
                    correct, trials = cells.get((row.at["needles"], row.at["depth"]), (0, 0))
                    cells[row.at["needles"], row.at["depth"]] = (correct + round(row.value * row.n), trials + row.n)
        assert 0 < sum(c for c, _ in cells.values()) < sum(t for _, t in cells.values()), f"{arm.label}: an empty map"
        chance = 10.0 ** -needle.options["digits"]
        retrieved += [wilson_interval(c, t)[0] > chance for c, t in cells.values()]
    assert any(retrieved)
