"""Runs with training.lora: what is trained, what is saved, and that a run goes on as if it had not been stopped."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file

from difftransformer.errors import ConfigError
from difftransformer.hub import open_model
from difftransformer.model import DiffTransformerForCausalLM
from difftransformer.train import build_model, checkpoints
from difftransformer.train.config import LoraConfig
from difftransformer.train.lora import add_lora, merged_state
from difftransformer.train.parallel import DeferredModel
from difftransformer_lab.studies import train_run

IDS = torch.arange(24).view(2, 12)


@pytest.fixture
def start(toy_recipe, toy_shards, tmp_path, needs):
    """attention_type -> the folder of an untrained toy."""
    needs("peft")

    def save(attention_type, **fields):
        recipe = toy_recipe.with_model(attention_type)
        recipe = dataclasses.replace(recipe, model=recipe.model | fields)
        torch.manual_seed(5)
        model = DiffTransformerForCausalLM(recipe.model_config(vocab_size=toy_shards.tokenizer.vocab_size))
        model.save_pretrained(tmp_path / "start")
        return tmp_path / "start"

    return save


def adapted(recipe, start, **lora):
    training = dataclasses.replace(recipe.training, lora=LoraConfig(rank=4, **lora), keep_checkpoints=9)
    return dataclasses.replace(recipe, model={}, start_from=str(start), training=training)


@pytest.mark.parametrize("attention_type", ["diff", "diff_v2", "dex", "softmax"])
def test_what_is_trained(attention_type, start, toy_recipe, toy_shards, tmp_path):
    place = start(attention_type, qk_norm=True)
    recipe = adapted(toy_recipe, place, targets=["q_proj", "o_proj"], also=["input_layernorm"])
    model = train_run(tmp_path / "run", recipe, toy_shards)
    before, after = (load_file(folder / "model.safetensors") for folder in (place, checkpoints(tmp_path / "run")[-1]))
    assert set(before) == set(after)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    parts = ("q_proj", "o_proj", "input_layernorm", "lambda_", "dex_", "head_norm", "q_norm", "k_norm")
    assert moved == {name for name in before if any(part in name for part in parts)}
    opened = open_model(checkpoints(tmp_path / "run")[-1]).eval()
    torch.testing.assert_close(opened(IDS).logits, model.eval()(IDS).logits, rtol=0, atol=1e-5)
    low = after["model.layers.0.self_attn.q_proj.weight"] - before["model.layers.0.self_attn.q_proj.weight"]
    assert torch.linalg.matrix_rank(low.double(), rtol=1e-4) <= 4


def test_resumes_bitwise(start, toy_recipe, toy_shards, tmp_path):
    recipe = adapted(toy_recipe, start("diff"))
    whole = train_run(tmp_path / "whole", recipe, toy_shards)
    train_run(tmp_path / "cut", recipe, toy_shards)
    for path in checkpoints(tmp_path / "cut")[1:]:
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    resumed = train_run(tmp_path / "cut", recipe, toy_shards)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_starts_as_the_model_it_adapts(start, toy_recipe):
    model = open_model(start("diff"))
    before = model(IDS).logits
    add_lora(model, LoraConfig(), seed=0)
    assert torch.equal(model(IDS).logits, before)
    assert set(merged_state(model)) == set(open_model(start("diff")).state_dict())


def test_merged_weights_are_by_the_formula_of_the_paper(start):
    """W + (alpha / rank) B A, section 4.1 of arXiv:2106.09685."""
    plain, model = open_model(start("diff")).state_dict(), open_model(start("diff"))
    add_lora(model, LoraConfig(rank=4, alpha=5.0), seed=0)
    parts = {name: parameter.data for name, parameter in model.named_parameters() if "lora_" in name}
    for part in parts.values():
        part.normal_(generator=torch.Generator().manual_seed(1))
    for name, merged in merged_state(model).items():
        layer = name.removesuffix(".weight")
        a, b = (parts.get(f"{layer}.lora_{which}.default.weight") for which in "AB")
        expected = plain[name] if a is None else plain[name] + 5 / 4 * b @ a
        torch.testing.assert_close(merged, expected)
    assert len(parts) == 2 * 2 * len(LoraConfig().targets)  # two layers


@pytest.mark.parametrize("initialization", ["fan_in", "normal"])
def test_filled_later_it_has_the_values_of_a_model_built_whole(initialization, start, toy_recipe, toy_shards):
    start("diff")  # PEFT is there
    recipe = dataclasses.replace(toy_recipe, model=toy_recipe.model | {"initialization": initialization})
    config, lora = recipe.model_config(vocab_size=toy_shards.tokenizer.vocab_size), LoraConfig(rank=4)
    model = build_model(config, 3)
    add_lora(model, lora, seed=7)
    later = DeferredModel(lambda: build_model(config, 3))
    later.change(lambda network: add_lora(network, lora, seed=7))
    later.fill("cpu")
    found = later.network.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found[name], tensor), name
        if "lora_A" in name:
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < tensor.abs().max() <= bound
            assert tensor.std() == pytest.approx(bound / 3**0.5, rel=0.2)
    plain = build_model(config, 3).state_dict()
    assert all(
        torch.equal(plain[name.replace(".base_layer", "")], t) for name, t in found.items() if "lora_" not in name
    )


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"targets": ["query"]}, "training.lora.targets: no layer 'query'; choose from down_proj, gate_proj, k_proj"),
        ({"also": ["nothing"]}, "training.lora.also: no parameter's name contains 'nothing'"),
        (
            {"also": ["norm", "q_proj"]},
            "training.lora.also: all parameters whose name contains 'q_proj' belong to targets",
        ),
        ({"targets": ["q_proj", "lm_head"]}, "training.lora.targets: the weight of 'lm_head' is the embedding too"),
    ],
)
def test_names_that_fit_nothing(lora, words, start, toy_recipe):
    with pytest.raises(ConfigError, match=words):
        add_lora(open_model(start("diff", tie_word_embeddings=True)), LoraConfig(**lora), seed=0)


def test_an_output_layer_of_its_own_is_adapted(start, toy_recipe, toy_shards, tmp_path):
    recipe = adapted(toy_recipe, start("softmax", tie_word_embeddings=False), targets=["lm_head"])
    model = train_run(tmp_path / "run", recipe, toy_shards).eval()
    opened = open_model(checkpoints(tmp_path / "run")[-1]).eval()
    torch.testing.assert_close(opened(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)


def test_muon_trains_adapters_alone(start, toy_recipe, toy_shards, tmp_path):
    """Adapters of the Transformer are matrices, so nothing is left for AdamW."""
    recipe = adapted(toy_recipe, start("softmax"))
    optimizer = dataclasses.replace(recipe.training.optimizer, method="muon")
    recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, optimizer=optimizer))
    model = train_run(tmp_path / "run", recipe, toy_shards)
    assert all((tensor != 0).all() for name, tensor in model.named_parameters() if "lora_B" in name)
    stored = load_file(checkpoints(tmp_path / "run")[-1] / "optimizer.safetensors")
    trained = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
    assert {key.partition("/")[2] for key in stored if "lora_" in key} == trained


@pytest.mark.parametrize(
    ("fields", "words"), [({"rank": 0}, "rank=0"), ({"alpha": 0}, "alpha=0"), ({"targets": []}, "name at least one")]
)
def test_numbers_out_of_range(fields, words):
    with pytest.raises(ConfigError, match=words):
        LoraConfig(**fields)
