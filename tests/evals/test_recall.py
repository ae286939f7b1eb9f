"""AR-hits against a definition written out, planted losses, and counts against a dictionary."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from difftransformer.data import byte_tokenizer
from difftransformer.errors import ConfigError, DataError
from difftransformer_lab.cli.main import main
from difftransformer_lab.evals.engine import run_task
from difftransformer_lab.evals.tasks.recall import Options, RecallTask, counted, packed
from tests.support.answering import tiny_model
from tests.support.fakes import TensorModel, Uniform

VOCABULARY = byte_tokenizer().vocab_size


class Planted(TensorModel):
    """A loss of 1 where a pair of tokens occurred before in the row, 5 elsewhere; or on a list of rare pairs alone."""

    def __init__(self, frequent=frozenset()):
        self.tokenizer, self.frequent = byte_tokenizer(), frequent

    def nll(self, input_ids, targets):
        losses = torch.full(targets.shape, 5.0)
        for row, (before, after) in enumerate(zip(input_ids.tolist(), targets.tolist(), strict=True)):
            seen = set()
            for place, pair in enumerate(zip(before, after, strict=True)):
                if pair in seen and pair not in self.frequent:
                    losses[row, place] = 1.0
                seen.add(pair)
        return losses


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the cat and the dog. " * 3 + "aaaa" + "".join(chr(33 + i % 90) for i in range(0, 1800, 7)))
    return str(path)


def figures(scores):
    return {row.name: row for row in scores.measurements}


def test_planted_losses_are_measured_exactly(text):
    found = figures(run_task(Planted(), RecallTask(Options(text=text, window=40, windows=6), Planted())))
    assert found["nll of AR-hits"].value == 1.0
    assert found["nll of others"].value == 5.0
    share = found["share of AR-hits"].value
    assert 0.05 < share < 0.95
    assert found["nll"].value == pytest.approx(share + 5 * (1 - share))
    assert found["nll of AR-hits"].standard_error == pytest.approx(0, abs=1e-12)
    assert found["nll"].standard_error > 0


def test_hits_of_a_text_by_hand(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcabxaaa")
    task = RecallTask(Options(text=str(path), window=8, windows=1), Planted())
    # Targets b c a b x a a a: the second "ab" and the second "aa".
    assert task.hits.tolist() == [[False, False, False, True, False, False, False, True]]
    hits = figures(run_task(Planted(), task))["AR-hits"]
    assert (hits.value, hits.n, hits.unit) == (2, 8, "tokens")
    path.write_text("abcdabcd")
    task = RecallTask(Options(text=str(path), window=8, windows=1, ngram=3), Planted())
    assert task.hits.tolist() == [[False] * 5 + [True, True, False]]


def test_frequent_pairs_are_others(text, tmp_path):
    train = tmp_path / "train.txt"
    train.write_text("the " * 50 + "dog ")
    frequent = {(ord(a), ord(b)) for a, b in ("th", "he", "e ", " t")}
    options = Options(text=text, window=40, windows=6, train_text=str(train), max_train_count=10)
    model = Planted(frequent)
    found = figures(run_task(model, RecallTask(options, model)))
    assert (found["nll of AR-hits"].value, found["nll of others"].value) == (1.0, 5.0)
    fewer = found["share of AR-hits"].value
    every = RecallTask(Options(text=text, window=40, windows=6), model).hits.mean()
    assert fewer < every
    # At most so often is rare still: none of these pairs comes more than 50 times.
    loose = Options(text=text, window=40, windows=6, train_text=str(train), max_train_count=50)
    assert RecallTask(loose, model).hits.mean() == every


def test_uniform_model_has_the_same_loss_on_both_sides(text):
    model = Uniform(VOCABULARY)
    model.tokenizer = byte_tokenizer()
    found = figures(run_task(model, RecallTask(Options(text=text, window=40, windows=6), model)))
    assert found["nll of AR-hits"].value == pytest.approx(np.log(VOCABULARY))
    assert found["nll of others"].value == pytest.approx(np.log(VOCABULARY))


@pytest.mark.parametrize("ngram", [2, 3])
def test_counts_are_a_dictionarys(ngram):
    draw = np.random.default_rng(0)
    parts = [draw.integers(0, 7, size) for size in (500, 1, 0, 300, 2)]
    whole = np.concatenate(parts).tolist()
    expected = Counter(zip(*(whole[offset:] for offset in range(ngram)), strict=False))
    grams = [tuple(row) for row in draw.integers(0, 8, (200, ngram)).tolist()]
    kinds = np.unique(np.concatenate([packed(np.array(gram), ngram, 8) for gram in grams]))
    found = counted(kinds, parts, ngram, 8)
    unpacked = [tuple(int(kind) // 8**power % 8 for power in reversed(range(ngram))) for kind in kinds]
    assert found.tolist() == [expected[gram] for gram in unpacked]
    assert found.sum() > 100


def test_shards_count_as_their_text(toy_shards, toy_text, tmp_path, monkeypatch):
    class Toy(Planted):
        tokenizer = toy_shards.tokenizer

        def __init__(self):
            pass

    text = str(next(iter(sorted(toy_text.iterdir()))))
    options = {"text": text, "window": 200, "windows": 3, "max_train_count": 40}
    task = RecallTask(Options(**options, train_text=str(toy_shards.folder)), Toy())
    stream = toy_shards.tokens("train")[:].tolist()
    counts = Counter(pairwise(stream))
    for request, hits in zip(task.requests, task.hits.tolist(), strict=True):
        seen = set()
        for pair, hit in zip(pairwise(request.ids), hits, strict=True):
            assert hit == (pair in seen and counts[pair] <= 40)
            seen.add(pair)
    monkeypatch.setattr("difftransformer.data.shards.copies", lambda: tmp_path)
    there = RecallTask(Options(**options, train_text=f"file://{toy_shards.folder}"), Toy())
    assert there.hits.tolist() == task.hits.tolist()
    with pytest.raises(DataError, match="the shards have another tokenizer"):
        RecallTask(Options(**options, train_text=str(toy_shards.folder)), Planted())


def test_what_does_not_fit(text, tmp_path):
    with pytest.raises(ConfigError, match="ngram=8: with 258 tokens"):
        RecallTask(Options(text=text, window=40, ngram=8), Planted())
    with pytest.raises(ConfigError, match="window=2 is shorter than an n-gram of 3"):
        RecallTask(Options(text=text, window=2, ngram=3), Planted())
    path = tmp_path / "new.txt"
    path.write_text("abcdefgh")
    with pytest.raises(DataError, match="0 of 7 tokens are AR-hits"):
        RecallTask(Options(text=str(path), window=8), Planted())


def test_the_command(text, tmp_path, capfd):
    words = ["--text", text, "--train-text", text, "--window", "32", "--windows", "3", "--max-train-count", "5"]
    assert main(["eval", "recall", tiny_model(tmp_path / "model"), "--out", str(tmp_path / "out"), *words]) == 0
    assert "AR-hits" in capfd.readouterr().out
    assert (tmp_path / "out" / "recall.svg").is_file()
