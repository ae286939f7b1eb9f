"""The byte bigram baseline."""

import math
import random
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from difftransformer.errors import DataError
from difftransformer_lab.studies import comparison
from difftransformer_lab.studies.comparison import byte_bigram_bits_per_byte


def test_a_value_computed_by_hand():
    # Training text "aab": c(a) = 2, c(b) = 1, n = 3; "a" is followed twice, by two kinds of byte.
    p_a, p_b = 3 / 259, 2 / 259
    p_b_after_a = (1 + 2 * p_b) / (2 + 2)
    expected = -(math.log2(p_a) + math.log2(p_b_after_a)) / 2
    assert byte_bigram_bits_per_byte(b"aab", b"ab") == pytest.approx(expected, rel=1e-12)
    # Nothing follows "b" in training, so the byte after it is scored by the unigram.
    assert byte_bigram_bits_per_byte(b"aab", b"ba") == pytest.approx(-(math.log2(p_b) + math.log2(p_a)) / 2, rel=1e-12)


def independent(train: bytes, validation: bytes) -> float:
    counts = Counter(train)
    following: dict[int, Counter] = defaultdict(Counter)
    for first, second in pairwise(train):
        following[first][second] += 1

    def unigram(b):
        return (counts[b] + 1) / (len(train) + 256)

    def bigram(a, b):
        kinds, total = len(following[a]), following[a].total()
        if not total:
            return unigram(b)
        weight = kinds / (kinds + total)
        return weight * unigram(b) + (1 - weight) * following[a][b] / total

    for a in (0, train[0], 255):
        assert math.fsum(bigram(a, b) for b in range(256)) == pytest.approx(1.0)
    bits = -math.log2(unigram(validation[0]))
    return (bits - sum(math.log2(bigram(a, b)) for a, b in pairwise(validation))) / len(validation)


@pytest.mark.parametrize("chunk", [None, 7])
def test_it_agrees_with_an_independent_computation(chunk, monkeypatch):
    if chunk:
        monkeypatch.setattr(comparison, "_CHUNK_BYTES", chunk)
    draw = random.Random(2)
    train = bytes(draw.choices(range(256), weights=range(256, 0, -1), k=2000))
    validation = bytes(draw.choices(range(256), k=701))
    assert byte_bigram_bits_per_byte(train, validation) == pytest.approx(independent(train, validation), rel=1e-12)


def test_a_text_that_repeats_costs_little_and_noise_costs_eight_bits():
    assert byte_bigram_bits_per_byte(b"ab" * 5000, b"ab" * 500) < 0.02
    noise = random.Random(0).randbytes(400_000)
    assert byte_bigram_bits_per_byte(noise[:200_000], noise[200_000:]) == pytest.approx(8.0, abs=0.25)


def test_an_empty_text_is_refused():
    with pytest.raises(DataError, match="empty training text"):
        byte_bigram_bits_per_byte(b"", b"x")
    with pytest.raises(DataError, match="empty validation text"):
        byte_bigram_bits_per_byte(b"x", b"")
