"""The command line: help, one-line errors with exit status 2, and every verb on a toy."""

import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from difftransformer import DiffTransformerForCausalLM, __version__
from difftransformer.train import checkpoints
from difftransformer_lab.cli.main import VERBS, main, module_name, verbs
from difftransformer_lab.results import TaskResult, read_result
from tests.support import fresh


@pytest.fixture(autouse=True)
def _same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def _trained(tmp_path_factory):
    return tmp_path_factory.mktemp("command") / "run"


@pytest.fixture
def run(_trained, toy_file, tmp_path):
    """A copy of a run that the command trained."""
    if not _trained.exists():
        assert main(["train", str(toy_file), "--out", str(_trained)]) == 0
    shutil.copytree(_trained, tmp_path / "run")
    return tmp_path / "run"


def test_help_fits_a_screen(capsys):
    for words in ([], ["--help"], ["-h"], ["help"]):
        assert main(words) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
        for verb in VERBS:
            assert any(re.search(rf"^(\w+)? +{verb}  +\w", line) for line in lines), verb


@pytest.mark.parametrize("verb", [*verbs(), "eval quick"])
def test_help_of_every_verb_shows_its_arguments(verb, capsys):
    """Every parameter of the verb's function is offered, a task describes options of its own, and the page fits a screen."""
    assert main([*verb.split(), "--help"]) == 0
    text = capsys.readouterr().out
    entries = re.split(r"^  (?=\S)", text, flags=re.MULTILINE)[1:]
    module = importlib.import_module(f"difftransformer_lab.cli.{module_name(verb)}")
    parameters = inspect.signature(module.run).parameters
    named = {name.strip("_").replace("_", "-") for name, one in parameters.items() if one.default is not one.empty}
    for name in named - {"options"}:
        assert re.search(rf"--{name}\b|\[{name.upper()}\]", text), name
    assert len(text.splitlines()) <= 45
    assert "_" not in "".join(re.findall(r"--[\w-]+", text))
    for entry in entries:
        assert len(entry.split()) > 2, f"no description: {entry}"


@pytest.mark.parametrize(("task", "words", "field", "value"), [
    ("icl", ["--shots", "6"], "shots", [6]), ("icl", ["--shots=6,8"], "shots", [6, 8]),
    ("needle", ["--lengths", "[512]", "--needles", "[[1,1],[2,2]]"], "needles", [[1, 1], [2, 2]]),
    ("math", ["--sets", "a.jsonl", "--max-new-tokens", "5"], "sets", ["a.jsonl"]),
    ("math", ["--max_new_tokens=5"], "max_new_tokens", 5), ("maps", ["--prompt", "[x]"], "prompt", "[x]"),
])  # fmt: skip
def test_one_value_is_a_list_and_flags_have_one_spelling(task, words, field, value, monkeypatch):
    seen = []
    monkeypatch.setattr("difftransformer_lab.cli.eval_task.run_together", lambda run, *_: seen.append(run) or 0)
    assert main(["eval", task, "model", *words]) == 0
    options = inspect.getclosurevars(seen[0]).nonlocals["options"]
    assert getattr(options, field) == value


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_unknown_command(fails):
    assert "difftransformer trian: no such command; did you mean train?" in fails("trian")
    assert "difftransformer check: no such command; choose check causality" in fails("check", "future", "demo")
    assert "difftransformer eval_needle: no such command; did you mean eval needle?" in fails("eval_needle")
    assert "choose one of demo, compare, study, report, train," in fails("zzz")
    assert "no task, suite or model 'needl'; did you mean needle?" in fails("eval", "needl", "model")
    assert "choose one of allocation," in fails("eval", "zzz", "model")


@pytest.mark.parametrize(("words", "message"), [
    (["train", "x.yaml", "--sede", "3"], "no option '--sede'; did you mean --seed?"),
    (["train"], "give RECIPE; see difftransformer train --help"), (["train", "a.yaml", "b.yaml"], "b.yaml"),
    (["train", "x.yaml", "--seed", "many"], "--seed 'many': expected a whole number"),
    (["train", "x" * 5000], "xxx..."),
    (["eval", "icl", "m", "--shots", "[6,x]"], """--shots "[6, 'x']": expected a list such as [1,2]"""),
    (["eval", "needle", "m", "--cities", "none"], "--cities 'none': expected one of all, seen, unseen, apart"),
    (["compare", "x.yaml", "--seeds"], "--seeds"), (["bench", "attention", "--repeats", "1"], "--repeats 1: give at least 3"),
    (["bench", "models", "--threads", "0"], "--threads 0: give at least 1"), (["bench", "everything"], "everything"),
    (["generate", "m", "--prompt", "hello"], "no option '--prompt': PROMPT stands without a flag"),
    (["eval", "icl", "m", "--shot", "6"], "no option '--shot'; did you mean --shots?"),
    (["convert", "m", "--to", "diff"], "for that run difftransformer upcycle MODEL TARGET --to diff"),
    (["convert", "m", "out", "--to=dex"], "for that run difftransformer upcycle MODEL TARGET --to dex"),
    (["info", "4b"], "'4b' is neither a preset (tiny, small,"),
])  # fmt: skip
def test_wrong_words(fails, words, message):
    line = fails(*words)
    assert message in line
    assert len(line) < 300


@pytest.mark.parametrize(("words", "popen"), [(["--help"], subprocess.Popen), (["info", "backends"], fresh.Popen)])
def test_a_closed_pipe_is_silent(words, popen):
    command = [sys.executable, "-m", "difftransformer_lab", *words]
    with popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode


@pytest.mark.parametrize(("override", "message"), [
    ("training.steps=" + "9" * 5000, "training.steps"),
    ("training.stepz=1", "training.stepz: unknown key; did you mean steps?"),
    ("training.optimizer.learning_rate=3e-4", "(YAML reads 3e-4 as text: write 3.0e-4 or 0.0003)"),
    ("model.num_attention_heads=5", "is not a multiple of num_attention_heads=5"),
    ("model.sliding_window=0", "sliding_window=0"), ("data.source=nowhere", "source 'nowhere': no such file or folder"),
    ("data.tokenizer=nowhere", "nowhere: no such tokenizer"),
    ("training.context_stages=[[0, 16]]", "needle documents are longer than the context"),
])  # fmt: skip
def test_wrong_recipes(fails, toy_file, tmp_path, override, message):
    out = tmp_path / "out"
    line = fails("train", toy_file, "--out", out, "--set", override)
    assert message in line
    assert len(line) < 500
    assert not checkpoints(out)


def test_a_wrong_source_can_be_corrected_in_the_same_folder(fails, toy_file, tmp_path):
    out = tmp_path / "out"
    fails("train", toy_file, "--out", out, "--set", "data.source=nowhere")
    changes = ["--set", "training.retrieval.min_needles=2", "--set", "training.steps=1"]
    assert main(["train", str(toy_file), "--out", str(out), *changes]) == 0


@pytest.mark.parametrize(("options", "message"), [
    (["--threads", "0"], "--threads 0: give at least 1"),
    (["--device", "tpu"], "--device tpu: choose one of cpu, cuda"),
    (["--seed", "-1"], "seed=-1: give 0 or more"),
])  # fmt: skip
def test_wrong_options(fails, toy_file, tmp_path, options, message):
    assert message in fails("train", toy_file, "--out", tmp_path / "out", *options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there(fails, toy_file, tmp_path):
    assert "torch finds no CUDA device" in fails("train", toy_file, "--out", tmp_path / "out", "--device", "cuda")


def test_an_empty_folder_of_text(fails, tmp_path):
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in fails("tokenize", tmp_path / "empty", "--out", tmp_path / "shards")


def test_tokenize(toy_text, tmp_path, capsys):
    words = ["tokenize", str(toy_text), "--tokenizer", "byte", "--validation-share", "0.3", "--out", str(tmp_path)]
    assert main(words) == 0
    text = capsys.readouterr().out
    sizes = [int(size.replace(",", "")) for size in re.findall(r"([\d,]+) bytes", text)]
    assert sum(sizes) == sum(path.stat().st_size for path in toy_text.iterdir())
    assert "held-out lines of 30 characters or more" in text
    assert "vocabulary 258" in text


def test_a_damaged_checkpoint(fails, run, toy_file):
    damaged = checkpoints(run)[-1] / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:100])
    line = fails("eval", run)
    assert str(damaged) in line
    assert "step-000006, which is kept" in line
    with pytest.warns(UserWarning, match="training continues from step-000006"):
        assert main(["train", str(toy_file), "--out", str(run)]) == 0


def test_a_run_goes_on_with_another_way_to_save_and_another_policy(run, toy_file, fails):
    changes = ["--set", "training.nonfinite=skip", "--set", "training.checkpoint.asynchronous=true"]
    shutil.rmtree(checkpoints(run)[-1])
    assert main(["train", str(toy_file), "--out", str(run), *changes]) == 0
    training = yaml.safe_load((run / "config.yaml").read_text())["training"]
    assert (training["nonfinite"], training["checkpoint"]["asynchronous"]) == ("skip", True)
    assert "training.seed was 0 and is now 1" in fails("train", toy_file, "--out", run, "--seed", "1")
    assert "timeout_seconds=-1.0: give" in fails("train", toy_file, "--set", "training.checkpoint.timeout_seconds=-1.0")
    assert "choose one of stop, skip, rollback" in fails("train", toy_file, "--set", "training.nonfinite=go")


def test_debug_shows_the_traceback(run, toy_file):
    (checkpoints(run)[-1] / "model.safetensors").write_bytes(b"")
    with pytest.raises(Exception, match="damaged"):
        main(["eval", str(run), "--debug"])


def test_eval(run, tmp_path, capsys):
    """By default with the run's own recipe, beside the run; what is there already is not asked again."""
    assert main(["eval", str(run)]) == 0
    assert "validation loss, bits/byte" in capsys.readouterr().out
    folder = run / "evals" / "step-000008"
    found = {path.stem: read_result(path, TaskResult) for path in folder.iterdir()}
    assert set(found) == {"perplexity", "needle", "allocation"}
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert main(["eval", str(run), "--set", "evaluation.needle.documents=2"]) == 0
    changed = {path.stem for path, time in before.items() if path.stat().st_mtime_ns != time}
    assert changed == {"needle"}
    older = checkpoints(run)[0]
    words = ["eval", str(older), "--set", "evaluation.needle=null", "--set", "evaluation.allocation=null"]
    assert main([*words, "--out", str(tmp_path / "other")]) == 0
    (path,) = (tmp_path / "other").iterdir()
    other = read_result(path, TaskResult)
    assert other.data == found["perplexity"].data
    assert other.measurements != found["perplexity"].measurements


def test_a_task_on_the_text_that_a_run_held_out(run, tmp_path, fails):
    """The same options ask a run the same in a study and by the task's own command."""
    assert main(["eval", str(run)]) == 0
    words = ["--text", "validation", "--windows", "4", "--spread", "true", "--position-buckets", "8", "--window", "128"]
    for model in (run, checkpoints(run)[-1]):
        assert main(["eval", "perplexity", str(model), *words, "--out", str(tmp_path / model.name)]) == 0
        result = read_result(tmp_path / model.name / "perplexity.json", TaskResult)
        study = read_result(run / "evals" / "step-000008" / "perplexity.json", TaskResult)
        assert result.data == study.data
        assert result.measurements == study.measurements
    shutil.copytree(checkpoints(run)[-1], tmp_path / "bare")
    line = fails("eval", "perplexity", tmp_path / "bare", *words, "--out", tmp_path / "none")
    assert "only a run's folder tells which text was held out" in line


def test_a_run_is_used_from_another_folder_and_moves_with_its_project(toy, toy_text, toy_shards, tmp_path, monkeypatch):
    project, other = tmp_path / "project", tmp_path / "other"
    shutil.copytree(toy_text, project / "text")
    (other / "text").mkdir(parents=True)  # which is not what the run was trained on
    (other / "text" / "a.txt").write_text("other words\n" * 900)
    toy_shards.tokenizer.save(project / "tokens")
    data = {"source": "text", "tokenizer": "tokens", "validation_share": 0.3}
    (project / "toy.yaml").write_text(yaml.safe_dump(toy | {"data": data}))
    monkeypatch.chdir(project)
    assert main(["train", "toy.yaml"]) == 0
    before = (project / "runs" / "toy" / "metrics.jsonl").read_text()
    monkeypatch.chdir(other)
    run = "../project/runs/toy"
    shutil.rmtree(f"{run}/checkpoints/step-000008")
    assert main(["train", run, "--dry-run"]) == 0
    assert main(["train", run]) == 0
    assert main(["eval", run]) == 0
    assert main(["eval", "perplexity", run, "--text", "validation", "--windows", "2"]) == 0
    losses = [[json.loads(line).get("loss_nats") for line in text.splitlines()]
              for text in (before, Path(run, "metrics.jsonl").read_text())]  # fmt: skip
    assert losses[0] == losses[1]
    assert sorted(path.name for path in other.iterdir()) == ["evals", "text"]
    shutil.rmtree(f"{run}/evals")
    project.rename(tmp_path / "moved")
    assert main(["eval", "../moved/runs/toy"]) == 0
    assert list(Path("../moved/runs/toy/evals").iterdir())


def test_eval_of_what_is_no_model(fails, run, toy_file, tmp_path):
    assert "nowhere: no such folder" in fails("eval", tmp_path / "nowhere")
    bare = tmp_path / "bare"
    shutil.copytree(checkpoints(run)[-1], bare)
    assert "pass --recipe FILE" in fails("eval", bare)
    assert main(["eval", str(bare), "--recipe", str(toy_file), "--set", "evaluation.needle=null"]) == 0
    assert "vocabulary of 400" in fails("eval", bare, "--recipe", toy_file, "--set", "data.vocab_size=390")
    words = [word for key in ("data.needle_words=0", "data.split_seed=3") for word in ("--set", key)]
    assert re.search(
        r"vocabulary of 400, but the recipe's tokenizer has '\S+' as token \d+, which is '\S+' there; pass the recipe",
        fails("eval", bare, "--recipe", toy_file, *words),
    )
    (bare / "state.json").unlink()
    (bare / "model.safetensors").write_bytes(b"cut")
    assert str(bare) in fails("eval", bare, "--recipe", toy_file)
    (bare / "config.json").write_text("{")
    assert str(bare) in fails("eval", bare, "--recipe", toy_file)
    (bare / "config.json").write_text('{"model_type": "llama"}')
    assert str(bare) in fails("eval", bare, "--recipe", toy_file)


@pytest.mark.parametrize(("document", "message"), [
    (None, "no such results file"), ("", "not a results file"), ("{}", "not a results file"),
    ({"kind": "task", "version": 1, "result": {}}, "kind 'task', expected 'study'"),
    ({"kind": "study", "version": 99, "result": {}}, "results version 99, this release reads version 1"),
    ({"kind": "study", "version": 1, "result": {"name": "a"}}, "missing"),
])  # fmt: skip
def test_report_of_what_is_not_a_study(fails, tmp_path, document, message):
    path = tmp_path / "results.json"
    if document is not None:
        path.write_text(document if isinstance(document, str) else json.dumps(document))
    line = fails("report", path)
    assert str(path) in line
    assert message in line


def test_info(run, capsys):
    assert main(["info", "tiny"]) == 0
    assert "parameters" in capsys.readouterr().out
    assert main(["info", "backends"]) == 0
    assert "chunked" in capsys.readouterr().out
    model = DiffTransformerForCausalLM.from_pretrained(checkpoints(run)[-1])
    saved = sum(p.numel() for p in model.parameters())
    for named in (checkpoints(run)[-1], run):
        assert main(["info", str(named)]) == 0
        assert f"{saved:,}" in capsys.readouterr().out
