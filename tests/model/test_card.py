"""The model card: what is true of the model, once, and never over a person's words."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel

from difftransformer import DiffTransformerModel
from difftransformer.attention import VARIANTS
from difftransformer.errors import ConfigError
from difftransformer.model.card import CARD_FILE, Training, is_ours, model_card, training_section, write_card
from tests.support.tiny_models import tiny, tiny_config, tokens

TRAINED = Training(
    figures=[("steps", "8"), ("validation loss, nats/token", "1.2345")],
    recipe={
        "name": "toy",
        "data": {"source": "/home/someone/texts", "tokenizer": "bpe", "folder": "/home/someone/shards"},
        "training": {"steps": 8},
    },
)


def front_matter(text):
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])


def rows(text):
    return dict(re.findall(r"^\| (.+?) \| (.+?) \|$", text, re.MULTILINE))


@pytest.mark.parametrize("attention_type", VARIANTS)
def test_every_saved_model_has_a_card_with_the_sizes_of_the_module(attention_type, tmp_path):
    model = tiny(attention_type=attention_type)
    model.save_pretrained(tmp_path / "mine")
    text = (tmp_path / "mine" / CARD_FILE).read_text()
    front = front_matter(text)
    assert front["library_name"] == "transformers"
    assert front["pipeline_tag"] == "text-generation"
    assert "license" not in front
    table = rows(text)
    assert table["attention type"] == f"`{attention_type}`"
    assert (table["initialization"], table["embedding multiplier"]) == ("`normal`", "1")
    assert "mimetic attention" not in table
    assert table["parameters"] == f"{sum(p.numel() for p in model.parameters()):,}"
    attention = sum(p.numel() for layer in model.model.layers for p in layer.self_attn.parameters())
    assert table["of these, attention"] == f"{attention:,}"
    cache = model(tokens(1, 7), use_cache=True).past_key_values
    numbers = sum(layer.keys[0, :, 0].numel() + layer.values[0, :, 0].numel() for layer in cache.layers)
    assert table["KV bytes/token in bf16"] == f"{2 * numbers:,}"
    assert table["layers"] == "2"
    assert "# mine\n" in text
    assert "arXiv:2410.05258" in text
    assert is_ours(text)


def test_the_card_states_the_start_and_the_multiplier():
    config = tiny_config(initialization="fan_in", hidden_size=48, mimetic_attention=True, depth_scaled_residual=True)
    table = rows(model_card(config, name="mine"))
    assert (table["initialization"], table["embedding multiplier"]) == ("`fan_in`", "6.9282")
    assert table["mimetic attention"] == table["depth scaled residual"] == "yes"


def test_the_code_of_the_card_opens_the_model(tmp_path, monkeypatch):
    model = tiny()
    model.save_pretrained(tmp_path / "FOLDER")
    monkeypatch.chdir(tmp_path)
    text = (tmp_path / "FOLDER" / CARD_FILE).read_text()
    namespace = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], namespace)
    assert torch.equal(namespace["model"](tokens(1, 5)).logits, model(tokens(1, 5)).logits)


def test_the_decoder_alone_makes_no_text(tmp_path):
    DiffTransformerModel(tiny_config()).save_pretrained(tmp_path)
    text = (tmp_path / CARD_FILE).read_text()
    assert "pipeline_tag" not in front_matter(text)
    assert "AutoModel.from_pretrained" in text


def test_a_card_of_ours_is_renewed_and_a_persons_is_kept(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path)
    tiny(attention_type="diff_v2").save_pretrained(tmp_path)
    ours = (tmp_path / CARD_FILE).read_text()
    assert rows(ours)["attention type"] == "`diff_v2`"
    for theirs in ("# My model\n", ours.replace("## Use", "## How I use it"), ours + "One line more.\n", ""):
        (tmp_path / CARD_FILE).write_text(theirs)
        model.save_pretrained(tmp_path)
        assert (tmp_path / CARD_FILE).read_text() == theirs
    assert not write_card(tmp_path, ours)


def test_what_was_trained_travels_with_the_weights_and_says_where_from(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path / "run")
    card = model_card(model.config, name="run", training=TRAINED, license="mit")
    assert front_matter(card)["license"] == "mit"
    assert rows(card)["validation loss, nats/token"] == "1.2345"
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", card, re.DOTALL)[1])
    assert recipe == {"name": "toy", "data": {"source": "texts", "tokenizer": "bpe"}, "training": {"steps": 8}}
    assert "someone" not in card
    (tmp_path / "run" / CARD_FILE).write_text(card)
    AutoModelForCausalLM.from_pretrained(tmp_path / "run").save_pretrained(tmp_path / "next")
    text = (tmp_path / "next" / CARD_FILE).read_text()
    assert text.count("Of the model that this one was loaded from:") == 1
    assert rows(text)["validation loss, nats/token"] == "1.2345"
    AutoModelForCausalLM.from_pretrained(tmp_path / "next").save_pretrained(tmp_path / "third")
    assert training_section((tmp_path / "third" / CARD_FILE).read_text()) == training_section(text)
    assert training_section(card.replace("1.2345", "0.1")) is None


def test_a_folder_with_the_name_of_a_model_on_the_hub_is_not_its_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny()
    model.save_pretrained("owner/name")
    Path("owner/name", CARD_FILE).write_text(model_card(model.config, name="name", training=TRAINED))
    model.name_or_path = "owner/name"  # as a model opened from the hub has it
    model.save_pretrained("next")
    assert training_section(Path("next", CARD_FILE).read_text()) is None
    opened = AutoModelForCausalLM.from_pretrained("owner/name")
    monkeypatch.chdir("next")
    opened.save_pretrained(tmp_path / "third")
    assert training_section((tmp_path / "third" / CARD_FILE).read_text())


def test_a_push_by_position_has_no_card_of_ours(tmp_path, monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "save_pretrained", lambda *_, **__: None)
    tiny().save_pretrained(tmp_path, True, None, True)
    assert not (tmp_path / CARD_FILE).exists()
    tiny().save_pretrained(tmp_path, True, None, False)
    assert (tmp_path / CARD_FILE).exists()


def test_places_of_the_training_machine_are_not_on_the_card():
    stream = "hf-stream:owner/name:config"
    recipe = {
        "name": "toy",
        "data": {"mixture": [{"source": "/home/someone/a.txt", "weight": 2.0}, {"source": stream, "weight": 1.0}]},
        "training": {"steps": 8, "checkpoint": {"asynchronous": True}},
        "evaluation": [{"task": "perplexity", "options": {"text": "/home/someone/b.txt", "windows": 4}}],
        "start_from": "/home/someone/runs/first",
        "branch_from": "../someone/second",
    }
    shown = {
        "name": "toy",
        "data": {"mixture": [{"source": "a.txt", "weight": 2.0}, {"source": stream, "weight": 1.0}]},
        "training": {"steps": 8, "checkpoint": {"asynchronous": True}},
        "evaluation": [{"task": "perplexity", "options": {"text": "b.txt", "windows": 4}}],
        "start_from": "first",
        "branch_from": "second",
    }
    card = model_card(tiny_config(), name="run", training=Training(figures=[], recipe=recipe))
    assert yaml.safe_load(re.search(r"```yaml\n(.*?)```", card, re.DOTALL)[1]) == shown
    kept = {"data": {"source": stream, "tokenizer": "ids:7"}, "start_from": None}
    card = model_card(tiny_config(), name="run", training=Training(figures=[], recipe=kept))
    assert yaml.safe_load(re.search(r"```yaml\n(.*?)```", card, re.DOTALL)[1]) == kept


def test_a_licence_is_an_identifier():
    with pytest.raises(ConfigError, match=r"license='My own: licence'.*such as mit"):
        model_card(tiny_config(), name="x", license="My own: licence")
