"""Several processes evaluate as one: the same figures to the bit, one file of answers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from difftransformer_lab.cli.main import main
from difftransformer_lab.evals.models.causal import CausalLanguageModel
from difftransformer_lab.evals.requests import Choice, Continuation, Loss
from tests.support import tiny_folders
from tests.support.parallel_steps import run_commands

QUESTIONS = 24


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"{word} {number}" for number in range(400) for word in tiny_folders.SENTENCES[:2]))
    return path


@pytest.fixture(scope="module")
def tasks(text):
    """Command lines of tasks whose requests are of every kind, without the model."""
    people = text.with_name("people.jsonl")
    rows = [{"document": f"{n} met {n + 1}.", "reference": "They met."} for n in range(QUESTIONS)]
    people.write_text("".join(json.dumps(row) + "\n" for row in rows))
    suite = text.with_name("suite.yaml")
    listed = [{"task": "perplexity", "options": {"text": str(text), "window": 32, "windows": 6}}, {"task": "recall"}]
    listed[1]["options"] = {"text": str(text), "window": 32, "windows": 4}
    suite.write_text(json.dumps({"name": "tiny", "tasks": listed}))
    small = ["--batch-tokens", "200", "--text", str(text)]
    return {
        "perplexity": [*small, "--window", "64", "--windows", "9"],
        "needle": [*small, "--lengths", "[300]", "--documents", "3", "--digits", "2", "--depths", "[0.0, 1.0]"],
        "outliers": [*small, "--window", "40", "--tokens", "400"],
        "hallucination": ["--file", str(people), "--judgments", str(text.with_name("judged")), "--max-new-tokens", "9"],
        str(suite): [],
    }


def commands(tasks, model, folder, *flags):
    out = {task: str(folder / Path(task).stem) for task in tasks}
    return [["eval", task, str(model), "--out", out[task], *words, *flags] for task, words in tasks.items()]


def answered(folder):
    """The answers of every task by the name of their file, by request."""
    found = {}
    for path in folder.rglob("*.answers.jsonl"):
        rows = [json.loads(line.partition("\t")[0]) for line in path.read_text().splitlines()[1:]]
        found[str(path.relative_to(folder))] = {row["request"]: row["answer"] for row in rows}
        assert len(rows) == len(found[str(path.relative_to(folder))])  # none twice
    return found


def figures(folder):
    read = {path.relative_to(folder): json.loads(path.read_text())["result"] for path in folder.rglob("*.json")}
    return {str(path): result["measurements"] for path, result in read.items()}


@pytest.fixture(scope="module")
def alone(tasks, tmp_path_factory):
    """The model, and the folder of what one process finds."""
    base = tmp_path_factory.mktemp("alone")
    tiny_folders.saved(base / "model", max_position_embeddings=1024, initializer_range=0.2)
    for line in commands(tasks, base / "model", base / "found"):
        assert main(line) == 0
    return base / "model", base / "found"


@pytest.mark.slow
def test_two_processes_answer_to_the_bit_as_one(tasks, alone, tmp_path):
    model, expected = alone
    done = run_commands(2, commands(tasks, model, tmp_path))
    assert [json.loads(one.stdout.splitlines()[-1]) for one in done] == [[0] * len(tasks)] * 2, done[0].stderr
    assert done[1].stdout.count("\n") == 1  # the statuses that the test prints
    assert done[1].stderr == ""
    assert answered(tmp_path) == answered(expected)
    assert figures(tmp_path) == figures(expected)
    assert len(figures(expected)) == 6
    assert len(answered(expected)) == 6


@pytest.mark.slow
def test_any_number_of_processes_goes_on(tasks, alone, tmp_path):
    """What one process has left of a batch is computed with the whole batch, so that no bit differs."""
    model, expected = alone
    few = {name: tasks[name] for name in ("perplexity", "needle")}
    for name in few:
        (tmp_path / name).mkdir()
        path = tmp_path / name / f"{name}.answers.jsonl"
        lines = (expected / name / path.name).read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:3] + lines[-1:]))
    run_commands(2, commands(few, model, tmp_path))
    for name in few:
        assert answered(tmp_path / name) == answered(expected / name)
        assert figures(tmp_path / name) == figures(expected / name)


@pytest.mark.slow
def test_parts_hold_every_request_once(alone):
    model = CausalLanguageModel(tiny_folders.model(), tokenizer=None, batch_tokens=64)
    prompts = [tuple(range(length)) for length in (5, 9, 5, 30, 30, 30, 31)]
    requests = [Loss(prompt) for prompt in prompts] + [Continuation(prompt, 2) for prompt in prompts]
    requests += [Choice(prompt, ((1,), (2,))) for prompt in prompts]
    parts = model.parts(requests)
    assert sorted(index for part in parts for index in part) == list(range(len(requests)))
    assert [0, 2] in parts  # losses of equal length
    assert [3, 4] in parts
    assert all(len({type(requests[index]) for index in part}) == 1 for part in parts)


def test_a_common_prefix_is_kept_within_a_run():
    """Documents of 200 tokens with 40 short questions each: a run ends only where little is computed again."""
    model = CausalLanguageModel(tiny_folders.model(max_position_embeddings=256), tokenizer=None)
    documents = [tuple(range(begin, begin + 200)) for begin in (0, 1000)]
    requests = [Choice((*document, 300 + n), ((1,), (2,))) for document in documents for n in range(40)]
    parts = model.parts(requests)
    assert all(len({requests[index].prompt[0] for index in part}) == 1 for part in parts)
    assert 2 <= len(parts) <= 4


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bad_input_is_said_once(alone, tmp_path):
    bad = {
        ("--device", "cuda"): "--device cuda: this machine has 0 GPUs",
        ("--processes", "3"): "--processes 3: torchrun has started 2; omit --processes",
        ("--batch-tokens", "0"): "--batch-tokens 0: give at least 1",
    }
    done = run_commands(2, [["eval", "perplexity", str(alone[0]), "--out", str(tmp_path), *words] for words in bad])
    assert [json.loads(one.stdout) for one in done] == [[2] * len(bad)] * 2
    said = [line for one in done for line in one.stderr.splitlines()]
    assert len(said) == len(bad)
    assert all(message in line for message, line in zip(bad.values(), said, strict=True)), said


@pytest.mark.slow
def test_interrupted_in_two_processes_goes_on_in_one(tasks, alone, text, tmp_path):
    """Ctrl-C, as a terminal sends it to all processes."""
    model, _ = alone
    words = ["eval", "perplexity", str(model), "--text", str(text), "--window", "64", "--windows", "200"]
    words += ["--batch-tokens", "64", "--out"]
    journal = tmp_path / "two" / "perplexity.answers.jsonl"
    command = [sys.executable, "-m", "difftransformer_lab", *words, str(tmp_path / "two"), "--processes", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    deadline = time.monotonic() + 120
    while not journal.exists() or journal.read_text().count("\n") < 5:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    (line,) = errors.splitlines()
    assert " eval perplexity " in line.partition("stopped; every answer is saved. Continue with: ")[2]
    there = journal.read_text().count("\n")
    assert 5 <= there < 150
    assert main([*words, str(tmp_path / "two")]) == 0
    assert main([*words, str(tmp_path / "one")]) == 0
    assert journal.read_text().count("\n") > there
    assert answered(tmp_path / "two") == answered(tmp_path / "one")
    assert figures(tmp_path / "two") == figures(tmp_path / "one")
