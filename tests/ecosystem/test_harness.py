"""Tasks of lm-eval: the scores are those that the logits give."""

import json
import math

import pytest
import torch

from difftransformer.data.tokenizer import byte_tokenizer
from difftransformer_lab.cli.main import main
from difftransformer_lab.evals.tasks.harness import _items
from difftransformer_lab.results import TaskResult, read_result
from tests.support.tiny_folders import logits, saved, stock

pytestmark = [
    # lm-eval and datasets leave a file of a task open
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
]
QUESTIONS = [
    {"question": f"{i} plus one makes", "choices": ["one", "twenty-two", "a hundred and three"], "answer": i % 3}
    for i in range(8)
]
TASKS = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
"""
CHOICE = """doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
metadata: {version: 1.5}
"""
TEXT = """doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]
"""


@pytest.fixture
def tasks(tmp_path):
    folder = tmp_path / "tasks"
    folder.mkdir()
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, kind, rest in (("tiny_choice", "multiple_choice", CHOICE), ("tiny_text", "loglikelihood_rolling", TEXT)):
        text = TASKS.format(name=name, file=file, kind=kind) + rest
        (folder / f"{name}.yaml").write_text(text)
    return folder


def log_likelihood(network, before, after):
    """log p(after | before) in nats, byte by byte; an empty `before` is the end of text."""
    encode = byte_tokenizer().encode
    context = encode(before) or [256]
    ids = torch.tensor([context + encode(after)])
    log = logits(network, ids).double().log_softmax(-1)[0, :-1]
    return log.gather(1, ids[0, 1:, None])[len(context) - 1 :].sum().item()


def expected(network):
    """Accuracy and bits a byte, from the logits."""
    right, nats, size = 0, 0.0, 0
    for document in QUESTIONS:
        scores = [log_likelihood(network, document["question"], " " + choice) for choice in document["choices"]]
        right += scores.index(max(scores)) == document["answer"]
        nats -= log_likelihood(network, "", document["question"])
        size += len(document["question"].encode())
    return right / len(QUESTIONS), nats / size / math.log(2)


@pytest.mark.parametrize("kind", ["diff", "diffllama"])
def test_the_command_scores_what_the_logits_give(kind, needs, tasks, tmp_path, capsys):
    needs("lm_eval")
    network = stock(tmp_path / "m") if kind == "diffllama" else saved(tmp_path / "m", kind)
    words = ["eval", "harness", str(tmp_path / "m"), "--tasks", "tiny_choice,tiny_text", "--include-path", str(tasks)]
    assert main([*words, "--batch-size", "4", "--out", str(tmp_path / "r")]) == 0
    out = capsys.readouterr().out
    assert "tiny_choice" in out
    result = read_result(tmp_path / "r" / "harness.json", TaskResult)
    by_name = {(row.at["task"], row.name): row for row in result.measurements}
    accuracy, bits = expected(network)
    choice, text = by_name["tiny_choice", "acc"], by_name["tiny_text", "bits_per_byte"]
    assert choice.value == accuracy
    assert choice.standard_error == pytest.approx(math.sqrt(accuracy * (1 - accuracy) / 7))
    assert text.value == pytest.approx(bits, rel=1e-5)
    assert (choice.n, choice.better, choice.at) == (8, "higher", {"task": "tiny_choice", "version": "1.5", "shots": 0})
    assert (text.better, text.unit) == ("lower", "bits_per_byte")
    assert [item.score for item in result.items if item.name == "acc tiny_choice"].count(1.0) == accuracy * 8
    assert result.data.name.startswith("lm-eval 0.4")
    assert result.seed == 1234
    assert main([*words, "--limit", "3", "--out", str(tmp_path / "three")]) == 0
    assert {row.n for row in read_result(tmp_path / "three" / "harness.json", TaskResult).measurements} == {3}


def test_rows_are_cut_to_the_context_that_is_asked_for(needs, tasks, tmp_path):
    """lm-eval scores a long text in windows, each with the last token before it."""
    needs("lm_eval")
    network = saved(tmp_path / "m", "diff")
    words = ["eval", "harness", str(tmp_path / "m"), "--tasks", "tiny_text", "--include-path", str(tasks)]
    out = ["--out", str(tmp_path / "r")]
    assert main([*words, "--context-tokens", "8", *out]) == 0
    nats = size = 0
    for text in (document["question"] for document in QUESTIONS):
        assert len(text) == 16
        nats -= log_likelihood(network, "", text[:8]) + log_likelihood(network, text[7], text[8:])
        size += len(text)
    (row,) = read_result(tmp_path / "r" / "harness.json", TaskResult).measurements
    assert row.value == pytest.approx(nats / size / math.log(2), rel=1e-5)
    assert main([*words, *out]) == 0  # other questions, so a result of its own
    (path,) = (tmp_path / "r").glob("harness-*.json")
    (whole,) = read_result(path, TaskResult).measurements
    assert whole.value == pytest.approx(expected(network)[1], rel=1e-5)
    assert whole.value != pytest.approx(row.value, rel=1e-3)


def test_a_perplexity_has_no_items():
    """As in LAMBADA, where lm-eval keeps the log-likelihood of each answer and gives exp(-mean): the greater, the better."""
    samples = [
        {"doc_id": index, "filter": "none", "metrics": ["perplexity", "acc"], "perplexity": -2.5, "acc": index}
        for index in range(2)
    ]
    higher = {"lambada_openai": {"perplexity": False, "acc": True}}
    assert _items({"samples": {"lambada_openai": samples}, "higher_is_better": higher}, 0) == [
        {"name": "acc lambada_openai, 0 shots", "item": "document 0", "score": 0.0},
        {"name": "acc lambada_openai, 0 shots", "item": "document 1", "score": 1.0},
    ]


def test_what_is_wrong_is_said_on_one_line(needs, tasks, tmp_path, monkeypatch, capsys):
    needs("lm_eval")
    monkeypatch.chdir(tmp_path)
    saved(tmp_path / "m")

    def fails(*words):
        capsys.readouterr()
        assert main(["eval", "harness", *map(str, words)]) == 2
        return capsys.readouterr().err.strip().splitlines()[-1]

    local = ["--include-path", tasks]
    assert "tiny_texts: lm-eval cannot run it" in fails(tmp_path / "m", "--tasks", "tiny_texts", *local)
    assert "no such folder" in fails(tmp_path / "none", "--tasks", "tiny_text", *local)
    assert "limit=0: give at least 1" in fails(tmp_path / "m", "--tasks", "tiny_text", "--limit", 0, *local)
    assert "--include-path" in fails(tmp_path / "m", "--tasks", "tiny_text", "--include-path", tmp_path / "none")
    (tasks / "questions.jsonl").unlink()
    assert "tiny_text: lm-eval cannot run it" in fails(tmp_path / "m", "--tasks", "tiny_text", *local)
