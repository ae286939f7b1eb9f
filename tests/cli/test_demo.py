"""The models that come with the package, and the command `demo`."""

from pathlib import Path

import pytest
import yaml

from difftransformer.sources import find_model, shipped_models
from difftransformer_lab.cli.main import main
from difftransformer_lab.explorer import DEFAULT_PROMPT

ROOT = Path(__file__).parents[2]
MOST_BYTES = 3_000_000


def test_the_shipped_pair_is_small_and_its_cards_say_how_it_was_made():
    pair = shipped_models()
    assert [*pair] == ["demo", "demo-twin"]
    assert sum(path.stat().st_size for folder in pair.values() for path in folder.iterdir()) <= MOST_BYTES
    recipe = yaml.safe_load((ROOT / "recipes" / "demo.yaml").read_text())
    for folder, arm in zip(pair.values(), ("diff", "softmax"), strict=True):
        card = (folder / "README.md").read_text()
        made = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
        assert made["model"] == recipe["model"] | {"attention_type": arm}
        assert made["training"]["optimizer"] | recipe["training"]["optimizer"] == made["training"]["optimizer"]
        assert all(words in card for words in ("validation loss", "needle accuracy (seen cities) |", "Python 3."))


def test_a_folder_of_the_same_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_model("demo") == shipped_models()["demo"]
    (tmp_path / "demo").mkdir()
    assert find_model("demo") == Path("demo")


def test_the_shipped_model_answers_and_draws_its_maps(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "demo", DEFAULT_PROMPT, "--max-new-tokens", "3", "--backend", "reference"]) == 0
    assert capfd.readouterr().out.strip() == "42"
    assert main(["maps", "demo", "--beside", "demo-twin"]) == 0
    assert (tmp_path / "evals" / "demo" / "maps.html").stat().st_size > 10_000


def test_nothing_is_written_into_the_package(tmp_path, monkeypatch, capfd):
    """Also where the shipped model is named by its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("difftransformer.data.prepare_shards", lambda data: None)
    folders = []
    monkeypatch.setattr(
        "difftransformer_lab.studies.evaluate_checkpoint", lambda *words, **options: folders.append(words[3]) or {}
    )
    for model in ("demo", str(shipped_models()["demo"])):
        assert main(["eval", model]) == 0
    assert folders == [Path("evals", "demo", "recipe")] * 2


def test_without_a_prompt_the_error_gives_one(monkeypatch, fails):
    monkeypatch.setattr("sys.stdin", None)
    assert r"such as $'The special magic Lisbon number is: 42\nThe" in fails("generate", "demo")


@pytest.mark.parametrize(("words", "advice"), [
    (["train", "demo", "--steps", "10"], "use --set training.steps=10"),
    (["train", "demo", "--learning-rate=0.1"], "use --set training.optimizer.learning_rate=0.1"),
    (["compare", "demo", "--hidden_size"], "use --set model.hidden_size=VALUE"),
])  # fmt: skip
def test_a_field_of_the_recipe_as_a_flag(words, advice, fails):
    assert advice in fails(*words)
