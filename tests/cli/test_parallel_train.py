"""Two processes: signals to one, to the launcher, a process that is killed, torchrun's restarts; then going on bitwise."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from torch.distributed.launcher import api

from difftransformer.train import checkpoints
from difftransformer_lab.cli.members import launch
from tests.cli.test_interruption import losses, steps_done, wait_until
from tests.support.checkpoint_tensors import tensors_of
from tests.support.ports import free_port

PATIENCE_SECONDS = 120


@pytest.fixture
def start_two(toy, toy_shards, tmp_path, start):
    """Start the toy run in two processes, in a folder."""
    toy["training"] |= {"steps": 120, "checkpoint_every": 50, "validate_every": 40}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(toy))

    def run(folder, launcher=("-m", "difftransformer_lab"), flags=("--processes", "2")):
        return start("train", recipe, "--out", folder, *flags, launcher=launcher)

    return run


def members(launcher):
    """The processes that torchrun's launcher has started, by rank."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher.pid:
                variables = dict(word.partition("=")[::2] for word in (folder / "environ").read_text().split("\0"))
                found[int(variables["RANK"])] = int(folder.name)
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return found


@pytest.mark.parametrize(("set_before", "seconds"), [(None, 1800), ("7", 7)])
def test_processes_have_time_to_save(monkeypatch, set_before, seconds):
    """What torch's launcher is asked for; nothing is started."""
    asked = []
    monkeypatch.setattr(api, "elastic_launch", lambda config, program: asked.append(config) or (lambda *words: {}))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", set_before or "")  # so that it is put back afterwards
    if set_before is None:
        monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
    assert launch(2, ["train", "demo"]) == 0
    (config,) = asked
    assert config.shutdown_timeout == seconds
    assert set(config.signals_to_handle.split(",")) == {"SIGTERM", "SIGINT"}


LAUNCHER = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, *sys.argv[1:]], stdout=sys.stdout).pid, flush=True)
time.sleep(300)
"""
SCRIPT = """
from difftransformer.train.parallel import joined
print("meets", flush=True)
with joined("cpu"):
    pass
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")
@pytest.mark.parametrize("by", ["command", "script"])
def test_a_killed_launcher_is_not_waited_for(toy_file, tmp_path, by):
    """A process that waits for another, which never comes, at a port where nothing listens."""
    where = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    command = ["-m", "difftransformer_lab", "train", toy_file, "--out", tmp_path / "run"]
    words = map(str, command if by == "command" else ["-c", SCRIPT])
    options = {"stdout": subprocess.PIPE, "text": True, "env": os.environ | where}
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, *words], **options)
    member = Path(f"/proc/{launcher.stdout.readline().strip()}")

    def runs():
        return member.exists() and (member / "stat").read_text().rpartition(")")[2].split()[0] != "Z"

    if by == "script":
        assert launcher.stdout.readline() == "meets\n"
    wait_until(lambda: len([*(member / "task").iterdir()]) > 1)  # a thread watches the launcher
    assert runs()
    launcher.kill()
    wait_until(lambda: not runs())
    launcher.communicate()


@pytest.mark.slow(minutes=2)
@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds processes in /proc")
def test_stopped_and_killed_goes_on_bitwise(start_two, tmp_path):
    run = tmp_path / "run"

    def ended(process):
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
        assert "Traceback" not in errors
        assert len(errors.splitlines()) <= 2, errors
        return process.returncode, errors

    process = start_two(run)
    wait_until(lambda: steps_done(run) >= 10, process)
    os.kill(members(process)[1], signal.SIGTERM)  # one process of the two
    status, errors = ended(process)
    stopped = steps_done(run)
    assert status == 75
    assert checkpoints(run)[-1].name == f"step-{stopped:06d}"
    assert f"stopped after step {stopped}; saved {checkpoints(run)[-1]}. Continue with: " in errors

    process = start_two(run)
    wait_until(lambda: steps_done(run) >= stopped + 10, process)
    killed = time.monotonic()
    os.kill(members(process)[1], signal.SIGKILL)
    status, errors = ended(process)
    assert status == 2
    assert "process 1 of 2 was killed (SIGKILL), and the others were ended" in errors
    assert time.monotonic() - killed < 60

    for number in (signal.SIGKILL, signal.SIGHUP):  # of the launcher: its processes notice, save and end
        process, before = start_two(run), steps_done(run)
        wait_until(lambda process=process, before=before: steps_done(run) > before, process)
        both = members(process)
        process.send_signal(number)
        process.communicate()
        wait_until(lambda both=both: not any(Path(f"/proc/{pid}").exists() for pid in both.values()))
        assert checkpoints(run)[-1].name == f"step-{steps_done(run):06d}"

    assert ended(start_two(run))[0] == 0

    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    restarted = tmp_path / "restarted"
    process = start_two(restarted, [*torchrun, "-m", "difftransformer_lab"], ())
    for least in (10, 60):
        wait_until(lambda least=least: steps_done(restarted) >= least, process)
        killed = members(process)[1]
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda killed=killed: members(process).get(1, killed) != killed, process)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0

    assert ended(start_two(tmp_path / "whole"))[0] == 0
    for went_on in (run, restarted):
        assert losses(went_on) == losses(tmp_path / "whole")
        found, expected = (tensors_of(checkpoints(at)[-1]) for at in (went_on, tmp_path / "whole"))
        assert found.keys() == expected.keys()
        for key in found:
            assert torch.equal(found[key], expected[key]), key
