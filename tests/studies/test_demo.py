"""The first command of the README, as a user runs it: what it promises must be in its results."""

import subprocess
import sys
from pathlib import Path

import pytest

from difftransformer.results import Comparison, read_result
from difftransformer.statistics import wilson_interval

ROOT = Path(__file__).parents[2]


def check_promises(result: Comparison) -> None:
    """What a comparison must show to be worth reading."""
    (bigram,) = result.baselines
    assert len(result.runs) == 2 * len(result.seeds)
    for run in result.runs:
        assert run.nll.bits_per_byte < bigram.bits_per_byte, f"{run.run} learnt no more than letter pairs"
    retrieved = []
    for model in result.models:
        cells = {}
        for run in (run for run in result.runs if run.model == model.model):
            for cell in run.needle.cells:
                if cell.cities == "seen":
                    correct, trials = cells.get((cell.needles, cell.depth), (0, 0))
                    cells[cell.needles, cell.depth] = (correct + cell.correct, trials + cell.trials)
        assert 0 < sum(c for c, _ in cells.values()) < sum(t for _, t in cells.values()), f"{model.model}: an empty map"
        retrieved += [wilson_interval(c, t)[0] > run.needle.chance for c, t in cells.values()]
    assert any(retrieved)


@pytest.mark.slow
def test_the_demo_shows_what_it_promises(tmp_path):
    command = [sys.executable, "-m", "difftransformer", "compare", "recipes/demo.yaml", "--out", str(tmp_path / "demo")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "demo" / "index.html").exists()
    result = read_result(tmp_path / "demo" / "results.json", Comparison)
    assert len(result.seeds) >= 2
    check_promises(result)
