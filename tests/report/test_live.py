"""The page of runs that are going on: their last losses, from files whose last line may be half written."""

import json
import re

import pytest

from difftransformer_lab.cli.console import resumable, when_ended
from difftransformer_lab.cli.progress import small_curve
from difftransformer_lab.report.live import LivePage


def metrics(path, losses, validation):
    rows = [{"step": step, "loss_nats": loss} for step, loss in enumerate(losses, 1)]
    rows.append({"step": len(losses), "validation_loss_nats": validation})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 9')
    return path, 100


@pytest.mark.parametrize("reason", [KeyboardInterrupt(), ValueError("a run failed")])
def test_the_page_refreshes_itself_until_the_command_ends(tmp_path, reason):
    runs = {"diff & co": metrics(tmp_path / "a", [5.0, 3.25], 3.5), "not begun": (tmp_path / "b", 100)}
    page = LivePage(tmp_path / "page", "demo")
    page.update(runs, 0, 2)
    text = (tmp_path / "page" / "index.html").read_text()
    assert '<meta http-equiv="refresh" content="5">' in text
    for words in ("0 of 2 runs ended", "2 of 100", "3.250", "3.500", "diff &amp; co"):
        assert words in text
    assert "not begun" not in text
    assert len(re.findall(r"<path d=\"M[\d.]+ [\d.]+L", text)) == 2  # a curve, wide and narrow
    page.update(runs, 1, 2)
    assert (tmp_path / "page" / "index.html").read_text() == text  # it is not old yet

    def fails():
        with resumable("saved"):
            when_ended.append(page.stop)
            raise reason

    with pytest.raises(type(reason), match=r"Continue with|a run failed"):
        fails()
    stopped = (tmp_path / "page" / "index.html").read_text()
    assert "1 of 2 runs ended. Stopped" in stopped
    assert "http-equiv" not in stopped
    page = LivePage(tmp_path / "page", "demo")
    with resumable("saved"):  # the command goes on
        when_ended.append(page.stop)
        for ended in (1, 2):  # of a study's tuning: other runs follow
            page.update(runs, ended, 2)
            assert '<meta http-equiv="refresh" content="5">' in (tmp_path / "page" / "index.html").read_text()
    text = (tmp_path / "page" / "index.html").read_text()
    assert "2 of 2 runs ended.<" in text
    assert "refresh" not in text.replace("loads itself anew", "")


def test_a_small_curve_is_high_where_the_loss_is():
    assert small_curve([8.0, 4.5, 1.0]) == "\u2588\u2585\u2581"
    assert small_curve([2.0]) == "\u2581"
    assert len(small_curve([float(i) for i in range(100)])) == 12
