"""Before the first step: a start that drowns the embeddings is said once, and a leaking variant from outside is refused."""

import dataclasses
import shutil
import warnings

import pytest
import torch

from difftransformer.attention import VARIANTS, SoftmaxAttention
from difftransformer.errors import ConfigError
from difftransformer.train import checkpoints, loop
from difftransformer_lab.studies import start_run, train_run

WORDS = (
    r"^at step 0 the attention of layer 0 starts \d+\.\d times as large as the embeddings that it joins, and drowns them; "
    r"start with initialization: fan_in$"
)


@pytest.fixture
def wide(toy_recipe):
    """start -> the toy recipe with one layer of width 128."""

    def recipe(start, **fields):
        shape = {"hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 1, "initialization": start}
        training = dataclasses.replace(toy_recipe.training, **{"steps": 3, "validation_windows": 1} | fields)
        return dataclasses.replace(toy_recipe, model=shape, training=training)

    return recipe


def train(folder, recipe, shards):
    start_run(folder, recipe)
    return train_run(folder, recipe, shards)


def test_once_for_a_new_model(wide, toy_shards, tmp_path):
    """And neither where its run continues nor for its saved weights."""
    recipe = wide("normal", keep_checkpoints=9, checkpoint_every=1)
    with pytest.warns(UserWarning, match=WORDS) as said:
        train(tmp_path / "run", recipe, toy_shards)
    assert len(said) == 1
    *_, newest = checkpoints(tmp_path / "run")
    shutil.rmtree(newest)
    saved = dataclasses.replace(recipe, model={}, start_from=str(checkpoints(tmp_path / "run")[-1]))
    with warnings.catch_warnings(action="error"):
        train(tmp_path / "run", recipe, toy_shards)
        train(tmp_path / "second", saved, toy_shards)


@pytest.mark.parametrize(("slower", "precision"), [(8, "bf16"), (1.5, "bf16"), (8, "fp32")])
def test_bf16_that_the_processor_computes_in_software(wide, toy_shards, tmp_path, monkeypatch, slower, precision):
    monkeypatch.setattr(loop, "matmul_flops", lambda device, kind: 1e9 if kind == "fp32" else 1e9 / slower)
    with warnings.catch_warnings(action="always", record=True) as said:
        train(tmp_path / "run", wide("fan_in", precision=precision, steps=1), toy_shards)
    lines = [str(warning.message) for warning in said if "bf16" in str(warning.message)]
    expected = (
        "precision bf16: products of matrices take 8.0 times as long as with fp32 on this processor; "
        "training.precision=fp32 trains faster"
    )
    assert lines == ([expected] if slower > 2 and precision == "bf16" else [])


def test_not_for_fan_in(wide, toy_shards, tmp_path):
    with warnings.catch_warnings(action="error"):
        train(tmp_path / "run", wide("fan_in"), toy_shards)


def test_losses_and_weights_are_those_without_the_measurement(wide, toy_shards, tmp_path, read_run, monkeypatch):
    with pytest.warns(UserWarning, match=WORDS):
        measured = train(tmp_path / "measured", wide("normal"), toy_shards)
    monkeypatch.setattr(loop, "_warn_of_start", lambda config, seed: None)
    plain = train(tmp_path / "plain", wide("normal"), toy_shards)
    assert read_run(tmp_path / "measured") == read_run(tmp_path / "plain")
    for a, b in zip(measured.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("every", [None, 64])
def test_variants_from_outside_are_checked_for_causality(every, toy_recipe, toy_shards, tmp_path, monkeypatch):
    """Tiled kernels leak at the borders of tiles: here every 64th token sees the next one."""

    class Outside(SoftmaxAttention):
        name = "outside"

        def forward(self, hidden_states, **given):
            output, *rest = super().forward(hidden_states, **given)
            if every:
                border = torch.arange(1, output.shape[1] + 1) % every == 0
                output = output + output.roll(-1, 1) * border[:, None]
            return output, *rest

    monkeypatch.setitem(VARIANTS, "outside", Outside)
    training = dataclasses.replace(toy_recipe.training, steps=1, validation_windows=1)
    model = toy_recipe.model | {"attention_type": "outside", "initialization": "fan_in"}
    recipe = dataclasses.replace(toy_recipe, model=model, training=training)
    if every is None:
        train(tmp_path / "run", recipe, toy_shards)
        return
    with pytest.raises(
        ConfigError, match=r"'outside' is not causal: the output at token (63|127) depends on tokens from"
    ):
        train(tmp_path / "run", recipe, toy_shards)
    assert not checkpoints(tmp_path / "run")
