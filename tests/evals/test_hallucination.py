"""Answers judged against their documents: prompts, cuts, verdicts counted, and the command from end to end."""

import json

import pytest
import yaml

from difftransformer.errors import ConfigError, DataError, EvaluationError
from difftransformer.progress import shown_by
from difftransformer_lab.cli.main import main
from difftransformer_lab.evals.engine import run_task
from difftransformer_lab.evals.sets.grounded import GROUNDED_SETS, GroundedItem
from difftransformer_lab.evals.tasks import hallucination, quantized, task_kind
from difftransformer_lab.evals.tasks.hallucination import HallucinationTask, Options
from difftransformer_lab.results import TaskResult, read_result
from tests.support.answering import Writer, tiny_model
from tests.support.judge_server import KEY, judge_server, reply

WORDS = [f"word{letter}" for letter in "abcdefghijklmnop"]


@pytest.fixture
def file(tmp_path):
    rows = [
        {"document": f"{word} met {other}.", "reference": "They met.", "question": f"Whom did {word} meet?"}
        for word, other in zip(WORDS, WORDS[::-1], strict=True)
    ]
    path = tmp_path / "people.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def options(file, tmp_path):
    return lambda **fields: Options(**{"file": file, "judgments": str(tmp_path / "judgments.jsonl")} | fields)


def document_of(prompt):
    return prompt.partition("Document:\n")[2].partition("\n\n")[0]


def figures(scores):
    return {(row.name, row.at.get("set")): row for row in scores.measurements}


def test_the_oracle_and_the_liar(options):
    oracle = Writer(lambda prompt: f" {document_of(prompt)}\nand nonsense")
    found = figures(run_task(oracle, HallucinationTask(options(), oracle)))
    assert (found["accuracy", "people"].value, found["accuracy", "people"].n) == (1.0, 16)
    assert found["mean accuracy", None].value == 1.0
    liar = Writer(lambda prompt: " Everybody knows better")
    found = figures(run_task(liar, HallucinationTask(options(), liar)))
    assert (found["accuracy", "people"].value, found["unjudged", "people"].value) == (0.0, 0.0)


def test_questions_are_asked_and_empty_answers_are_wrong(options):
    model = Writer(lambda prompt: "\n\n wordp\nwordb" if "Whom did worda meet?" in prompt else "")
    scores = run_task(model, HallucinationTask(options(kind="qa"), model))
    found = figures(scores)
    assert found["accuracy", "people"].value == 1 / 16
    assert found["empty answers", "people"].value == 15 / 16
    assert sorted(item.score for item in scores.items)[-2:] == [0.0, 1.0]


@pytest.mark.parametrize("within", [False, True], ids=["plain", "quantized"])
def test_judging_reports_progress(within, options):
    name, chosen = "hallucination", options(items=16)
    if within:
        name, chosen = "quantized", quantized.Options(task=name, task_options=vars(chosen), bits=[16])
    told, model = [], Writer(lambda prompt: f" {document_of(prompt)}" if "worda" in prompt else "")
    with shown_by(lambda *report: told.append(report)):
        run_task(model, task_kind(name).make(chosen, model))
    # Two documents name worda; the other answers are empty, and nobody judges them.
    assert [row for row in told if row[2:] == ("judging",)] == [(n, 2, "judging") for n in range(3)]


def test_what_has_no_verdict_is_said(options, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with judge_server(lambda text: reply(f"VERDICT: {'worda' in text}")) as (server, address):
        limited = options(judge="openai:tiny", endpoint=address, max_judgments=10)
        model = Writer(lambda prompt: document_of(prompt))
        task = HallucinationTask(limited, model)
        scores = run_task(model, task)
        found = figures(scores)
        assert found["unjudged", "people"].value == 6
        assert (found["accuracy", "people"].n, found["accuracy", "people"].value) == (10, 0.1)
        assert len(scores.items) == 10
        assert "6 of 16 answers have no verdict and are left out of the accuracy: the limit of 10" in task.choices[-1]
        task = HallucinationTask(limited, model)
        assert figures(run_task(model, task))["accuracy", "people"].value == 2 / 16
        assert len(server.candidates) == 16
        assert any("verdicts of different judges" in choice for choice in task.choices)


def test_a_judge_that_says_nothing_at_all(options, monkeypatch):
    with judge_server(lambda text: reply("?")) as (_, address):
        one = options(judge="openai:tiny", endpoint=address, key_variable="", retries=0)
        model = Writer(document_of)
        with pytest.raises(EvaluationError, match=r"openai:tiny judged nothing: .* every answer is saved"):
            run_task(model, HallucinationTask(one, model))


def test_a_long_document_loses_its_middle_for_the_model_alone(options, tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"document": "begins " + "x" * 500 + " ends", "reference": "R"}) + "\n")
    model = Writer(lambda prompt: " begins ends", context_tokens=150)
    task = HallucinationTask(options(file=str(path), max_new_tokens=20), model)
    run_task(model, task)
    (prompt,) = model.prompts
    assert len(task.requests[0].prompt) == 130
    assert document_of(prompt).startswith("begins xxx")
    assert document_of(prompt).endswith("xxx ends")
    assert any(choice.startswith("1 of 1 documents do not fit") for choice in task.choices)
    row = json.loads((tmp_path / "judgments.jsonl").read_text())
    assert len(row["document_begins"]) == 400  # of the whole one
    words = r"long/1: the prompt without its document takes \d+ tokens .* --max-new-tokens"
    with pytest.raises(DataError, match=words):
        HallucinationTask(options(file=str(path), max_new_tokens=90), model)


def test_public_sets_and_their_caps(options, monkeypatch):
    asked = []

    def read(name, items, seed):
        asked.append((name, items))
        kind = GROUNDED_SETS[name].kind
        return [GroundedItem(name="0", document="D", reference="R", question="Q" if kind == "qa" else None)]

    monkeypatch.setattr(hallucination, "read_grounded", read)
    task = HallucinationTask(options(file=None), Writer(str))
    assert asked == [(name, 100) for name in GROUNDED_SETS]
    assert [request.tokens for request in task.requests] == [64, 128, 512, 128, 32, 32]
    prompts = [task.tokenizer.decode(request.prompt) for request in task.requests]
    assert ["Q" in prompt.partition("D\n")[2] for prompt in prompts] == [False] * 3 + [True] * 3
    assert len(HallucinationTask(options(sets=["xsum"]), Writer(str)).requests) == 17  # a set and the file


@pytest.mark.parametrize(("fields", "words"), [
    ({"judge": "gpt"}, "judge='gpt': choose overlap, nli:FOLDER or openai:MODEL"),
    ({"judge": "openai:"}, "judge='openai:'"),
    ({"judge": "openai:m", "key_variable": "NO_SUCH_VARIABLE"}, "key_variable=NO_SUCH_VARIABLE"),
    ({"sets": ["xsums"]}, "set 'xsums'"),
])  # fmt: skip
def test_impossible_options(options, fields, words):
    with pytest.raises(ConfigError, match=words):
        HallucinationTask(options(**fields), Writer(str))


def test_the_command(file, tmp_path, monkeypatch, capfd):
    """A judge that fails, a stop, and a second call that judges what is missing and asks the model nothing again."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    out = tmp_path / "out"
    with judge_server(lambda text: reply("Fine.\nVERDICT: True")) as (server, address):
        words = ["eval", "hallucination", tiny_model(tmp_path / "model"), "--out", str(out), "--file", file]
        words += ["--kind", "qa", "--items", "3", "--endpoint", address, "--retries", "0"]
        words += ["--judgments", str(out / "judgments.jsonl"), "--max-new-tokens", "3", "--judge", "openai:tiny"]
        server.script = ["drop", reply("VERDICT: True"), (401, {}, f'{{"error": {{"message": "{KEY}"}}}}')]
        assert main(words) == 2
        assert "refuses with status 401;" in " ".join(capfd.readouterr().err.split())
        assert main(words) == 0
    assert len(server.candidates) == 5
    lines = (out / "judgments.jsonl").read_text().splitlines()
    assert [json.loads(line)["verdict"] for line in lines] == ["faithful"] * 3
    result = json.loads((out / "hallucination.json").read_text())["result"]
    assert result["measurements"][0]["value"] == 1.0
    assert (out / "hallucination.png").stat().st_size > 5000
    captured = capfd.readouterr()
    held = [path.read_text() for path in out.iterdir() if path.suffix in (".json", ".jsonl", ".svg")]
    for text in (*held, captured.out, captured.err):
        assert KEY not in text


def test_a_suite_judges_what_has_no_verdict_yet(file, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    out, suite = tmp_path / "out", tmp_path / "suite.yaml"
    with judge_server(lambda text: reply("VERDICT: True")) as (server, address):
        judged = {"file": file, "kind": "qa", "items": 3, "max_new_tokens": 3, "judge": "openai:tiny", "retries": 0}
        judged |= {"endpoint": address, "judgments": str(out / "judgments.jsonl")}
        suite.write_text(yaml.safe_dump({"name": "judged", "tasks": [{"task": "hallucination", "options": judged}]}))
        words = ["eval", str(suite), tiny_model(tmp_path / "model"), "--out", str(out)]
        server.script = [reply("VERDICT: True"), "drop"]
        unjudged, asked = [], []
        for _ in range(3):
            assert main(words) == 0
            result = read_result(out / "models/0-model/hallucination.json", TaskResult)
            unjudged += [row.value for row in result.measurements if row.name == "unjudged"]
            asked.append(len(server.candidates))
    assert unjudged == [1.0, 0.0, 0.0]
    assert asked[1:] == [asked[0] + 1] * 2
