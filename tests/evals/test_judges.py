"""Judges: an endpoint that fails in the usual ways, a local classifier, words; and a file that loses no verdict."""

import json
import sys
import traceback

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from difftransformer.errors import CheckpointError, ConfigError, EvaluationError
from difftransformer_lab.evals.judges import endpoint
from difftransformer_lab.evals.judges import nli as nli_judge
from difftransformer_lab.evals.judges.base import Case, OutOfBudget, Unjudged, judge_all
from difftransformer_lab.evals.judges.endpoint import EndpointJudge
from difftransformer_lab.evals.judges.nli import NliJudge
from difftransformer_lab.evals.judges.overlap import OverlapJudge
from difftransformer_lab.evals.tasks.hallucination import Options, make_judge
from tests.support.judge_server import KEY, judge_server, reply

VARIABLE = "DIFFTRANSFORMER_TEST_KEY"


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv(VARIABLE, KEY)
    with judge_server(lambda text: reply(f"Judged {text}.\n\nVERDICT: {'true' in text}")) as (server, address):
        yield server, address


def case(answer, **fields):
    base = {"set_name": "s", "item": answer, "document": "The cat sat.", "question": None, "reference": "A cat."}
    return Case(**base | {"answer": answer} | fields)


CASES = [case(f"{'true' if index % 2 else 'wrong'} {index}") for index in range(6)]
EXPECTED = [bool(index % 2) for index in range(6)]


def judge(address, **spending):
    return EndpointJudge("tiny", address, VARIABLE, **{"timeout_seconds": 0.3, "retries": 0} | spending)


def test_spending_is_limited_as_asked(monkeypatch):
    monkeypatch.setenv(VARIABLE, KEY)
    asked = {"key_variable": VARIABLE, "max_judgments": 5, "max_cost_tokens": 7, "timeout_seconds": 2.5}
    made = make_judge(Options(judge="openai:tiny", endpoint="http://127.0.0.1:1/v1", **asked))
    assert isinstance(made, EndpointJudge)
    assert (made.max_requests, made.max_tokens, made.timeout_seconds) == (5, 7, 2.5)


def verdicts(found):
    return [None if verdict is None else verdict.faithful for verdict in found]


def test_verdicts_and_reasons_are_kept_for_a_person(server, tmp_path):
    stub, address = server
    found, reasons = judge_all(judge(address), CASES, tmp_path / "deep" / "judgments.jsonl")
    assert verdicts(found) == EXPECTED
    assert reasons == []
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


SOON = {"retry-after-ms": "1"}


@pytest.mark.parametrize("failure", ["hang", "drop", (429, SOON, "{}"), (500, SOON, "<html>")])
def test_a_failed_request_is_tried_again(server, failure):
    stub, address = server
    stub.script = [failure]
    one = judge(address, retries=1)
    assert one.judge(CASES[1]).faithful
    assert stub.candidates == ["true 1"] * 2
    assert one.requests == 1


REPLIES = {
    "not JSON": (200, {}, "<html>"), "no object": (200, {}, "[]"), "no message": (200, {}, '{"choices": []}'),
    "no text": reply(None), "no verdict": reply("It is fine."), "verdict not last": reply("VERDICT: True\nor is it?"),
    "two verdicts": reply("VERDICT: True or VERDICT: False"), "cut short": (200, {"X-Cut": "1"}, "{"),
    "another error": (503, {}, "{}"),
    "too long a document": (413, {}, '{"error": {"code": "context_length_exceeded", "message": "x"}}'),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLIES)
def test_a_case_without_a_verdict_stops_nothing(server, tmp_path, name):
    stub, address = server
    stub.script = [REPLIES[name]]
    found, (reason,) = judge_all(judge(address), CASES[:3], tmp_path / "j.jsonl")
    assert verdicts(found) == [None, *EXPECTED[1:3]]
    assert reason.startswith(f"{address}: ")
    assert ("(context_length_exceeded)" in reason) == (name == "too long a document")
    assert verdicts(judge_all(judge(address), CASES[:3], tmp_path / "j.jsonl")[0]) == EXPECTED[:3]
    assert stub.candidates == ["wrong 0", "true 1", "wrong 2", "wrong 0"]


@pytest.mark.parametrize(
    "text", ["**VERDICT: True**", "verdict: TRUE.", "VERDICT: True\n\n", "I see VERDICT: False in it.\nVERDICT: True"]
)
def test_usual_spellings_of_a_verdict(server, text):
    stub, address = server
    stub.script = [reply(text)]
    assert judge(address).judge(CASES[0]).faithful


def test_no_judgment_is_lost_and_only_missing_ones_are_asked_again(server, tmp_path):
    stub, address = server
    file = tmp_path / "j.jsonl"
    stub.script = [reply("x\nVERDICT: False"), "drop", reply("x\nVERDICT: False")]
    found, (reason,) = judge_all(judge(address), CASES[:3], file)
    assert verdicts(found) == [False, None, False]
    assert reason == f"{address}: the connection failed"
    with open(file, "ab") as torn:  # as if killed in the middle of a line
        torn.write(b'{"set": "s", "verd')
    stub.candidates.clear()
    with pytest.warns(UserWarning, match="line 3 is not whole and is left out"):
        assert verdicts(judge_all(judge(address), CASES, file)[0]) == EXPECTED
    assert stub.candidates == [CASES[index].answer for index in (1, 3, 4, 5)]
    stub.candidates.clear()
    assert verdicts(judge_all(judge(address), CASES, file)[0]) == EXPECTED
    assert stub.candidates == []
    # Another judge has said nothing yet; nor has this one on another document.
    assert judge_all(EndpointJudge("other", address, VARIABLE), CASES[:1], file)[0]
    judge_all(judge(address), [case("true", document="Another.")], file)
    assert len(stub.candidates) == 2


def test_a_refusal_of_everything_ends_the_judging_and_loses_nothing(server, tmp_path):
    stub, address = server
    stub.script = [reply("VERDICT: False"), (401, {}, '{"error": {"code": "invalid_api_key", "message": "x"}}')]
    with pytest.raises(EvaluationError, match=r"refuses with status 401 \(invalid_api_key\); check the model's name"):
        judge_all(judge(address), CASES, tmp_path / "j.jsonl")
    stub.candidates.clear()
    judge_all(judge(address), CASES[:2], tmp_path / "j.jsonl")
    assert stub.candidates == ["true 1"]


def test_requests_are_limited(server, tmp_path):
    stub, address = server
    found, reasons = judge_all(judge(address, max_requests=2), CASES, tmp_path / "j.jsonl")
    assert len(stub.candidates) == 2
    assert verdicts(found) == [False, True, None, None, None, None]
    assert reasons == ["the limit of 2 requests to the judge is reached (--max-judgments)"]


def test_tokens_are_limited(server, tmp_path):
    stub, address = server
    stub.answer = lambda text: reply("VERDICT: True", tokens=3000)
    foreseen = len(json.dumps(endpoint.RUBRIC)) // 3 + 1024
    found, reasons = judge_all(judge(address, max_tokens=6000 + foreseen), CASES, tmp_path / "j.jsonl")
    assert verdicts(found) == [True, True, None, None, None, None]
    assert reasons[0].startswith(f"6000 of {6000 + foreseen} tokens are spent")
    assert len(stub.candidates) == 2
    # A request that got no answer counts as foreseen: it may have been worked on.
    stub.script = ["hang"] * 4
    one, cases = judge(address, max_tokens=2 * foreseen + 500), [case("true new"), case("newer"), case("newest")]
    assert verdicts(judge_all(one, cases, tmp_path / "k.jsonl")[0]) == [None] * 3
    assert one.requests == 2


def test_an_endpoint_that_is_gone_stops_the_judging(server, tmp_path):
    stub, address = server
    stub.script = ["drop"] * 100
    found, reasons = judge_all(judge(address), CASES, tmp_path / "j.jsonl")
    assert verdicts(found) == [None] * 6
    assert len(stub.candidates) == 3
    assert "3 answers in a row; run again later" in reasons[-1]


def test_the_key_is_nowhere(server, tmp_path, capfd, caplog):
    """Also where the server says it back in an error, or the client would log it."""
    stub, address = server
    caplog.set_level(0)
    echo = json.dumps({"error": {"message": f"who is {KEY}?", "code": KEY}})
    headers = {"X-Request-Id": KEY}
    stub.script = [(500, headers, echo), (429, headers, echo), reply("All is in it.\nVERDICT: True")]
    one = judge(address)
    found, reasons = judge_all(one, CASES[:3], tmp_path / "j.jsonl")
    assert verdicts(found) == [None, None, True]
    seen = [repr(found), repr(reasons), repr(one), str(one.rules), one.identity, (tmp_path / "j.jsonl").read_text()]
    for step in ((401, headers, echo), (422, headers, echo), "drop", "hang", (200, headers, KEY)):
        stub.script = [step]
        with pytest.raises((EvaluationError, OutOfBudget, Unjudged)) as caught:
            one.judge(case("new"))
        seen.append("".join(traceback.format_exception(caught.value)))
    captured = capfd.readouterr()
    for text in (*seen, captured.out, captured.err, caplog.text):
        assert KEY not in text


@pytest.mark.parametrize("variable", ["sk-0123-not-for-anyone", "a b", "7"])
def test_a_key_in_place_of_its_variable_is_not_repeated(variable):
    with pytest.raises(ConfigError, match="key_variable: give the name of an environment variable") as caught:
        EndpointJudge("tiny", "http://127.0.0.1:1/v1", variable)
    assert variable not in str(caught.value)


@pytest.mark.parametrize("value", [None, "", "two words", "schlüssel"])
def test_a_key_that_cannot_be(monkeypatch, value):
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(ConfigError, match=f"key_variable={VARIABLE}") as caught:
        judge("http://127.0.0.1:1/v1")
    assert not value or value not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    ["ftp://x", "localhost:80", "https://me:secret@x/v1", "https://x/v1?key=secret", "", "http://[", "http://x:port"],
)
def test_an_address_that_cannot_be(monkeypatch, address):
    monkeypatch.setenv(VARIABLE, KEY)
    with pytest.raises(ConfigError, match="endpoint: ") as caught:
        judge(address)
    assert "secret" not in str(caught.value)


def test_no_key_is_sent_where_none_is_named(server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-another-endpoint")
    monkeypatch.setenv("OPENAI_ORG_ID", "org-of-another-endpoint")
    stub, address = server
    assert EndpointJudge("tiny", address, "").judge(CASES[1]).faithful
    assert "Authorization" not in stub.headers[0]
    assert "another-endpoint" not in str(stub.headers[0])


def test_without_the_client_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match=r"judge=openai:tiny needs openai; run pip install 'difft.*judge"):
        judge("http://127.0.0.1:1/v1")


@pytest.mark.parametrize("row", ['{"answers_of": "x"}', '{"key": [], "verdict": "faithful", "reasoning": ""}'])
def test_a_file_of_something_else_is_refused(row, tmp_path):
    (tmp_path / "j.jsonl").write_text(f"{row}\n")
    with pytest.raises(CheckpointError, match="line 1 is not a judgment; choose another with --judgments"):
        judge_all(OverlapJudge(0.5), CASES, tmp_path / "j.jsonl")


@pytest.mark.parametrize(("answer", "faithful", "words"), [
    ("The cat sat.", True, "100% of 2 content words are given."),
    ("A cat sat on a mat", False, "67% of 3 content words are given; not in it: mat."),
    ("It was.", False, "no content words"),
])  # fmt: skip
def test_overlap(answer, faithful, words):
    found = OverlapJudge(0.8).judge(case(answer))
    assert found.faithful is faithful
    assert words in found.reasoning
    assert OverlapJudge(0.5).judge(case("A cat sat on a mat")).faithful
    assert OverlapJudge(0.2).judge(case("One cat ran far away home")).faithful  # a fifth, and 1 - 4/5 is a little less
    assert OverlapJudge(1.0).judge(case("1,500 dogs", document="Of 1,500 DOGS.")).faithful
    with pytest.raises(ConfigError, match="overlap_threshold=0"):
        OverlapJudge(0)


@pytest.fixture
def nli(tmp_path):
    """Save a classifier with a tokenizer of whole words."""

    def save(labels=("contradiction", "Entailment", "neutral")):
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "dog", "ran", "on", "mat", ",", ".", *"abc"]
        backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=32, num_labels=len(labels), id2label=dict(enumerate(labels)),
        )  # fmt: skip
        BertForSequenceClassification(config).save_pretrained(tmp_path / "nli")
        names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(tmp_path / "nli")
        return str(tmp_path / "nli")

    return save


def test_nli_asks_for_every_sentence_in_every_window(nli, monkeypatch):
    one = NliJudge(nli())
    assert (one.entailment, one.window_tokens) == (1, 32)
    seen = []

    def planted(input_ids, **_):
        """Entails where a row holds all the words of its sentence in its document."""
        logits = torch.zeros(len(input_ids), 3)
        for row, ids in enumerate(input_ids.tolist()):
            first = ids.index(3)
            premise, hypothesis = ids[1:first], ids[first + 1 : ids.index(3, first + 1)]
            seen.append((tuple(premise), tuple(hypothesis)))
            logits[row, 1 if set(hypothesis) <= set(premise) else 2] = 3.0
        return type("Out", (), {"logits": logits})

    monkeypatch.setattr(one, "model", planted)
    monkeypatch.setattr(nli_judge, "_BATCH_WINDOWS", 2)
    document = "the dog ran . " * 12 + "the cat sat on a mat . " + "the dog ran . " * 12
    assert one.judge(case("the cat sat .", document=document)).faithful
    assert len(set(seen)) > 3
    assert all(len(premise) + len(hypothesis) + 3 <= 32 for premise, hypothesis in seen)
    found = one.judge(case("the cat sat . the cat ran c .", document=document))
    assert not found.faithful
    assert found.reasoning.splitlines()[0].startswith("entailed (0.9")
    assert found.reasoning.splitlines()[1].startswith("NOT entailed (0.0")
    seen.clear()
    one.judge(case("the cat", document=document, question="a b"))
    assert len({hypothesis for _, hypothesis in seen}) == 1
    assert len(seen[0][1]) == 4  # question and answer


def test_nli_on_the_model_itself(nli):
    folder = nli()
    one = NliJudge(folder)
    batch = one.tokenizer("the cat sat", "the dog", return_tensors="pt")
    expected = one.model(**batch).logits.softmax(-1)[0]
    found = one.judge(case("the dog", document="the cat sat"))
    assert found.faithful == (int(expected.argmax()) == 1)
    assert f"({expected[1]:.2f})" in found.reasoning


def test_nli_that_cannot_be(nli, tmp_path):
    with pytest.raises(ConfigError, match="its labels are yes, not_entailment, none of them entailment"):
        NliJudge(nli(("yes", "not_entailment")))
    with pytest.raises(ConfigError, match="no such folder"):
        NliJudge(str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="cannot be opened as a sequence classifier"):
        NliJudge(str(tmp_path / "empty"))


def test_a_sentence_beyond_the_window_has_no_verdict(nli, tmp_path):
    found, reasons = judge_all(NliJudge(nli()), [case("the cat " * 15)], tmp_path / "j.jsonl")
    assert found == [None]
    assert "a sentence longer than the model's window of 32 tokens" in reasons[0]
