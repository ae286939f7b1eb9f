"""Checkpoints: whole or not there, damage named, opened by transformers."""

import errno
import json
import re
import shutil
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from difftransformer.errors import CheckpointError
from difftransformer.train import (
    Interrupted,
    checkpoints,
    latest_checkpoint,
    read_metrics,
    run_summary,
    saving,
    verify_checkpoint,
)
from difftransformer.train.checkpoint import delete_checkpoint
from difftransformer.train.config import CheckpointConfig
from difftransformer.train.metrics import read_lines
from difftransformer.typed import build
from tests.train.test_resume import stop_after


@pytest.fixture
def run(plain_run, tmp_path):
    """A copy of a trained run with checkpoints of steps 6 and 8."""
    folder = tmp_path / "run"
    shutil.copytree(plain_run, folder, ignore=shutil.ignore_patterns("step-000003"))
    assert names(folder) == ["step-000006", "step-000008"]
    return folder


def names(run):
    return [path.name for path in checkpoints(run)]


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = [
    ("config.json", flip),
    ("model.safetensors", cut),
    ("optimizer.safetensors", flip),
    ("tokenizer.json", lambda path: path.unlink()),
    ("state.json", cut),
    ("state.json", lambda path: path.write_text("[]")),
    ("state.json", lambda path: path.write_text('{"version": 1, "files": []}')),
]


@pytest.mark.parametrize(("file", "damage"), DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run, train_toy, read_run, file, damage):
    before, newest = read_run(run), run / "checkpoints" / "step-000008"
    damage(newest / file)
    with pytest.raises(CheckpointError) as error:
        verify_checkpoint(newest)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(str(newest / file))
    assert "step-000006, which is kept" in message
    with pytest.warns(UserWarning, match=f"{re.escape(str(newest / file))}.*; training continues from step-000006$"):
        train_toy(run)
    verify_checkpoint(newest)
    assert read_run(run) == before


def test_damage_of_the_only_checkpoint_says_so(run, train_toy):
    shutil.rmtree(run / "checkpoints" / "step-000006")
    flip(run / "checkpoints" / "step-000008" / "optimizer.safetensors")
    with pytest.raises(CheckpointError, match="no intact checkpoint exists; delete"):
        train_toy(run)


def test_a_checkpoint_with_a_sum_of_its_state_opens(run, train_toy, read_run):
    """As earlier releases wrote it."""
    before = read_run(run)
    shutil.rmtree(run / "checkpoints" / "step-000008")
    path = run / "checkpoints" / "step-000006" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sha256": "00"}))
    train_toy(run)
    assert read_run(run) == before


def test_checkpoints_that_are_kept_for_good(train_toy, tmp_path):
    """Each is what the undisturbed run has at that step."""
    train_toy(tmp_path, steps=8, checkpoint_every=3, keep_checkpoints=1, keep_every=4, keep_steps=[1, 5])
    assert names(tmp_path) == [f"step-00000{step}" for step in (1, 4, 5, 8)]
    for path in checkpoints(tmp_path):
        assert verify_checkpoint(path).step == int(path.name[-1])
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_damaged_later_checkpoint_does_not_count_as_the_newest(run, train_toy):
    """The run goes on from step 6, since step 8 is damaged, and its next checkpoint stays."""
    flip(run / "checkpoints" / "step-000008" / "model.safetensors")
    with pytest.warns(UserWarning, match="training continues from step-000006"), pytest.raises(Interrupted) as stopped:
        train_toy(run, keep_checkpoints=1, on_metrics=stop_after(7))
    assert names(run) == ["step-000007", "step-000008"]
    assert verify_checkpoint(stopped.value.checkpoint).step == 7


def test_a_deletion_that_is_cut_short_leaves_no_checkpoint(run, monkeypatch):
    def stop(path, **options):
        if path.exists():
            (path / "config.json").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as stopped:
        stopped.setattr(shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            delete_checkpoint(run / "checkpoints" / "step-000006")
    assert names(run) == ["step-000008"]


def test_another_version_is_refused(run, train_toy):
    path = checkpoints(run)[-1] / "state.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"version": 99}))
    for opens in (lambda: verify_checkpoint(checkpoints(run)[-1]), lambda: train_toy(run)):
        with pytest.raises(CheckpointError, match="version 99, this release reads 1"):
            opens()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attention_type": "softmax"}, r"\(model.layers.0.self_attn.head_norm.weight has .*None in"),
        ({"model": {"hidden_size": 64}}, r".*32\) in the file"),
    ],
)
def test_a_checkpoint_of_another_model(run, train_toy, fields, words):
    with pytest.raises(CheckpointError, match=f"weights of another model {words}"):
        train_toy(run, **fields)


def test_transformers_opens_a_checkpoint(run, train_toy, toy_shards):
    trained = train_toy(run)
    path = checkpoints(run)[-1]
    opened, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    assert type(opened) is type(trained)
    assert opened.config.attention_type == "diff"
    for (name, a), (_, b) in zip(trained.state_dict().items(), opened.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    text = "the special magic Lisbon number is: 42"
    assert tokenizer(text).input_ids == toy_shards.tokenizer.encode(text)
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.eos_token_id == toy_shards.tokenizer.end_of_text


def test_a_leftover_of_a_killed_writer_is_ignored_and_removed(run, train_toy):
    leftover = run / "checkpoints" / ".step-000099.tmp"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    assert latest_checkpoint(run).name == "step-000008"
    shutil.rmtree(run / "checkpoints" / "step-000008")
    train_toy(run)
    assert not leftover.exists()
    verify_checkpoint(checkpoints(run)[-1])


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["moments", "tokenizer", "rename"])
def test_a_full_disk_keeps_and_names_the_older_checkpoint(run, train_toy, monkeypatch, where):
    shutil.rmtree(run / "checkpoints" / "step-000008")
    kept = run / "checkpoints" / "step-000006"
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    with monkeypatch.context() as patch:
        if where == "moments":
            write = saving.save_file
            patch.setattr(saving, "save_file", lambda *a, **k: (full_disk if "opt" in a[1].stem else write)(*a, **k))
        elif where == "tokenizer":
            patch.setattr("difftransformer.data.tokenizer.write_text_atomically", full_disk)
        else:
            patch.setattr("pathlib.Path.rename", full_disk)
        with pytest.raises(CheckpointError) as error:
            train_toy(run)
    message = str(error.value)
    assert "step-000008" in message
    assert "o space left on device" in message
    assert f"{kept} is kept and complete" in message
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000006"]
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    train_toy(run)  # there is room again
    verify_checkpoint(checkpoints(run)[-1])


def test_a_full_disk_at_the_first_checkpoint(tmp_path, train_toy, monkeypatch):
    monkeypatch.setattr(saving, "save_file", full_disk)
    with pytest.raises(CheckpointError, match="no earlier checkpoint exists"):
        train_toy(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_goes_on_while_the_disk_is_full(tmp_path, train_toy, read_run, plain_run, monkeypatch, asynchronous):
    write = saving.save_file

    def full_at_times(tensors, path, **options):
        full_disk() if path.parent.name in (".step-000003.tmp", ".step-000004.tmp") else write(tensors, path, **options)

    monkeypatch.setattr(saving, "save_file", full_at_times)
    with pytest.warns(UserWarning, match="training goes on") as warned:
        train_toy(tmp_path / "run", checkpoint_every=1, checkpoint=CheckpointConfig(asynchronous=asynchronous))
    assert len(warned) == 2
    for step, warning in zip((3, 4), warned, strict=True):
        words = f"step {step} cannot be written .*step-000002 is kept and complete; training goes on$"
        assert re.search(words, str(warning.message))
    assert read_run(tmp_path / "run") == read_run(plain_run)
    assert verify_checkpoint(checkpoints(tmp_path / "run")[-1]).step == 8


@pytest.fixture
def hang(monkeypatch):
    """hang(step): the writer of that step's checkpoint waits for the event that is returned."""
    write = saving.save_file

    def hang_at(step):
        released = threading.Event()

        def waiting(tensors, path, **options):
            if path.parent.name == f".step-{step:06d}.tmp":
                released.wait(60)
            write(tensors, path, **options)

        monkeypatch.setattr(saving, "save_file", waiting)
        return released

    return hang_at


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, train_toy, read_run, plain_run, hang):
    run, released = tmp_path / "run", hang(3)

    def release(metrics):
        if metrics.step == 5:
            assert checkpoints(run) == []
            released.set()

    train_toy(run, keep_checkpoints=9, checkpoint=CheckpointConfig(asynchronous=True), on_metrics=release)
    assert released.is_set()
    assert read_run(run) == read_run(plain_run)
    assert names(run) == ["step-000003", "step-000006", "step-000008"]
    for path in checkpoints(run):
        assert verify_checkpoint(path).step == int(path.name[-1])
        for file in ("model.safetensors", "optimizer.safetensors"):
            assert (path / file).read_bytes() == (plain_run / "checkpoints" / path.name / file).read_bytes()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_writer_that_hangs_ends_the_run(tmp_path, train_toy, read_run, plain_run, hang, asynchronous):
    released, how = hang(4), CheckpointConfig(asynchronous=asynchronous, timeout_seconds=2.0)
    before = threading.active_count()
    with pytest.raises(CheckpointError) as error:
        train_toy(tmp_path / "run", checkpoint_every=2, checkpoint=how)
    words = r"step 4 cannot be written \(it has not ended after 2 s\); .*step-000002 is kept and complete"
    assert re.search(words, str(error.value))
    assert names(tmp_path / "run") == ["step-000002"]
    released.set()
    while threading.active_count() > before:
        threading.Event().wait(0.01)
    train_toy(tmp_path / "run", checkpoint_every=2)
    assert read_run(tmp_path / "run") == read_run(plain_run)


def test_order_is_by_step_beyond_six_digits(tmp_path):
    for step in (999_999, 1_000_000, 20):
        (tmp_path / "checkpoints" / f"step-{step:06d}").mkdir(parents=True)
    assert names(tmp_path) == ["step-000020", "step-999999", "step-1000000"]


def test_no_checkpoint(tmp_path):
    assert checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        latest_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds an adapter without its model; merge them"):
        latest_checkpoint(tmp_path)


def test_latest_checkpoint_takes_a_run_or_a_checkpoint(run):
    newest = checkpoints(run)[-1]
    assert latest_checkpoint(run) == latest_checkpoint(newest) == newest


def test_saving_prints_nothing(tmp_path, train_toy, capfd):
    train_toy(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_damaged_metrics_are_named(run, train_toy):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], '{"step":', *lines[2:]]) + "\n")
    with pytest.raises(CheckpointError, match=f"{re.escape(str(path))}: line 2"):
        train_toy(run)


def test_a_summary_checks_the_last_lines_alone(run, monkeypatch):
    """Each checkpoint has one, so that of a long run may not cost more for each step before it."""
    (run / "config.yaml").write_text("name: toy\n")
    built, lines = [], list(read_lines(run / "metrics.jsonl"))
    monkeypatch.setattr(
        run_summary, "build", lambda kind, line, **words: built.append(line) or build(kind, line, **words)
    )
    summary = dict(run_summary.training_summary(run, 6).figures)
    assert [line["step"] for line in built] == [6, 6]
    (loss,) = (line["loss_nats"] for line in lines if line["step"] == 6 and "loss_nats" in line)
    (validation,) = (line["validation_loss_nats"] for line in lines if line["step"] == 6 and len(line) < 5)
    assert summary["training loss of the last step, nats/token"] == f"{loss:.4f}"
    assert summary["validation loss at step 6, nats/token"] == f"{validation:.4f}"


def test_metrics_of_a_run_that_was_never_started(tmp_path):
    with pytest.raises(CheckpointError, match="cannot read"):
        read_metrics(tmp_path / "metrics.jsonl")
