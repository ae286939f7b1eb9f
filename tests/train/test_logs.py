"""What a run says beside its loss: compared with gradients, maps and hidden states of this test; it changes no weight."""

import copy
import dataclasses
import gzip
import json
import math
import platform
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from difftransformer.data import Loader, validation_rows
from difftransformer.errors import ConfigError
from difftransformer.hub import export_folder
from difftransformer.model import count as count_work
from difftransformer.model.nll import summed_next_token_nll
from difftransformer.ops import attention_maps
from difftransformer.train import (
    Callback,
    Interrupted,
    LogsConfig,
    build_model,
    checkpoints,
    read_metrics,
    train,
    verify_checkpoint,
)
from difftransformer.train.activation_stats import activation_stats
from difftransformer.train.config import CheckpointConfig, LoraConfig
from difftransformer.train.lora import add_lora
from difftransformer.train.metrics import InsideMetrics, MetricsLog, StepMetrics, read_lines
from difftransformer.train.parallel import Mesh
from difftransformer.train.profiling import Profile
from difftransformer.train.speed import train_flops_per_token
from difftransformer.train.trackers import Trackers, scalars
from difftransformer_lab.evals.evaluate import TaskSpec
from difftransformer_lab.studies import start_run, train_run
from difftransformer_lab.studies.evaluation import draw_tasks, evaluate_checkpoint
from difftransformer_lab.studies.records import run_record
from tests.support import fresh, parallel_steps
from tests.train.test_resume import stop_after

STEP = {"step": 1, "loss_nats": 2.0, "gradient_norm": 1.0, "learning_rate": 0.1, "tokens": 5, "seconds": 1.0}
OLD = STEP | {"tokens_per_second": 5.0, "lambdas": [0.2, 0.3]}


def test_gradient_norms_by_part(toy_recipe, toy_shards, model_config, tmp_path):
    """Those of the first step, by backward passes of this test."""
    config = dataclasses.replace(toy_recipe.training, steps=1)
    train(config, model_config(), toy_shards, tmp_path)
    (line,), _ = read_metrics(tmp_path / "metrics.jsonl")
    model = build_model(model_config(), config.seed)
    how = {name: getattr(config, name) for name in ("batch_tokens", "context_stages", "seed", "retrieval")}
    batch = next(Loader(toy_shards, split="train", **how))
    (part,) = batch.parts(1, "cpu")
    (summed_next_token_nll(model, part.input_ids, part.targets) / batch.step_targets).backward()
    whole = {name: parameter.grad.double().square().sum() for name, parameter in model.named_parameters()}
    lambdas = sum(square for name, square in whole.items() if "lambda_" in name)
    expected = {
        "embedding": whole["model.embed_tokens.weight"],
        "lambdas": lambdas,
        "attention": sum(square for name, square in whole.items() if "self_attn" in name) - lambdas,
        "mlp": sum(square for name, square in whole.items() if "mlp" in name),
        "norms": sum(square for name, square in whole.items() if "layernorm" in name or name == "model.norm.weight"),
    }
    if not model.config.tie_word_embeddings:
        expected["head"] = whole["lm_head.weight"]
    assert line.gradient_norms.keys() == expected.keys()
    for name, square in expected.items():
        assert line.gradient_norms[name] == pytest.approx(math.sqrt(square), rel=1e-4), name
    assert math.hypot(*line.gradient_norms.values()) == pytest.approx(line.gradient_norm, rel=1e-5)


@pytest.mark.parametrize("attention_type", ["diff", "softmax"])
def test_inside_is_what_maps_and_layers_show(attention_type, toy_recipe, toy_shards, model_config):
    model = build_model(model_config(attention_type), 3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)  # sharper maps
        for layer in model.model.layers:  # the extremes are negative
            layer.self_attn.k_proj.weight.copy_(-layer.self_attn.q_proj.weight)
        model.model.embed_tokens.weight[:, 0] = -8 * model.model.embed_tokens.weight.abs().max()
    row = validation_rows(toy_shards, 64, 1)
    found = activation_stats(model, row, toy_recipe.training, Mesh())
    compiled = copy.deepcopy(model)
    for layer in compiled.model.layers:
        layer.compile(backend="eager")
    with torch.no_grad():
        compiled(row[:, 0])
    assert activation_stats(compiled, row, toy_recipe.training, Mesh()) == found
    model.eval()
    entropies, logits, hidden = [], [], []

    def see(module, arguments, options):
        x = arguments[0] if arguments else options["hidden_states"]
        batch, length, _ = x.shape
        heads = module.layout.num_heads
        maps = 2 if attention_type == "diff" else 1
        cos, sin = (table.unsqueeze(-2) for table in options["position_embeddings"])
        parts = []
        for projection in (module.q_proj, module.k_proj):
            flat = projection(x).view(batch, length, heads * maps, -1)
            left, right = flat.chunk(2, -1)
            turned = torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
            parts.append(turned.view(batch, length, heads, -1).transpose(1, 2))
        query, key = parts
        width = query.shape[-1] // maps
        future = torch.ones(length, length).triu(1).bool()
        scores = [
            (query[..., at : at + width] @ key[..., at : at + width].mT / width**0.5).masked_fill(future, -math.inf)
            for at in range(0, maps * width, width)
        ]
        drawn = [one.softmax(-1) for one in scores]
        if maps == 2:
            torch.testing.assert_close(torch.stack(drawn), torch.stack(attention_maps(query, key, is_causal=True)))
        entropies.append(torch.stack([-torch.where(p > 0, p * p.log(), 0).sum(-1) for p in drawn]).mean().item())
        seen = torch.cat([one[~future.expand_as(one)] for one in scores])
        assert -seen.min() > seen.max()
        logits.append(seen.abs().max().item())

    hooks = [layer.self_attn.register_forward_pre_hook(see, with_kwargs=True) for layer in model.model.layers]
    hooks += [layer.register_forward_hook(lambda m, a, out: hidden.append(out[0])) for layer in model.model.layers]
    with torch.no_grad():
        model(row[:, 0])
    for hook in hooks:
        hook.remove()
    assert all(-one.min() > one.max() for one in hidden)
    assert found["attention_entropy_nats"] == pytest.approx(entropies, rel=1e-4)
    assert found["largest_logits"] == pytest.approx(logits, rel=1e-4)
    assert found["largest_hidden_states"] == pytest.approx([one.abs().max().item() for one in hidden], rel=1e-5)


def test_inside_that_overflows_stays_readable(toy_recipe, toy_shards, model_config, tmp_path):
    model = build_model(model_config("softmax"), 3)
    torch.nn.init.constant_(model.model.layers[1].mlp.down_proj.weight, math.inf)
    found = activation_stats(model, validation_rows(toy_shards, 64, 1), toy_recipe.training, Mesh())
    log = MetricsLog(tmp_path / "metrics.jsonl", step=0)
    log.write(InsideMetrics(step=1, **found))
    log.close()
    first, second = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)[
        "largest_hidden_states"
    ]
    assert first > 0
    assert second is None


def test_logs_change_no_bit(toy_recipe, toy_shards, model_config, tmp_path):
    for name, logs in (("off", None), ("on", LogsConfig(inside_every=2, peak_tflops=0.1))):
        train(toy_recipe.training, model_config(), toy_shards, tmp_path / name, logs=logs)
    states = [tmp_path / name / "checkpoints" / "step-000008" for name in ("off", "on")]
    for file in ("model.safetensors", "optimizer.safetensors"):
        off, on = (load_file(state / file) for state in states)
        assert off.keys() == on.keys()
        assert all(torch.equal(off[key], on[key]) for key in off), file
    steps, _ = read_metrics(tmp_path / "on" / "metrics.jsonl")
    inside = [line["step"] for line in read_lines(tmp_path / "on" / "metrics.jsonl") if "largest_logits" in line]
    assert inside == [2, 4, 6, 8]
    assert [line.step for line in steps] == list(range(1, 9))


def test_mfu_is_work_over_time_over_peak(toy_recipe, toy_shards, model_config, tmp_path):
    train(toy_recipe.training, model_config(), toy_shards, tmp_path, logs=LogsConfig(peak_tflops=0.25))
    (line, *_), _ = read_metrics(tmp_path / "metrics.jsonl")
    model = build_model(model_config(), 0)
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    if model.config.tie_word_embeddings:
        matrices += model.config.vocab_size * model.config.hidden_size
    # Six FLOPs a weight and token; attention adds less than half of it again in rows of 128 tokens.
    least = 6 * matrices * line.tokens_per_second / 0.25e12
    assert least < line.mfu < 1.5 * least
    assert 50e6 < line.peak_bytes < 50e9


def _counted_flops(model, ids):
    with FlopCounterMode(display=False) as counter:
        model(ids, labels=ids).loss.backward()
    return counter.get_total_flops() / ids.numel()


@pytest.mark.slow
@pytest.mark.tools
@pytest.mark.parametrize("tied", [False, True])
def test_flops_of_adapters_are_those_that_torch_counts(model_config, tied):
    """Adapters add products, and frozen matrices lose that of their own gradient. Attention is the same in both models."""
    config = model_config(tie_word_embeddings=tied, attn_backend="reference")
    ids = torch.arange(64).view(1, 64) % config.vocab_size
    whole, adapted = build_model(config, 0), build_model(config, 0)
    add_lora(adapted, LoraConfig(rank=3, targets=["q_proj", "down_proj"], also=["embed_tokens"]), seed=0)
    counted = _counted_flops(adapted, ids) - _counted_flops(whole, ids)
    stated = [train_flops_per_token(model, config, 64) for model in (adapted, whole)]
    assert counted < 0
    assert stated[0] - stated[1] == pytest.approx(counted, rel=1e-3)


def test_mfu_takes_the_rows_of_each_stage(toy_recipe, toy_shards, model_config, tmp_path):
    """Attention's share of the work grows with the rows: keys of a query are half of them."""
    stages = [(0, 32), (1, 64), (2, 128)]
    config = dataclasses.replace(toy_recipe.training, steps=3, retrieval=None, context_stages=stages)
    train(config, model_config(), toy_shards, tmp_path, logs=LogsConfig(peak_tflops=1.0))
    lines, _ = read_metrics(tmp_path / "metrics.jsonl")
    each = [1e12 * line.mfu / line.tokens_per_second for line in lines]
    assert each[2] - each[1] == pytest.approx(2 * (each[1] - each[0]), rel=1e-9)
    assert each[0] == pytest.approx(count_work(model_config(), context_tokens=32).train_flops_per_token)


FAULTS = """
import resource, torch
from difftransformer.train.speed import keep_freed_memory
keep_freed_memory()
for _ in range(3):
    torch.ones(2**24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(2**24)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_large_tensors_reuse_freed_memory():
    assert int(fresh.run(FAULTS)) < 1000  # of 163,840 pages


def test_lines_of_earlier_releases_are_read(tmp_path):
    """Without newer fields, and with a sum of the line."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps(OLD | {"crc32": "00000000"}) + "\n")
    (line,), _ = read_metrics(tmp_path / "metrics.jsonl")
    assert (line.mfu, line.peak_bytes, line.gradient_norms) == (None, None, {})


def test_callbacks_see_every_step_in_order(toy_recipe, toy_shards, model_config, tmp_path):
    """A callback of one's own adds a figure, skips a step, keeps its state in checkpoints, and is closed."""
    seen = []

    class Own(Callback):
        def on_restore(self, trainer, state):
            seen.append(("restore", trainer.step, None if state is None else len(state.norms)))

        def on_gradients(self, trainer, update):
            update.action = "skip" if trainer.step == 1 else None

        def on_step(self, trainer, figures):
            figures["mfu"] = 0.5
            seen.append(("step", trainer.step))

        def on_validation(self, trainer, figures):
            figures["validation_accuracy"] = 0.25
            seen.append(("validation", trainer.step))

        def on_save(self, trainer, state):
            state["norms"] = [1.0] * trainer.step
            seen.append(("save", trainer.step))

        def close(self):
            seen.append(("close",))

    config = dataclasses.replace(toy_recipe.training, steps=4, checkpoint_every=3, validate_every=3)
    for steps in (4, 5):
        config = dataclasses.replace(config, steps=steps)
        train(config, model_config(), toy_shards, tmp_path, callbacks=[Own()])
    first = ["restore", "step", "step", "validation", "save", "step", "validation", "save", "close"]
    assert [event[0] for event in seen] == [*first, "restore", "step", "validation", "save", "close"]
    assert seen[0] == ("restore", 0, None)
    assert seen[len(first)] == ("restore", 4, 4)
    steps, validations = read_metrics(tmp_path / "metrics.jsonl")
    assert [(line.step, line.mfu) for line in steps] == [(step, 0.5) for step in (1, 3, 4, 5)]
    assert {line.validation_accuracy for line in validations} == {0.25}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_callback_finds_its_state_in_the_checkpoint(train_toy, tmp_path, asynchronous):
    """A run that is stopped has then seen the same losses as one that is not; what it puts into a save later is not in it."""

    class Losses(Callback):
        def __init__(self):
            self.seen = []

        def on_restore(self, trainer, state):
            self.seen = [] if state is None else state.callbacks["losses"]["seen"]

        def on_step(self, trainer, figures):
            self.seen.append(figures["loss_nats"])

        def on_save(self, trainer, state):
            state["callbacks"]["losses"] = {"seen": self.seen}

    fields = {"checkpoint": CheckpointConfig(asynchronous=asynchronous), "keep_checkpoints": 9}
    whole, cut, resumed = Losses(), Losses(), Losses()
    train_toy(tmp_path / "whole", callbacks=[whole], **fields)
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "cut", callbacks=[cut], on_metrics=stop_after(5), **fields)
    train_toy(tmp_path / "cut", callbacks=[resumed], **fields)
    assert len(whole.seen) == 8
    assert (cut.seen, resumed.seen) == (whole.seen[:5], whole.seen)
    for path in checkpoints(tmp_path / "cut"):
        state = verify_checkpoint(path)
        assert state.callbacks == {"losses": {"seen": whole.seen[: state.step]}}


def test_names_of_numbers():
    line = StepMetrics(**OLD, gradient_norms={"mlp": 0.5})
    named = dict(scalars(line))
    assert named["lambdas/layer_01"] == 0.3
    assert named["gradient_norms/mlp"] == 0.5
    assert "step" not in named
    assert "mfu" not in named


@pytest.mark.parametrize(
    ("package", "logs", "extra"),
    [("torch.utils.tensorboard", {"tensorboard": True}, "tensorboard"), ("wandb", {"wandb": "p"}, "wandb")],
)
def test_a_missing_package_is_said_in_one_line(package, logs, extra, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"pip install 'difftransformer\[{extra}\]'"):
        Trackers(LogsConfig(**logs)).open(tmp_path, step=0)


def test_trackers_get_every_number_under_its_name(tmp_path, monkeypatch):
    """Whatever their packages do with it: here they are stand-ins, which write down how they are called."""
    calls = []

    class Writer:
        def __init__(self, folder, purge_step):
            calls.append(("open", Path(folder), purge_step))

        def add_scalar(self, name, number, step):
            calls.append(("board", name, number, step))

        def close(self):
            calls.append(("close",))

    opened = SimpleNamespace(
        log=lambda numbers, step: calls.extend(("wandb", name, number, step) for name, number in numbers.items()),
        finish=lambda: calls.append(("finish",)),
    )

    def init(**options):
        calls.append(("init", options["project"], options["name"], Path(options["dir"])))
        return opened

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    run = tmp_path / "run"
    trackers = Trackers(LogsConfig(tensorboard=True, wandb="toy"))
    trackers.open(run, step=6)
    trackers.on_metrics(
        None, InsideMetrics(step=7, attention_entropy_nats=[1.5], largest_logits=[3.0], largest_hidden_states=[5.0])
    )
    trackers.close()
    numbers = {f"{name}/layer_00": number for name, number in
               (("attention_entropy_nats", 1.5), ("largest_logits", 3.0), ("largest_hidden_states", 5.0))}  # fmt: skip
    assert calls[:2] == [("open", run / "tensorboard", 7), ("init", "toy", "run", run)]
    for tracker in ("board", "wandb"):
        assert [call[1:] for call in calls if call[0] == tracker] == [(*number, 7) for number in numbers.items()]
    assert sorted(calls[-2:]) == [("close",), ("finish",)]


def test_tensorboard_gets_the_numbers(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    trackers = Trackers(LogsConfig(tensorboard=True))
    trackers.open(tmp_path, step=0)
    trackers.on_metrics(None, StepMetrics(**OLD))
    inside = {"attention_entropy_nats": [1.5, 2.5], "largest_logits": [3.0, 4.0], "largest_hidden_states": [5.0, 6.0]}
    trackers.on_metrics(None, InsideMetrics(step=1, **inside))
    trackers.close()
    found = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [event.value for event in found.Scalars("loss_nats")] == [2.0]
    assert [event.value for event in found.Scalars("attention_entropy_nats/layer_01")] == [2.5]


def test_wandb_offline_gets_the_numbers(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    trackers = Trackers(LogsConfig(wandb="toy"))
    trackers.open(tmp_path, step=0)
    trackers.on_metrics(None, StepMetrics(**OLD))
    trackers.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 30  # another process writes it
    while b"gradient_norm" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"gradient_norm" in file.read_bytes()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"k" * 40 in path.read_bytes() for path in files)


@pytest.mark.slow
def test_two_processes_say_the_same(toy_shards, tmp_path):
    """Of divided weights, heads and tokens: norms of parts, and what goes on inside."""
    runs = {"one": (1, {}), "fsdp": (2, {"data": {"shard": 2}}), "tensor": (2, {"tensor": 2})}
    runs["ulysses"], logs = (2, {"context": 2}), {"inside_every": 2}
    for name, (count, layout) in runs.items():
        options = {"layout": layout, "variants": ["diff"], "logs": logs, "context_stages": [[0, 32]]}
        parallel_steps.run_layout(count, tmp_path / name, toy_shards.folder, 4, **options)
    expected = list(read_lines(tmp_path / "one" / "diff" / "metrics.jsonl"))
    for name in ("fsdp", "tensor", "ulysses"):
        found = list(read_lines(tmp_path / name / "diff" / "metrics.jsonl"))
        assert len(found) == len(expected)
        for line, other in zip(found, expected, strict=True):
            assert line.keys() == other.keys()
            for key in ("gradient_norms", "attention_entropy_nats", "largest_logits", "largest_hidden_states"):
                if key in line:
                    assert line[key] == pytest.approx(other[key], rel=2e-5), (name, key)


def test_checkpoints_are_evaluated_while_training(toy_recipe, toy_shards, tmp_path, read_run):
    """By the figures of `eval RUN`, also when the run is stopped between saving and evaluating; it changes no weight."""
    training = dataclasses.replace(toy_recipe.training, steps=4, checkpoint_every=2, retrieval=None, keep_checkpoints=9)
    spec = TaskSpec(task="perplexity", options={"text": "validation", "windows": 2})
    plain = dataclasses.replace(toy_recipe, training=training, evaluation=[spec])
    recipe = dataclasses.replace(plain, logs=LogsConfig(evaluate_every=2))
    start_run(tmp_path / "run", recipe)
    evaluated, asked = train_run(tmp_path / "run", recipe, toy_shards), train_run(tmp_path / "plain", plain, toy_shards)
    for a, b in zip(evaluated.parameters(), asked.parameters(), strict=True):
        assert torch.equal(a, b)
    assert read_run(tmp_path / "run") == read_run(tmp_path / "plain")
    metrics = tmp_path / "run" / "metrics.jsonl"

    def lines():
        return [line for line in read_lines(metrics) if "evaluation" in line]

    for step, line in zip((2, 4), lines(), strict=True):
        result = evaluate_checkpoint(
            tmp_path / "plain" / "checkpoints" / f"step-{step:06d}", plain, toy_shards, tmp_path / f"again{step}"
        )["perplexity"]
        nll = next(m.value for m in result.measurements if m.name == "nll" and not m.detail)
        assert (line["step"], line["evaluation"]["perplexity/nll"]) == (step, nll)
    whole = lines()
    rows = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(rows[:-1]))
    train_run(tmp_path / "run", recipe, toy_shards)
    assert lines() == whole
    how = {"seconds": 0, "device": "cpu", "threads": 1}
    record = run_record(tmp_path / "run", recipe, draw_tasks(recipe, toy_shards), toy_shards, **how)
    assert record.curves["perplexity/nll"].steps == [2, 4]
    with pytest.raises(ConfigError, match=r"logs\.evaluate_every=3 is no multiple of training\.checkpoint_every=2"):
        dataclasses.replace(plain, logs=LogsConfig(evaluate_every=3))


def test_profile_is_a_trace_of_the_steps(toy_recipe, toy_shards, model_config, tmp_path):
    config = dataclasses.replace(toy_recipe.training, steps=6)
    train(config, model_config(), toy_shards, tmp_path, callbacks=[Profile(2)])
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "steps-3-4-process-0.json.gz"
    names = [event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
    assert names.count("Optimizer.step#AdamW.step") == 2


def test_a_run_with_an_average_is_evaluated_by_it(toy_recipe, toy_shards, tmp_path):
    training = dataclasses.replace(toy_recipe.training, steps=3, checkpoint_every=3, retrieval=None, ema=0.75)
    spec = TaskSpec(task="perplexity", options={"text": "validation", "windows": 2})
    recipe = dataclasses.replace(toy_recipe, training=training, evaluation=[spec])
    start_run(tmp_path / "run", recipe)
    train_run(tmp_path / "run", recipe, toy_shards)
    export_folder(tmp_path / "run", tmp_path / "last")
    export_folder(tmp_path / "run", tmp_path / "average", average=True)
    asked = (tmp_path / "run" / "checkpoints" / "step-000003", tmp_path / "average", tmp_path / "last")
    run, average, last = (
        evaluate_checkpoint(folder, recipe, toy_shards, tmp_path / f"evals-{folder.name}")["perplexity"].measurements
        for folder in asked
    )
    assert run == average != last
