"""Signals to real processes: Ctrl-C and kill -9 of `train` and `compare`, then going on."""

import contextlib
import dataclasses
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml

from difftransformer.train import checkpoints, read_metrics
from difftransformer_lab.cli.main import main
from difftransformer_lab.results import RunRecord, TaskResult, read_result
from difftransformer_lab.studies import recipe_from, save_recipe
from difftransformer_lab.studies.run import main as run_main

PATIENCE_SECONDS = 120


@pytest.fixture(autouse=True)
def _one_thread():
    """Losses are bitwise the same for the same number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def steps_done(run):
    path = run / "metrics.jsonl"
    return path.read_text().count('"loss_nats"') if path.exists() else 0


def wait_until(condition, process=None):
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.002)


def children_in(folder):
    """Processes that were started for a folder below this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if b"difftransformer_lab.child" in (line := path.read_bytes()) and str(folder).encode() + b"/" in line:
                found.append(int(path.parent.name))
    return found


def is_alive(pid):
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def losses(run):
    clocks = ("seconds", "tokens_per_second", "mfu", "peak_bytes")
    steps, validations = read_metrics(run / "metrics.jsonl")
    lines = [{k: v for k, v in dataclasses.asdict(line).items() if k not in clocks} for line in steps]
    return lines, validations


@pytest.mark.slow
def test_train_stopped_and_killed_goes_on_bitwise(toy, tmp_path, start):
    stages = [[0, 64], [40, 128]]
    toy["training"] |= {"steps": 200, "checkpoint_every": 5, "validate_every": 80, "context_stages": stages}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(toy))
    run = tmp_path / "run"
    command = ["train", path, "--out", run, "--threads", "1", "--set", "compare.models=[diff, softmax]"]

    process = start(*command)
    wait_until(lambda: steps_done(run) >= 10, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130, err
    newest = checkpoints(run)[-1]
    stopped = steps_done(run)
    assert stopped < 200
    assert newest.name == f"step-{stopped:06d}"
    assert f"stopped after step {stopped}; saved {newest}." in err
    again = f" train {path} --out {run} --threads 1 --set 'compare.models=[diff, softmax]'"
    assert again in err.partition("Continue with: ")[2]
    assert "Traceback" not in err

    process = start(*command)
    wait_until(lambda: steps_done(run) >= stopped + 20, process)
    wait_until(lambda: any(run.glob("checkpoints/.step-*.tmp")), process)  # while it saves
    process.kill()
    process.communicate()
    killed = steps_done(run)
    saved = int(checkpoints(run)[-1].name.removeprefix("step-"))
    assert stopped < saved <= killed < 200

    words = [str(word) for word in command]
    assert main(words) == 0
    reference = tmp_path / "reference"
    assert main([str(reference) if word == str(run) else word for word in words]) == 0
    assert losses(run) == losses(reference)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (checkpoints(run)[-1] / file).read_bytes() == (checkpoints(reference)[-1] / file).read_bytes()


@pytest.mark.slow(minutes=2)
def test_compare_stopped_and_killed_goes_on_with_the_same_results(toy, tmp_path, start, monkeypatch):
    toy["training"] |= {"steps": 300, "checkpoint_every": 50, "validate_every": 120, "context_stages": [[0, 64]]}
    toy["evaluation"][1]["options"]["lengths"] = [96]
    toy["evaluation"][2]["options"]["length"] = 96
    toy["compare"] = {"seeds": 1, "jobs": 2}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(toy))
    study = tmp_path / "study"
    runs = [study / "runs" / f"{model}-seed0" for model in ("diff", "softmax")]
    command = ["compare", path, "--out", study]

    process = start(*command)
    wait_until(lambda: all(steps_done(run) >= 5 for run in runs), process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130, err
    assert f" compare {path} --out {study}" in err.partition("Continue with: ")[2]
    for run in runs:
        assert checkpoints(run)[-1].name == f"step-{steps_done(run):06d}"

    before = [steps_done(run) for run in runs]
    process = start(*command)
    wait_until(lambda: all(steps_done(run) > done + 5 for run, done in zip(runs, before, strict=True)), process)
    children = children_in(study)
    assert len(children) == 2
    process.kill()  # its children notice, save if they can, and end
    killed = time.monotonic()
    process.communicate()
    wait_until(lambda: not any(map(is_alive, children)))
    assert time.monotonic() - killed < 5
    assert all(steps_done(run) < 300 for run in runs)

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("difftransformer_lab.studies.comparison.measure_costs", lambda *args, **options: [])
    assert main([str(word) for word in command]) == 0
    for run, model in zip(runs, ("diff", "softmax"), strict=True):
        found = read_result(run / "record.json", RunRecord)
        reference = tmp_path / "reference" / run.name
        reference.mkdir(parents=True)
        recipe = recipe_from(toy, source="toy").with_model(model).with_seed(0)
        save_recipe(recipe, reference / "config.yaml")
        assert run_main([str(reference), "1", "cpu"]) == 0
        assert losses(run) == losses(reference)
        for name in ("perplexity", "needle", "allocation"):
            expected = read_result(reference / "evals" / "step-000300" / f"{name}.json", TaskResult)
            result, measured = found.evaluations[name], (expected.measurements, expected.items, expected.grids)
            assert (result.measurements, result.items, result.grids) == measured, name
