"""eval suite: several experiments on two models, one page; what is there is not asked again; what cannot be run is said."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
import torch
import yaml

from difftransformer import DiffTransformerConfig
from difftransformer.cli.main import main
from difftransformer.data.tokenizer import byte_tokenizer
from difftransformer.evals.language_model import CausalLanguageModel
from difftransformer.results import TaskResult, read_result
from difftransformer.studies import suite as suites
from difftransformer.train import build_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two folders: a DIFF model and its twin, as they start."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("diff", "softmax"):
        config = DiffTransformerConfig(
            attention_type=name,
            vocab_size=258,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            bos_token_id=256,
            eos_token_id=256,
            pad_token_id=257,
        )
        build_model(config, seed=3).save_pretrained(folder / name)
        byte_tokenizer().save(folder / name)
    return [str(folder / "diff"), str(folder / "softmax")]


@pytest.fixture
def preset(toy_text, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(file.read_text() for file in sorted(toy_text.glob("*.txt"))[:6]))
    tasks = [
        {"task": "perplexity", "label": "the loss", "options": {"text": str(text), "window": 64, "windows": 4}},
        {
            "task": "needle",
            "options": {"text": str(text), "lengths": [128, 160], "documents": 3, "digits": 3, "depths": [0.0, 1.0]},
        },
        {"task": "perplexity", "label": "elsewhere", "options": {"text": str(tmp_path / "none.txt")}},
    ]
    path = tmp_path / "suite.yaml"
    path.write_text(yaml.safe_dump({"name": "tiny", "tasks": tasks}))
    return path


def test_two_models_on_one_page(models, preset, tmp_path, capsys, monkeypatch):
    out = tmp_path / "report"
    words = ["eval", "suite", *models, "--preset", str(preset), "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "elsewhere: left out" in printed
    page = (out / "index.html").read_text()
    assert "Suite tiny" in page
    assert "none.txt" in page[page.index("Not run") :]
    assert page.count("<svg ") == 2
    assert "diff minus softmax" in page
    results = [
        read_result(out / "models" / f"{i}-{name}" / "the loss.json", TaskResult)
        for i, name in enumerate(("diff", "softmax"))
    ]
    assert [result.model.attention for result in results] == ["diff", "softmax"]
    assert results[0].data == results[1].data
    assert results[0].model.sha256 != results[1].model.sha256
    # The figure is the model's own loss on the text's first bytes.
    with torch.no_grad():
        for result, folder in zip(results, models, strict=True):
            network = suites.open_language_model(folder)
            with network as opened:
                ids = torch.tensor([[*open_bytes(preset)[:65]]])
                loss = opened.language_model.model(input_ids=ids, labels=ids).loss.item()
            first = result.items[0]
            assert first.score / first.weight == pytest.approx(loss, rel=1e-5)
    for figure in ("the-loss", "needle"):
        ElementTree.parse(out / "figures" / f"{figure}.svg")
        assert (out / "tables" / f"{figure}.csv").read_text().count("\n") > 2

    def never(self, requests):
        raise AssertionError("asked again")

    monkeypatch.setattr(CausalLanguageModel, "answer", never)
    assert main(words) == 0


def open_bytes(preset):
    return (preset.parent / "text.txt").read_bytes()


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({"name": "x", "tasks": []}, "give at least one"),
        ({"name": "x", "tasks": [{"task": "needle"}, {"task": "needle"}]}, "'needle' stands twice; give labels"),
        ({"name": "x", "tasks": [{"task": "nothing"}]}, "no task 'nothing'; choose one of"),
        ({"name": "x", "tasks": [{"task": "needle", "options": {"length": [5]}}]}, "did you mean lengths?"),
        ({"name": "x", "tasks": [{"task": "needle", "label": "../a"}]}, "label '../a': it names files"),
        ([1], "a suite is a mapping with name and tasks"),
    ],
)
def test_impossible_suites_are_refused(document, words, models, tmp_path, capsys):
    path = tmp_path / "suite.yaml"
    path.write_text(yaml.safe_dump(document))
    assert main(["eval", "suite", models[0], "--preset", str(path), "--out", str(tmp_path / "out")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_named_twice_or_missing_is_refused(models, preset, tmp_path, capsys):
    assert main(["eval", "suite", models[0], models[0], "--preset", str(preset)]) == 2
    assert "named twice" in capsys.readouterr().err
    assert main(["eval", "suite", str(tmp_path / "none"), "--preset", str(preset), "--out", str(tmp_path / "o")]) == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["eval", "suite", models[0], "--preset", "unheard", "--out", str(tmp_path / "o")]) == 2
    assert "one that is shipped: " in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(suites.shipped_recipes("suites")))
def test_shipped_suites_load(name):
    suite = suites.load_suite(name)
    assert suite.name == name
    assert suite.tasks


def test_one_task_writes_results_answers_and_a_picture(models, preset, tmp_path, capsys):
    text = str(preset.parent / "text.txt")
    words = ["eval", "needle", models[0], "--text", text, "--lengths", "[128]", "--documents", "2", "--digits", "3"]
    assert main([*words, "--out", str(tmp_path / "one")]) == 0
    assert "needle.json" in capsys.readouterr().out
    result = read_result(tmp_path / "one" / "needle.json", TaskResult)
    assert result.data.requests == 10
    assert result.options["lengths"] == [128]
    assert len((tmp_path / "one" / "needle.answers.jsonl").read_text().splitlines()) == 11
    ElementTree.parse(tmp_path / "one" / "needle.svg")
    assert (tmp_path / "one" / "needle.png").read_bytes()[:4] == b"\x89PNG"
    # Another seed asks other questions: the answers that are there are not taken for theirs.
    assert main([*words, "--out", str(tmp_path / "one"), "--seed", "1"]) == 2
    assert "choose another --out, or delete the file" in capsys.readouterr().err
    assert (
        main(["eval", "needle", models[0], "--text", text, "--lengths", "[1024]", "--out", str(tmp_path / "two")]) == 2
    )
    assert "the model's context has 256" in capsys.readouterr().err
    assert json.loads((tmp_path / "one" / "needle.json").read_text())["kind"] == "task"
