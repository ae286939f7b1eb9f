"""eval SUITE: several experiments on two models, one page; what is there is not asked again; what cannot be run is said."""

import json
import math
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from difftransformer_lab.cli.main import main
from difftransformer_lab.evals import suite as suites
from difftransformer_lab.evals.models.causal import CausalLanguageModel
from difftransformer_lab.evals.tasks import needle
from difftransformer_lab.results import TaskResult, read_result
from tests.support import tiny_folders


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two folders: a DIFF model and its twin, as they start."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("diff", "softmax"):
        tiny_folders.saved(folder / name, name, max_position_embeddings=256)
    return [str(folder / "diff"), str(folder / "softmax")]


@pytest.fixture
def preset(toy_text, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(file.read_text() for file in sorted(toy_text.glob("*.txt"))[:6]))
    needles = {"text": str(text), "lengths": [128, 160], "documents": 3, "digits": 3, "depths": [0.0, 1.0]}
    tasks = [
        {"task": "perplexity", "label": "the loss", "options": {"text": str(text), "window": 64, "windows": 4}},
        {"task": "needle", "options": needles},
        {"task": "perplexity", "label": "elsewhere", "options": {"text": str(tmp_path / "none.txt")}},
    ]
    path = tmp_path / "suite.yaml"
    path.write_text(yaml.safe_dump({"name": "tiny", "tasks": tasks}))
    return path


def test_two_models_on_one_page(models, preset, tmp_path, capsys, monkeypatch):
    out = tmp_path / "report"
    words = ["eval", str(preset), *models, "--out", str(out)]
    assert main(words) == 2  # one task could not be run
    said = capsys.readouterr()
    assert "elsewhere: left out" in said.out
    lines = [line.partition(" on ")[0] for line in said.err.splitlines()]
    assert lines == [f"difftransformer eval {preset}: missing: elsewhere"] * 2
    page = (out / "index.html").read_text()
    assert "Suite tiny" in page
    assert "none.txt" in page[page.index("Not run") :]
    assert page.count("<svg ") == 4  # two pictures, each for a wide and for a narrow screen
    assert "diff minus softmax" in page
    files = [out / "models" / name / "the loss.json" for name in ("0-diff", "1-softmax")]
    results = [read_result(file, TaskResult) for file in files]
    assert [result.model.attention for result in results] == ["diff", "softmax"]
    assert results[0].data == results[1].data
    assert results[0].model.sha256 != results[1].model.sha256
    # The figure is the model's own loss on the text's first bytes.
    with torch.no_grad():
        for result, folder in zip(results, models, strict=True):
            with suites.open_language_model(folder) as opened:
                ids = torch.tensor([[*(tmp_path / "text.txt").read_bytes()[:65]]])
                loss = opened.language_model.model(input_ids=ids, labels=ids).loss.item()
            first = result.items[0]
            assert first.score / first.weight == pytest.approx(loss, rel=1e-5)
    for figure in ("the-loss", "needle"):
        ElementTree.parse(out / "figures" / f"{figure}.svg")
        assert (out / "tables" / f"{figure}.csv").read_text().count("\n") > 2

    def never(self, requests):
        raise AssertionError("asked again")

    monkeypatch.setattr(CausalLanguageModel, "answer", never)
    assert main(words) == 2
    assert "asked again" not in capsys.readouterr().err


def figure(out, model, label):
    rows = read_result(out / "models" / model / f"{label}.json", TaskResult).measurements
    (nll,) = (row.value for row in rows if row.name == "nll")
    return nll


def test_what_changed_behind_its_name_is_asked_again(models, preset, tmp_path, capsys):
    """The text, then the model's weights: the figure is that of a new folder."""
    model = tmp_path / "diff"
    shutil.copytree(models[0], model)
    document = yaml.safe_load(preset.read_text())
    document["tasks"] = document["tasks"][:1]
    preset.write_text(yaml.safe_dump(document))
    text, out = tmp_path / "text.txt", tmp_path / "report"
    words = ["eval", str(preset), str(model), "--out", str(out)]
    weights = model / "model.safetensors"
    assert main(words) == 0
    seen = [figure(out, "0-diff", "the loss")]
    for change in (
        lambda: text.write_text(text.read_text().replace("a", "Z")),
        lambda: save_file({n: w * 1.5 for n, w in load_file(weights).items()}, weights, {"format": "pt"}),
    ):
        change()
        assert main(words) == 0
        assert "to other questions; every question is asked again" in " ".join(capsys.readouterr().out.split())
        seen.append(figure(out, "0-diff", "the loss"))
        assert main([*words[:-1], str(tmp_path / f"new{len(seen)}")]) == 0
        assert figure(tmp_path / f"new{len(seen)}", "0-diff", "the loss") == seen[-1]
    assert len(set(seen)) == 3


def test_right_answers_that_changed_behind_a_name_are_scored_again(models, tmp_path, monkeypatch):
    """The model is asked the same, so its answers are kept; what is right has changed."""
    problems, path = tmp_path / "problems.jsonl", tmp_path / "out" / "models" / "0-diff" / "math.json"
    options = {"sets": [str(problems)], "shots": 0, "max_new_tokens": 4}
    preset = tmp_path / "suite.yaml"
    preset.write_text(yaml.safe_dump({"name": "x", "tasks": [{"task": "math", "options": options}]}))
    asked = []

    def seven(self, requests):
        asked.extend(requests)
        yield from ((index, list(b" 7")) for index in range(len(requests)))

    monkeypatch.setattr(CausalLanguageModel, "answer", seven)
    shares = []
    for right in ("7", "8", "8"):
        problems.write_text(json.dumps({"question": "How many days has a week?", "answer": right}) + "\n")
        assert main(["eval", str(preset), models[0], "--out", str(tmp_path / "out")]) == 0
        shares.append(read_result(path, TaskResult).measurements[0].value)
    assert shares == [1.0, 0.0, 0.0]
    assert len(asked) == 1


def test_a_window_without_hits_costs_no_page(models, preset, tmp_path):
    """Recall in windows of which one has no AR-hit: both models are compared on the others."""
    text = tmp_path / "text.txt"
    text.write_text("abababababababab" + "".join(map(chr, range(33, 60))) + "abababab" * 4)
    tasks = [{"task": "recall", "options": {"text": str(text), "window": 16, "windows": 4}}]
    preset.write_text(yaml.safe_dump({"name": "tiny", "tasks": tasks}))
    assert main(["eval", str(preset), *models, "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "index.html").read_text()
    assert "diff minus softmax" in page
    items = read_result(tmp_path / "out" / "models" / "0-diff" / "recall.json", TaskResult).items
    hits, whole = ([item for item in items if item.name == name] for name in ("nll of AR-hits", "nll"))
    assert 0 < len(hits) < len(whole)


def test_undefined_figures_and_broken_figures_are_gaps_of_the_page(models, preset, tmp_path, capsys, monkeypatch):
    """A model that answers NaN, a task that fails in its own code, a model that cannot be opened: the page has the rest."""
    out = tmp_path / "out"
    broken = tmp_path / "broken"
    shutil.copytree(models[1], broken)
    weights = load_file(broken / "model.safetensors")
    save_file({name: w * math.nan for name, w in weights.items()}, broken / "model.safetensors", {"format": "pt"})

    def fail(*_):
        raise IndexError("no such place")

    monkeypatch.setattr(needle.NeedleTask, "score", fail)
    words = ["eval", str(preset), models[0], str(broken), str(tmp_path / "none"), "--out", str(out)]
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith(f"difftransformer eval {preset}: missing: ") for line in lines)
    page = (out / "index.html").read_text()
    for gap in ("broken: nll is undefined", "IndexError: no such place", f"every task on {tmp_path / 'none'}"):
        assert gap in page
        assert any(gap in line for line in lines)
    assert f"{figure(out, '0-diff', 'the loss'):.2g}" in page
    text = ["--text", str(preset.parent / "text.txt"), "--window", "64", "--windows", "2"]
    assert main(["eval", "perplexity", str(broken), *text, "--out", str(tmp_path / "one")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "difftransformer eval perplexity: missing: nll is undefined" in lines
    assert all(line.startswith("difftransformer eval perplexity: missing: ") for line in lines)


@pytest.mark.parametrize(("document", "words"), [
    ({"name": "x", "tasks": []}, "give at least one"),
    ({"name": "x", "tasks": [{"task": "needle"}, {"task": "needle"}]}, "'needle' is given twice; give labels"),
    ({"name": "x", "tasks": [{"task": "nothing"}]}, "no task 'nothing'; choose one of"),
    ({"name": "x", "tasks": [{"task": "needle", "options": {"length": [5]}}]}, "did you mean lengths?"),
    ({"name": "x", "tasks": [{"task": "needle", "label": "../a"}]}, "label '../a': it names files"),
    ([1], "a suite is a mapping with name and tasks"),
])  # fmt: skip
def test_impossible_suites_are_refused(document, words, models, tmp_path, fails):
    path = tmp_path / "suite.yaml"
    path.write_text(yaml.safe_dump(document))
    assert words in fails("eval", path, models[0], "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_named_twice_or_missing_is_refused(models, preset, tmp_path, fails):
    assert "given twice" in fails("eval", preset, models[0], models[0])
    assert "no such folder" in fails("eval", preset, tmp_path / "none", "--out", tmp_path / "o")
    assert "one that is shipped: " in fails("eval", "unheard.yaml", models[0], "--out", tmp_path / "o")


@pytest.mark.parametrize("name", sorted(suites.shipped_recipes("suites")))
def test_shipped_suites_load(name):
    suite = suites.load_suite(name)
    assert suite.name == name
    assert suite.tasks


def test_one_task_on_two_models_is_a_suite_of_one(models, preset, tmp_path):
    words = ["--text", str(preset.parent / "text.txt"), "--window", "64", "--windows", "2"]
    assert main(["eval", "perplexity", *models, *words, "--out", str(tmp_path / "out")]) == 0
    assert "diff minus softmax" in (tmp_path / "out" / "index.html").read_text()
    assert figure(tmp_path / "out", "0-diff", "perplexity") != figure(tmp_path / "out", "1-softmax", "perplexity")


def test_results_of_other_models_stay_and_a_replaced_page_is_named(models, preset, tmp_path, monkeypatch, capsys):
    """Two runs with checkpoints of one step; then pages of two pairs of models, by default and in one folder."""
    monkeypatch.chdir(tmp_path)
    steps = [f"{run}/checkpoints/step-000010" for run in ("a", "b")]
    for model, step in zip(models, steps, strict=True):
        shutil.copytree(model, step)
    words = ["--text", str(preset.parent / "text.txt"), "--window", "64", "--windows", "2"]
    for place in ([], ["--out", "one"]):
        for step in steps:
            assert main(["eval", "perplexity", step, *words, *place]) == 0
    results = [read_result(path, TaskResult) for path in sorted(tmp_path.glob("evals/*/*.json"))]
    assert [result.model.name for result in results] == steps
    assert {read_result(path, TaskResult).model.name for path in tmp_path.glob("one/*.json")} == {*steps}
    for place in ([], ["--out", "one"]):
        for pair in (steps, models):
            assert main(["eval", "perplexity", *pair, *words, *place]) == 0
    said = capsys.readouterr().out
    assert len([*tmp_path.glob("reports/*/index.html")]) == 2
    assert f"one/index.html: replaces the page 'Suite perplexity: {', '.join(steps)}'" in said
    assert said.count("replaces") == 1


def test_one_task_writes_results_answers_and_a_picture(models, preset, tmp_path, capsys, fails):
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
    # The answers of another model are not taken for this one's.
    assert main([*words, "--out", str(tmp_path / "one"), "--dtype", "bf16"]) == 0
    (other,) = (tmp_path / "one").glob("needle-*.json")
    assert read_result(other, TaskResult).model.dtype == "bfloat16"
    assert read_result(tmp_path / "one" / "needle.json", TaskResult) == result
    words = ["eval", "needle", models[0], "--text", text, "--lengths", "[1024]", "--out", tmp_path / "two"]
    assert "the model's context has 256; shorten --lengths" in fails(*words)
    assert json.loads((tmp_path / "one" / "needle.json").read_text())["kind"] == "task"


def test_each_set_of_options_keeps_its_result(models, preset, tmp_path, capsys):
    """Options that ask other questions, and options that score the same answers otherwise, beside the first ones."""
    text, folder = str(preset.parent / "text.txt"), tmp_path / "one"
    words = ["eval", "perplexity", models[0], "--text", text, "--window", "64", "--out", str(folder)]

    def results(*more):
        assert main([*words, *more]) == 0
        named = Path(capsys.readouterr().out.split("Results: ")[1].splitlines()[0]).name
        return {path.name: read_result(path, TaskResult).created for path in folder.glob("*.json")}, named

    first, plain = results("--windows", "2")
    assert list(first) == [plain] == ["perplexity.json"]
    second, other = results("--windows", "3")
    buckets, third = results("--windows", "2", "--position-buckets", "2")
    assert len(buckets) == 3 == len({plain, other, third})
    assert second.items() <= buckets.items()
    again = {name: results("--windows", windows)[1] for name, windows in ((plain, "2"), (other, "3"))}
    assert again == {plain: plain, other: other}
    options = {path.stem: read_result(path, TaskResult).options for path in folder.glob("*.json")}
    assert sorted((one["windows"], one["position_buckets"]) for one in options.values()) == [(2, 0), (2, 2), (3, 0)]
    assert all((folder / f"{stem}.svg").exists() and (folder / f"{stem}.answers.jsonl").exists() for stem in options)


def test_default_lengths_fit_and_one_line_says_that_nothing_ran(models, preset, tmp_path, fails):
    words = ["eval", "needle", *models, "--text", str(preset.parent / "text.txt"), "--documents", "1", "--digits", "2"]
    assert main([*words, "--out", str(tmp_path / "fits")]) == 0
    result = read_result(tmp_path / "fits" / "models" / "0-diff" / "needle.json", TaskResult)
    assert {row.at["length_tokens"] for row in result.measurements if "depth" in row.at} == {256}
    said = fails(*words, "--lengths", "[1024]", "--out", tmp_path / "none")
    assert "needle: no task could be run; needle on" in said
    assert "the model's context has 256" in said


def test_a_suite_bounds_the_rows_of_longer_models(models, preset, tmp_path):
    options = {"text": str(preset.parent / "text.txt"), "windows": 2}
    document = {"name": "short", "context_tokens": 48, "tasks": [{"task": "perplexity", "options": options}]}
    (tmp_path / "short.yaml").write_text(yaml.safe_dump(document))
    assert main(["eval", str(tmp_path / "short.yaml"), models[0], "--out", str(tmp_path / "out")]) == 0
    result = read_result(tmp_path / "out" / "models" / "0-diff" / "perplexity.json", TaskResult)
    assert max(row.at["position"] for row in result.measurements if "position" in row.at) == 48
