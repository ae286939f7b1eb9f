"""What people try with `train`: a run or a text in place of a recipe, flags of others; and what a dry run refuses."""

import shlex

import pytest
import yaml

from difftransformer.train import read_metrics
from difftransformer_lab.cli.main import main


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """A folder with 30 texts, in the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my: texts").mkdir()
    for index in range(30):
        (tmp_path / "my: texts" / f"{index}.txt").write_text(f"text {index} tells of {index * index} things\n" * 60)
    return tmp_path / "my: texts"


@pytest.mark.parametrize("words", [["runs/mine"], ["runs/mine/"], ["runs/mine/config.yaml"]])
def test_a_run_goes_on(toy, tmp_path, monkeypatch, capsys, words):
    toy["training"] |= {"steps": 4, "checkpoint_every": 2, "context_stages": [[0, 64]]}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(toy))
    assert main(["train", "mine.yaml", "--out", "runs/mine"]) == 0
    (newest,) = (tmp_path / "runs/mine/checkpoints").glob("step-000004")
    newest.rename(tmp_path / "set aside")
    before = read_metrics(tmp_path / "runs/mine/metrics.jsonl")[0]
    capsys.readouterr()
    assert main(["train", *words]) == 0
    out = capsys.readouterr().out
    assert "runs/mine/checkpoints/step-000004" in out
    assert "step 1 of 4" not in out
    after = read_metrics(tmp_path / "runs/mine/metrics.jsonl")[0]
    assert [step.loss_nats for step in after] == [step.loss_nats for step in before]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mine"]


def test_a_text_gets_a_recipe_that_trains(texts, tmp_path, capsys):
    assert main(["train", "my: texts/"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "my: texts.yaml: a recipe for the text in my: texts"
    words = shlex.split(said[1].removeprefix("Next: "))[-2:]
    assert words == ["train", "my: texts.yaml"]
    assert main([*words, "--set", "training.steps=2", "--set", "training.validate_every=2"]) == 0
    assert (tmp_path / "runs" / "my: texts" / "checkpoints" / "step-000002").is_dir()
    recipe = (tmp_path / "my: texts.yaml").read_text()
    (tmp_path / "my: texts.yaml").write_text(recipe + "# mine\n")
    assert main(["train", "my: texts"]) == 0
    assert (tmp_path / "my: texts.yaml").read_text() == recipe + "# mine\n"


def test_the_recipe_of_another_text_is_not_taken(texts, tmp_path, fails):
    """Two texts of one name: the next command would train on the first."""
    (tmp_path / "my.txt").write_text("Some other text.\n\nAnd more.\n\n" * 40)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "a.txt").write_text("A text.\n" * 400)
    (tmp_path / "my" / "b.txt").write_text("Another.\n" * 400)
    (tmp_path / "my" / "c.txt").write_text("A third.\n" * 400)
    assert main(["train", "my.txt"]) == 0
    before = (tmp_path / "my.yaml").read_text()
    assert "my.yaml is there and not a recipe for my (data.source: my.txt); rename it" in fails("train", "my")
    assert (tmp_path / "my.yaml").read_text() == before
    for data in ("null", "text", "{source: 5}"):
        (tmp_path / "my.yaml").write_text(f"data: {data}\n")
        assert "my.yaml is there and not a recipe for my " in fails("train", "my")


def test_what_is_neither_run_nor_text(texts, tmp_path, fails):
    (tmp_path / "empty").mkdir()
    assert "empty" in fails("train", "empty")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    assert "model holds a model; to start from its weights, set start_from: model in a recipe" in fails(
        "train", "model"
    )
    assert list(tmp_path.glob("*.yaml")) == []


@pytest.mark.parametrize("content", ["text,b\nhello,1\n", 'text,b\n"a: b: c",1\n'])
@pytest.mark.parametrize("verb", ["train", "compare"])
def test_what_is_handed_over_in_place_of_a_recipe(verb, content, texts, tmp_path, fails):
    """A table, which train does not read by itself; and a folder of texts, which train alone takes."""
    (tmp_path / "x.csv").write_text(content)
    said = fails(verb, "x.csv")
    assert said.startswith(f"difftransformer {verb}: x.csv: ")
    assert (
        "a folder or file of .txt, .md, .py or .jsonl; the column text of a .csv or .parquet file is data.source: hf:"
        in said
    )
    if verb == "compare":
        assert "difftransformer train TEXT writes a recipe for a folder" in fails(verb, texts.name)


def test_a_folder_that_is_no_run_is_not_written_into(toy_file, texts, fails):
    before = sorted(texts.iterdir())
    for dry in ([], ["--dry-run"]):
        line = f"{texts.name}: holds 0.txt and no run; name a new folder, or a run, as --out"
        assert line in fails("train", toy_file, "--out", texts.name, *dry)
    (texts / "config.yaml").write_text("mine: 1\n")
    assert f"{texts.name}/config.yaml: " in fails("train", toy_file, "--out", texts.name)
    (texts / "config.yaml").unlink()
    assert sorted(texts.iterdir()) == before


@pytest.mark.parametrize(("words", "reply"), [
    ("dmeo", "dmeo: no such file; did you mean demo?"),
    ("nosuch", "nosuch: no such file; name a YAML file, or one that is shipped: ablation, demo"),
    ("--seeds 3", "compare RECIPE --seeds N trains N of each model"),
    ("demo --resume", "train RUN goes on with the run in the folder RUN"),
    ("demo --batch_size=4", "use --set training.batch_tokens=N"),
])  # fmt: skip
def test_guesses(words, reply, fails):
    assert reply in fails("train", *words.split())


def test_needle_rows_of_the_recipe_are_not_kept_silently(texts, capsys):
    words = ["train", "demo", "--dry-run", "--set", f"data.source={texts.name!r}"]
    line = "80% of the rows are the recipe's needle documents, and not your text; --set training.retrieval=null leaves"
    assert main(words) == 0
    assert line in capsys.readouterr().out
    assert main([*words, "--set", "training.retrieval=null"]) == 0
    assert main(["train", "demo", "--dry-run"]) == 0
    assert "needle documents" not in capsys.readouterr().out


def test_training_says_so_too(toy_file, texts, tmp_path, capsys):
    words = ["--set", f"data.source={texts.name!r}", "--set", "training.steps=5"]
    assert main(["train", str(toy_file), *words, "--set", f"data.folder={tmp_path / 'shards'}"]) == 0
    assert "50% of the rows are the recipe's needle documents" in capsys.readouterr().out


def test_a_dry_run_refuses_what_training_would(texts, toy_file, tmp_path, monkeypatch, fails):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    dry = ["train", toy_file, "--dry-run"]
    assert "--device cuda: torch finds no CUDA device here" in fails(*dry, "--device", "cuda")
    assert "--device gpu: choose one of cpu, cuda" in fails(*dry, "--device", "gpu")
    assert "--threads 100000: give at most" in fails(*dry, "--threads", "100000")
    assert "must be a multiple of 192" in fails(*dry, "--processes", "3")
    for path in list(texts.iterdir())[3:]:
        path.unlink()
    assert "of 3 documents leaves none for validation" in fails(
        *dry, "--set", f"data.source={texts.name!r}", "--set", "data.validation_share=0.001"
    )
    run = tmp_path / "run"
    assert main(["train", str(toy_file), "--out", str(run), "--set", "training.steps=5"]) == 0
    said = fails(*dry, "--out", run)
    assert "holds a run of another recipe (training.steps was 5 and is now 8)" in said
    assert (
        f"goes on from it with --set branch_from={run} (weights, moments, place in the data) or start_from (wei" in said
    )
    assert "in another --out" in said
    assert "branch_from" not in fails(*dry, "--out", run, "--set", "training.steps=4")


def test_missing_text_is_named_before_a_tokenizer_is_trained(toy_file, tmp_path, fails, caplog):
    caplog.set_level("INFO")
    changes = ["--set", "data.source=nosuch", "--set", f"data.folder={tmp_path / 'shards'}"]
    assert "source 'nosuch': no such file or folder" in fails("train", toy_file, *changes)
    assert "source 'nosuch': no such file or folder" in fails("tokenize", "nosuch", "--out", tmp_path / "shards")
    assert "training a BPE" not in caplog.text
