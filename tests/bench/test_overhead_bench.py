"""The benchmark of the training loop: the parts that it names add up to what a clock around the run shows."""

import time

import pytest

from difftransformer_lab.bench import overhead
from difftransformer_lab.bench.overhead import time_overhead


@pytest.mark.slow
def test_parts_are_within_a_step(monkeypatch):
    calls, bare = [], overhead._bare_step

    def counted(*words):
        step = bare(*words)

        def run():
            calls.append(time.perf_counter())
            step()

        return run

    monkeypatch.setattr(overhead, "_bare_step", counted)
    began = time.perf_counter()
    (row,) = time_overhead("0.5M", "fp32", rounds=8, budget_seconds=1.0)
    whole = time.perf_counter() - began
    assert len(calls) == 2 + overhead.WARM_UP + 8  # one bare step after each of the loop
    assert row.steps == 8 - overhead.SAVES - 1
    assert 0 < row.loader_share < 0.5
    assert 0 < row.log_share < 0.5
    assert row.save_seconds > 0
    assert row.steps * (row.step_seconds + row.bare_seconds) < whole
    assert row.share == pytest.approx(row.loader_share + row.log_share + row.inside_share + row.save_share)
    assert row.ratio_to_bare == pytest.approx(row.step_seconds / row.bare_seconds, rel=0.5)
