"""`examples/speedrun.py`: what its log holds, its table against the runs in it, and that it goes on where it stopped."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from scipy import stats

SCRIPT = Path(__file__).parents[2] / "examples" / "speedrun.py"
SIZES = [
    "--width", "32", "--layers", "2", "--batch", "256", "--context", "32", "--tokens", "1024", "--valid", "256",
    "--timed", "1", "--device", "cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("speedrun")
    (made / "text").mkdir()
    (made / "text" / "numbers.txt").write_text(" ".join(map(str, range(4000))), encoding="utf-8")
    return made


def run(folder, seeds):
    command = [sys.executable, SCRIPT, *SIZES, "--attention", "softmax", "diff", "diff_v2", "--data", folder / "text"]
    command += ["--seeds", str(seeds), "--out", folder / "log"]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    log = (folder / "log").read_text(encoding="utf-8")
    return log, [json.loads(line) for line in log.splitlines() if line.startswith('{"arm"')]


@pytest.mark.slow
def test_the_log_and_its_table(folder):
    run(folder, 1)
    log, runs = run(folder, 2)
    assert log.startswith(SCRIPT.read_text(encoding="utf-8"))
    assert log.count('"""Train small language models') == 1
    keys = [(each["arm"], each["seed"], each["steps"]) for each in runs]
    assert len(set(keys)) == len(keys)
    parameters = {each["arm"]: each["parameters"] for each in runs}
    assert max(parameters.values()) - min(parameters.values()) <= 3 * 32 * 2  # a row of the MLP of each layer

    loss = {key: each["loss"] for key, each in zip(keys, runs, strict=True)}
    softmax, diff = ([loss[arm, seed, 4] for seed in (0, 1)] for arm in ("softmax", "diff"))
    table = log[log.rindex("Equal tokens") : log.rindex("Equal time")].splitlines()
    (row,) = (line.split() for line in table if line.startswith("diff "))
    mean, difference = statistics.mean(diff), statistics.mean(diff) - statistics.mean(softmax)
    p = stats.ttest_rel(diff, softmax).pvalue
    assert row[1:6] == ["2", f"{mean:.4f}", f"{statistics.stdev(diff):.4f}", f"{difference:+.4f}", f"{p:.4f}"]
