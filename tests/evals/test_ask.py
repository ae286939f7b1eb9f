"""One's own questions: exact answers of a model that knows them, choices by the likelihoods that the logits give."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from difftransformer.data import byte_tokenizer
from difftransformer.errors import ConfigError, DataError
from difftransformer_lab.evals.engine import run_task
from difftransformer_lab.evals.models.causal import CausalLanguageModel
from difftransformer_lab.evals.prompts.texts import TaskContext
from difftransformer_lab.evals.tasks.ask import AskTask, Options
from tests.support.answering import Writer
from tests.support.tiny_folders import logits, saved

CAPITALS = {"Portugal": "Lisbon", "Norway": "Oslo", "Peru": "Lima", "Kenya": "Nairobi"}


@pytest.fixture
def file(tmp_path):
    def write(*rows):
        path = tmp_path / "mine.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def capitals(file):
    return file(*({"question": f"Capital of {land}?", "answer": city} for land, city in CAPITALS.items()))


def figures(scores):
    return {row.name: row for row in scores.measurements}


def known(prompt):
    return CAPITALS[prompt.rpartition("Capital of ")[2].partition("?")[0]]


@pytest.mark.parametrize(("write", "share"), [
    (lambda prompt: f" {known(prompt)}\nand more", 1), (lambda prompt: f"\n\n {known(prompt).upper()}.", 1),
    (lambda prompt: f" It is {known(prompt)}", 0), (lambda prompt: " Lima", 0.25), (lambda prompt: "", 0),
])  # fmt: skip
def test_an_answer_is_the_first_line_and_exact(capitals, write, share):
    model = Writer(write)
    task = AskTask(Options(questions=capitals), model)
    scores = run_task(model, task)
    row = figures(scores)["accuracy"]
    assert (row.value, row.n) == (share, 4)
    assert [item.item for item in scores.items] == [f"line {line}" for line in range(1, 5)]
    assert model.prompts[0].endswith("Question: Capital of Portugal?\nAnswer:")
    assert "nll of the answer" not in figures(scores)  # which this model cannot tell


def test_a_template_and_a_chat(capitals):
    model = Writer(lambda prompt: f" {known(prompt)}")
    run_task(model, AskTask(Options(questions=capitals, template="Q: 1 + 1?\nA: 2\nQ: {question}\nA:"), model))
    assert model.prompts[0].endswith("A: 2\nQ: Capital of Portugal?\nA:")
    model.tokenizer.chat_template = "<{{ messages[0]['content'] }}>{% if add_generation_prompt %}!{% endif %}"
    chat = Writer(known, tokenizer=model.tokenizer)
    scores = run_task(chat, AskTask(Options(questions=capitals, prompt="chat"), chat))
    assert chat.prompts[0] == "<Capital of Portugal?>!"
    assert figures(scores)["accuracy"].value == 1


def test_choices_are_weighed_as_the_logits_say(file, tmp_path):
    """Sums of log-likelihoods computed here, token by token."""
    network = saved(tmp_path / "m", "diff", initializer_range=0.3)
    questions = [(f"{n} plus {n}?", [f"{2 * n}", "a hundred and three", "none"]) for n in range(6)]
    path = file(*({"question": text, "answer": choices[n % 3], "choices": choices}
                  for n, (text, choices) in enumerate(questions)))  # fmt: skip
    model = CausalLanguageModel(network, byte_tokenizer())
    scores = run_task(
        model, AskTask(Options(questions=path), TaskContext(tokenizer=byte_tokenizer(), context_tokens=512))
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "m")
    right, per_byte, nats = [], [], []
    for number, (text, choices) in enumerate(questions):
        prompt = [256, *tokenizer(f"Question: {text}\nAnswer:", add_special_tokens=False).input_ids]
        told = []
        for choice in choices:
            ids = torch.tensor([[*prompt, *tokenizer(f" {choice}", add_special_tokens=False).input_ids]])
            log = logits(network, ids).double().log_softmax(-1)[0, :-1]
            told.append(-log.gather(1, ids[0, 1:, None])[len(prompt) - 1 :].sum().item())
        lengths = [len(choice) for choice in choices]
        right.append(min(range(3), key=told.__getitem__) == number % 3)
        per_byte.append(min(range(3), key=lambda one: told[one] / lengths[one]) == number % 3)
        nats.append(told[number % 3])
    found = figures(scores)
    assert 0 < sum(right) < 6
    assert found["accuracy"].value == sum(right) / 6
    assert found["accuracy per byte"].value == sum(per_byte) / 6
    assert found["chance among choices"].value == pytest.approx(1 / 3)
    assert found["nll of the answer"].value == pytest.approx(sum(nats) / 6, rel=1e-5)


def test_questions_of_both_kinds(file, tmp_path):
    network = saved(tmp_path / "m")
    path = file(
        {"question": "One?", "answer": 1, "choices": [1, 2]},
        {"question": "Two?", "answer": "2"},
        {"question": "Three?", "answer": "3", "choices": ["2", "3", "4"]},
    )
    context = TaskContext(tokenizer=byte_tokenizer(), context_tokens=512)
    task = AskTask(Options(questions=path, max_new_tokens=2), context)
    assert len(task.requests) == 6
    found = figures(run_task(CausalLanguageModel(network, byte_tokenizer()), task))
    assert (found["accuracy"].n, found["accuracy per byte"].n, found["nll of the answer"].n) == (3, 2, 3)


@pytest.mark.parametrize(("row", "words"), [
    ({"question": "?"}, 'line 2 has no text in "answer"'),
    ({"question": "?", "answer": "a", "choices": "ab"}, 'line 2: "choices" is not a list'),
    ({"question": "?", "answer": "a", "choices": ["a"]}, "line 2: give two or more different choices"),
    ({"question": "?", "answer": "c", "choices": ["a", "b"]}, "and as the answer 'c' one of them"),
    ({"question": "?", "answer": "a", "choices": ["a", "a"]}, "two or more different choices"),
])  # fmt: skip
def test_a_bad_line_is_named(file, row, words):
    with pytest.raises(DataError, match=words):
        AskTask(Options(questions=file({"question": "?", "answer": "!"}, row)), Writer(str))


def test_options_that_cannot_be(tmp_path):
    with pytest.raises(DataError, match=r"none.jsonl: no such file; name a .jsonl file"):
        AskTask(Options(questions=str(tmp_path / "none.jsonl")), Writer(str))
    with pytest.raises(ConfigError, match=r"questions='': name a \.jsonl file"):
        AskTask(Options(), Writer(str))
    with pytest.raises(ConfigError, match=r"template='Q:': name the place of the question by {question}"):
        Options(template="Q:")
