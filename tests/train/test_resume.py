"""A run that was interrupted, at any step and in any way, goes on bitwise as if it had not been."""

import dataclasses
import os
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file

from difftransformer.data import DataConfig, Loader, prepare_shards
from difftransformer.errors import CheckpointError, ConfigError
from difftransformer.hub import export_folder
from difftransformer.train import Interrupted, ScheduleConfig, build_model, checkpoints, load_checkpoint, trainer
from difftransformer.train.checkpoint import verify_checkpoint
from difftransformer.train.optim import build_optimizer
from difftransformer_lab.studies import start_run, train_run
from difftransformer_lab.studies.run import share_stable_part


def stop_after(step):
    """A listener that sends SIGINT when a step is done."""

    def on_metrics(metrics):
        if metrics.step == step and hasattr(metrics, "loss_nats"):
            os.kill(os.getpid(), signal.SIGINT)

    return on_metrics


FAN_IN = {"initialization": "fan_in", "tie_word_embeddings": False, "depth_scaled_residual": True}


def test_interrupted_at_every_step(tmp_path, train_toy, read_run):
    whole = train_toy(tmp_path / "whole", model=FAN_IN)
    steps, validations = read_run(tmp_path / "whole")
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert [line["step"] for line in validations] == [3, 6, 8]
    for step in range(1, 8):
        with pytest.raises(Interrupted) as stopped:
            train_toy(tmp_path / "cut", model=FAN_IN, on_metrics=stop_after(step))
        assert stopped.value.step == step
        assert stopped.value.checkpoint == checkpoints(tmp_path / "cut")[-1]
        assert stopped.value.checkpoint.name == f"step-{step:06d}"
    resumed = train_toy(tmp_path / "cut", model=FAN_IN)
    assert read_run(tmp_path / "cut") == (steps, validations)
    for (name, a), (_, b) in zip(whole.state_dict().items(), resumed.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    states = [verify_checkpoint(checkpoints(tmp_path / name)[-1]) for name in ("whole", "cut")]
    assert states[0].loader == states[1].loader
    assert states[0].loader["step"] == 8
    for file in ("model.safetensors", "optimizer.safetensors"):
        found = [(checkpoints(tmp_path / name)[-1] / file).read_bytes() for name in ("whole", "cut")]
        assert found[0] == found[1], file


def test_reading_ahead_trains_the_same(tmp_path, train_toy, read_run, plain_run):
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "ahead", prefetch=True, on_metrics=stop_after(3))
    train_toy(tmp_path / "ahead", prefetch=True)
    assert read_run(tmp_path / "ahead") == read_run(plain_run)


def test_the_average_of_weights_is_kept_and_exported(tmp_path, train_toy, plain_run):
    """By its recurrence over the weights of every step; a run that was stopped has the same, and weights are as without it."""
    every = {"checkpoint_every": 1, "keep_checkpoints": 9}
    train_toy(tmp_path / "whole", ema=0.75, **every)
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "cut", ema=0.75, on_metrics=stop_after(3))
    train_toy(tmp_path / "cut", ema=0.75)
    cut, whole, plain = (checkpoints(run)[-1] for run in (tmp_path / "cut", tmp_path / "whole", plain_run))
    assert len({(newest / "model.safetensors").read_bytes() for newest in (cut, whole, plain)}) == 1
    assert (cut / "optimizer.safetensors").read_bytes() == (whole / "optimizer.safetensors").read_bytes()
    average = None
    for checkpoint in checkpoints(tmp_path / "whole"):
        weights = load_file(checkpoint / "model.safetensors")
        average = weights if average is None else {n: 0.75 * average[n] + 0.25 * w for n, w in weights.items()}
    export_folder(tmp_path / "cut", tmp_path / "averaged", average=True)
    exported = load_file(tmp_path / "averaged" / "model.safetensors")
    assert exported.keys() == average.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, average[name], rtol=1e-5, atol=1e-7)
    with pytest.raises(CheckpointError, match=r"it has no average of the weights; train with training\.ema"):
        export_folder(plain_run, tmp_path / "none", average=True)


def test_a_decay_branch_is_the_run_that_had_its_steps_from_the_start(tmp_path, toy_recipe, toy_shards, read_run):
    """One stable run serves two numbers of steps, bitwise."""

    def run(name, steps, branch_from=None):
        schedule = ScheduleConfig(shape="wsd", warmup_steps=2, decay_steps=2, floor=0.1)
        training = dataclasses.replace(toy_recipe.training, steps=steps, schedule=schedule, keep_steps=[4])
        recipe = dataclasses.replace(toy_recipe, training=training, branch_from=branch_from)
        start_run(tmp_path / name, recipe)
        train_run(tmp_path / name, recipe, toy_shards)
        newest = checkpoints(tmp_path / name)[-1]
        content = [(newest / f"{part}.safetensors").read_bytes() for part in ("model", "optimizer")]
        return [line for line in read_run(tmp_path / name)[0] if line["step"] > 4], content

    branch_point = str(tmp_path / "stable" / "checkpoints" / "step-000004")
    run("stable", 8)
    assert run("branch", 6, branch_point) == run("whole", 6)
    assert [line["step"] for line in run("branch", 6, branch_point)[0]] == [5, 6]  # again: it is done
    with pytest.raises(ConfigError, match=r"branch_from: .* has step 4, and training.steps is 4"):
        run("short", 4, branch_point)


@pytest.fixture
def sharing(tmp_path, toy_recipe, toy_shards, read_run):
    """Train a run of the schedule "wsd" that may share with those beside it; return its files, and list where it began."""

    def run(name, steps, seed=0, shape="wsd", shards=toy_shards):
        schedule = ScheduleConfig(shape=shape, warmup_steps=2, floor=0.1)
        every = {"checkpoint_every": 3, "validate_every": 4, "keep_checkpoints": 3}
        training = dataclasses.replace(toy_recipe.training, steps=steps, schedule=schedule, seed=seed, **every)
        recipe, folder = dataclasses.replace(toy_recipe, training=training), tmp_path / name
        start_run(folder, recipe)
        share_stable_part(folder, recipe, shards, sorted(folder.parent.iterdir()))
        run.began.append([path.name for path in checkpoints(folder)])
        train_run(folder, recipe, shards)
        (folder / "began").touch()
        newest = checkpoints(folder)[-1]
        content = [(newest / f"{part}.safetensors").read_bytes() for part in ("model", "optimizer")]
        return read_run(folder), content

    run.began = []
    return run


def test_runs_of_a_study_share_what_comes_before_the_decay(sharing):
    """The longer run is bit for bit the one that had its steps alone, and trains only what the shorter one has not."""
    alone = sharing("alone/long", 12)
    sharing("study/short", 8)  # decays after step 7
    sharing("study/linear", 8, shape="linear")
    sharing("study/seed", 8, seed=1)
    assert sharing("study/long", 12) == alone
    assert sharing.began == [[], [], [], [], ["step-000006"]]
    assert sharing("study/shorter", 7) == sharing("apart/shorter", 7)
    assert sharing.began[-2:] == [["step-000006"], []]


def test_a_damaged_run_is_not_shared(sharing, tmp_path, toy, toy_shards):
    """Nor one of another text. Neither stops a run, which takes the newest checkpoint that is whole."""
    sharing("study/short", 8)
    study = tmp_path / "study"
    (study / "notes").write_text("no folder")
    for name, file, text in (
        ("recipe", "config.yaml", "model: ["),
        ("weights", "checkpoints/step-000006/model.safetensors", "x"),
        ("state", "checkpoints/step-000006/state.json", "[]"),
        ("metrics", "metrics.jsonl", '{"step"\n\n'),
    ):
        shutil.copytree(study / "short", study / name)
        (study / name / file).write_text(text)
        shutil.copytree(study, tmp_path / name, ignore=shutil.ignore_patterns("short", "long"))
        sharing(f"{name}/long", 12)
        assert sharing.began[-1] == (["step-000003"] if name in ("weights", "state") else []), name
        shutil.rmtree(study / name)
    sharing("study/long", 12)
    assert sharing.began[-1] == ["step-000006"]
    other = prepare_shards(DataConfig(**toy["data"] | {"split_seed": 1, "folder": str(tmp_path / "shards")}))
    shutil.rmtree(study / "long")
    sharing("study/long", 12, shards=other)
    assert sharing.began[-1] == []


def test_goes_on_from_an_older_checkpoint_and_writes_the_lines_after_it_again(tmp_path, train_toy, read_run, plain_run):
    """As after SIGKILL: the metrics file is ahead of the newest checkpoint and ends in half a line."""
    killed, seen = tmp_path / "killed", []
    shutil.copytree(plain_run, killed, ignore=shutil.ignore_patterns("step-000006", "step-000008"))
    with (killed / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 9, "loss_na')
    train_toy(killed, keep_checkpoints=9, on_metrics=lambda metrics: seen.append(metrics.step))
    assert min(seen) == 4
    assert read_run(killed) == read_run(plain_run)


def test_a_finished_run_is_not_trained_again(tmp_path, train_toy, plain_run):
    shutil.copytree(plain_run, tmp_path / "run")
    seen = []
    train_toy(tmp_path / "run", on_metrics=seen.append)
    assert seen == []
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (plain_run / "metrics.jsonl").read_bytes()


def test_the_second_signal_interrupts_at_once(tmp_path, train_toy):
    def twice(metrics):
        if metrics.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    with pytest.raises(KeyboardInterrupt):
        train_toy(tmp_path, on_metrics=twice)
    assert checkpoints(tmp_path) == []


def test_a_signal_ends_a_validation_which_is_made_up_for(tmp_path, train_toy, read_run, monkeypatch):
    fields = {"validation_windows": 6, "accumulation": 2, "validate_every": 4}
    train_toy(tmp_path / "whole", **fields)
    draw, validations = trainer.summed_next_token_nll, []

    def signalled(model, *arguments, **options):
        if not model.training:
            validations.append(model)
            if len(validations) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
        return draw(model, *arguments, **options)

    monkeypatch.setattr(trainer, "summed_next_token_nll", signalled)
    with pytest.raises(Interrupted) as stopped:
        train_toy(tmp_path / "cut", **fields)
    assert (stopped.value.step, stopped.value.status, len(validations)) == (4, 75, 2)
    assert read_run(tmp_path / "cut")[1] == []
    train_toy(tmp_path / "cut", **fields)
    assert read_run(tmp_path / "cut") == read_run(tmp_path / "whole")


def test_handlers_are_put_back(tmp_path, train_toy):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train_toy(tmp_path, steps=1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_twins_see_the_same_batches_and_another_seed_sees_others(tmp_path, train_toy, monkeypatch):
    batches: dict[str, list[torch.Tensor]] = {}
    draw = Loader.__next__

    def record(self):
        batch = draw(self)
        batches.setdefault(name, []).append(torch.cat([batch.input_ids.flatten(), batch.targets.flatten()]))
        return batch

    monkeypatch.setattr(Loader, "__next__", record)
    for name, attention_type, seed in (("diff", "diff", 0), ("softmax", "softmax", 0), ("other", "diff", 1)):
        train_toy(tmp_path / name, attention_type=attention_type, seed=seed, steps=6)
    assert len(batches["diff"]) == 6
    assert all(torch.equal(a, b) for a, b in zip(batches["diff"], batches["softmax"], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(batches["diff"], batches["other"], strict=True))


def test_random_state_and_moments_come_back(tmp_path, toy_recipe, train_toy, model_config):
    """What a checkpoint holds is put back into a fresh model and optimiser exactly."""
    torch.manual_seed(5)
    trained = train_toy(tmp_path)
    next_drawn = torch.rand(3)
    torch.manual_seed(6)
    model = build_model(model_config(), seed=99)
    optimizer = build_optimizer(model, toy_recipe.training.optimizer)
    state = load_checkpoint(checkpoints(tmp_path)[-1], model=model, optimizer=optimizer)
    assert (state.step, state.tokens) == (8, 8 * 256)
    assert torch.equal(next_drawn, torch.rand(3))
    for name, parameter in trained.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
        moments = optimizer.state[model.get_parameter(name)]
        assert set(moments) == {"exp_avg", "exp_avg_sq", "step"}
        assert moments["step"].item() == 8
        assert moments["exp_avg_sq"].min() >= 0
        assert moments["exp_avg_sq"].max() > 0
