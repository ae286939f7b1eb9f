"""Optimiser, schedule, clipping, accumulation and precision against the same thing written another way."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import get_wsd_schedule

from difftransformer.attention import RMSNorm
from difftransformer.data import Loader
from difftransformer.errors import ConfigError
from difftransformer.train import OptimizerConfig, ScheduleConfig, TrainingConfig, build_model, read_metrics, train
from difftransformer.train.optim import build_optimizer, learning_rate
from difftransformer.train.parallel import Mesh, mesh
from difftransformer.train.parallel.processes import Processes
from difftransformer.train.trainer import recompute_activations, validate
from tests.families.test_families import source_model, upcycled
from tests.support.cases import needs_kernels


@pytest.mark.parametrize(
    ("attention_type", "form", "count"),
    [
        ("diff", "layer", 8),
        ("diff", "head", 8),
        ("diff", "scalar", 2),
        ("diff", "token", 0),
        ("diff", "constant", 0),
        ("softmax", None, 0),
    ],
)
def test_norms_and_lambdas_do_not_decay(model_config, attention_type, form, count):
    """Lambda by token is a projection, whose matrix decays."""
    fields = {} if form is None else {"lambda_form": form}
    model = build_model(model_config(attention_type, **fields), seed=0)
    decayed, kept = build_optimizer(model, OptimizerConfig(weight_decay=0.3)).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    gains = {id(p) for module in model.modules() if isinstance(module, RMSNorm) for p in module.parameters()}
    lambdas = {i for i, name in names.items() if "lambda_" in name and not name.endswith("_proj.weight")}
    assert {id(p) for p in kept["params"]} == gains | lambdas
    assert {names[id(p)] for p in decayed["params"]} == {
        name for name in names.values() if name.endswith(("_proj.weight", "embed_tokens.weight"))
    }
    assert len(lambdas) == count
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_gains_by_head_do_not_decay(tmp_path):
    """A Cohere's norms of queries and keys have a gain for each head."""
    model, _ = upcycled(source_model("cohere"), tmp_path, "diff")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert model.get_parameter("model.layers.0.self_attn.q_norm.weight").dim() == 2
    norms = {name for name in names.values() if "norm" in name}
    for method in ("adamw", "muon"):
        groups = build_optimizer(model, OptimizerConfig(method=method, weight_decay=0.3)).param_groups
        kept = {names[id(p)] for group in groups if not group["weight_decay"] for p in group["params"]}
        decayed = {names[id(p)] for group in groups if group["weight_decay"] for p in group["params"]}
        assert norms <= kept
        assert kept | decayed == {*names.values()}
        assert {name for name in kept - norms if "lambda_" not in name and not name.endswith("bias")} == set()


@pytest.mark.parametrize("form", ["layer", "head"])
def test_rates_over_width(toy_recipe, toy_shards, model_config, tmp_path, form):
    """What a step of AdamW does to activations of size 1 is the same at every width, for each kind of parameter.

    Gradients of equal signs move every weight by the rate: a product of d inputs by d times as much, an embedding that is
    multiplied by sqrt(d) by sqrt(d) times as much.
    """
    moved = {}
    for width in (32, 64):
        shape = {
            "hidden_size": width,
            "intermediate_size": 3 * width,
            "tie_word_embeddings": False,
            "lambda_form": form,
        }
        config = model_config(**shape, initialization="fan_in")
        model = build_model(config, seed=0)
        optimizer = build_optimizer(model, OptimizerConfig(base_width=32, learning_rate=1e-3, weight_decay=0.3))
        for group in optimizer.param_groups:
            assert group["rate_factor"] * group["weight_decay"] in (0.0, pytest.approx(0.3))
            group["lr"], group["weight_decay"] = 1e-3 * group["rate_factor"], 0.0
            assert group["rate_factor"] == 1 or width != 32
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for name, parameter in model.named_parameters():
            inputs = torch.ones(parameter.shape[-1])
            change = before[name] - parameter.detach()
            if name == "model.embed_tokens.weight":
                moved[width, name] = change.mean() * model.config.embedding_multiplier
            else:
                is_matrix = name.endswith("_proj.weight") or name == "lm_head.weight"
                moved[width, name] = (change @ inputs).mean() if is_matrix else change.mean()
    names = {name for _, name in moved}
    assert len(names) > 12
    for name in names:
        torch.testing.assert_close(moved[32, name], moved[64, name], rtol=1e-3, atol=0)
    tied = build_model(model_config(tie_word_embeddings=True), seed=0)
    with pytest.raises(ConfigError, match=r"base_width: the embedding is the output layer too"):
        build_optimizer(tied, OptimizerConfig(base_width=32))
    training = dataclasses.replace(toy_recipe.training, steps=1, optimizer=OptimizerConfig(base_width=32))
    train(training, config, toy_shards, tmp_path)
    (line,), _ = read_metrics(tmp_path / "metrics.jsonl")
    assert line.learning_rate == learning_rate(0, peak=3.2e-4, steps=1, schedule=training.schedule)


def adamw(weights, gradients, *, rate, betas, eps, decay):
    """AdamW's equations (arXiv:1711.05101 Algorithm 2), in float64."""
    m = v = np.zeros_like(weights)
    for t, gradient in enumerate(gradients, 1):
        m = betas[0] * m + (1 - betas[0]) * gradient
        v = betas[1] * v + (1 - betas[1]) * gradient**2
        hat_m, hat_v = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        weights = weights - rate * decay * weights - rate * hat_m / (np.sqrt(hat_v) + eps)
    return weights


def test_adamw_against_its_equations():
    draw = np.random.default_rng(0)
    start = {"matrix": draw.normal(size=(3, 4)), "vector": draw.normal(size=5)}
    gradients = {name: [draw.normal(size=value.shape) for _ in range(4)] for name, value in start.items()}
    module = torch.nn.ParameterDict({name: torch.tensor(value) for name, value in start.items()})
    config = OptimizerConfig(learning_rate=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    optimizer = build_optimizer(module, config)
    for step in range(4):
        for name in start:
            module[name].grad = torch.tensor(gradients[name][step])
        optimizer.step()
    for name, decay in (("matrix", 0.2), ("vector", 0.0)):
        expected = adamw(start[name], gradients[name], rate=0.01, betas=(0.8, 0.9), eps=1e-6, decay=decay)
        np.testing.assert_allclose(module[name].detach().numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize(("warmup", "steps"), [(10, 110), (0, 5), (3, 4), (20, 10), (1, 1)])
def test_schedule_against_interpolation(warmup, steps):
    rates = [
        learning_rate(step, peak=2.0, steps=steps, schedule=ScheduleConfig(warmup_steps=warmup, floor=0.1))
        for step in range(steps)
    ]
    # A line up to the peak in `warmup` steps, where step s has done s + 1 of them, then a line from there to the floor.
    up = np.interp(np.arange(1, steps + 1), [0, warmup], [0.0, 2.0]) if warmup else np.full(steps, 2.0)
    down = np.interp(np.arange(steps), [warmup, max(steps - 1, warmup + 1)], [2.0, 0.2])
    np.testing.assert_allclose(rates, np.where(np.arange(steps) < warmup, up, down), rtol=1e-12)


def _rates(steps, **schedule):
    return [learning_rate(at, peak=2.0, steps=steps, schedule=ScheduleConfig(**schedule)) for at in range(steps)]


def _torch_rates(steps, make):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler, rates = make(optimizer), []
    for _ in range(steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 10])
def test_cosine_and_wsd_against_torch_and_transformers(warmup):
    cosine = _torch_rates(
        110 - warmup, lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 109 - warmup, eta_min=0.2)
    )
    found = _rates(110, shape="cosine", warmup_steps=warmup, floor=0.1)
    np.testing.assert_allclose(found[warmup:], cosine[: 110 - warmup], rtol=1e-9)
    # Its last step is after the end: ours are one step ahead. Its warm-up begins at the floor.
    how = {"min_lr_ratio": 0.1, "warmup_type": "linear", "decay_type": "linear"}
    theirs = _torch_rates(110, lambda o: get_wsd_schedule(o, warmup, 20, num_training_steps=110, **how))
    found = _rates(110, shape="wsd", warmup_steps=warmup, decay_steps=20, floor=0.1)
    np.testing.assert_allclose(found[warmup:], theirs[warmup + 1 :], rtol=1e-9)
    assert _rates(50, shape="wsd", warmup_steps=5) == _rates(50, shape="wsd", warmup_steps=5, decay_steps=5)


def test_the_rate_that_training_reports_and_uses(plain_run, toy_recipe, read_run):
    steps, _ = read_run(plain_run)
    training = toy_recipe.training
    assert [line["learning_rate"] for line in steps] == [
        learning_rate(step, peak=0.002, steps=8, schedule=training.schedule) for step in range(8)
    ]
    assert [line["tokens"] for line in steps] == [256 * step for step in range(1, 9)]


def test_a_step_against_torch(tmp_path, train_toy, toy_recipe, toy_shards, model_config, read_run):
    """Two whole steps written out: mean loss, gradient norm, clip, AdamW with its two groups, lambdas."""
    optimizer = dataclasses.replace(toy_recipe.training.optimizer, clip_norm=0.5, weight_decay=0.3)
    trained = train_toy(tmp_path, steps=2, optimizer=optimizer)
    steps, _ = read_run(tmp_path)

    training = toy_recipe.training
    model = build_model(model_config(), seed=0).train()
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0}]
    expected = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=False, foreach=False)
    loader = Loader(
        toy_shards, batch_tokens=256, context_stages=training.context_stages, seed=0, retrieval=training.retrieval
    )
    for step, rate in enumerate((0.001, 0.002)):
        batch = next(loader)
        loss = F.cross_entropy(model(input_ids=batch.input_ids).logits.flatten(0, 1), batch.targets.flatten())
        expected.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.double().pow(2).sum() for p in model.parameters()]).sum().sqrt().item()
        assert norm > 0.5  # or clipping would not be seen
        for parameter in model.parameters():
            parameter.grad *= 0.5 / norm
        for group in expected.param_groups:
            group["lr"] = rate
        expected.step()
        assert steps[step]["loss_nats"] == pytest.approx(loss.item(), rel=1e-5)
        assert steps[step]["gradient_norm"] == pytest.approx(norm, rel=1e-4)
        for index, (layer, lam) in enumerate(zip(model.model.layers, steps[step]["lambdas"], strict=True)):
            a, start = layer.self_attn, 0.8 - 0.6 * np.exp(-0.3 * index)
            one, two = (a.lambda_q1 @ a.lambda_k1).exp(), (a.lambda_q2 @ a.lambda_k2).exp()
            assert lam == pytest.approx((one - two).item() + start, abs=1e-5)
    for (name, a), (_, b) in zip(trained.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6, msg=name)


def test_no_clip_leaves_gradients_alone(tmp_path, train_toy, toy_recipe, read_run):
    """AdamW hardly sees the scale of a gradient, so the second step's norm tells clipped from not clipped apart."""
    optimizer = toy_recipe.training.optimizer
    for name, clip in (("none", None), ("wide", 1e9)):
        train_toy(tmp_path / name, steps=3, optimizer=dataclasses.replace(optimizer, clip_norm=clip))
    assert read_run(tmp_path / "none") == read_run(tmp_path / "wide")


def test_accumulation_gives_the_same_losses(tmp_path, train_toy, read_run, plain_run):
    train_toy(tmp_path, accumulation=2)  # 2 rows of 128 tokens in the second stage
    for one, two in zip(read_run(plain_run)[0], read_run(tmp_path)[0], strict=True):
        assert two["loss_nats"] == pytest.approx(one["loss_nats"], abs=1e-6 * one["step"])
        assert two["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=1e-4)


def test_gradient_checkpointing_changes_nothing(tmp_path, train_toy, read_run, plain_run):
    train_toy(tmp_path, gradient_checkpointing=True)
    for a, b in zip(read_run(plain_run)[0], read_run(tmp_path)[0], strict=True):
        assert b["loss_nats"] == pytest.approx(a["loss_nats"], abs=1e-6)


@needs_kernels  # of which each call is one operation
@pytest.mark.parametrize(("how", "again"), [(True, "all"), ("selective", "neither product nor attention")])
def test_what_is_computed_again(how, again, toy_recipe, model_config):
    """In the operations of a step: the layers' products once more, or none, and attention as often."""

    class Calls(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.attention, self.products = 0, 0

        def __torch_dispatch__(self, operator, types, arguments=(), options=None):
            name = operator.name()
            self.attention += name.startswith("difftransformer::") and "backward" not in name
            self.products += name == "aten::mm"
            return operator(*arguments, **(options or {}))

    ids, counted = torch.arange(64)[None], []
    for checkpointing in (False, how):
        model = build_model(model_config(), seed=0).train()
        recompute_activations(model, dataclasses.replace(toy_recipe.training, gradient_checkpointing=checkpointing))
        with Calls() as calls:
            model(ids, labels=ids).loss.backward()
        counted.append((calls.attention, calls.products))
    (attention, products), found = counted
    layers, projections = 2, 7  # four of attention, three of the MLP; the last one's output is of no gradient's use
    assert attention == layers
    if again == "all":
        assert found == (2 * attention, products + layers * (projections - 1))
    else:
        assert found == (attention, products)


def test_layers_are_compiled_where_asked(tmp_path, train_toy, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(type(module).__name__))
    for asked, expected in ((False, 0), ("auto", 0), (True, 2)):
        train_toy(tmp_path / str(asked), steps=1, compile=asked)
        assert compiled == ["DecoderLayer"] * expected


@pytest.mark.parametrize(("has_triton", "expected"), [(True, 2), (False, 0)])
def test_layers_are_compiled_on_a_gpu(has_triton, expected, toy_recipe, model_config, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(type(module).__name__))
    monkeypatch.setattr(mesh, "find_spec", lambda name: name if has_triton else None)
    model = build_model(model_config(), seed=0)
    mesh.Mesh(Processes(device="cuda")).place(model, toy_recipe.training)
    assert compiled == ["DecoderLayer"] * expected


def test_the_returned_model_has_logits_beside_its_loss(tmp_path, train_toy):
    model = train_toy(tmp_path, steps=1, loss_chunk_tokens=24)
    ids = torch.arange(6)[None]
    for training in (model.training, False):
        output = model.train(training)(ids, labels=ids)
        assert output.logits.shape == (1, 6, model.config.vocab_size)
        loss = F.cross_entropy(output.logits[0, :-1], ids[0, 1:])
        assert output.loss.item() == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("fields", [{"z_loss": 0.01}, {"z_loss": 0.01, "loss_chunk_tokens": 24}, {}], ids=str)
def test_the_loss_of_a_step_is_that_of_the_configuration(
    fields, tmp_path, train_toy, read_run, toy_recipe, toy_shards, model_config
):
    train_toy(tmp_path, steps=1, **fields)
    (line,), _ = read_run(tmp_path)
    training, model = toy_recipe.training, build_model(model_config(), seed=0).train()
    rows = {"context_stages": training.context_stages, "retrieval": training.retrieval}
    batch = next(Loader(toy_shards, batch_tokens=256, seed=0, **rows))
    logits, targets = model(input_ids=batch.input_ids).logits.double().flatten(0, 1), batch.targets.flatten()
    squares = logits.logsumexp(-1).square()[targets != -100].mean()
    expected = F.cross_entropy(logits, targets) + fields.get("z_loss", 0) * squares
    assert line["loss_nats"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.slow
def test_bf16_trains_with_fp32_weights(tmp_path, train_toy, read_run):
    fields = {"steps": 30, "retrieval": None, "context_stages": [(0, 64)]}
    model = train_toy(tmp_path / "bf16", precision="bf16", **fields)
    train_toy(tmp_path / "fp32", **fields)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    low, full = ([line["loss_nats"] for line in read_run(tmp_path / name)[0]] for name in ("bf16", "fp32"))
    assert low != full
    assert low[-1] < low[0] - 0.5
    assert low == pytest.approx(full, abs=0.05)


def test_validation_is_the_mean_over_its_windows(toy_recipe, toy_shards, model_config):
    """However the windows are put into batches, and without touching training."""
    config = dataclasses.replace(toy_recipe.training, validation_windows=5)
    model = build_model(model_config(), seed=0).train()
    before = copy.deepcopy(model.state_dict())
    found = validate(model, toy_shards, config, Mesh())
    stream = np.asarray(toy_shards.tokens("validation")[:]).astype(np.int64)
    fitting = (len(stream) - 1) // 128
    losses = []
    for index in range(5):
        start = index * fitting // 5 * 128
        window = torch.from_numpy(stream[start : start + 129])
        logits = model(input_ids=window[None, :-1]).logits[0].double()
        losses.append(-logits.log_softmax(-1)[torch.arange(128), window[1:]].mean().item())
    assert found == pytest.approx(np.mean(losses), rel=1e-6)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps": 0}, "steps=0"),
        ({"batch_tokens": 0}, "batch_tokens=0"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0"),
        ({"accumulation": 3}, "accumulation 3"),
    ],
)
def test_impossible_settings_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        TrainingConfig(**({"steps": 4, "batch_tokens": 256, "context_stages": [(0, 64)]} | fields))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: OptimizerConfig(learning_rate=-1.0), "learning_rate=-1.0"),
        (lambda: OptimizerConfig(learning_rate=float("nan")), "learning_rate=nan"),
        (lambda: OptimizerConfig(betas=(0.9, 1.0)), "betas"),
        (lambda: OptimizerConfig(eps=0.0), "eps=0"),
        (lambda: OptimizerConfig(weight_decay=-0.1), "weight_decay=-0.1"),
        (lambda: OptimizerConfig(clip_norm=0.0), "clip_norm=0"),
        (lambda: ScheduleConfig(warmup_steps=-1), "warmup_steps=-1"),
        (lambda: ScheduleConfig(floor=1.5), "floor=1.5"),
    ],
)
def test_impossible_optimisers_are_refused(build, words):
    with pytest.raises(ConfigError, match=words):
        build()
