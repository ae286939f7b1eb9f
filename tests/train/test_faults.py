"""Steps with a loss or gradient that is not finite, or a gradient norm far from those before."""

import dataclasses
import math
import os
import signal
import statistics
import threading

import pytest
import torch
from safetensors.torch import load_file

from difftransformer.data import Loader
from difftransformer.errors import ConfigError, DiffTransformerError, Diverged
from difftransformer.train import Callback, Interrupted, checkpoints, read_metrics, saving, trainer
from difftransformer.train.config import CheckpointConfig, OptimizerConfig, ScheduleConfig
from difftransformer.train.faults import OUTLIER_STEPS, Faults
from difftransformer.train.metrics import read_lines
from tests.train.test_resume import stop_after


@pytest.fixture
def poison(monkeypatch):
    """poison(batch, ...): training on these batches, counted from 1, gives a loss that is not finite."""
    draw, compute = Loader.__next__, trainer.summed_next_token_nll
    seen = []

    def next_batch(loader):
        seen.append(loader.step + 1)
        return draw(loader)

    def poisoned(*batches):
        def nll(model, *arguments, **options):
            found = compute(model, *arguments, **options)
            return found * math.nan if model.training and seen[-1] in batches else found

        monkeypatch.setattr(Loader, "__next__", next_batch)
        monkeypatch.setattr(trainer, "summed_next_token_nll", nll)
        return seen

    return poisoned


def faults(run):
    return [line for line in read_lines(run / "metrics.jsonl") if "fault" in line]


def weights(run):
    return load_file(checkpoints(run)[-1] / "model.safetensors")


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_loss_that_is_not_finite_stops(train_toy, tmp_path, poison):
    poison(5)
    with pytest.raises(Diverged, match="step 5 has loss nan and gradient norm nan"):
        train_toy(tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000003"]


@pytest.mark.parametrize("policy", ["stop", "skip", "rollback"])
def test_a_validation_loss_that_is_not_finite_is_in_no_metrics(train_toy, tmp_path, poison, monkeypatch, policy):
    """It ends the run, unless the next step can go back."""
    poison(5, 6, 7, 8)
    monkeypatch.setattr(trainer, "validate", lambda *words: math.nan)
    message = "step 5 has loss nan" if policy == "rollback" else "the validation loss after step 4 is nan; lower"
    with pytest.raises(Diverged, match=message):
        train_toy(tmp_path, validate_every=4, checkpoint_every=9, nonfinite=policy)
    assert read_metrics(tmp_path / "metrics.jsonl")[1] == []


def test_weights_that_fail_validation_are_not_gone_back_to(train_toy, tmp_path, read_run):
    """As an update that overflows leaves them: the loss before it is finite, and every one after it is not."""

    class Overflow(Callback):
        gone = False

        def on_step(self, trainer, figures):
            if trainer.step == 5 and not self.gone:
                self.gone = True
                torch.nn.init.constant_(next(trainer.model.parameters()), math.nan)

    every = {"validate_every": 1, "checkpoint_every": 1, "keep_checkpoints": 1, "nonfinite": "rollback"}
    with pytest.warns(UserWarning, match="step 6 has loss nan .*; training goes back to step 4"):
        train_toy(tmp_path, callbacks=[Overflow()], **every)
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path).values())
    assert [line["step"] for line in read_run(tmp_path)[1]] == list(range(1, 9))


def test_lambda_that_overflows_stays_readable(train_toy, tmp_path):
    with pytest.raises(Diverged, match="step 2 has loss nan"):
        train_toy(tmp_path, optimizer=OptimizerConfig(learning_rate=1e30), schedule=ScheduleConfig(warmup_steps=0))
    (first,), _ = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isfinite(first.loss_nats)
    assert set(first.lambdas) == {None}


def test_a_skipped_step_leaves_weights_and_moments(train_toy, tmp_path, read_run, poison, monkeypatch):
    step, calls = torch.optim.AdamW.step, []

    def but_the_fifth(optimizer, *arguments):
        calls.append(optimizer)
        if len(calls) != 5:
            step(optimizer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", but_the_fifth)
        train_toy(tmp_path / "reference")
    poison(5)
    with pytest.warns(UserWarning, match="step 5 has loss nan and gradient norm nan; it is skipped"):
        train_toy(tmp_path / "run", nonfinite="skip")
    assert_equal(weights(tmp_path / "run"), weights(tmp_path / "reference"))
    lines, validations = read_run(tmp_path / "reference")
    assert read_run(tmp_path / "run") == ([line for line in lines if line["step"] != 5], validations)
    unknown = {"faulty_loss_nats": None, "faulty_gradient_norm": None}
    assert faults(tmp_path / "run") == [{"step": 5, "fault": "nonfinite", "action": "skip", "at_step": 5, **unknown}]


def test_a_step_without_a_target_leaves_weights_and_moments(train_toy, tmp_path, read_run, monkeypatch):
    """Its gradient is zero, and yet the moments would move the weights. The next steps are those that follow."""
    draw, seen = Loader.__next__, []

    def next_batch(loader):
        batch = draw(loader)
        if loader.step == 5:
            return dataclasses.replace(batch, targets=torch.full_like(batch.targets, -100), step_targets=0)
        return batch

    class Watch(Callback):
        def on_restore(self, trainer, state):
            trainer.optimizer.register_step_post_hook(lambda *_: seen.append(trainer.step + 1))

    monkeypatch.setattr(Loader, "__next__", next_batch)
    with pytest.warns(UserWarning, match="^step 5 has no target to learn; it is skipped$"):
        train_toy(tmp_path, callbacks=[Watch()])
    assert seen == [1, 2, 3, 4, 6, 7, 8]
    assert [line["step"] for line in read_run(tmp_path)[0]] == seen
    (fault,) = faults(tmp_path)
    assert (fault["fault"], fault["action"], fault["at_step"]) == ("no target", "skip", 5)


def test_going_back_leaves_out_the_batches_since_the_checkpoint(train_toy, tmp_path, read_run, poison, monkeypatch):
    """As a run that was stopped at the checkpoint of step 3, and then sees the batches after the fifth."""
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "reference", on_metrics=stop_after(3))
    put_back = Loader.load_state_dict
    with monkeypatch.context() as patch:
        patch.setattr(Loader, "load_state_dict", lambda self, state: put_back(self, state | {"step": 5}))
        train_toy(tmp_path / "reference")
    seen = poison(5)
    with pytest.warns(UserWarning, match="step 5 has loss nan .*; training goes back to step 3"):
        train_toy(tmp_path / "run", nonfinite="rollback")
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert_equal(weights(tmp_path / "run"), weights(tmp_path / "reference"))
    assert read_run(tmp_path / "run") == read_run(tmp_path / "reference")
    assert [(line["step"], line["action"], line["at_step"]) for line in faults(tmp_path / "run")] == [
        (4, "rollback", 5)
    ]


@pytest.mark.parametrize(("policy", "stopped_at"), [("skip", 5), ("rollback", 3), ("rollback", 5)])
@pytest.mark.filterwarnings("ignore:step . has loss")
def test_a_run_with_faults_goes_on_bitwise(train_toy, tmp_path, read_run, poison, policy, stopped_at):
    poison(5)
    train_toy(tmp_path / "whole", nonfinite=policy)

    def stop(metrics):
        if metrics.step == stopped_at and not hasattr(metrics, "validation_loss_nats"):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train_toy(tmp_path / "cut", nonfinite=policy, on_metrics=stop)
    train_toy(tmp_path / "cut", nonfinite=policy)
    assert_equal(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    assert read_run(tmp_path / "cut") == read_run(tmp_path / "whole")
    assert faults(tmp_path / "cut") == faults(tmp_path / "whole")


@pytest.mark.filterwarnings("ignore:step .* has loss")
@pytest.mark.parametrize(("policy", "found"), [("skip", "step 15"), ("rollback", "step 5")])
def test_faults_without_end_stop(train_toy, tmp_path, poison, policy, found):
    poison(*range(5, 99))
    with pytest.raises(DiffTransformerError, match=f"{found} has .*, the 11th such step since the last checkpoint"):
        train_toy(tmp_path, steps=30, checkpoint_every=4, nonfinite=policy)
    assert checkpoints(tmp_path)[-1].name == {"skip": "step-000012", "rollback": "step-000004"}[policy]


def test_there_is_nothing_to_go_back_to(train_toy, tmp_path, poison):
    poison(2)
    with pytest.raises(DiffTransformerError, match="step 2 has loss nan"):
        train_toy(tmp_path, nonfinite="rollback")


def test_going_back_waits_for_the_first_checkpoint(train_toy, tmp_path, poison, monkeypatch):
    """Its writer is held until training waits for it."""
    write, wait, waited = saving.save_file, saving.wait, threading.Event()

    def held(tensors, path, **options):
        assert waited.wait(60)
        write(tensors, path, **options)

    def waiting(futures, seconds):
        waited.set()
        return wait(futures, seconds)

    monkeypatch.setattr(saving, "save_file", held)
    monkeypatch.setattr(saving, "wait", waiting)
    poison(4)
    with pytest.warns(UserWarning, match="step 4 has loss nan .*; training goes back to step 3"):
        train_toy(tmp_path, nonfinite="rollback", checkpoint=CheckpointConfig(asynchronous=True))
    assert checkpoints(tmp_path)[-1].name == "step-000008"


def after(norms, sigmas=6.0):
    """A watch that has seen these gradient norms."""
    watch = Faults("skip", sigmas)
    watch.norms.extend(norms)
    return watch


def test_outliers_are_six_sigma_above_the_last_norms():
    watch = Faults("skip", 6.0)
    norms = [1 + 0.1 * math.sin(step) for step in range(300)]
    for step, norm in enumerate(norms):
        window = norms[max(0, step - OUTLIER_STEPS) : step]
        if step >= OUTLIER_STEPS:
            edge = statistics.fmean(window) + 6 * statistics.pstdev(window)
            for found, expected in ((edge * 0.999, None), (edge * 1.001, "outlier")):
                assert after(window).fault(2.0, found) == expected
        assert watch.fault(2.0, norm) is None
    assert list(watch.norms) == norms[-OUTLIER_STEPS:]
    assert after(norms[:127]).fault(2.0, 1e6) is None  # too few to tell
    assert after(norms, None).fault(2.0, 1e6) is None
    assert after(norms).fault(math.inf, 1.0) == "nonfinite"


def test_a_new_level_of_norms_is_accepted():
    watch = after([1 + 0.1 * math.sin(step) for step in range(128)])
    found = [watch.fault(2.0, 10 + 0.1 * math.sin(step)) for step in range(20)]
    assert found[0] == "outlier"
    assert found[-1] is None


def test_an_outlier_is_skipped_also_after_resuming(train_toy, tmp_path, read_run, monkeypatch):
    """The window is in the checkpoint: the outlier is found by norms from before the interruption."""
    monkeypatch.setattr("difftransformer.train.faults.OUTLIER_STEPS", 4)
    compute = trainer.summed_next_token_nll
    steps = []

    def steep(model, *arguments, **options):
        found = compute(model, *arguments, **options)
        return found * 1e4 if model.training and steps[-1] == 7 else found

    draw = Loader.__next__
    monkeypatch.setattr(Loader, "__next__", lambda self: steps.append(self.step + 1) or draw(self))
    monkeypatch.setattr(trainer, "summed_next_token_nll", steep)

    with pytest.warns(UserWarning, match="step 7 has loss .*; it is skipped"):
        train_toy(tmp_path / "whole", outlier_sigmas=6.0)
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "cut", outlier_sigmas=6.0, on_metrics=stop_after(6))
    with pytest.warns(UserWarning, match="step 7 has loss .*; it is skipped"):
        train_toy(tmp_path / "cut", outlier_sigmas=6.0)
    assert read_run(tmp_path / "cut") == read_run(tmp_path / "whole")
    assert_equal(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    (line,) = faults(tmp_path / "cut")
    assert (line["step"], line["fault"], line["action"]) == (7, "outlier", "skip")
    assert line["faulty_gradient_norm"] > 100


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf])
def test_sigmas_out_of_range(train_toy, tmp_path, value):
    with pytest.raises(ConfigError, match="outlier_sigmas"):
        train_toy(tmp_path, outlier_sigmas=value)
