"""Many-shot classification: what is shown, who scores what, which labels can be reached, and what does not fit."""

from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, normalizers, pre_tokenizers

from difftransformer.data import Tokenizer, byte_tokenizer, train_bpe
from difftransformer.errors import DataError, EvaluationError
from difftransformer_lab.evals import CausalLanguageModel
from difftransformer_lab.evals.engine import run_task
from difftransformer_lab.evals.models import causal
from difftransformer_lab.evals.prompts.demonstrations import PromptForm
from difftransformer_lab.evals.requests import Choice
from difftransformer_lab.evals.sets.labelled import Example
from difftransformer_lab.evals.tasks.icl import Options, ShotsTask
from tests.support.classification import Reader, figures, truth, write_labelled

LABELS = ("new", "new york", "new york city", "rome")


@pytest.fixture
def files(tmp_path):
    """40 texts a label to show, but 3 of one of them; 60 a label to ask about. A text tells its label."""
    shown = dict.fromkeys(LABELS, 40) | {"rome": 3}
    return {
        "train_file": write_labelled(tmp_path / "train.jsonl", shown),
        "test_file": write_labelled(tmp_path / "test.jsonl", dict.fromkeys(LABELS, 60)),
    }


def test_the_oracle_is_always_right(files):
    model = Reader(truth, LABELS)
    scores = run_task(model, ShotsTask(Options(**files, demonstrations=[0, 5, 40], items=30, draws=2), model))
    found = figures(scores, "accuracy")
    assert [(row.value, row.standard_error, row.n) for row in found] == [(1.0, 0.0, 30)] * 3
    assert [row.at["demonstrations"] for row in found] == [0, 5, 40]
    assert [row.value for row in figures(scores, "accuracy of a draw")] == [1.0] * 6
    assert [item.weight for item in scores.items] == [2.0] * 3 * 30
    (chance,) = figures(scores, "chance")
    assert (chance.value, chance.n) == (0.25, 4)


def test_a_uniform_model_is_right_by_chance(files):
    rng = np.random.default_rng(0)
    model = Reader(lambda prompt: LABELS[rng.integers(4)], LABELS)
    scores = run_task(model, ShotsTask(Options(**files, shots=[1, 2, 3], items=240), model))
    for row in figures(scores, "accuracy"):
        assert row.standard_error == pytest.approx((row.value * (1 - row.value) / 240) ** 0.5)
        assert abs(row.value - 0.25) < 2 * row.standard_error
        assert row.value > 0.1


def test_several_draws_of_one_item_are_one_observation(files):
    """Half of the items right in every draw, the others in the first of two alone."""
    model = Reader(truth, LABELS)
    task = ShotsTask(Options(**files, shots=[1], items=20, draws=2), model)
    assert len({request.prompt for request in task.requests}) == 40
    (right,) = {tuple(sorted(LABELS).index(item.label) for item in task.items)}
    wrong = [(index + 1) % 4 if place >= 10 else index for place, index in enumerate(right)]
    scores = task.score([*right, *wrong])
    (row,) = figures(scores, "accuracy")
    assert (row.value, row.n) == (0.75, 20)
    assert row.standard_error == pytest.approx(np.std([1.0] * 10 + [0.5] * 10, ddof=1) / 20**0.5)
    assert [row.value for row in figures(scores, "accuracy of a draw")] == [1.0, 0.5]


def test_what_is_shown(files):
    """The form written out, one of each class in a round, more shots after fewer, the same before every item."""
    model = Reader(truth, LABELS)
    task = ShotsTask(Options(**files, shots=[1, 2, 5], items=6, seed=3), model)
    blocks, prompts = {}, [model.tokenizer.decode(request.prompt) for request in task.requests]
    for place, prompt in enumerate(prompts):
        *shown, question = prompt.removeprefix("<|endoftext|>").split("\n==\n")
        assert question == f"Text: {task.items[place % 6].text}\nLabel:"
        assert blocks.setdefault(place // 6, shown) == shown
    ones = [[line.partition("\nLabel: ")[2] for line in shown] for shown in blocks.values()]
    assert [len(labels) for labels in ones] == [4, 8, 4 * 3 + 3 * 2]  # one class has 3 examples
    assert all(sorted(ones[2][begin : begin + 4]) == sorted(LABELS) for begin in (0, 4, 8))
    assert ones[2].count("rome") == 3
    assert all(line.endswith(f" of {label}\nLabel: {label}") for line, label in zip(blocks[2], ones[2], strict=True))
    assert len(set(blocks[2])) == 18
    assert blocks[1][:4] == blocks[0]
    assert blocks[2][:8] == blocks[1]
    assert {item.label for item in task.items[:4]} == set(LABELS)
    other = ShotsTask(Options(**files, shots=[1, 2, 5], items=6, seed=4), model)
    assert not {request.prompt for request in other.requests} & {request.prompt for request in task.requests}


def test_tokens_are_those_of_the_whole_text(files):
    texts = [f"Text: {word} of new york\nLabel: new york\n==\n" for word in ("some", "words", "here")] * 20
    tokenizer = train_bpe(texts, 400)
    model = Reader(truth, LABELS, tokenizer=tokenizer)
    task = ShotsTask(Options(**files, shots=[2], items=5), model)
    for request in task.requests:
        text = tokenizer.decode(request.prompt[1:])
        for label, option in zip(task.labels, request.options, strict=True):
            assert list(request.prompt[1:] + option) == tokenizer.encode(f"{text} {label}\n")
            parts = [request.prompt[place : place + len(option)] for place in range(len(request.prompt))]
            assert text.count(f" {label}\n") == parts.count(option)


def wanting(monkeypatch, tokenizer, label):
    """A model whose next token is always the next one of a label."""
    target = []

    class Wanting:
        def __init__(self, model, enabled, whole):
            pass

        def start(self):
            pass

        def next_logits(self, path):
            logits = torch.zeros(tokenizer.vocab_size)
            logits[target[len(path) - 1]] = 1.0
            return logits

    monkeypatch.setattr(causal, "PrefixCache", Wanting)
    network = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: None))
    network.eval = lambda: network
    model = CausalLanguageModel(network, tokenizer, context_tokens=1000)
    left = "Label:"
    target[:] = tokenizer.encode(f"{left} {label}\n")[len(tokenizer.encode(left)) :]
    return model


@pytest.mark.parametrize("label", LABELS)
def test_every_label_can_be_reached(label, monkeypatch):
    tokenizer = byte_tokenizer()
    form = PromptForm(tokenizer, LABELS, ("Text", "Label"))
    model = wanting(monkeypatch, tokenizer, label)
    assert list(model.answer([Choice((1,), form.options)])) == [(0, LABELS.index(label))]


def word_tokenizer(words, **parts):
    backend = tokenizers.Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    for name, part in parts.items():
        setattr(backend, name, part)
    return Tokenizer(backend, end_of_text="<eot>", pad="<eot>")


def test_labels_that_a_tokenizer_cannot_tell_apart():
    words = ["<unk>", "<eot>", "text", "label", ":", "a", "may", "june"]
    lower = word_tokenizer(words, normalizer=normalizers.Lowercase())
    with pytest.raises(DataError, match=r"the labels 'May' and 'may' have the same tokens \[6\]; rename one"):
        PromptForm(lower, ["june", "May", "may"], ("Text", "Label"))
    prefix = "the label 'may', its line end included, is a prefix of the label 'may june' and could"
    with pytest.raises(DataError, match=prefix):
        PromptForm(lower, ["may june", "june", "may"], ("Text", "Label"))


def test_a_tokenizer_that_joins_prompt_and_label():
    vocabulary = {character: n for n, character in enumerate("<>abelxtTL:= \n")}
    backend = tokenizers.Tokenizer(models.BPE({**vocabulary, "e": 90, ": ": 91, "<eot>": 92}, [(":", " ")]))
    tokenizer = Tokenizer(backend, end_of_text="<eot>", pad="<eot>")
    with pytest.raises(DataError, match=r"does not split .*before ' a\\n', so a prompt that ends there"):
        PromptForm(tokenizer, ["a", "b"], ("T", "L"))


def test_what_fits_into_the_context(files):
    """Without shots named they double up to the context's end; the longest prompt and label just fit, one more would not."""

    def task(context_tokens, **options):
        model = Reader(truth, LABELS, context_tokens=context_tokens)
        return ShotsTask(Options(**files, items=8, **options), model)

    longest = max(len(option) for option in task(10**6, shots=[1]).requests[0].options)
    whole = task(10**6, shots=[7]).requests
    context_tokens = max(len(request.prompt) for request in whole) + longest
    sizes = [(at["shots"], at["demonstrations"]) for at in task(context_tokens).sizes]
    assert sizes == [(1, 4), (2, 8), (4, 15), (7, 24)]
    assert [request.prompt for request in task(context_tokens).requests[-8:]] == [request.prompt for request in whole]
    assert [at["shots"] for at in task(context_tokens - 1).sizes] == [1, 2, 4, 6]
    assert [at["shots"] for at in task(10**6).sizes] == [1, 2, 4, 8, 16, 32, 40]  # all there are
    most = (
        rf"shots=8: .* context of {context_tokens} tokens; at most 24 demonstrations do, 7 of each class; ask for fewer"
    )
    with pytest.raises(EvaluationError, match=most):
        task(context_tokens, shots=[1, 8])
    with pytest.raises(EvaluationError, match=r"demonstrations=25: .*at most 24 demonstrations do"):
        task(context_tokens, demonstrations=[25, 3])
    assert task(context_tokens, demonstrations=[24, 3]).sizes == [{"demonstrations": 24}, {"demonstrations": 3}]
    with pytest.raises(EvaluationError, match=r"shots=1: .*at most 0 demonstrations do"):
        task(60)
    with pytest.raises(EvaluationError, match=r"longest test item with its answer takes more than the .* 30 tokens"):
        task(30, demonstrations=[0])


@pytest.mark.parametrize(("options", "error", "words"), [
    ({"shots": [41]}, EvaluationError, "shots=41: the largest class has 40 training examples"),
    ({"demonstrations": [124]}, EvaluationError, "demonstrations=124: there are 123 training examples"),
    ({"items": 241}, DataError, "items=241: train.jsonl, test.jsonl has 240 test examples"),
])  # fmt: skip
def test_what_the_data_do_not_have_is_refused(options, error, words, files):
    with pytest.raises(error, match=words):
        ShotsTask(Options(**files | options), Reader(truth, LABELS))


def test_words_of_the_sets(files):
    assert Options().words() == ("Question", "Type")
    assert Options(data="clinc150", label_word="Intent").words() == ("utterance", "Intent")
    assert Options(**files).words() == ("Text", "Label")


def test_equal_examples_are_not_confused():
    """A demonstration's tokens are found by its text and label, not by its place."""
    form = PromptForm(byte_tokenizer(), ("x", "y"), ("T", "L"))
    shown = [Example("a", "x"), Example("a", "y")]
    assert form.tokenizer.decode(form.demonstrations(shown)[1:]) == "T: a\nL: x\n==\nT: a\nL: y\n==\n"
