"""A small made-up corpus, its tokenizers and its shards. Nothing here depends on the machine or the Python version."""

import random

import pytest

from difftransformer.data import DataConfig, Document, Shards, byte_tokenizer, train_bpe
from tests.support.shards import split_documents, write_shards


def request(source, folder, /, **fields):
    own = {"source": str(source), "tokenizer": "byte", "validation_share": 0.2, "folder": str(folder)}
    return DataConfig(**own | fields)


def stored(shards):
    """What each example of both splits teaches, sorted: (input, target) pairs, -100 where nothing is learned."""
    found = []
    for split in ("train", "validation"):
        example = []
        for token, target, flags in (record for part in shards.records[split].parts for record in part.tolist()):
            example.append((token, target if flags & 1 else -100))
            if flags & 2:
                found.append(example)
                example = []
        assert not example
    return sorted(found)


def _corpus(documents: int, lines: int) -> list[Document]:
    draw = random.Random(5)
    letters = "etaoinshrdlucmfwyp"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 9))) for _ in range(300)]
    texts = []
    for index in range(documents):
        text = ""
        for _ in range(lines):
            indent = " " * draw.choice((0, 0, 4, 8))
            text += indent + " ".join(draw.choices(words, k=draw.randint(2, 12))) + draw.choice(("\n", ":\n", "\n\n"))
        texts.append(Document(f"document-{index:03d}", text + f"é ☃ {index}\n"))
    return texts


@pytest.fixture(scope="session")
def corpus():
    return _corpus(documents=40, lines=40)


@pytest.fixture(scope="session")
def bpe(corpus):
    return train_bpe([document.text for document in corpus], 600)


@pytest.fixture(scope="session", params=["bpe", "byte"])
def tokenizer(request, bpe):
    return bpe if request.param == "bpe" else byte_tokenizer()


@pytest.fixture(scope="session")
def shards_folder(tmp_path_factory, corpus, bpe):
    """Small shards of several files; tests that damage them copy them first."""
    folder = tmp_path_factory.mktemp("shards")
    train, validation = split_documents(corpus, validation_share=0.3, seed=1)
    write_shards(folder, train, validation, bpe, source="made up", request={"seed": 1}, shard_tokens=4096)
    return folder


@pytest.fixture(scope="session")
def shards(shards_folder):
    return Shards.open(shards_folder)


@pytest.fixture
def text(tmp_path):
    """A folder of text files."""
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(20):
        (folder / f"{index:02d}.txt").write_text(f"document {index} says {index * index}\n" * 20, encoding="utf-8")
    return folder
