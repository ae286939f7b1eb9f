"""From a request to shards: made once, reused, and made again when the text changes."""

import dataclasses
import json
import os
import shutil
import time

import pytest

from difftransformer.data import DataConfig, SourceConfig, bpe, iter_documents, prepare, prepare_shards
from difftransformer.errors import ConfigError, DataError
from tests.data.conftest import request


def test_the_same_request_is_tokenised_once(text, tmp_path):
    first = prepare_shards(request(text, tmp_path / "shards"))
    stamp = (first.folder / "train-00000.bin").stat().st_mtime_ns
    again = prepare_shards(request(text, tmp_path / "shards"))
    assert again.folder == first.folder
    assert (again.folder / "train-00000.bin").stat().st_mtime_ns == stamp


def test_changed_text_and_changed_requests_get_shards_of_their_own(text, tmp_path):
    first = prepare_shards(request(text, tmp_path / "shards"))
    other_split = prepare_shards(request(text, tmp_path / "shards", split_seed=1))
    (text / "00.txt").write_text("something else entirely\n", encoding="utf-8")
    changed = prepare_shards(request(text, tmp_path / "shards"))
    assert len({first.folder, other_split.folder, changed.folder}) == 3
    held_out = first.text_bytes("validation") + first.text_bytes("train")
    assert b"something else" in changed.text_bytes("validation") + changed.text_bytes("train")
    assert b"something else" not in held_out


def test_needle_words_become_tokens(text, tmp_path):
    plain = prepare_shards(request(text, tmp_path / "shards", tokenizer="bpe", vocab_size=400))
    taught = prepare_shards(request(text, tmp_path / "shards", tokenizer="bpe", vocab_size=400, needle_words=50))
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


@pytest.mark.parametrize("tokenizer", ["bpe", "byte"])
def test_a_missing_source_is_refused_before_anything_is_read(text, tmp_path, caplog, tokenizer):
    caplog.set_level("INFO")
    sources = [SourceConfig(source=str(text)), SourceConfig(source=str(tmp_path / "gone"))]
    for where in ({"mixture": sources}, {"source": str(tmp_path / "gone")}):
        with pytest.raises(DataError, match="gone': no such file or folder"):
            prepare_shards(DataConfig(**where, tokenizer=tokenizer, vocab_size=300, folder=str(tmp_path / "s")))
    assert not [line for line in caplog.messages if "training a BPE" in line or str(text) in line]
    assert not [*tmp_path.glob("s/*/*")]


def test_the_request_is_recorded_without_its_place(text, tmp_path):
    config = request(text, tmp_path / "shards")
    recorded = prepare_shards(config).manifest.request
    expected = dataclasses.asdict(config)
    del expected["folder"], expected["mixture"], expected["options"]
    assert {key: recorded[key] for key in expected} == expected
    assert str(tmp_path / "shards") not in str(recorded)


def count_reads(monkeypatch):
    """A list that grows with every reading of the source."""
    reads = []

    def read(source, *arguments, **known):
        reads.append(source)
        return iter_documents(source, *arguments, **known)

    monkeypatch.setattr(prepare, "iter_documents", read)
    return reads


def test_unchanged_text_is_not_read_again(text, tmp_path, monkeypatch):
    monkeypatch.setattr("difftransformer.data.text._RECENT_SECONDS", 0)
    reads = count_reads(monkeypatch)
    first = prepare_shards(request(text, tmp_path / "shards"))
    assert prepare_shards(request(text, tmp_path / "shards")).folder == first.folder
    assert len(reads) == 1
    os.utime(text / "00.txt", (1, 1))  # touched, but the same text: read once more, then known again
    for _ in range(2):
        assert prepare_shards(request(text, tmp_path / "shards")).folder == first.folder
    assert len(reads) == 2
    prepare_shards(request(text, tmp_path / "shards", split_seed=1))
    assert len(reads) == 3


@pytest.mark.parametrize(
    "change",
    [
        lambda text: (text / "00.txt").write_text("longer than it was before\n" * 99),
        lambda text: (text / "00.txt").unlink(),
        lambda text: (text / "more.txt").write_text("more"),
        lambda text: (text / "00.txt").rename(text / "99.txt"),
        lambda text: same_size_and_time(text / "00.txt"),
    ],
)
def test_any_change_of_the_files_is_seen(text, tmp_path, monkeypatch, change):
    monkeypatch.setattr("difftransformer.data.text._RECENT_SECONDS", 0)
    first = prepare_shards(request(text, tmp_path / "shards"))
    change(text)
    assert prepare_shards(request(text, tmp_path / "shards")).folder != first.folder


def test_damaged_shards_say_what_makes_them_whole(text, tmp_path):
    """Their manifest would be found again."""
    first = prepare_shards(request(text, tmp_path / "shards"))
    content = (first.folder / "train-00000.bin").read_bytes()
    (first.folder / "train-00000.bin").write_bytes(content[:-2])
    with pytest.raises(DataError, match=f"; delete {first.folder} and tokenise again with difftransformer tokenize"):
        prepare_shards(request(text, tmp_path / "shards"))
    shutil.rmtree(first.folder)
    again = prepare_shards(request(text, tmp_path / "shards"))
    assert (again.folder / "train-00000.bin").read_bytes() == content


def test_shards_stand_for_a_text_that_is_missing(text, tmp_path):
    first = prepare_shards(request(text, tmp_path / "shards"))
    (tmp_path / "shards").rename(tmp_path / "there")
    text.rename(tmp_path / "moved")
    again = prepare_shards(request(text, tmp_path / "there"))
    assert again.manifest == first.manifest
    with pytest.raises(DataError, match="text': no such file or folder"):
        prepare_shards(request(text, tmp_path / "there", split_seed=1))


def same_size_and_time(path):
    """Change a byte of a file, and put its time of modification back."""
    before = path.stat()
    time.sleep(0.05)  # longer than a tick of the file system's clock
    path.write_bytes(path.read_bytes().replace(b"document 0", b"document 9"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def test_files_that_have_just_changed_are_always_read(text, tmp_path, monkeypatch):
    """Another change within the resolution of the file system's clock would leave size and times as they are."""
    reads = count_reads(monkeypatch)
    for _ in range(2):
        prepare_shards(request(text, tmp_path / "shards"))
    assert len(reads) == 2


def test_shards_of_an_older_release_are_used(text, tmp_path, monkeypatch):
    first = prepare_shards(request(text, tmp_path / "shards"))
    path = first.folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["source_state"]
    path.write_text(json.dumps(manifest))
    stamp = (first.folder / "train-00000.bin").stat().st_mtime_ns
    again = prepare_shards(request(text, tmp_path / "shards"))
    assert again.folder == first.folder
    assert (again.folder / "train-00000.bin").stat().st_mtime_ns == stamp


def test_too_few_documents_are_refused_before_a_tokenizer_is_trained(text, tmp_path, monkeypatch):
    for path in sorted(text.iterdir())[3:]:
        path.unlink()
    monkeypatch.setattr(bpe, "train_bpe", None)
    fields = {"tokenizer": "bpe", "vocab_size": 300, "folder": str(tmp_path / "shards"), "validation_share": 0.02}
    one = {"source": str(text)}
    mixed = {"mixture": [SourceConfig(**one)]}
    for source in (one, mixed):
        with pytest.raises(DataError, match=r"0.02 of 3 documents leaves none for validation; set validation_share to"):
            prepare_shards(DataConfig(**source, **fields))
