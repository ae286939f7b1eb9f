"""Recipes: every one that is shipped loads, a saved one comes back equal, and mistakes are named on one line."""

import json
from pathlib import Path

import pytest
import yaml

from difftransformer.errors import ConfigError
from difftransformer.model import PRESETS
from difftransformer.train import TrainingConfig
from difftransformer_lab.studies import load_recipe, recipe_dict, recipe_from, save_recipe
from difftransformer_lab.studies.recipe import identity

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def test_there_are_recipes():
    assert "demo" in {path.stem for path in RECIPES}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_load_and_are_named_after_their_file(path, tmp_path):
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert isinstance(recipe.training, TrainingConfig)
    for attention_type in recipe.compare.models:
        recipe.with_model(attention_type).model_config(vocab_size=300)
    save_recipe(recipe, tmp_path / "again.yaml")
    assert load_recipe(tmp_path / "again.yaml") == recipe


def test_a_saved_recipe_comes_back_equal(toy_recipe, tmp_path):
    save_recipe(toy_recipe, tmp_path / "a" / "recipe.yaml")
    assert load_recipe(tmp_path / "a" / "recipe.yaml") == toy_recipe
    plain = recipe_dict(toy_recipe)
    assert recipe_from(plain, source="x") == toy_recipe
    assert yaml.safe_load(yaml.safe_dump(plain)) == plain
    assert plain["training"]["context_stages"] == [[0, 64], [4, 128]]


def test_other_models_and_seeds_change_nothing_else(toy_recipe):
    other = toy_recipe.with_model("softmax").with_seed(7)
    assert other.model["attention_type"] == "softmax"
    assert other.training.seed == 7
    assert other.with_seed(0).training == toy_recipe.training
    assert (other.data, other.evaluation, other.compare) == (toy_recipe.data, toy_recipe.evaluation, toy_recipe.compare)


def test_what_makes_a_run_another(toy):
    def of(**changes):
        changed = json.loads(json.dumps(toy))
        for key, value in changes.items():
            part, _, name = key.partition("__")
            changed[part] = changed.get(part, {}) | {name: value} if name else value
        return identity(recipe_from(changed, source="toy"))

    same = of()
    assert of(name="other") == of(data__folder="elsewhere") == of(evaluation_batch_tokens=7) == same
    assert of(training__checkpoint_every=1) == of(compare={"seeds": 5}) == same
    assert of(training__compile=False) == same  # what is left out has its default
    others = [of(training__seed=1), of(training__steps=9), of(model__head_norm="none"), of(data__split_seed=1)]
    others.append(of(evaluation=toy["evaluation"][:1]))
    assert len({same, *others}) == 6


def test_overrides(toy_file):
    changes = "training.steps=100 training.optimizer.learning_rate=0.5 training.context_stages=[[0,32]] "
    changes += "model.attention_type=softmax evaluation.needle=null evaluation.perplexity.windows=6 name=other"
    recipe = load_recipe(toy_file, changes.split())
    assert recipe.training.steps == 100
    assert recipe.training.optimizer.learning_rate == 0.5
    assert recipe.training.context_stages == [(0, 32)]
    assert recipe.model_config(vocab_size=9).attention_type == "softmax"
    assert [spec.name for spec in recipe.evaluation] == ["perplexity", "allocation"]
    assert recipe.evaluation[0].options["windows"] == 6
    assert recipe.name == "other"


def test_a_preset_comes_first_and_own_fields_win(toy):
    toy["model"] = {"preset": "tiny", "num_hidden_layers": 3}
    config = recipe_from(toy, source="x").model_config(vocab_size=123)
    assert config.hidden_size == PRESETS["tiny"].fields["hidden_size"]
    assert (config.num_hidden_layers, config.vocab_size) == (3, 123)


def test_equal_parameters_are_a_key_of_the_recipe(toy):
    """The stated width is that of the type that is matched; the vocabulary does not matter."""
    toy["model"] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 171}
    plain, v2 = (
        recipe_from(toy | {"model": toy["model"] | more}, source="x")
        for more in ({"attention_type": "softmax"}, {"attention_type": "diff_v2", "match_parameters": "softmax"})
    )
    # V2 has 64 x 64 + 4 x 64 weights more in each layer; one of the MLP's width has 3 x 64.
    for vocabulary in (9, 5000):
        assert plain.model_config(vocab_size=vocabulary).intermediate_size == 171
        assert v2.model_config(vocab_size=vocabulary).intermediate_size == 171 - round((64 * 64 + 4 * 64) / (3 * 64))
    assert plain.with_model("softmax").model_config(vocab_size=9).intermediate_size == 171
    toy["model"]["match_parameters"] = "plain"
    with pytest.raises(ConfigError, match="attention_type='plain' is unknown"):
        recipe_from(toy, source="x")


def test_widths_that_processes_can_divide(toy):
    """341 with two processes; parameters change by 3 x 64 a layer of 16,384 + 3 x 64 x 341 or so."""
    toy["model"] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 341}
    for multiple, width in ((1, 341), (2, 340), (4, 340), (8, 344)):
        recipe = recipe_from(toy | {"model": toy["model"] | {"multiple_of": multiple}}, source="x")
        assert recipe.model_config(vocab_size=9).intermediate_size == width
    more = {"multiple_of": 2, "match_parameters": "softmax", "attention_type": "diff_v2"}
    recipe = recipe_from(toy | {"model": toy["model"] | more}, source="x")
    assert recipe.model_config(vocab_size=9).intermediate_size % 2 == 0
    makes = r"model\.multiple_of=64 makes intermediate_size 320 of 341, .* by 4\.[0-9] %"
    for multiple, message in ((64, makes), (0, r"model\.multiple_of=0: give at least 1")):
        with pytest.raises(ConfigError, match=message):
            recipe_from(toy | {"model": toy["model"] | {"multiple_of": multiple}}, source="x")


BAD = [
    # A misspelt key, with the nearest right one.
    ("training.stepz=3", "training.stepz: unknown key; did you mean steps? allowed: steps, batch_tokens,"),
    ("trainin.steps=3", "trainin: unknown key; did you mean training?"),
    ("steps=3", "steps: unknown key; did you mean training.steps?"),
    ("learning_rate=0.1", "learning_rate: unknown key; did you mean training.optimizer.learning_rate?"),
    ("training.learning_rate=0.1", "training.learning_rate: unknown key; did you mean optimizer.learning_rate?"),
    (
        "model.hidden_siz=64",
        "model.hidden_siz: unknown key; did you mean hidden_size? allowed: preset, attention_type,",
    ),
    ("evaluation.needle.digit=3", "evaluation.needle.digit: unknown key; did you mean digits?"),
    ("model.vocab_size=9", "model.vocab_size: unknown key"),
    # Wrong types.
    ("training.steps=many", "training.steps: expected int, got 'many'"),
    ("model.hidden_size=wide", "model.hidden_size: expected int, got 'wide'"),
    ("model=7", "model: expected a mapping, got 7"),
    ("training=null", "training: expected a mapping (TrainingConfig), got None"),
    # Impossible combinations.
    ("model.num_attention_heads=5", "hidden_size=32 is not a multiple of num_attention_heads=5"),
    ("model.preset=huge", "preset 'huge' is unknown; choose one of tiny,"),
    ("model.max_position_embeddings=64", "model.max_position_embeddings=64 is below the trained context of 128 tokens"),
    ("training.batch_tokens=200", "training: batch_tokens=200: from step 0 it must be a multiple of 64"),
    ("training.retrieval.share=2", "training.retrieval: "),
    ("evaluation.needle.needles=[[1, 2]]", "evaluation.needle: needles=[[1, 2]]: ask for at least 1"),
    ("evaluation=[{task: needl}]", "evaluation.needl: no task 'needl'; choose one of"),
    ("evaluation=[{task: needle}, {task: needle}]", "evaluation.'needle' is given twice; give labels"),
    ("evaluation_batch_tokens=0", "evaluation_batch_tokens=0: give at least 1"),
    ("data.validation_share=2", "data: validation_share=2.0"),
    ("compare.models=[diff]", "compare: models=['diff']: name two or more attention types"),
    ("compare.fields={dex: {}}", "compare: fields.dex: unknown key"),
    ("compare.seeds=0", "compare: seeds=0"),
    # Overrides that are none.
    ("training.steps", "--set training.steps: expected KEY=VALUE"),
    ("training.steps=[", "--set training.steps=[: the value is not valid YAML"),
    ("name.x=3", "--set name.x=3: name is not a mapping in the recipe"),
    (
        "evaluation.icl.data=x",
        "--set evaluation.icl.data=x: the recipe has no evaluation 'icl'; it has perplexity, needle, allocation",
    ),
    ("evaluation.needle=3", "--set evaluation.needle=3: give null to leave a task out"),
]


@pytest.mark.parametrize(("override", "message"), BAD, ids=[override for override, _ in BAD])
def test_mistakes_are_named(toy_file, override, message):
    with pytest.raises(ConfigError) as error:
        load_recipe(toy_file, [override])
    assert str(error.value).startswith(message if message.startswith("--set") else f"{toy_file}: {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("content", "message"), [
    (None, "no such file"), ("a folder", "a folder; a recipe is a mapping"), (b"name: [1", "not valid YAML in line 1"),
    (b"a: b\n\tc: d", "not valid YAML in line 2"), (b"- 1\n- 2", "a recipe is a mapping"),
    (b"", "a recipe is a mapping"), (b"name: \xff\xfe", "cannot be read"),
    (b"name: toy", "model: missing (Recipe needs it)"),
])  # fmt: skip
def test_files_that_are_no_recipe(tmp_path, content, message):
    path = tmp_path / "recipe.yaml"
    if content == "a folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_recipe(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)
