"""Answers judged against their documents: prompts, cuts, judges that fail in the usual ways, and the command."""

import json
import sys
import traceback

import pytest
import yaml

from difftransformer.errors import CheckpointError, ConfigError, DataError, EvaluationError
from difftransformer.progress import shown_by
from difftransformer_lab.cli.main import main
from difftransformer_lab.evals.engine import run_task
from difftransformer_lab.evals.tasks import hallucination, quantized, task_kind
from difftransformer_lab.evals.tasks.hallucination import (
    SETS,
    EndpointJudge,
    HallucinationTask,
    Item,
    Options,
    OverlapJudge,
    judge_all,
    read_items,
)
from difftransformer_lab.results import TaskResult, read_result
from tests.support.answering import Writer, tiny_model
from tests.support.judge_server import KEY, judge_server, reply

WORDS = [f"word{letter}" for letter in "abcdefghijklmnop"]


@pytest.fixture
def rows():
    return [{"document": f"{a} met {b}.", "reference": "Both."} for a, b in zip(WORDS, WORDS[::-1], strict=True)]


@pytest.fixture
def file(rows, tmp_path):
    path = tmp_path / "people.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def asked(rows, tmp_path):
    """The same documents with questions."""
    path = tmp_path / "asked.jsonl"
    lines = (row | {"question": f"Whom did {row['document'].split()[0]} meet?"} for row in rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in lines))
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


def test_questions_are_asked_and_empty_answers_are_wrong(options, asked):
    model = Writer(lambda prompt: "\n\n wordp\nwordb" if "Whom did worda meet?" in prompt else "")
    scores = run_task(model, HallucinationTask(options(file=asked), model))
    found = figures(scores)
    assert found["accuracy", "asked"].value == 1 / 16
    assert found["empty answers", "asked"].value == 15 / 16
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


def test_what_has_no_verdict_is_said_and_asked_again(options, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with judge_server(lambda text: reply(f"VERDICT: {'worda' in text}")) as (server, address):
        server.script = [reply("It is fine.")] * 6
        judged = options(judge="openai:tiny", endpoint=address)
        model = Writer(lambda prompt: document_of(prompt))
        task = HallucinationTask(judged, model)
        scores = run_task(model, task)
        found = figures(scores)
        assert found["unjudged", "people"].value == 6
        assert (found["accuracy", "people"].n, found["accuracy", "people"].value) == (10, 0.1)
        assert len(scores.items) == 10
        assert task.choices[-1] == "6 of 16 answers have no verdict and are left out."
        task = HallucinationTask(judged, model)
        assert figures(run_task(model, task))["accuracy", "people"].value == 2 / 16
        assert len(server.candidates) == 22
        assert any("Verdicts of different judges" in choice for choice in task.choices)


def test_a_judge_that_says_nothing_at_all(options):
    with judge_server(lambda text: reply("?")) as (_, address):
        one = options(judge="openai:tiny", endpoint=address, key_variable="")
        model = Writer(document_of)
        with pytest.raises(EvaluationError, match="openai:tiny: no reply has a verdict; every answer is saved"):
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
    assert any(choice.startswith("1 of 1 documents lose their middle") for choice in task.choices)
    row = json.loads((tmp_path / "judgments.jsonl").read_text())
    assert len(row["document_begins"]) == 400  # of the whole one
    words = r"long/1: the prompt without its document takes \d+ tokens .* --max-new-tokens"
    with pytest.raises(DataError, match=words):
        HallucinationTask(options(file=str(path), max_new_tokens=90), model)


PUBLIC_ROWS = {
    "EdinburghNLP/xsum": {"document": "D", "summary": "R"}, "abisee/cnn_dailymail": {"article": "D", "highlights": "R"},
    "Xnhyacinth/LongBench": {"question": "Q", "context": "D", "answers": ["R", "S"]},
}  # fmt: skip


def test_public_sets_and_their_caps(options, monkeypatch):
    loaded = []

    def load(name, hub_name, **how):
        loaded.append((name, how["config"], how["split"]))
        return [PUBLIC_ROWS[hub_name]]

    monkeypatch.setattr(hallucination, "load_set", load)
    task = HallucinationTask(options(file=None), Writer(str))
    assert loaded == [(name, row[3], "test") for name, row in SETS.items()]
    assert [request.tokens for request in task.requests] == [64, 128, 512, 128, 32, 32]
    assert [item.question for item in task.items] == [None] * 3 + ["Q"] * 3
    assert [item.reference for item in task.items] == ["R"] * 2 + ["R | S"] * 4
    prompts = [task.tokenizer.decode(request.prompt) for request in task.requests]
    assert ["Q" in prompt.partition("D\n")[2] for prompt in prompts] == [False] * 3 + [True] * 3
    assert len(HallucinationTask(options(sets=["xsum"]), Writer(str)).requests) == 17  # a set and the file


def test_a_draw_is_the_seeds_and_in_order(options):
    draws = [[item.name for item in read_items(options(items=5, seed=seed))] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert draws[0] == sorted(set(draws[0]), key=int)
    assert len(draws[0]) == 5


@pytest.mark.parametrize(("row", "words"), [
    ({"document": "A.", "reference": ""}, "line 2 has no text in \"reference\" .it holds ''"),
    ({"document": ["A."], "reference": "B."}, 'line 2 has no text in "document"'),
    ({"document": "A.", "reference": "B."}, 'line 2 has no text in "question" .met document, reference.'),
])  # fmt: skip
def test_a_bad_line_is_named(options, tmp_path, row, words):
    first = {"document": "A.", "reference": "B.", "question": "C?"}
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(first)}\n{json.dumps(row)}\n")
    with pytest.raises(DataError, match=words):
        read_items(options(file=str(path)))


@pytest.mark.parametrize(("fields", "words"), [
    ({"judge": "gpt"}, "judge='gpt': choose overlap or openai:MODEL"), ({"judge": "openai:"}, "judge='openai:'"),
    ({"judge": "openai:m", "key_variable": "NO_SUCH_VARIABLE"}, "key_variable: name an environment variable"),
    ({"sets": ["xsums"]}, r"sets=\['xsums'\]: xsums: choose from xsum, "),
])  # fmt: skip
def test_impossible_options(options, fields, words):
    with pytest.raises(ConfigError, match=words):
        HallucinationTask(options(**fields), Writer(str))


VARIABLE = "DIFFTRANSFORMER_TEST_KEY"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setattr(hallucination, "RETRIES", 0)
    monkeypatch.setattr(hallucination, "TIMEOUT_SECONDS", 0.3)
    with judge_server(lambda text: reply(f"Judged {text}.\n\nVERDICT: {'true' in text}")) as (server, address):
        yield server, address


def case(answer, document="The cat sat.", question=None):
    return Item("s", answer, document, question, "A cat.", 9), answer


CASES = [case(f"{'true' if index % 2 else 'wrong'} {index}") for index in range(6)]
EXPECTED = [bool(index % 2) for index in range(6)]


def judge(address, model="tiny"):
    return EndpointJudge(model, address, VARIABLE)


def verdicts(found):
    return [None if verdict is None else verdict[0] for verdict in found]


def test_verdicts_and_reasons_are_kept_for_a_person(server, tmp_path):
    stub, address = server
    assert verdicts(judge_all(judge(address), CASES, tmp_path / "deep" / "judgments.jsonl")) == EXPECTED
    rows = [json.loads(line) for line in (tmp_path / "deep" / "judgments.jsonl").read_text().splitlines()]
    assert [row["verdict"] for row in rows] == ["hallucinated", "faithful"] * 3
    assert rows[1] == rows[1] | {
        "set": "s", "answer": "true 1", "reasoning": "Judged true 1.", "document_begins": "The cat sat.",
        "judge": "openai:tiny",
    }  # fmt: skip
    body = stub.bodies[0]
    assert (body["model"], body["temperature"]) == ("tiny", 0)
    assert "VERDICT: True" in body["messages"][0]["content"]
    assert "<document>\nThe cat sat.\n</document>" in body["messages"][1]["content"]
    assert "<question>" not in body["messages"][1]["content"]
    assert stub.headers[0]["Authorization"] == f"Bearer {KEY}"


REPLIES = {
    "not JSON": (200, {}, "<html>"), "no object": (200, {}, "[]"), "no message": (200, {}, '{"choices": []}'),
    "no text": reply(None), "no verdict": reply("It is fine."), "verdict not last": reply("VERDICT: True\nor is it?"),
    "two verdicts": reply("VERDICT: True or VERDICT: False"),
    "too long a document": (413, {}, '{"error": {"code": "context_length_exceeded", "message": "x"}}'),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLIES)
def test_a_case_without_a_verdict_stops_nothing(server, tmp_path, name):
    stub, address = server
    stub.script = [REPLIES[name]]
    assert verdicts(judge_all(judge(address), CASES[:3], tmp_path / "j.jsonl")) == [None, *EXPECTED[1:3]]
    assert verdicts(judge_all(judge(address), CASES[:3], tmp_path / "j.jsonl")) == EXPECTED[:3]
    assert stub.candidates == ["wrong 0", "true 1", "wrong 2", "wrong 0"]


@pytest.mark.parametrize(
    "text", ["**VERDICT: True**", "verdict: TRUE.", "VERDICT: True\n\n", "I see VERDICT: False in it.\nVERDICT: True"]
)
def test_usual_spellings_of_a_verdict(server, text):
    stub, address = server
    stub.script = [reply(text)]
    assert judge(address).judge(*CASES[0])[0]


@pytest.mark.parametrize(
    "failure", ["hang", "drop", (503, {}, "{}"), (401, {}, '{"error": {"code": "x", "message": "x"}}')]
)
def test_an_endpoint_that_fails_ends_the_judging_and_loses_nothing(server, tmp_path, failure):
    stub, address = server
    stub.script = [reply("VERDICT: False"), failure]
    with pytest.raises(EvaluationError, match=r"check address, model and key. Every answer and judgment is saved"):
        judge_all(judge(address), CASES, tmp_path / "j.jsonl")
    stub.candidates.clear()
    judge_all(judge(address), CASES[:2], tmp_path / "j.jsonl")
    assert stub.candidates == ["true 1"]


def test_a_failed_request_is_tried_again(server, monkeypatch):
    stub, address = server
    stub.script = [(500, {"retry-after-ms": "1"}, "<html>")]
    monkeypatch.setattr(hallucination, "RETRIES", 1)
    assert judge(address).judge(*CASES[1])[0]
    assert stub.candidates == ["true 1"] * 2


def test_only_missing_judgments_are_asked_again(server, tmp_path):
    stub, address = server
    file = tmp_path / "j.jsonl"
    stub.script = [reply("x\nVERDICT: False"), reply("?"), reply("x\nVERDICT: False")]
    assert verdicts(judge_all(judge(address), CASES[:3], file)) == [False, None, False]
    with open(file, "ab") as torn:  # as if killed in the middle of a line
        torn.write(b'{"set": "s", "verd')
    stub.candidates.clear()
    with pytest.warns(UserWarning, match="line 3 is not whole and is left out"):
        assert verdicts(judge_all(judge(address), CASES, file)) == EXPECTED
    assert stub.candidates == [CASES[index][1] for index in (1, 3, 4, 5)]
    stub.candidates.clear()
    assert verdicts(judge_all(judge(address), CASES, file)) == EXPECTED
    assert stub.candidates == []
    # Another judge has said nothing yet; nor has this one on another document.
    judge_all(judge(address, "other"), CASES[:1], file)
    judge_all(judge(address), [case("true", document="Another.")], file)
    assert len(stub.candidates) == 2


def test_the_key_is_nowhere(server, tmp_path, capfd, caplog):
    """Also where the server says it back in an error, or the client would log it."""
    stub, address = server
    caplog.set_level(0)
    echo = json.dumps({"error": {"message": f"who is {KEY}?", "code": KEY}})
    headers = {"X-Request-Id": KEY}
    stub.script = [(422, headers, echo), (200, headers, KEY), reply("All is in it.\nVERDICT: True")]
    one = judge(address)
    found = judge_all(one, CASES[:3], tmp_path / "j.jsonl")
    assert verdicts(found) == [None, None, True]
    seen = [repr(found), repr(one), str(one.rules), one.identity, (tmp_path / "j.jsonl").read_text()]
    for step in ((401, headers, echo), (429, headers, echo), (500, headers, echo), "drop", "hang"):
        stub.script = [step]
        with pytest.raises(EvaluationError) as caught:
            one.judge(*case("new"))
        seen.append("".join(traceback.format_exception(caught.value)))
    captured = capfd.readouterr()
    for text in (*seen, captured.out, captured.err, caplog.text):
        assert KEY not in text


@pytest.mark.parametrize("value", [None, "", "two words", "schlüssel"])
def test_a_key_that_cannot_be(monkeypatch, value):
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match="key_variable: name an environment variable") as caught:
        judge("http://127.0.0.1:1/v1")
    assert not value or value not in str(caught.value)


@pytest.mark.parametrize("address", [
    "ftp://x", "localhost:80", "https://me:secret@x/v1", "https://x/v1?key=secret", "", "http://[", "http://x:port",
])  # fmt: skip
def test_an_address_that_cannot_be(monkeypatch, address):
    monkeypatch.setenv(VARIABLE, KEY)
    with pytest.raises(ConfigError, match="endpoint: ") as caught:
        judge(address)
    assert "secret" not in str(caught.value)


def test_an_endpoint_without_keys(server, monkeypatch):
    """What the client would read from the environment by itself is for another endpoint."""
    monkeypatch.setenv("OPENAI_API_KEY", "of-another-endpoint")
    monkeypatch.setenv("OPENAI_ORG_ID", "of-another-endpoint")
    stub, address = server
    assert EndpointJudge("tiny", address, "").judge(*CASES[1])[0]
    assert "Authorization" not in stub.headers[0]
    assert "another-endpoint" not in str(stub.headers[0])


def test_without_the_client_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match=r"judge=openai:tiny needs openai; run pip install 'difft.*judge"):
        judge("http://127.0.0.1:1/v1")


@pytest.mark.parametrize("row", ['{"answers_of": "x"}', '{"key": [], "verdict": "faithful", "reasoning": ""}'])
def test_a_file_of_something_else_is_refused(row, tmp_path):
    (tmp_path / "j.jsonl").write_text(f"{row}\n")
    with pytest.raises(CheckpointError, match="line 1 is not a judgment; choose another --judgments"):
        judge_all(OverlapJudge(), CASES, tmp_path / "j.jsonl")


@pytest.mark.parametrize(("answer", "faithful", "words"), [
    ("Some cats slept", True, "100% of 3 content words are given; missing: none."),
    ("Some cats slept on 1,500 mats", False, "60% of 5 content words are given; missing: 1,500, mats."),
    ("Four words in five: cats, SOME, slept, there, outside", False, "50% of 8"), ("It was.", False, "0% of 0"),
    ("cats slept there, some away", True, "80% of 5 content words"),
])  # fmt: skip
def test_overlap(answer, faithful, words):
    found = OverlapJudge().judge(*case(answer, "Some cats slept there.", None))
    assert found[0] is faithful
    assert words in found[1]
    assert OverlapJudge().judge(*case("Alice", "Some cats.", "Who is Alice?"))[0]


def test_the_command(asked, tmp_path, monkeypatch, capfd):
    """A judge that fails, a stop, and a second call that judges what is missing and asks the model nothing again."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    out = tmp_path / "out"
    with judge_server(lambda text: reply("Fine.\nVERDICT: True")) as (server, address):
        words = ["eval", "hallucination", tiny_model(tmp_path / "model"), "--out", str(out), "--file", asked]
        words += ["--items", "3", "--endpoint", address]
        words += ["--judgments", str(out / "judgments.jsonl"), "--max-new-tokens", "3", "--judge", "openai:tiny"]
        server.script = [reply("VERDICT: True"), (401, {}, f'{{"error": {{"message": "{KEY}"}}}}')]
        assert main(words) == 2
        assert "AuthenticationError 401;" in " ".join(capfd.readouterr().err.split())
        assert main(words) == 0
    assert len(server.candidates) == 4
    lines = (out / "judgments.jsonl").read_text().splitlines()
    assert [json.loads(line)["verdict"] for line in lines] == ["faithful"] * 3
    result = json.loads((out / "hallucination.json").read_text())["result"]
    assert result["measurements"][0]["value"] == 1.0
    assert (out / "hallucination.png").stat().st_size > 5000
    captured = capfd.readouterr()
    held = [path.read_text() for path in out.iterdir() if path.suffix in (".json", ".jsonl", ".svg")]
    for text in (*held, captured.out, captured.err):
        assert KEY not in text


def test_a_suite_judges_what_has_no_verdict_yet(asked, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    out, suite = tmp_path / "out", tmp_path / "suite.yaml"
    with judge_server(lambda text: reply("VERDICT: True")) as (server, address):
        judged = {"file": asked, "items": 3, "max_new_tokens": 3, "judge": "openai:tiny"}
        judged |= {"endpoint": address, "judgments": str(out / "judgments.jsonl")}
        suite.write_text(yaml.safe_dump({"name": "judged", "tasks": [{"task": "hallucination", "options": judged}]}))
        words = ["eval", str(suite), tiny_model(tmp_path / "model"), "--out", str(out)]
        server.script = [reply("VERDICT: True"), reply("?")]
        unjudged, asked = [], []
        for _ in range(3):
            assert main(words) == 0
            result = read_result(out / "models/0-model/hallucination.json", TaskResult)
            unjudged += [row.value for row in result.measurements if row.name == "unjudged"]
            asked.append(len(server.candidates))
    assert unjudged == [1.0, 0.0, 0.0]
    assert asked[1:] == [asked[0] + 1] * 2
