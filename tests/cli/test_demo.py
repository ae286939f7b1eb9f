"""The models that come with the package, the command `demo`, and the line that says what comes next."""

import importlib
import shlex
from pathlib import Path

import pytest
import yaml

from difftransformer.data import prepare_shards
from difftransformer.sources import find_model, shipped_models
from difftransformer_lab.cli.arguments import parser_of, read_words
from difftransformer_lab.cli.main import main, module_name, split_verb
from difftransformer_lab.cli.next_steps import suggest
from difftransformer_lab.explorer import DEFAULT_PROMPT
from difftransformer_lab.report import read_evidence
from difftransformer_lab.report.stored import stored_demo
from difftransformer_lab.studies import load_recipe

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
    assert capfd.readouterr().out.splitlines()[-1] == "Next: difftransformer eval needle demo demo-twin"


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


RUN = {"recipe": "demo", "out": None, "dry_run": False, "set": None}
PAIR = {"recipe": "demo", "out": None, "seeds": None, "set": None}


@pytest.mark.parametrize(("verb", "values", "command"), [
    ("train", RUN, "eval runs/demo"),
    ("train", RUN | {"set": ["name=mine", "training.steps=5"], "device": "cuda"}, "eval runs/mine --device cuda"),
    ("train", RUN | {"set": ["name=mine"], "out": "a/b"}, "eval a/b"),
    ("train", RUN | {"dry_run": True}, "train demo"),
    (
        "train",
        RUN | {"dry_run": True, "set": ["training.steps=5", "name=mine"], "seed": 3, "out": "a b"},
        "train demo --out 'a b' --seed 3 --set training.steps=5 --set name=mine",
    ),
    ("plan", {"recipe": "paper-3b", "set": ["training.steps=5"]}, "train paper-3b --set training.steps=5"),
    ("compare", PAIR, "compare demo --seeds 5"),
    ("compare", PAIR | {"out": "my folder", "seeds": 4}, "compare demo --out 'my folder' --seeds 6"),
    (
        "compare",
        PAIR | {"set": ["compare.seeds=1", "training.steps=9"], "jobs": 2, "no_costs": True},
        "compare demo --seeds 3 --jobs 2 --set compare.seeds=1 --set training.steps=9 --no-costs",
    ),
    (
        "study",
        {"study": "start", "preset": "gpu", "seeds": 2, "set": ["training.steps=9"], "out": "there", "dry_run": True},
        "study start --preset gpu --seeds 2 --out there --set training.steps=9",
    ),
    ("export", {"model": "runs/demo", "out": "made"}, "check causality made"),
    ("eval needle", {"models": ["a", "b"], "out": None}, "maps a"),
    ("maps", {"model": "a", "beside": "b", "device": "cuda"}, "eval needle a b --device cuda"),
    ("upcycle", {"model": "a", "out": "b", "train": None}, "eval perplexity a b"),
])  # fmt: skip
def test_next(verb, values, command, capfd):
    suggest(verb, values)
    assert capfd.readouterr().out == f"Next: difftransformer {command}\n"
    called, words = split_verb(shlex.split(command))  # raises where there is no such command
    module = importlib.import_module(f"difftransformer_lab.cli.{module_name(called)}")
    own = module.declare(called) if hasattr(module, "declare") else None
    read_words(parser_of(called, "", module, own), words)  # as one reads it that is typed


@pytest.mark.parametrize("options", [
    ["--tokenizer", "byte", "--validation-share", "0.25"],
    ["--vocab-size", "300", "--validation-share", "0.3", "--split-seed", "3"],
])  # fmt: skip
def test_the_command_after_tokenize_reads_its_shards(options, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my text: new").mkdir()
    for name in "abcdefghij":
        (tmp_path / "my text: new" / f"{name}.txt").write_text(f"{name} is a letter, and so is {name.upper()}.\n" * 50)
    assert main(["tokenize", "my text: new", *options, "--out", "my shards"]) == 0
    line = capfd.readouterr().out.splitlines()[-1].removeprefix("Next: difftransformer ")
    verb, recipe, *words = shlex.split(line)
    assert (verb, recipe, set(words[::2])) == ("train", "demo", {"--set"})
    made = [*(tmp_path / "my shards").glob("[!.]*")]
    assert len(made) == 1
    shards = prepare_shards(load_recipe("demo", words[1::2]).data)
    assert shards.folder.resolve() == made[0]
    assert [*(tmp_path / "my shards").glob("[!.]*")] == made


@pytest.mark.slow(minutes=2)
def test_the_demo_trains_a_pair_and_shows_it_beside_the_stored_result(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--steps", "60"]) == 0
    said = capfd.readouterr().out
    for words in ("DIFF (demo) answers: 42", "step 60: DIFF Transformer", "this run", "Next: "):
        assert words in said
    page = (tmp_path / "reports" / "demo" / "index.html").read_text()
    assert '<iframe src="maps.html"' in page
    assert said.count("and needle accuracy so far:") == 1
    loss = next(row for row in stored_demo().rows if row.figure.unit == "bits/byte").statistic.mean
    assert f"{loss:.3f}" in page
    assert "stored (1,000 steps, 3 seeds)" in page
    result = read_evidence(tmp_path / "reports" / "demo" / "results.json")
    (bigram,) = result.index.baselines
    for _, _, _, run in result.every_run():
        bits = next(row for row in run.evaluations["perplexity"].measurements if row.name == "bits per byte")
        assert bits.value < bigram.bits_per_byte
