"""Lines in place of a progress bar: at each tenth of the work, and after a while in any case."""

import pytest

from difftransformer.cli import progress


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_slow_evaluation_prints_a_line_at_least_every_half_minute(clock, capfd):
    with progress.evaluation_progress("needle") as update:
        for second in range(0, 121, 5):
            clock[0] = float(second)
            update(second // 50, 1000)
        update(100, 1000)
        update(150, 1000)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("needle: ") and "after" in line]
    assert lines == [
        "needle: 0 % after 35 s",
        "needle: 0 % after 70 s, about 69930 s left",
        "needle: 0 % after 105 s, about 52395 s left",
        "needle: 10 % after 120 s, about 1080 s left",
    ]
