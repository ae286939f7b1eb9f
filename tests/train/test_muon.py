"""Muon for hidden matrices: which parameters it takes, what a step does, and resuming."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from difftransformer.errors import ConfigError
from difftransformer.train import Interrupted, OptimizerConfig, build_model, checkpoints
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
