"""Kills at many moments: the same bits, no line lost or doubled, no child left. A part of tests/support/kill_storm.py."""

import pytest

from tests.support.kill_storm import run_storms

KILLS = {"train": 8, "compare": 2, "eval": 4, "ranks": 4, "term": 3}


@pytest.mark.slow(minutes=2)
def test_kills_leave_no_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    storms = run_storms(tmp_path, **KILLS)
    assert {storm.name: storm.faults for storm in storms} == {name: [] for name in KILLS}
    assert {storm.name: storm.counts["kills"] for storm in storms} == KILLS
    assert storms[1].counts["children"] > 0
