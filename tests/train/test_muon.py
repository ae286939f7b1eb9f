"""Muon for hidden matrices: which parameters it takes, what a step does, and resuming."""

import copy
import dataclasses
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from difftransformer.attention import DifferentialAttention
from difftransformer.errors import ConfigError
from difftransformer.train import (
    Interrupted,
    MuonWithAdamW,
    OptimizerConfig,
    build_model,
    checkpoints,
    muon_parameter_groups,
)
from difftransformer.train.optim import build_optimizer
from tests.train.test_resume import stop_after

MUON = OptimizerConfig(method="muon", learning_rate=0.01, weight_decay=0.0)


class Small(torch.nn.Module):
    """An embedding, an output layer, and hidden matrices of which one has a single row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.output = torch.nn.Embedding(7, 6), torch.nn.Linear(6, 7, bias=False)
        self.wide, self.row = torch.nn.Linear(6, 4), torch.nn.Linear(6, 1)

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.output


def test_update_is_the_nearest_orthogonal_matrix():
    """Its singular vectors are those of the gradient, and its singular values those of a quintic iteration, near 1."""
    model = Small()
    optimizer = build_optimizer(model, MUON)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    gradient = model.wide.weight.grad.double()
    optimizer.step()
    update = (before["wide.weight"] - model.wide.weight.detach()).double() / (0.01 * 0.2 * 6**0.5)
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    inner = left.T @ update @ right.T
    assert (inner.diagonal() - 1).abs().max() < 0.35
    assert (inner - inner.diagonal().diag()).abs().max() < 0.05
    for name in ("embedding.weight", "output.weight", "row.weight", "wide.bias"):
        parameter = model.get_parameter(name)
        # AdamW's first step: the sign of the gradient
        assert torch.allclose(before[name] - parameter, 0.01 * parameter.grad.sign(), atol=1e-6), name


def test_momentum_is_that_of_the_configuration():
    """Without it, the second update is that of the second gradient alone."""
    draw, updates = torch.Generator().manual_seed(1), []
    earlier, gradient = (torch.randn(4, 6, generator=draw) for _ in range(2))
    for momentum, first in ((0.0, earlier), (0.0, torch.zeros(4, 6)), (0.9, earlier)):
        model = Small()
        optimizer = build_optimizer(model, dataclasses.replace(MUON, momentum=momentum))
        for one in (first, gradient):
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            model.wide.weight.grad = one.clone()
            before = model.wide.weight.detach().clone()
            optimizer.step()
        updates.append(before - model.wide.weight.detach())
    torch.testing.assert_close(updates[0], updates[1])
    assert not torch.allclose(updates[0], updates[2], rtol=0.1)


@pytest.mark.parametrize(
    ("attention_type", "fields"),
    [("diff", {}), ("diff", {"lambda_form": "head"}), ("diff_v2", {}), ("softmax", {})],
    ids=str,
)
def test_takes_hidden_matrices(model_config, attention_type, fields):
    model = build_model(model_config(attention_type, **fields), seed=0)
    optimizer = build_optimizer(model, MUON)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    assert sorted(found) == sorted(names.values())
    muon = {names[id(p)] for p in optimizer.param_groups[0]["params"]}
    assert muon == {name for name in names.values() if name.endswith("_proj.weight")}


def test_resumes_bitwise(tmp_path, toy_recipe, train_toy, read_run, plain_run):
    optimizer = dataclasses.replace(toy_recipe.training.optimizer, method="muon")
    whole = train_toy(tmp_path / "whole", optimizer=optimizer)
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "cut", optimizer=optimizer, on_metrics=stop_after(5))
    resumed = train_toy(tmp_path / "cut", optimizer=optimizer)
    assert read_run(tmp_path / "cut") == read_run(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    adamw = load_file(checkpoints(plain_run)[-1] / "model.safetensors")
    assert not torch.equal(adamw["model.layers.0.mlp.up_proj.weight"], whole.model.layers[0].mlp.up_proj.weight)


def test_momentum_is_a_rate():
    with pytest.raises(ConfigError, match=r"momentum=1\.0"):
        OptimizerConfig(momentum=1.0)


ADAMW = {"betas": (0.8, 0.99), "eps": 1e-7}


class Foreign(torch.nn.Module):
    """A model of someone else, with a layer of this package."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.tokens, self.places = torch.nn.Embedding(11, 16), torch.nn.Parameter(torch.randn(5, 16))
        self.attention = DifferentialAttention(16, 2, layer_index=0)
        self.block = torch.nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
        self.norm, self.head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 11)
        self.classes = torch.nn.Linear(16, 3)

    def forward(self, ids):
        hidden = self.tokens(ids) + self.places
        hidden = self.norm(self.block(hidden + self.attention(hidden)[0]))
        return self.head(hidden), self.classes(hidden)


def loss_of(model, seed=0):
    ids = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(seed))
    return sum(one.square().mean() for one in model(ids))


def one_and_two():
    """The optimizer over a foreign model, and torch's two over its copy."""
    one, two = Foreign(), Foreign()
    optimizer = MuonWithAdamW(muon_parameter_groups(one), lr=0.01, weight_decay=0.1, momentum=0.9, **ADAMW)
    hidden, outer, vectors = (group["params"] for group in muon_parameter_groups(two))
    muon = torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    groups = [{"params": outer}, {"params": vectors, "weight_decay": 0.0}]
    return (one, [optimizer]), (two, [muon, torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, **ADAMW)])


def train_on(model, optimizers, seeds, schedulers=()):
    for seed in seeds:
        loss_of(model, seed).backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
        for one in schedulers:
            one.step()


def assert_same(a, b):
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(x, y), name


def test_groups_of_a_model_of_someone_else():
    model = Foreign()
    names = {parameter: name for name, parameter in model.named_parameters()}
    found = [{names[one] for one in group["params"]} for group in muon_parameter_groups(model, adamw=[model.classes])]
    attention = {f"attention.{name}_proj.weight" for name in "qkvo"}
    block = {f"block.{name}" for name in ("self_attn.in_proj_weight", "self_attn.out_proj.weight")}
    assert found[0] == attention | block | {"block.linear1.weight", "block.linear2.weight"}
    assert found[1] == {"tokens.weight", "places", "head.weight", "classes.weight"}
    assert found[2] == set(names.values()) - found[0] - found[1]
    assert {"attention.lambda_q1", "attention.head_norm.weight", "norm.weight", "head.bias"} < found[2]
    small = {"vocab_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    for model in (
        LlamaForCausalLM(LlamaConfig(**small, hidden_size=8, intermediate_size=8)),
        GPT2LMHeadModel(GPT2Config(**small, n_embd=8)),
    ):
        hidden, outer, *_ = (group["params"] for group in muon_parameter_groups(model))
        assert {id(model.get_input_embeddings().weight), id(model.lm_head.weight)} <= {id(one) for one in outer}
        assert len(hidden) == (7 if model.config.model_type == "llama" else 4)


def test_is_torchs_two_optimizers_under_schedulers():
    (one, own), (two, both) = one_and_two()
    for make in (
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=9, cycle_momentum=False),
    ):
        train_on(one, own, range(4), [make(optimizer) for optimizer in own])
        train_on(two, both, range(4), [make(optimizer) for optimizer in both])
        assert_same(one, two)
    torch.optim.lr_scheduler.OneCycleLR(own[0], 0.02, total_steps=9).step()  # it looks for momentum or betas


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy", "dcp", "dcp_flat"])
def test_goes_on_from_its_state(how, tmp_path):
    """In a new optimizer, whose own rate the state replaces, as that of torch's optimizers does."""
    (one, (optimizer,)), (two, both) = one_and_two()
    train_on(one, [optimizer], range(3))
    train_on(two, both, range(6))
    if how in ("deepcopy", "pickle"):
        new, again = (
            copy.deepcopy((one, optimizer)) if how == "deepcopy" else pickle.loads(pickle.dumps((one, optimizer)))
        )
    else:
        new = copy.deepcopy(one)
        again = MuonWithAdamW(muon_parameter_groups(new), lr=0.5, **ADAMW)
        if how == "state_dict":
            torch.save(optimizer.state_dict(), tmp_path / "state")
            again.load_state_dict(torch.load(tmp_path / "state"))
        else:
            options = StateDictOptions(flatten_optimizer_state_dict=how == "dcp_flat")
            dcp.save(get_optimizer_state_dict(one, optimizer, options=options), checkpoint_id=tmp_path, no_dist=True)
            state = get_optimizer_state_dict(new, again, options=options)
            dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
            set_optimizer_state_dict(new, again, state, options=options)
    train_on(new, [again], range(3, 6))
    assert_same(new, two)
    assert again.state.keys() == set(new.parameters())


def test_groups_are_added():
    """A frozen layer that joins later; AdamW takes it unless it says otherwise."""
    model = Foreign()
    later = {id(parameter) for parameter in (model.classes.weight, model.classes.bias)}
    first = [parameter for parameter in model.block.parameters() if id(parameter) not in later]
    optimizer = MuonWithAdamW([{"params": first}], lr=0.01)
    before = copy.deepcopy(model.classes)
    optimizer.add_param_group({"params": [model.classes.weight], "use_muon": True, "lr": 0.02, "weight_decay": 0.0})
    optimizer.add_param_group({"params": model.classes.bias})
    for group in optimizer.param_groups:
        group["lr"] *= 2
    train_on(model, [optimizer], [0])
    update = before.weight - model.classes.weight
    singular = torch.linalg.svdvals(update.detach() / (0.04 * 0.2 * 16**0.5))
    assert ((singular > 0.6) & (singular < 1.3)).all()
    torch.testing.assert_close((before.bias * (1 - 0.02 * 0.1) - model.classes.bias).abs(), torch.full((3,), 0.02))
    with pytest.raises(ConfigError, match=r"use_muon has a parameter of shape \(11,\); leave it to AdamW"):
        optimizer.add_param_group({"params": [model.head.bias], "use_muon": True})
    assert len(optimizer.param_groups) == 3


def test_grad_scaler_closure_and_hooks():
    """A scaled step is that of the gradients, one that overflows is skipped by both, and a hook is called once a step."""
    (one, (optimizer,)), (two, both) = one_and_two()
    calls, scaler = [], torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer.register_step_post_hook(lambda *words: calls.append(len(words)))
    for seed in range(3):
        scaler.scale(loss_of(one, seed)).backward()
        if seed == 1:
            one.head.weight.grad.fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    train_on(two, both, (0, 2))
    assert_same(one, two)

    def closure():
        loss = loss_of(one)
        loss.backward()
        return loss

    expected = loss_of(one).detach()
    assert torch.equal(optimizer.step(closure), expected)
    assert len(calls) == 3
