"""Two processes of which one meets a fault: both go on or end, and nothing unreadable counts."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from difftransformer.errors import CheckpointError
from difftransformer.hub import export_folder, open_model
from difftransformer.train import checkpoints, read_metrics, verify_checkpoint
from difftransformer.train.checkpoint import file_sum
from difftransformer.train.parallel import ALONE
from tests.support import parallel_faults
from tests.support.checkpoint_tensors import tensors_of
from tests.support.parallel_steps import run_main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def faults(toy_shards, tmp_path_factory):
    """The folder of the scenarios' runs, and what the first process said."""
    folder = tmp_path_factory.mktemp("faults")
    done = run_main(2, parallel_faults.__name__, folder, toy_shards.folder)
    first, second = (json.loads(worker.stdout.splitlines()[-1]) for worker in done)
    assert not any(said for name, said in second.items() if "raised" not in name)  # one process warns
    return folder, first


def steps_of(run):
    return [int(path.name.removeprefix("step-")) for path in checkpoints(run)]


def assert_same_tensors(run, expected):
    found, wanted = (tensors_of(checkpoints(at)[-1]) for at in (run, expected))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", ["asynchronous", "slow"])
def test_checkpoints_are_the_same(faults, name):
    """Saved while training goes on, or by a process that is slower than the first."""
    folder, said = faults
    assert said["plain"] == said[name] == []
    for path, expected in zip(*(checkpoints(folder / one / "diff") for one in (name, "plain")), strict=True):
        assert verify_checkpoint(path).step == verify_checkpoint(expected).step
        found, wanted = tensors_of(path), tensors_of(expected)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted | found)


@pytest.mark.parametrize(
    ("policy", "follows", "steps"),
    [("skip", "it is skipped", [1, 2, 3, 4, 6, 7, 8]), ("rollback", "training goes back to step 4", [*range(1, 9)])],
)
def test_all_do_the_same_where_one_loss_is_not_finite(faults, toy_shards, tmp_path, policy, follows, steps):
    """As one process does."""
    folder, said = faults
    assert said[policy] == [f"step 5 has loss nan and gradient norm nan; {follows}"]
    with pytest.warns(UserWarning, match="step 5 has loss nan"):
        parallel_faults.poisoned(tmp_path, toy_shards.folder, ALONE, rank=0, nonfinite=policy)
    found, expected = (read_metrics(at / "diff" / "metrics.jsonl")[0] for at in (folder / policy, tmp_path))
    assert [line.step for line in found] == [line.step for line in expected] == steps
    for line, wanted in zip(found, expected, strict=True):
        assert line.loss_nats == pytest.approx(wanted.loss_nats, rel=1e-5)


def test_a_checkpoint_of_two_processes_is_exported(faults, tmp_path):
    run = faults[0] / "plain" / "diff"
    done = export_folder(run, tmp_path / "out")
    assert "model.safetensors" in done.files
    assert not any("optimizer" in name or "index" in name for name in done.files)
    exported = load_file(tmp_path / "out" / "model.safetensors")
    tensors = tensors_of(checkpoints(run)[-1])
    assert exported.keys() <= tensors.keys()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in exported.items())


def test_a_full_disk_of_the_second_process(faults):
    folder, said = faults
    for step, file, line in zip((4, 6), ("model", "optimizer"), said["full"], strict=True):
        name = f"{file}-00002-of-00002.safetensors: No space left on device"
        assert f"step {step} cannot be written ({name})" in line
        assert line.endswith("step-000002 is kept and complete; training goes on")
    assert steps_of(folder / "full" / "diff") == [2, 8]
    assert_same_tensors(folder / "full" / "diff", folder / "plain" / "diff")


def test_a_writer_of_the_second_process_that_hangs(faults):
    folder, said = faults
    reason = "CheckpointError: {}: the checkpoint of step 4 cannot be written (it has not ended after 4 s)"
    assert said["hanging raised"].startswith(reason.format(folder / "hanging" / "diff" / "checkpoints" / "step-000004"))
    assert "step-000002 is kept and complete; see whether the disk answers" in said["hanging raised"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("file", "damage"),
    [("model-00002-of-00002.safetensors", flip), ("optimizer-00002-of-00002.safetensors", lambda path: path.unlink())],
)
def test_a_damaged_or_missing_file_of_one_process(faults, toy_shards, tmp_path, file, damage):
    shutil.copytree(faults[0] / "plain" / "diff", tmp_path / "diff")
    newest = checkpoints(tmp_path / "diff")[-1]
    damage(newest / file)
    with pytest.raises(CheckpointError, match=rf"^{newest / file}: (damaged|missing)"):
        open_model(tmp_path / "diff")
    with pytest.warns(UserWarning, match=f"{newest / file}.*; training continues from step-000006$"):
        parallel_faults.train(tmp_path, toy_shards.folder, ALONE)  # on another mesh: one process
    (after, _), (before, _) = (read_metrics(at / "diff" / "metrics.jsonl") for at in (tmp_path, faults[0] / "plain"))
    for line, wanted in zip(after, before, strict=True):
        assert line.loss_nats == pytest.approx(wanted.loss_nats, rel=1e-5)


@pytest.mark.parametrize("places", ["{", "{}", '{"exp_avg/model.embed_tokens.weight": {"saved_offsets": "a"}}'])
def test_places_of_parts_that_cannot_be_right_are_one_line(faults, toy_shards, tmp_path, places):
    """In a checkpoint whose sums are right."""
    shutil.copytree(faults[0] / "plain" / "diff", tmp_path / "diff")
    newest = checkpoints(tmp_path / "diff")[-1]
    file = newest / "optimizer-00001-of-00002.safetensors"
    save_file(load_file(file), file, metadata={"DCP_SHARDING_INFO": places})
    state = json.loads((newest / "state.json").read_text())
    state["files"][file.name] = file_sum(file)
    (newest / "state.json").write_text(json.dumps(state))
    with pytest.raises(CheckpointError, match=f"^{newest / 'optimizer.safetensors'}: ") as error:
        parallel_faults.train(tmp_path, toy_shards.folder, ALONE)
    assert "\n" not in str(error.value)
