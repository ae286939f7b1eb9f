"""Validation loss: uniform model, parts, and the sum written out."""

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import normalizers

from difftransformer.data import Tokenizer, byte_tokenizer
from difftransformer.errors import ConfigError, DataError
from difftransformer_lab.evals import TaskContext, run_task
from difftransformer_lab.evals.engine import task_sha256
from difftransformer_lab.evals.tasks.perplexity import Options, PerplexityTask
from difftransformer_lab.results import Measurement
from tests.support.fakes import TensorModel


def drawn(shards, **options):
    where = TaskContext(tokenizer=shards.tokenizer, context_tokens=100, validation=lambda: shards.tokens("validation"))
    return PerplexityTask(Options(text="validation", **options), where)


def scored(model, shards, **options):
    """Scores with the windows spread over the held-out text, as a study asks."""
    return run_task(model, drawn(shards, spread=True, **options))


def figures(scores, name) -> list[Measurement]:
    return [row for row in scores.measurements if row.name == name]


def test_a_uniform_model(uniform, toy_shards):
    result = scored(uniform, toy_shards, windows=6)
    (nll,), (bits,) = figures(result, "nll"), figures(result, "bits per byte")
    assert nll.value == pytest.approx(math.log(400), rel=1e-12)
    (perplexity,) = figures(result, "perplexity")
    assert perplexity.value == pytest.approx(400, rel=1e-12)
    assert perplexity.better is None
    # Tokens and bytes counted from the windows' targets, the ends of text left out.
    stream = np.asarray(toy_shards.tokens("validation")[:]).astype(np.int64)
    fitting = (len(stream) - 1) // 100
    count = tokens = 0
    for index in range(6):
        start = index * fitting // 6 * 100
        targets = stream[start + 1 : start + 101]
        text = targets[targets != toy_shards.tokenizer.end_of_text]
        count += len(toy_shards.tokenizer.decode(text).encode())
        tokens += len(text)
    assert sum(item.weight for item in result.items if item.name == "nll") == tokens < 600
    assert sum(item.weight for item in result.items if item.name == "bits per byte") == count
    assert bits.value == pytest.approx(tokens * math.log2(400) / count, rel=1e-12)


class Sloped(TensorModel):
    """A loss that tells where it was: position plus a hundredth of the target."""

    def nll(self, input_ids, targets):
        return torch.arange(targets.shape[1]).expand(targets.shape) + 0.01 * targets


def test_parts_add_up(toy_shards):
    result = scored(Sloped(), toy_shards, windows=6, position_buckets=7)
    (nll,), buckets = figures(result, "nll"), figures(result, "nll by position")
    edges = [(row.at["start"], row.at["end"]) for row in buckets]
    stream = np.asarray(toy_shards.tokens("validation")[:]).astype(np.int64)
    starts = [index * ((len(stream) - 1) // 100) // 6 * 100 + 1 for index in range(6)]
    text = np.array([stream[start : start + 100] != toy_shards.tokenizer.end_of_text for start in starts])
    assert 0 < (~text).sum() < 20  # separators
    tokens = [int(text[:, start:end].sum()) for start, end in edges]
    total = sum(row.value * count for row, count in zip(buckets, tokens, strict=True))
    assert total == pytest.approx(nll.value * text.sum(), rel=1e-9)
    for row in figures(result, "nll") + figures(result, "bits per byte"):
        items = [item for item in result.items if item.name == row.name]
        assert len(items) == 6
        assert sum(item.score for item in items) / sum(item.weight for item in items) == pytest.approx(row.value)
    assert edges[0][0] == 0
    assert edges[-1][1] == 100
    assert all(a[1] == b[0] for a, b in pairwise(edges))
    assert len(edges) == 7
    # Positions rise by one a token, targets are worth at most 4: a bucket's mean lies beside its middle.
    for row, (start, end) in zip(buckets, edges, strict=True):
        middle = (start + end - 1) / 2
        assert middle <= row.value <= middle + 4
    assert figures(scored(Sloped(), toy_shards, windows=6), "nll by position") == []


def test_the_error_of_perplexity_is_that_of_a_small_change_of_loss(toy_shards):
    result = scored(Sloped(), toy_shards, windows=6, window=10)
    (nll,), (perplexity,) = figures(result, "nll"), figures(result, "perplexity")
    step = 1e-6 * nll.standard_error
    expected = (math.exp(nll.value + step) - math.exp(nll.value - step)) / (2 * step) * nll.standard_error
    assert perplexity.standard_error == pytest.approx(expected, rel=1e-4)


def test_a_loss_without_a_finite_perplexity(toy_shards):
    class Hopeless(TensorModel):
        def nll(self, input_ids, targets):
            return torch.full(targets.shape, 1000.0, dtype=torch.float64)

    assert figures(scored(Hopeless(), toy_shards, windows=2), "perplexity") == []


def test_more_buckets_than_positions(toy_shards):
    result = scored(Sloped(), toy_shards, windows=2, position_buckets=50, window=9)
    assert [row.at for row in figures(result, "nll by position")] == [{"start": i, "end": i + 1} for i in range(9)]


def test_windows_follow_one_another_unless_they_are_spread(toy_shards):
    stream = np.asarray(toy_shards.tokens("validation")[:]).astype(np.int64).tolist()
    for options, starts in (({}, [0, 100, 200]), ({"stride": 50}, [0, 50, 100])):
        task = drawn(toy_shards, windows=3, **options)
        assert [list(request.ids) for request in task.requests] == [stream[start : start + 101] for start in starts]


def test_text_shorter_than_the_window(uniform, toy_shards):
    with pytest.raises(DataError, match="tokens, and 10000001 are needed"):
        scored(uniform, toy_shards, window=10**7)


class Position(TensorModel):
    """A loss of one for the first target of a window, two for the second, and so on."""

    tokenizer, context_tokens = byte_tokenizer(), 100

    def nll(self, input_ids, targets):
        return torch.arange(1, targets.shape[1] + 1, dtype=torch.float64).expand(targets.shape)


def test_sliding_windows_score_each_token_once(text):
    """Window 10, stride 4: the first window scores its ten targets, each other its last four."""
    model = Position()
    task = PerplexityTask(Options(text=text, window=10, stride=4, windows=3), model)
    stream = [*Path(text).read_bytes()]
    assert [list(request.ids) for request in task.requests] == [stream[start : start + 11] for start in (0, 4, 8)]
    scores = run_task(model, task)
    expected = (sum(range(1, 11)) + 2 * sum(range(7, 11))) / (10 + 4 + 4)
    nll = next(row for row in scores.measurements if row.name == "nll")
    assert nll.value == pytest.approx(expected)
    assert [item.weight for item in scores.items if item.name == "nll"] == [10, 4, 4]
    curve = {row.at["position"]: row.value for row in scores.measurements if row.at}
    assert curve == {position: pytest.approx(np.mean(range(1, position + 1))) for position in curve}
    with pytest.raises(ConfigError, match="above the window"):
        PerplexityTask(Options(text=text, window=8, stride=9), model)


DECOMPOSED = "\u1112\u1161\u11ab\u1100\u1173\u11af"  # 18 bytes; composed they are 6


@pytest.fixture
def two_texts(tmp_path):
    """Documents of 18 and of 3 bytes, which are 6 and 3 tokens behind a tokenizer that composes."""
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in (DECOMPOSED, "abc")))
    return str(tmp_path / "text.jsonl")


def composing(**begins):
    backend = tokenizers.Tokenizer.from_str(byte_tokenizer().backend.to_str())
    backend.normalizer = normalizers.NFC()
    return Tokenizer(backend, **begins)


def test_bits_a_byte_count_the_bytes_that_were_given(uniform, two_texts, caplog):
    """The first token is context alone; it has none of the bytes of its syllable, whose last token has all."""
    context = TaskContext(tokenizer=composing(), context_tokens=100)
    task = PerplexityTask(Options(text=two_texts, window=10, windows=1), context)
    (bits,) = figures(run_task(uniform, task), "bits per byte")
    assert bits.value == pytest.approx(8 * math.log2(400) / 21, rel=1e-12)
    assert any("1 of 2 documents cannot be restored" in choice for choice in task.choices)
    assert "bits a byte: The tokenizer loses text" in caplog.text
    plain = PerplexityTask(
        Options(text=two_texts, window=10, windows=1), TaskContext(tokenizer=byte_tokenizer(), context_tokens=100)
    )
    (bits,) = figures(run_task(uniform, plain), "bits per byte")
    assert bits.value == pytest.approx(math.log2(400), rel=1e-12)
    assert not any("restored" in choice for choice in plain.choices)
    assert task_sha256(task) != task_sha256(plain)


@pytest.mark.parametrize(
    ("begins", "asked", "is_begun"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_a_window_begins_as_the_tokenizer_begins_a_text(two_texts, begins, asked, is_begun):
    """The targets are the same, and every window of a stride begins so; the result says which."""
    where = TaskContext(tokenizer=composing(begin_of_text="<|pad|>", begins_texts=begins), context_tokens=100)
    plain = PerplexityTask(Options(text=two_texts, window=4, stride=2, add_bos_token=False), where)
    task = PerplexityTask(Options(text=two_texts, window=4, stride=2, add_bos_token=asked), where)
    assert [request.ids[1:] for request in task.requests] == [request.ids[1:] for request in plain.requests]
    assert all((request.ids[0] == 257) == is_begun for request in task.requests)
    begun = "Each window begins with '<|pad|>'" if is_begun else "No window begins with '<|pad|>'"
    assert any(choice.startswith(begun) for choice in task.choices)
