"""From a request to shards: made once, reused, and made again when the text changes."""

import dataclasses

import pytest

from difftransformer.data import DataConfig, prepare_shards
from difftransformer.errors import ConfigError


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(20):
        (folder / f"{index:02d}.txt").write_text(f"document {index} says {index * index}\n" * 20, encoding="utf-8")
    return folder


def request(text, tmp_path, **fields):
    return DataConfig(
        **{
            "source": str(text),
            "tokenizer": "byte",
            "validation_share": 0.2,
            "folder": str(tmp_path / "shards"),
            **fields,
        }
    )


def test_the_same_request_is_tokenised_once(text, tmp_path):
    first = prepare_shards(request(text, tmp_path))
    stamp = (first.folder / "manifest.json").stat().st_mtime_ns
    again = prepare_shards(request(text, tmp_path))
    assert again.folder == first.folder
    assert (again.folder / "manifest.json").stat().st_mtime_ns == stamp


def test_changed_text_and_changed_requests_get_shards_of_their_own(text, tmp_path):
    first = prepare_shards(request(text, tmp_path))
    other_split = prepare_shards(request(text, tmp_path, split_seed=1))
    (text / "00.txt").write_text("something else entirely\n", encoding="utf-8")
    changed = prepare_shards(request(text, tmp_path))
    assert len({first.folder, other_split.folder, changed.folder}) == 3
    held_out = first.text_bytes("validation") + first.text_bytes("train")
    assert b"something else" in changed.text_bytes("validation") + changed.text_bytes("train")
    assert b"something else" not in held_out


def test_needle_words_become_tokens(text, tmp_path):
    plain = prepare_shards(request(text, tmp_path, tokenizer="bpe", vocab_size=400))
    taught = prepare_shards(request(text, tmp_path, tokenizer="bpe", vocab_size=400, needle_words=50))
    sentence = "\nThe special magic Lisbon number is: 42"
    assert len(taught.tokenizer.encode(sentence)) < len(plain.tokenizer.encode(sentence))
    assert b"magic" not in taught.text_bytes("train")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"validation_share": 0.0}, "validation_share=0.0"),
        ({"tokenizer": "bpe", "vocab_size": 100}, "vocab_size=100"),
        ({"needle_words": -1}, "needle_words=-1"),
    ],
)
def test_impossible_requests_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        DataConfig(**fields)


def test_the_request_is_recorded_without_its_place(text, tmp_path):
    config = request(text, tmp_path)
    recorded = prepare_shards(config).manifest.request
    expected = dataclasses.asdict(config)
    del expected["folder"]
    assert {key: recorded[key] for key in expected} == expected
    assert str(tmp_path / "shards") not in str(recorded)
