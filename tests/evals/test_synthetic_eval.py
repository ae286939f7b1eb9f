"""Accuracy on synthetic tasks: readers of the context, guesses, and a network whose logits are computed once more."""

import json

import numpy as np
import pytest
import torch
import yaml

from difftransformer import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.data import DataConfig, id_tokenizer
from difftransformer.data.synthetic import TASKS
from difftransformer.errors import ConfigError
from difftransformer_lab.cli.main import main
from difftransformer_lab.evals.engine import run_task
from difftransformer_lab.evals.models.causal import CausalLanguageModel
from difftransformer_lab.evals.prompts.texts import TaskContext
from difftransformer_lab.evals.requests import Continuation, Predictions
from difftransformer_lab.evals.tasks.synthetic import Options, SyntheticTask, draw
from difftransformer_lab.results import TaskResult, read_result
from tests.support.answering import answers_to

MQAR = {"vocab_size": 64, "test": [[32, 4, 60], [32, 8, 40]]}


class Reader:
    """Answers each place with what a function of the tokens up to it says."""

    def __init__(self, predict):
        self.predict, self.tokenizer, self.context_tokens = predict, id_tokenizer(64), 1000

    def answer(self, requests):
        for index, request in enumerate(requests):
            yield index, [self.predict(list(request.ids[: place + 1])) for place in request.places]


def value_of(ids):
    """The token after the first occurrence of the last token."""
    return ids[ids.index(ids[-1]) + 1]


def accuracies(predict, **options):
    context = TaskContext(tokenizer=id_tokenizer(64), context_tokens=64)
    scores = run_task(Reader(predict), SyntheticTask(Options(**options), context))
    return {tuple(row.at.values()): row for row in scores.measurements}, scores.items


def test_a_reader_of_the_context_knows_every_answer():
    rows, _ = accuracies(value_of, task="mqar", options=MQAR)
    assert {at: (row.value, row.n, row.units) for at, row in rows.items()} == {
        (): (1.0, 60 * 4 + 40 * 8, 100),
        (4, 32): (1.0, 240, 60),
        (8, 32): (1.0, 320, 40),
    }


def test_guesses_are_right_by_chance():
    """A constant is no value here; the first value is right once in each example, whatever the number of pairs."""
    rows, _ = accuracies(lambda ids: 0, task="mqar", options=MQAR)
    assert {row.value for row in rows.values()} == {0.0}
    rows, items = accuracies(lambda ids: ids[1], task="mqar", options=MQAR)
    assert (rows[4, 32].value, rows[8, 32].value) == (1 / 4, 1 / 8)
    assert {(item.name, item.score, item.weight) for item in items} == {
        ("accuracy pairs 4, length 32", 1.0, 4.0),
        ("accuracy pairs 8, length 32", 1.0, 8.0),
    }


def test_variations_are_settings_of_their_own():
    """A reader of the slot before the last falls with the share of noise, and a reader of the context doesn't."""
    shares = [{"noise_share": 0.1}, {"noise_share": 0.6}]
    noisy = {"task": "noisy-recall", "options": {"length": 32}, "variations": shares}
    rows, _ = accuracies(value_of, **noisy)
    assert [row.value for row in rows.values()] == [1.0, 1.0, 1.0]
    assert list(rows) == [(), (0.1, 32), (0.6, 32)]
    assert rows[0.1, 32].n > 2 * rows[0.6, 32].n  # fewer pairs are left to ask for
    task = SyntheticTask(Options(**noisy, examples=7), TaskContext(tokenizer=id_tokenizer(64), context_tokens=64))
    assert len(task.requests) == 14


def test_the_task_of_a_run():
    """Its options and its seed are taken, and can be changed."""
    data = DataConfig(source="synthetic:mqar", options=MQAR, split_seed=5)
    context = TaskContext(tokenizer=id_tokenizer(64), context_tokens=64, data=lambda: data)
    own = SyntheticTask(Options(), context)
    named = SyntheticTask(Options(task="mqar", options=MQAR, seed=5), context)
    other = SyntheticTask(Options(task="mqar", options=MQAR), context)
    assert own.requests == named.requests != other.requests
    assert len(SyntheticTask(Options(options={"test": [[48, 4, 5]]}), context).requests) == 5


@pytest.mark.parametrize("name", [name for name in TASKS if name != "mqar"])
def test_every_task_asks_for_its_answers(name):
    options = Options(task=name, options={"test_examples": 9}, examples=3)
    task = SyntheticTask(options, TaskContext(tokenizer=id_tokenizer(300), context_tokens=512))
    scores = task.score([list(right) for right in task.scored_by()])
    assert scores.measurements[0].value == 1.0
    assert scores.measurements[0].n == sum(len(request.places) for request in task.requests) > 0
    assert task.score([[-1] * len(request.places) for request in task.requests]).measurements[0].value == 0


@pytest.mark.parametrize(("options", "data", "message"), [
    ({}, None, "task: the model's run was not trained on a synthetic task"),
    ({}, DataConfig(), "task: the model's run was not trained on a synthetic task"),
    ({"task": "mqar"}, None, "synthetic:mqar has 8192 token ids, and the model's vocabulary 66"),
    ({"task": "recall", "options": {"sise": 1}}, None, "options.sise: unknown key"),
])  # fmt: skip
def test_impossible_requests(options, data, message):
    context = TaskContext(tokenizer=id_tokenizer(64), context_tokens=64, data=None if data is None else lambda: data)
    with pytest.raises(ConfigError) as met:
        SyntheticTask(Options(**options), context)
    assert message in str(met.value)


def small_network():
    torch.manual_seed(3)
    config = DiffTransformerConfig(
        vocab_size=66, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=2048, initializer_range=0.5,
    )  # fmt: skip
    return DiffTransformerForCausalLM(config).eval()


def test_predictions_of_a_network():
    """They are the largest logits of a plain forward pass, also where rows are read in parts, and greedy continuations."""
    network = small_network()
    model = CausalLanguageModel(network, id_tokenizer(64))
    rng = np.random.default_rng(0)
    rows = [rng.integers(64, size=length).tolist() for length in (9, 9, 30, 700)]
    requests = [Predictions(tuple(row), tuple(range(len(row)))) for row in rows]
    found = answers_to(model, requests)
    for row, predicted in zip(rows, found, strict=True):
        with torch.no_grad():
            logits = network(input_ids=torch.tensor([row]), use_cache=False).logits[0]
        assert predicted == logits.argmax(-1).tolist()
    few = answers_to(model, [Predictions(tuple(rows[2]), (4, 29))])
    continued = answers_to(model, [Continuation(tuple(rows[2][:5]), 1), Continuation(tuple(rows[2]), 1)])
    assert [[token] for token in few[0]] == continued


def test_from_recipe_to_page(tmp_path, monkeypatch, capsys):
    """`train`, then `eval` of the run: both compute the same accuracy on the same held-out examples, in different ways."""
    monkeypatch.chdir(tmp_path)
    recipe = {
        "name": "tiny",
        "model": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        "data": {
            "source": "synthetic:recall",
            "options": {"vocab_size": 8, "length": 8, "train_on": "answers", "test_examples": 60},
        },
        "training": {
            "steps": 9, "batch_tokens": 256, "context_stages": [[0, 16]], "pack_documents": True, "validate_every": 3,
            "validation_windows": 30, "optimizer": {"learning_rate": 0.02}, "schedule": {"warmup_steps": 5},
        },
        "evaluation": [{"task": "synthetic"}],
    }  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["train", "tiny.yaml", "--out", "run"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [line["validation_accuracy"] for line in lines if "validation_accuracy" in line]
    assert len(logged) == 3
    assert 0.2 < logged[-1] < 1  # of 4 values
    assert main(["eval", "run"]) == 0
    (path,) = (tmp_path / "run" / "evals").glob("*/synthetic.json")
    result = read_result(path, TaskResult)
    assert result.data.name == "recall"
    assert result.measurements[0].n > 60
    assert result.measurements[0].value == pytest.approx(logged[-1], abs=1e-9)
    assert main(["eval", "synthetic", "run", "--out", "again"]) == 0
    assert read_result(tmp_path / "again" / "synthetic.json", TaskResult).measurements == result.measurements
    title, caption, figure = draw([result, result])
    assert (title, len(figure.axes[0].patches)) == ("Synthetic task", 2)
    assert "60 held-out examples of recall" in caption
    capsys.readouterr()


def test_settings_of_recipes(tmp_path, monkeypatch, capsys, fails):
    """What a synthetic source cannot have is refused in one line, with the key."""
    monkeypatch.chdir(tmp_path)
    options = {"vocab_size": 64, "train": [[32, 4, 90]], "test": [[32, 4, 9]]}
    recipe = {
        "name": "tiny", "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        "data": {"source": "synthetic:mqar", "options": options},
        "training": {"steps": 2, "batch_tokens": 128, "context_stages": [[0, 32]], "pack_documents": True},
        "evaluation": [{"task": "synthetic"}],
    }  # fmt: skip
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    for key, value, message in (
        ("data.tokenizer", "byte", "tokenizer=byte: synthetic:mqar has token ids of its own; leave tokenizer out"),
        ("data.source", "synthetic:copy", "no such task; choose one of synthetic:mqar"),
        ("data.source", "python-stdlib", "only a source of the form synthetic:NAME has options"),
        ("training.context_stages", "[[0, 16]]", "examples of synthetic:mqar have up to 32 tokens, and cannot be cut"),
        ("training.pack_documents", "false", "set pack_documents to true"),
        ("training.retrieval", "{share: 0.5}", "needle documents take text"),
    ):
        assert message in fails("train", "tiny.yaml", "--out", "run", "--set", f"{key}={value}")
    assert main(["train", "tiny.yaml", "--dry-run"]) == 0
    assert "diff, 4,240 parameters" in capsys.readouterr().out
    assert main(["train", "tiny.yaml", "--dry-run", "--set", "data.options.vocab_size=128"]) == 0
    assert f"diff, {4240 + 64 * 16:,} parameters" in capsys.readouterr().out  # embeddings of width 16
