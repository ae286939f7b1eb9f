"""A run and its shards in an object store: on another machine it continues bitwise from the newest whole checkpoint there."""

import dataclasses
import re
import shutil

import fsspec
import pytest

from difftransformer.data import Shards
from difftransformer.errors import CheckpointError, ConfigError
from difftransformer.train import Interrupted, checkpoints
from difftransformer.train.config import CheckpointConfig
from difftransformer_lab.studies import load_recipe, start_run, study, train_run
from difftransformer_lab.studies.comparison import comparison
from tests.support import parallel_steps
from tests.train.test_resume import stop_after


def test_a_lost_machine_continues_from_the_store(store, tmp_path, train_toy, toy_shards, read_run):
    url, shards = f"{store}/run", f"{store}/shards/toy"
    mirrored = {"checkpoint": CheckpointConfig(mirror=url), "checkpoint_every": 2, "keep_checkpoints": 1}
    fs, root = fsspec.core.url_to_fs(url)
    fs.put(str(toy_shards.folder), fs._strip_protocol(shards), recursive=True)
    train_toy(tmp_path / "whole", checkpoint_every=2, keep_checkpoints=1)
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "first", shards=Shards.open(shards), **mirrored, on_metrics=stop_after(5))
    assert [path.rpartition("/")[2] for path in fs.glob(f"{root}/checkpoints/*")] == ["step-000005"]
    # A copy that was cut short is none.
    fs.makedirs(f"{root}/checkpoints/step-000006")
    fs.pipe_file(f"{root}/checkpoints/step-000006/model.safetensors", b"half")
    shutil.rmtree(tmp_path / "first")
    shutil.rmtree(tmp_path / "copies")
    train_toy(tmp_path / "second", shards=Shards.open(shards), **mirrored)
    assert read_run(tmp_path / "second") == read_run(tmp_path / "whole")
    files = [
        {file.name: file.read_bytes() for file in checkpoints(tmp_path / name)[-1].iterdir()}
        for name in ("second", "whole")
    ]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert files[0][file] == files[1][file]
    assert [path.rpartition("/")[2] for path in fs.glob(f"{root}/checkpoints/*")] == ["step-000008"]
    there = fs.find(f"{root}/checkpoints/step-000008")
    assert {path.rpartition("/")[2]: fs.cat_file(path) for path in there} == files[0]


@pytest.fixture
def steps_there():
    """URL of a run -> the steps of its checkpoints in the store."""

    def list_steps(url):
        fs, root = fsspec.core.url_to_fs(url)
        return [int(path.rpartition("-")[2]) for path in sorted(fs.glob(f"{root}/checkpoints/*"))]

    return list_steps


def test_another_machine_keeps_what_the_first_one_kept(tmp_path, train_toy, steps_there):
    """It has the newest checkpoint alone. One of a later step, of a machine that came further, is left too."""
    url = "memory://kept/run"
    fields = {"checkpoint": CheckpointConfig(mirror=url), "checkpoint_every": 1, "keep_checkpoints": 2}
    fields |= {"keep_every": 4, "keep_steps": [1]}
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "first", **fields, on_metrics=stop_after(5))
    assert steps_there(url) == [1, 4, 5]
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "second", **fields, on_metrics=stop_after(7))
    assert steps_there(url) == [1, 4, 6, 7]
    shutil.rmtree(tmp_path / "first" / "checkpoints" / "step-000005")
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "first", **fields, on_metrics=stop_after(6))
    assert steps_there(url) == [1, 4, 5, 6, 7]
    train_toy(tmp_path / "second", **fields)
    assert steps_there(url) == [1, 4, 7, 8]


def test_a_branch_continues_from_the_store(tmp_path, toy_recipe, toy_shards, plain_run, steps_there):
    """And not from where it left the other run."""
    url = "memory://branch/run"
    training = dataclasses.replace(toy_recipe.training, checkpoint=CheckpointConfig(mirror=url), keep_checkpoints=1)
    branch_from = str(plain_run / "checkpoints" / "step-000003")
    recipe = dataclasses.replace(toy_recipe, training=training, branch_from=branch_from)
    start_run(tmp_path / "first", recipe)
    assert [path.name for path in checkpoints(tmp_path / "first")] == ["step-000003"]
    with pytest.raises(Interrupted):
        train_run(tmp_path / "first", recipe, toy_shards, on_metrics=stop_after(5))
    assert steps_there(url) == [5]
    start_run(tmp_path / "second", recipe)
    assert [path.name for path in checkpoints(tmp_path / "second")] == ["step-000005"]
    train_run(tmp_path / "second", recipe, toy_shards)
    weights = [(run / "checkpoints" / "step-000008" / "model.safetensors") for run in (tmp_path / "second", plain_run)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert steps_there(url) == [8]


def test_the_run_of_another_recipe_is_refused(tmp_path, toy_recipe, toy_shards):
    """Before anything is copied. What belongs to the machine may change."""

    def recipe(**fields):
        training = dataclasses.replace(toy_recipe.training, steps=2, **fields)
        return dataclasses.replace(toy_recipe, training=training)

    url = "memory://recipes/run"
    mirrored = {"checkpoint": CheckpointConfig(mirror=url)}
    start_run(tmp_path / "first", recipe(**mirrored))
    train_run(tmp_path / "first", recipe(**mirrored), toy_shards)
    faster = dataclasses.replace(toy_recipe.training.optimizer, learning_rate=0.5)
    rate = toy_recipe.training.optimizer.learning_rate
    words = f"{url}: holds a run of another recipe (training.optimizer.learning_rate was {rate} and is now 0.5)"
    with pytest.raises(CheckpointError, match=re.escape(words)):
        start_run(tmp_path / "second", recipe(**mirrored, optimizer=faster))
    assert list((tmp_path / "second").iterdir()) == []
    start_run(tmp_path / "second", recipe(**mirrored, keep_every=1))
    assert [path.name for path in checkpoints(tmp_path / "second")] == ["step-000002"]
    assert load_recipe(tmp_path / "second" / "config.yaml") == recipe(**mirrored, keep_every=1)


def test_a_store_without_a_recipe_is_refused(tmp_path, toy_recipe, train_toy):
    mirrored = {"steps": 2, "checkpoint": CheckpointConfig(mirror="memory://plain/run")}
    train_toy(tmp_path / "first", **mirrored)
    recipe = dataclasses.replace(toy_recipe, training=dataclasses.replace(toy_recipe.training, **mirrored))
    with pytest.raises(CheckpointError, match=r"memory://plain/run/config.yaml: not found"):
        start_run(tmp_path / "second", recipe)


def test_each_run_of_a_comparison_has_its_own_folder_in_the_store(tmp_path, toy_recipe, monkeypatch):
    folders = []
    monkeypatch.setattr(study, "run_jobs", lambda jobs, **options: folders.extend(job.folder for job in jobs))
    training = dataclasses.replace(toy_recipe.training, checkpoint=CheckpointConfig(mirror="memory://many/runs/"))
    recipe = dataclasses.replace(toy_recipe, training=training)
    study.Study(comparison(recipe), tmp_path, alone=True).train(tmp_path, at_once=1)
    mirrors = {load_recipe(folder / "config.yaml").training.checkpoint.mirror for folder in folders}
    names = ("diff-seed0", "diff-seed1", "softmax-seed0", "softmax-seed1")
    assert mirrors == {f"memory://many/runs/{name}" for name in names}


def test_a_store_that_fails_is_a_warning(tmp_path, train_toy, monkeypatch):
    fs = fsspec.filesystem("memory")
    monkeypatch.setattr(fs, "put_file", lambda *given, **options: (_ for _ in ()).throw(PermissionError("not allowed")))
    with pytest.warns(
        UserWarning,
        match=r"not copied, and training goes on: memory://b/r/checkpoints/step-\d+: cannot be written \(not al",
    ):
        train_toy(tmp_path, steps=1, checkpoint=CheckpointConfig(mirror="memory://b/r"))
    assert checkpoints(tmp_path)
    monkeypatch.setattr(fs, "find", lambda *given, **options: (_ for _ in ()).throw(KeyError("no\nkeys")))  # as of boto
    with pytest.raises(
        CheckpointError, match=r"memory://b/r/checkpoints: cannot be read \(.*no.*keys.*\); check the store"
    ) as met:
        train_toy(tmp_path / "third", steps=1, checkpoint=CheckpointConfig(mirror="memory://b/r"))
    assert "\n" not in str(met.value)
    with pytest.raises(ConfigError, match="nosuch://b/r cannot be opened"):
        train_toy(tmp_path / "other", steps=1, checkpoint=CheckpointConfig(mirror="nosuch://b/r"))


WAITS = """
    import os, sys, time
    from pathlib import Path
    from types import SimpleNamespace
    from difftransformer.stores import Store
    from difftransformer.train.config import TrainingConfig
    from difftransformer.train.mirror import Mirror
    from difftransformer.train.parallel import joined

    put, run = Store.put, Path(sys.argv[1])

    def slow_put(*given):
        time.sleep(2)
        put(*given)
        (run / "copied").touch()

    Store.put = slow_put
    with joined("cpu") as processes:
        config = TrainingConfig(steps=8, batch_tokens=64, context_stages=[(0, 64)])
        saved = SimpleNamespace(folder=run, step=3, config=config, processes=processes, finish_saving=lambda: True)
        Mirror(f"file://{run}/store").on_checkpoint(saved)
        print((run / "copied").exists(), flush=True)
    os._exit(0)
"""


def test_other_processes_wait_for_the_copy(plain_run, tmp_path):
    """They would go on into the next step's collectives, which time out."""
    shutil.copytree(plain_run, tmp_path / "run")
    done = [worker.finish() for worker in parallel_steps.start_code(2, WAITS, tmp_path / "run")]
    assert [worker.returncode for worker in done] == [0, 0], done[0].stderr + done[1].stderr
    assert [worker.stdout.split() for worker in done] == [["True"], ["True"]]
