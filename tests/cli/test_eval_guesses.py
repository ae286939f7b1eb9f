"""What people try with `eval` and beside it: the list of tasks, one's own questions, words of other programs."""

import json

import pytest

from difftransformer_lab.cli.main import main
from difftransformer_lab.evals.registry import task_help
from difftransformer_lab.results import TaskResult, read_result
from tests.support import tiny_folders


@pytest.mark.parametrize("words", ["eval --list", "eval list", "tasks"])
def test_the_list_of_tasks_has_a_line_for_each(words, capsys):
    assert main(words.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, about in task_help().items():
        assert f"  {name:<15}{about}" in lines
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize(("words", "reply"), [
    ("evaluate demo", "no such command; did you mean eval?"),
    ("compare demo demo-twin", "eval quick demo demo-twin compares trained ones"),
    ("eval needle demo --length 128", "no option --length; use --lengths N"),
    ("eval demo --data q.jsonl", "no option --data; eval ask MODEL questions.jsonl asks questions of your own"),
    ("eval ask demo", "give models and a file of questions: eval ask MODEL questions.jsonl"),
    ("eval ask q.jsonl", "give models and a file of questions"),
])  # fmt: skip
def test_guesses(words, reply, fails):
    assert reply in fails(*words.split())


def test_one_asks_questions_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        tiny_folders.saved(tmp_path / name, max_position_embeddings=128)
    rows = [{"question": f"{n}?", "answer": "a", "choices": ["a", "bc"]} for n in range(3)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["eval", "ask", "one", "mine.jsonl"]) == 0
    assert "accuracy per byte" in capsys.readouterr().out
    result = read_result(tmp_path / "evals" / "one" / "ask.json", TaskResult)
    assert (result.measurements[0].n, result.options["questions"]) == (3, "mine.jsonl")
    assert main(["eval", "ask", "one", "two", "mine.jsonl"]) == 0
    assert (tmp_path / "reports" / "ask-one-two" / "index.html").is_file()


@pytest.mark.slow
def test_default_lengths_fit_the_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny_folders.saved(tmp_path / "short", max_position_embeddings=160)
    assert main(["eval", "needle", "short", "--documents", "1"]) == 0
    result = read_result(tmp_path / "evals" / "short" / "needle.json", TaskResult)
    assert {row.at["length_tokens"] for row in result.measurements if "depth" in row.at} == {160}
    capsys.readouterr()
    assert main(["eval", "needle", "short", "demo", "--lengths", "4096", "--documents", "1"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("difftransformer eval needle: needle: no task could be run; needle on short: ")
