"""The models that are no networks, on the toy corpus."""

import pytest

from tests.support.fakes import Guesser, Oracle, Uniform


@pytest.fixture
def oracle(toy_shards):
    return Oracle(toy_shards.tokenizer)


@pytest.fixture
def guesser(toy_shards):
    return lambda digits: Guesser(toy_shards.tokenizer, digits)


@pytest.fixture
def uniform(toy_shards):
    return Uniform(toy_shards.tokenizer.vocab_size)


@pytest.fixture
def text(toy_text, tmp_path):
    """One file of the toy corpus."""
    path = tmp_path / "text.txt"
    path.write_text("".join(file.read_text() for file in sorted(toy_text.glob("*.txt"))[:8]))
    return str(path)
