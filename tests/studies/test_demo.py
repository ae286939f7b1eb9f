"""The first command of the README, as a user runs it: what it promises must be in its results."""

import subprocess
import sys
from pathlib import Path

import pytest

from difftransformer_lab.recipe_files import read_recipe
from difftransformer_lab.report import Evidence, read_evidence
from difftransformer_lab.statistics import wilson_interval

ROOT = Path(__file__).parents[2]


def check_promises(result: Evidence) -> None:
    """What a comparison must show to be worth reading."""
    (bigram,) = result.index.baselines
    assert len(list(result.every_run())) == result.index.planned
    for arm, _, seed, run in result.every_run():
        bits = next(row for row in run.evaluations["perplexity"].measurements if row.name == "bits per byte")
        assert bits.value < bigram.bits_per_byte, f"{arm.label}, seed {seed}, learnt no more than letter pairs"
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


def test_the_stored_result_shows_what_the_demo_promises():
    """With every model and seed, as `make demo-full` made it."""
    check_promises(read_evidence(ROOT / "docs" / "results" / "demo.json"))


@pytest.mark.slow(minutes=5)
def test_the_demo_shows_what_it_promises(tmp_path):
    """With its first seed alone, and its two main models."""
    recipe = read_recipe(ROOT / "recipes" / "demo.yaml")
    assert recipe["compare"]["seeds"] >= 2
    out = tmp_path / "demo"
    command = [sys.executable, "-m", "difftransformer_lab", "compare", "recipes/demo.yaml", "--out", str(out)]
    command += ["--set", "compare.seeds=1", "--set", "compare.models=[diff, softmax]", "--set", "compare.fields={}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (out / "index.html").exists()
    check_promises(read_evidence(out / "results.json"))
