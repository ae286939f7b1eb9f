"""Training that goes on from a saved model: its weights, its configuration, refusals that name the key."""

import dataclasses
import json
import shutil

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from difftransformer.errors import CheckpointError, ConfigError
from difftransformer.families import upcycle_folder
from difftransformer.hub import open_model
from difftransformer.train import checkpoints, read_metrics
from difftransformer.train.metrics import METRICS_FILE
from difftransformer_lab.studies import load_recipe, recipe_from, start_run, train_run


@pytest.fixture
def start(tmp_path, plain_run):
    """A trained toy's folder."""
    shutil.copytree(plain_run, tmp_path / "first")
    return checkpoints(tmp_path / "first")[-1]


@pytest.fixture
def recipe(toy_recipe, start):
    return dataclasses.replace(toy_recipe, model={}, start_from=str(start))


def test_goes_on_from_the_weights(recipe, start, toy_shards, tmp_path):
    """With a learning rate of almost nothing the weights stay what they were."""
    before = open_model(start)
    still = dataclasses.replace(recipe.training.optimizer, learning_rate=1e-30, weight_decay=0.0)
    recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, optimizer=still))
    start_run(tmp_path / "second", recipe)
    after = train_run(tmp_path / "second", recipe, toy_shards)
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert after.config.to_diff_dict() == before.config.to_diff_dict()


def test_resumes_bitwise(recipe, toy_shards, tmp_path):
    for name, keep in (("whole", 2), ("cut", 9)):
        training = dataclasses.replace(recipe.training, keep_checkpoints=keep)
        whole = train_run(tmp_path / name, dataclasses.replace(recipe, training=training), toy_shards)
    for path in checkpoints(tmp_path / "cut")[1:]:
        shutil.rmtree(path)
    resumed = train_run(tmp_path / "cut", recipe, toy_shards)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_goes_on_with_another_accumulation(toy_recipe, toy_shards, plain_run, read_run, tmp_path):
    """The batches are the same; sums over their parts are rounded otherwise."""
    folder = tmp_path / "cut"
    start_run(folder, toy_recipe)
    last = shutil.ignore_patterns("step-000006", "step-000008")
    shutil.copytree(plain_run, folder, ignore=last, dirs_exist_ok=True)
    changed = dataclasses.replace(toy_recipe, training=dataclasses.replace(toy_recipe.training, accumulation=2))
    start_run(folder, changed)
    train_run(folder, changed, toy_shards)
    assert load_recipe(folder / "config.yaml").training.accumulation == 2
    cut, whole = ([line["loss_nats"] for line in read_run(run)[0]] for run in (folder, plain_run))
    assert cut != whole
    assert cut == pytest.approx(whole, rel=1e-5)


def test_goes_on_at_another_length(toy, start, toy_shards, tmp_path):
    """From a run's folder, with rotary settings of its own: the weights are the run's."""
    run = start.parents[1]
    rope = {"rope_type": "default", "rope_theta": 640_000.0}
    model = toy["model"] | {"max_position_embeddings": 1024, "rope_parameters": rope}
    optimizer = toy["training"].get("optimizer", {}) | {"learning_rate": 1e-30, "weight_decay": 0.0}
    training = toy["training"] | {"optimizer": optimizer, "steps": 2}
    recipe = recipe_from(toy | {"model": model, "start_from": str(run), "training": training}, source="toy")
    after = train_run(tmp_path / "second", recipe, toy_shards)
    before = open_model(start)
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    assert after.config.rope_parameters["rope_theta"] == 640_000
    assert after.config.max_position_embeddings == 1024
    ids = torch.arange(40).unsqueeze(0)
    after.eval()
    assert not torch.allclose(after(ids).logits, before(ids).logits)
    before.config.rope_parameters = rope
    same = type(before)(before.config).eval()
    same.load_state_dict(before.state_dict())
    assert torch.equal(same(ids).logits, after(ids).logits)


def test_a_model_of_another_family(toy_recipe, toy_shards, tmp_path):
    """It learns, saves checkpoints that open, and its lambda is in the log."""
    fields = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen3Config(
        vocab_size=toy_shards.tokenizer.vocab_size,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
        **fields,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "qwen3")
    upcycle_folder(tmp_path / "qwen3", tmp_path / "diff", to="diff")
    recipe = dataclasses.replace(toy_recipe, model={}, start_from=str(tmp_path / "diff"))
    start_run(tmp_path / "run", recipe)
    trained = train_run(tmp_path / "run", recipe, toy_shards)
    steps, _ = read_metrics(tmp_path / "run" / METRICS_FILE)
    assert all(len(line.lambdas) == 2 for line in steps)
    assert steps[-1].loss_nats < steps[0].loss_nats
    opened = open_model(tmp_path / "run")
    assert type(opened).__name__ == "DifferentialQwen3ForCausalLM"
    assert all(torch.equal(a, b) for a, b in zip(opened.parameters(), trained.parameters(), strict=True))


def test_another_start_is_another_run(recipe, start, tmp_path, toy_shards):
    start_run(tmp_path / "second", recipe)
    train_run(tmp_path / "second", recipe, toy_shards)
    other = tmp_path / "first" / "copy"
    start.rename(other)
    with pytest.raises(CheckpointError, match=r"start_from was '.*' and is now '.*copy'"):
        start_run(tmp_path / "second", dataclasses.replace(recipe, start_from=str(other)))


class TestRefusals:
    def document(self, toy, start, **changes):
        return toy | {"model": {}, "start_from": str(start)} | changes

    def test_another_model_beside_it(self, toy, start, toy_shards, tmp_path):
        recipe = recipe_from(self.document(toy, start, model=toy["model"] | {"hidden_size": 64}), source="toy")
        with pytest.raises(ConfigError, match=r"model\.hidden_size is 64, and \d+ in start_from .*or use model: \{\}"):
            train_run(tmp_path / "second", recipe, toy_shards)

    def test_no_such_folder(self, toy, start):
        recipe = recipe_from(self.document(toy, start.parent / "nowhere"), source="toy")
        words = r"config.json: no such file; name the folder of a saved model as start_from"
        with pytest.raises(ConfigError, match=words):
            recipe.model_config(vocab_size=1)

    def test_another_kind_of_model(self, toy, start):
        path = start / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "llama"}))
        recipe = recipe_from(self.document(toy, start), source="toy")
        words = r"model_type 'llama', expected 'difftransformer' or 'differential_family'.*difftransformer upcycle or convert"
        with pytest.raises(ConfigError, match=words):
            recipe.model_config(vocab_size=1)

    def test_too_long_a_context(self, toy, start):
        training = toy["training"] | {"context_stages": [[0, 512]], "batch_tokens": 512}
        recipe = recipe_from(self.document(toy, start, training=training), source="toy")
        with pytest.raises(ConfigError, match="below the trained context of 512 tokens"):
            recipe.model_config(vocab_size=1)

    def test_another_tokenizer_of_the_same_size(self, recipe, start, toy_shards, tmp_path):
        (start / "state.json").unlink()
        path = start / "tokenizer.json"
        document = json.loads(path.read_text())
        vocabulary = document["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        path.write_text(json.dumps(document))
        words = rf"token {vocabulary['b']} is 'a' in data\.tokenizer and 'b' in start_from: .*; set data\.tokenizer to {start}"
        with pytest.raises(ConfigError, match=words):
            train_run(tmp_path / "second", recipe, toy_shards)

    def test_a_tokenizer_too_large(self, recipe, toy_shards, tmp_path, monkeypatch):
        monkeypatch.setitem(vars(toy_shards.tokenizer), "vocab_size", 10_000)  # where the cached property keeps it
        with pytest.raises(ConfigError, match=r"data\.tokenizer has 10000 tokens and the model of start_from"):
            train_run(tmp_path / "second", recipe, toy_shards)
