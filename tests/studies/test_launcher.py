"""Runs of a study as jobs of submitit, by its executor for this machine."""

import dataclasses

import pytest

from difftransformer.errors import ConfigError, DiffTransformerError
from difftransformer.train import checkpoints
from difftransformer_lab.studies import Job, start_run, train_run
from difftransformer_lab.studies.jobs import run_jobs
from difftransformer_lab.studies.launcher import submitting

pytestmark = [pytest.mark.slow, pytest.mark.tools]
pytest.importorskip("submitit")


def test_runs_are_those_of_this_process(toy_recipe, toy_shards, tmp_path):
    training = dataclasses.replace(toy_recipe.training, steps=2)
    recipe = dataclasses.replace(toy_recipe, training=training, evaluation=[])
    jobs = []
    for name in ("good", "bad"):
        start_run(tmp_path / name, recipe)
        jobs.append(Job(label=name, folder=tmp_path / name, shards=[toy_shards.folder], steps=2, threads=1))
    (tmp_path / "bad" / "config.yaml").write_text("name: bad\n")
    ended = []
    with submitting(tmp_path / "submitit", "local", "{timeout_min: 5}"):
        run_jobs(jobs[:1], at_once=1, on_done=ended.append)
        with pytest.raises(DiffTransformerError, match=r"bad: .*config.yaml: .*missing"):
            run_jobs(jobs[1:], at_once=1)
    assert [job.label for job in ended] == ["good"]
    train_run(tmp_path / "here", recipe, toy_shards)
    files = [checkpoints(tmp_path / name)[-1] / "model.safetensors" for name in ("good", "here")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_submitit_refuses_is_one_line(tmp_path):
    for options in ("{no_such_option: 1}", "[1]", "{"):
        with (
            pytest.raises(ConfigError, match="--launcher local --launcher-options") as met,
            submitting(tmp_path, "local", options),
        ):
            pass
        assert "\n" not in str(met.value)
