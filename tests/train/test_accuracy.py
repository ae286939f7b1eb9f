"""Accuracy during training, of models that read the text or write something else, against a count by hand."""

import dataclasses
import json
import math
import random
import re

import pytest
import torch

from difftransformer.data import (
    DataConfig,
    RetrievalMix,
    SourceConfig,
    needle_questions,
    prepare_shards,
    validation_rows,
)
from difftransformer.data.needles import CITIES_SEEN
from difftransformer.data.synthetic import draw_examples, synthetic_task
from difftransformer.errors import DataError
from difftransformer.train import accuracy, read_metrics
from difftransformer.train.accuracy import answer_scores, held_out_answers
from difftransformer.train.parallel import Mesh

MIX = RetrievalMix(share=0.5, min_needles=1, max_needles=3, digits=2)
QUESTION = re.compile(r"\nThe special magic ([A-Z][a-z]+) number is: ?")


class Predictor(torch.nn.Module):
    """Predicts after each token of a row what a function of the row says."""

    def __init__(self, vocab_size, predict):
        super().__init__()
        self.vocab_size, self.predict = vocab_size, predict

    def forward(self, input_ids, use_cache, **positions):
        logits = torch.zeros(*input_ids.shape, self.vocab_size)
        for row, ids in zip(logits, input_ids.tolist(), strict=True):
            predicted = self.predict(ids)
            row[range(len(predicted)), predicted] = 1.0
        return type("Outputs", (), {"logits": logits})


def text_of(ids):
    """Text of a row of bytes: without the token that begins it, and padding."""
    return bytes(token for token in ids if token < 256).decode()


def reader(digits=2):
    """Read the number of the last question from the context, of which `digits` digits are given back."""

    def predict(ids):
        text = text_of(ids)
        last = list(QUESTION.finditer(text))[-1]
        start = text.index(last[0][: len(last[0]) - 1]) + len(last[0])
        number = text[start : start + digits] + "x" * (2 - digits)
        return list((text[: last.end()] + number).encode())

    return predict


def scored(model, shards, training):
    return answer_scores(model, held_out_answers(shards, training, Mesh()), training, Mesh())


@pytest.fixture
def bytes_run(toy_text, toy_recipe, tmp_path):
    config = DataConfig(source=str(toy_text), tokenizer="byte", validation_share=0.3, folder=str(tmp_path))
    shards = prepare_shards(config)
    fields = {"retrieval": MIX, "context_stages": [(0, 256)], "validation_windows": 8, "pack_documents": False}
    return shards, dataclasses.replace(toy_recipe.training, **fields)


def test_needle_questions(bytes_run):
    """Each needle of a document is asked for, by a number of its own; the answer is scored alone."""
    shards, _ = bytes_run
    inputs, targets = needle_questions(
        shards.tokenizer, shards.tokens("validation"), context_tokens=256, mix=MIX, documents=8
    )
    assert inputs.shape == targets.shape == (24, 256)
    for ids, target in zip(inputs.tolist(), targets.tolist(), strict=True):
        text = text_of(ids)
        *needles, question = QUESTION.finditer(text)
        assert len(needles) == 3
        assert {needle[1] for needle in needles} <= set(CITIES_SEEN)
        (asked,) = [needle for needle in needles if needle[1] == question[1]]
        number = text[asked.end() : asked.end() + 2]
        assert text[question.end() :] == number
        scored = [(place, token) for place, token in enumerate(target) if token != -100]
        assert bytes(token for _, token in scored).decode() == f" {number}"
        assert all(ids[place + 1] == token for place, token in scored)


@pytest.mark.parametrize(("digits", "accuracy", "missed"), [(2, 1.0, 0), (1, 0.0, 1)])
def test_accuracy_counts_whole_numbers_and_the_loss_is_the_sum_over_tokens(bytes_run, digits, accuracy, missed):
    """A space and two digits, each with a logit of 1 if the model says it, among 257 others of 0."""
    shards, training = bytes_run
    size = shards.tokenizer.vocab_size
    found = scored(Predictor(size, reader(digits)), shards, training)
    assert found[0] == accuracy
    assert found[1] == pytest.approx(3 * math.log(math.e + size - 1) - (3 - missed), rel=1e-5)


def test_the_first_needle_for_every_question(bytes_run):
    """A model that gives the first number of the text is right once in a document of three needles."""
    shards, training = bytes_run

    def predict(ids):
        text = text_of(ids)
        first, *_, last = QUESTION.finditer(text)
        return list((text[: last.end()] + text[first.end() : first.end() + 2]).encode())

    model = Predictor(shards.tokenizer.vocab_size, predict)
    assert scored(model, shards, training)[0] == pytest.approx(1 / 3)


def test_text_without_questions_has_no_accuracy(bytes_run):
    shards, training = bytes_run
    plain = dataclasses.replace(training, retrieval=None)
    assert held_out_answers(shards, plain, Mesh()) is None


@pytest.mark.parametrize("windows", [5, 1000])
def test_accuracy_on_examples(toy_recipe, windows):
    """Of packed examples, every scored token counts once: a model that knows some values is right as often as they occur."""
    options = {"vocab_size": 32, "train": [[24, 3, 50]], "test": [[16, 2, 40], [24, 4, 30]]}
    shards = prepare_shards(DataConfig(source="synthetic:mqar", options=options))
    training = dataclasses.replace(
        toy_recipe.training, pack_documents=True, retrieval=None, context_stages=[(0, 64)], validation_windows=windows
    )
    asked = []

    def predict(ids):
        """The value of each key's first pair in the same example, if it is even."""
        predicted = []
        for place, token in enumerate(ids):
            before = [at for at in range(place) if ids[at] == token and ids[at + 1] >= 16]
            value = ids[before[-1] + 1] if 0 < token < 16 and before else 0
            predicted.append(value if value % 2 == 0 else 0)
        asked.append(ids)
        return predicted

    found, nll_nats = scored(Predictor(34, predict), shards, training)
    assert nll_nats == pytest.approx(math.log(math.e + 33) - found, rel=1e-5)  # a logit of 1 among others of 0
    held = draw_examples(synthetic_task("synthetic:mqar", options), 0, training=False)
    values = [value for one in held for value in one.targets.ravel().tolist() if value != -100]
    assert len(values) == 40 * 2 + 30 * 4
    if windows == 1000:
        assert found == pytest.approx(sum(value % 2 == 0 for value in values) / len(values))
    else:
        assert len(asked) == 5
        assert 0 < found < 1


def test_metrics_of_a_run(train_toy, tmp_path):
    """Runs with needle documents log an accuracy with every validation, and others log none."""
    train_toy(tmp_path / "with", steps=2, validate_every=1, retrieval=RetrievalMix(share=0.5, digits=2))
    train_toy(tmp_path / "without", steps=2, validate_every=2, retrieval=None)
    logged = read_metrics(tmp_path / "with" / "metrics.jsonl")[1]
    assert len(logged) == 2
    assert all(0 <= line.validation_accuracy < 0.5 for line in logged)
    assert all(line.validation_answer_nll_nats > 0 for line in logged)
    assert [line.validation_accuracy for line in read_metrics(tmp_path / "without" / "metrics.jsonl")[1]] == [None]


def test_questions_that_do_not_fit_the_text_are_refused_before_training(train_toy, tmp_path):
    """In text that is made of digits, every number of three digits occurs, so that none can be asked for."""
    draw = random.Random(5)
    lines = ("".join(draw.choices("0123456789", k=80)) for _ in range(2000))
    (tmp_path / "digits.txt").write_text("\n".join(lines) + "\n")
    source = {"source": str(tmp_path / "digits.txt"), "folder": str(tmp_path / "shards")}
    shards = prepare_shards(DataConfig(**source, tokenizer="byte", validation_share=0.3))
    fields = {"batch_tokens": 4096, "context_stages": [(0, 4096)], "retrieval": RetrievalMix(share=0.5, digits=3)}
    with pytest.raises(DataError, match=r"needle numbers of 3 digits: .* all occur in .* corpus text"):
        train_toy(tmp_path / "run", shards=shards, **fields)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == b""


def test_questions_are_drawn_once(train_toy, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        accuracy, "needle_questions", lambda *words, **by: drawn.append(by) or needle_questions(*words, **by)
    )
    train_toy(tmp_path, steps=3, validate_every=1, retrieval=RetrievalMix(share=0.5, digits=2))
    assert len(read_metrics(tmp_path / "metrics.jsonl")[1]) == 3
    assert len(drawn) == 1


def test_a_mixture_of_examples_has_an_accuracy(train_toy, tmp_path):
    """The share of right next tokens in its validation rows, of the model as it is saved."""
    for name, letter in (("one", 97), ("two", 98)):
        rows = ({"input_ids": [letter] * (3 + index % 5)} for index in range(40))
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    sources = [SourceConfig(source=str(tmp_path / f"{name}.jsonl")) for name in ("one", "two")]
    shards = prepare_shards(
        DataConfig(mixture=sources, tokenizer="byte", validation_share=0.3, folder=str(tmp_path / "shards"))
    )
    fields = {"steps": 2, "pack_documents": True, "context_stages": [(0, 64)], "validation_windows": 4}
    model = train_toy(tmp_path / "run", shards=shards, retrieval=None, **fields).eval()
    right = asked = 0
    for ids, targets, positions in validation_rows(shards, 64, 4).tolist():
        starts = [place for place, position in enumerate(positions) if position == 0]
        for start, end in zip(starts, [*starts[1:], 64], strict=True):
            predicted = model(torch.tensor([ids[start:end]])).logits[0].argmax(-1).tolist()
            pairs = [pair for pair in zip(predicted, targets[start:end], strict=True) if pair[1] != -100]
            right, asked = right + sum(met == target for met, target in pairs), asked + len(pairs)
    (line,) = read_metrics(tmp_path / "run" / "metrics.jsonl")[1]
    assert line.validation_accuracy == pytest.approx(right / asked)
