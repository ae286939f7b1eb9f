"""Loss and retrieval of any model on any text: an oracle, a guesser, and windows counted by hand."""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from difftransformer.data.tokenizer import Tokenizer, byte_tokenizer
from difftransformer.errors import ConfigError, DataError
from difftransformer_lab.evals.engine import run_task
from difftransformer_lab.evals.tasks import needle, perplexity
from tests.support.fakes import Guesser, Oracle, TensorModel, Uniform

NEEDLES = {"lengths": [240, 320], "needles": [[1, 1], [4, 2]], "depths": [0.0, 0.5, 1.0], "documents": 4, "digits": 3}


@pytest.fixture
def text(toy_text, tmp_path):
    """One file of the toy corpus."""
    path = tmp_path / "text.txt"
    path.write_text("".join(file.read_text() for file in sorted(toy_text.glob("*.txt"))[:8]))
    return str(path)


def test_the_oracle_finds_every_needle(text):
    model = Oracle(byte_tokenizer())
    task = needle.NeedleTask(needle.Options(text=text, **NEEDLES), model)
    scores = run_task(model, task)
    assert {row.value for row in scores.measurements} == {1.0}
    cells = [row for row in scores.measurements if "depth" in row.at]
    assert [row.n for row in cells] == [4] * 6 + [8] * 6
    assert len(scores.items) == 2 * 4
    assert sum(item.weight for item in scores.items) == 2 * 3 * 4 * (1 + 2)


def test_a_guesser_finds_them_by_chance(text):
    model = Guesser(byte_tokenizer(), 1)
    options = needle.Options(text=text, lengths=[200], depths=[0.5], documents=400, digits=1)
    whole = run_task(model, needle.NeedleTask(options, model)).measurements[0]
    assert whole.n == 400
    assert abs(whole.value - 0.1) < 3 * whole.standard_error
    assert whole.standard_error == pytest.approx(math.sqrt(0.1 * 0.9 / 400), rel=0.2)


def test_cells_differ_in_length_and_depth_alone(text):
    """The same city, number and haystack; the answer where the cell says; length for prompt and answer together."""
    task = needle.NeedleTask(needle.Options(text=text, lengths=[200, 320], documents=2), Oracle(byte_tokenizer()))
    rows = [bytes(id for id in request.prompt[1:]).decode() for request in task.requests]
    assert [len(request.prompt) + request.tokens + 1 for request in task.requests] == [200] * 10 + [320] * 10
    for document in range(2):
        chosen = rows[document::2]
        needles = {re.search(r"\nThe special magic (.+) number is: (\d{7})", row).groups() for row in chosen}
        assert len(needles) == 1
        haystacks = [re.sub(r"\nThe special magic .+ number is:( \d{7})?", "", row) for row in chosen]
        longest = max(haystacks, key=len)
        for haystack in haystacks:  # a line end may stand where the needle needed one
            assert sum(a != b for a, b in zip(haystack, longest, strict=False)) <= 2
        for row, haystack, depth in zip(chosen, haystacks, [0.0, 0.25, 0.5, 0.75, 1.0] * 2, strict=True):
            assert row.index("\nThe special magic") / len(haystack) == pytest.approx(depth, abs=0.1)


def chatting(template):
    made = byte_tokenizer()
    return Tokenizer(made.backend, chat_template=template)


def test_a_chat_models_prompt(text):
    tokenizer = chatting("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>")
    options = needle.Options(text=text, lengths=[600], depths=[0.5], documents=2, prompt="chat")
    task = needle.NeedleTask(options, Oracle(tokenizer))
    for request in task.requests:
        prompt = tokenizer.decode(request.prompt)
        assert prompt.startswith("<user>Somewhere in the text")
        question = re.search(r"\n\nQuestion: What is the special magic number for (.+)\?</s><assistant>$", prompt)
        assert len(re.findall(rf"\nThe special magic {question[1]} number is: \d{{7}}\n", prompt)) == 1
        assert len(request.prompt) + request.tokens <= 600
    answers = [tokenizer.encode(f"It is {number}, I think") for _, _, number in task._trials]
    assert task.score(answers).measurements[0].value == 1
    assert task.score([tokenizer.encode("1234567")] * 2).measurements[0].value == 0
    with pytest.raises(DataError, match="no chat template"):
        needle.NeedleTask(options, Oracle(byte_tokenizer()))
    with pytest.raises(DataError, match="does not write a user's message as it is"):
        needle.NeedleTask(options, Oracle(chatting("{{ messages[0].content | upper }}")))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lengths": [0]}, "lengths"),
        ({"needles": [[1]]}, "pairs"),
        ({"needles": [[1, 2]]}, "needles"),
        ({"depths": [2.0]}, "depths"),
    ],
)
def test_impossible_grids_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        needle.Options(**fields)


def test_needles_longer_than_the_length(text):
    with pytest.raises(DataError, match="longer than the context"):
        needle.NeedleTask(needle.Options(text=text, lengths=[40]), Oracle(byte_tokenizer()))


class Position(TensorModel):
    """A loss of one for the first target of a window, two for the second, and so on."""

    def __init__(self):
        self.tokenizer = byte_tokenizer()
        self.context_tokens = 100

    def nll(self, input_ids, targets):
        return torch.arange(1, targets.shape[1] + 1, dtype=torch.float64).expand(targets.shape)


def test_a_uniform_model_has_the_entropy_of_its_vocabulary(text):
    model = Uniform(258)
    model.tokenizer = byte_tokenizer()
    scores = run_task(model, perplexity.PerplexityTask(perplexity.Options(text=text, window=64, windows=5), model))
    by_name = {row.name: row for row in scores.measurements if not row.at}
    assert by_name["nll"].value == pytest.approx(math.log(258))
    assert by_name["nll"].standard_error == pytest.approx(0, abs=1e-12)
    assert by_name["bits per byte"].value == pytest.approx(math.log2(258))
    assert {row.at["position"] for row in scores.measurements if row.at} == {1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64}


def test_sliding_windows_score_each_token_once(text):
    """Window 10, stride 4: the first window scores its ten targets, each other its last four."""
    model = Position()
    task = perplexity.PerplexityTask(perplexity.Options(text=text, window=10, stride=4, windows=3), model)
    stream = [*Path(text).read_bytes()]
    assert [list(request.ids) for request in task.requests] == [stream[start : start + 11] for start in (0, 4, 8)]
    scores = run_task(model, task)
    expected = (sum(range(1, 11)) + 2 * sum(range(7, 11))) / (10 + 4 + 4)
    nll = next(row for row in scores.measurements if row.name == "nll")
    assert nll.value == pytest.approx(expected)
    assert [item.weight for item in scores.items if item.name == "nll"] == [10, 4, 4]
    curve = {row.at["position"]: row.value for row in scores.measurements if row.at}
    assert curve == {position: pytest.approx(np.mean(range(1, position + 1))) for position in curve}


def test_impossible_windows_are_refused(text):
    with pytest.raises(ConfigError, match="above the window"):
        perplexity.PerplexityTask(perplexity.Options(text=text, window=8, stride=9), Position())
    with pytest.raises(DataError, match="are needed"):
        perplexity.PerplexityTask(perplexity.Options(text=text, window=10**6), Position())
