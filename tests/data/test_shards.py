"""Shard folders: what is written is read back, and damage is met by name."""

import errno
import hashlib
import json
import shutil
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from difftransformer.data import Document, Shards, TokenStream, byte_tokenizer, shards, writing
from difftransformer.errors import ConfigError, DataError
from tests.support.shards import split_documents, write_shards

TRAIN = [Document("a", "first ☃ text\n"), Document("b", "second <|endoftext|> text")]
VALIDATION = [Document("c", "third")]


def test_documents_come_back_each_followed_by_the_end_of_text(tmp_path):
    tokenizer = byte_tokenizer()
    manifest = write_shards(tmp_path, TRAIN, VALIDATION, tokenizer, source="here", request={"seed": 3})
    opened = Shards.open(tmp_path)
    expected = [token for document in TRAIN for token in [*document.text.encode(), 256]]
    assert opened.tokens("train")[:].tolist() == expected
    assert opened.tokens("train")[:].dtype == np.uint16
    assert opened.tokens("validation")[:].tolist() == [*b"third", 256]
    assert opened.text_bytes("train") == "".join(document.text for document in TRAIN).encode()
    assert opened.manifest == manifest
    assert (manifest.source, manifest.request, manifest.vocab_size) == ("here", {"seed": 3}, 258)
    split = manifest.splits["train"]
    assert (split.documents, split.tokens, split.bytes) == (2, len(expected), len(expected) - 2)
    content = (tmp_path / "train-00000.bin").read_bytes()
    assert split.shards[0].sha256 == hashlib.sha256(content).hexdigest()
    assert np.frombuffer(content, "<u2").tolist() == expected
    assert opened.tokenizer.sha256 == tokenizer.sha256 == manifest.tokenizer_sha256


def test_several_files_read_as_one(shards, corpus):
    train, validation = split_documents(corpus, validation_share=0.3, seed=1)
    for split, documents in (("train", train), ("validation", validation)):
        manifest = shards.manifest.splits[split]
        assert len(manifest.shards) >= 2
        assert {shard.tokens for shard in manifest.shards[:-1]} == {4096}
        ids = [[*shards.tokenizer.encode(document.text), shards.tokenizer.end_of_text] for document in documents]
        flat = [token for document in ids for token in document]
        assert shards.tokens(split)[:].tolist() == flat
        assert (manifest.tokens, manifest.documents) == (len(flat), len(documents))
        assert shards.text_bytes(split) == "".join(document.text for document in documents).encode()
        assert manifest.bytes == len(shards.text_bytes(split))


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    start=st.none() | st.integers(-25, 25),
    stop=st.none() | st.integers(-25, 25),
)
def test_a_stream_slices_like_one_array(sizes, start, stop):
    whole = np.arange(sum(sizes), dtype=np.uint16)
    stream = TokenStream(np.split(whole, np.cumsum(sizes)[:-1]))
    assert len(stream) == len(whole)
    assert stream[start:stop].tolist() == whole[start:stop].tolist()
    assert stream[start:stop].dtype == np.uint16
    with pytest.raises(ValueError, match="step 2"):
        stream[::2]


def test_a_slice_costs_the_same_among_many_parts():
    """As those of long documents that are read several times are."""
    stream = TokenStream(list(np.arange(300_000, dtype=np.uint16).reshape(-1, 3)))
    tracemalloc.start()
    assert stream[100:110].tolist() == list(range(100, 110))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000


def test_large_vocabularies_take_four_bytes(tmp_path, monkeypatch):
    tokenizer = byte_tokenizer()
    monkeypatch.setattr(tokenizer, "vocab_size", 2**16)
    write_shards(tmp_path, TRAIN, VALIDATION, tokenizer)
    opened = Shards.open(tmp_path)
    assert opened.tokens("validation")[:].dtype == np.uint32
    assert opened.tokens("validation")[:].tolist() == [*b"third", 256]


def test_the_fingerprint_follows_the_data_and_not_the_place(tmp_path):
    tokenizer = byte_tokenizer()
    first = write_shards(tmp_path / "a", TRAIN, VALIDATION, tokenizer, source="a").fingerprint
    assert write_shards(tmp_path / "b", TRAIN, VALIDATION, tokenizer, source="b").fingerprint == first
    assert write_shards(tmp_path / "c", TRAIN[:1], VALIDATION, tokenizer).fingerprint != first
    assert write_shards(tmp_path / "d", VALIDATION, TRAIN, tokenizer).fingerprint != first


@pytest.fixture
def damaged(shards_folder, tmp_path):
    return shutil.copytree(shards_folder, tmp_path / "copy")


def test_a_missing_manifest_is_said(damaged, tmp_path):
    (damaged / "manifest.json").unlink()
    for folder in (damaged, tmp_path / "nowhere"):
        with pytest.raises(DataError, match=r"not a shard folder \(no manifest.json.*run difftransformer tokenize"):
            Shards.open(folder)


def test_a_changed_byte_is_found(damaged):
    path = damaged / "train-00001.bin"
    content = bytearray(path.read_bytes())
    before = hashlib.sha256(content).hexdigest()
    content[77] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        Shards.open(damaged)
    after = hashlib.sha256(content).hexdigest()
    words = ["train-00001.bin", "wrong checksum", f"expected sha256 {before}", f"got {after}", "tokenise again"]
    assert all(word in str(caught.value) for word in words)
    Shards.open(damaged, verify=False)


@pytest.mark.parametrize("verify", [True, False])
def test_a_truncated_or_missing_file_is_found_without_reading_it(damaged, verify):
    path = damaged / "validation-00000.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(
        DataError,
        match=r"validation-00000.bin: the file has 8190 bytes, the manifest says 8192; delete .*copy and tokenise",
    ):
        Shards.open(damaged, verify=verify)
    path.unlink()
    with pytest.raises(DataError, match=r"validation-00000.bin: the file is missing.*tokenise again"):
        Shards.open(damaged, verify=verify)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(version=99), r"manifest version 99, this release reads version 1"),
        (lambda m: m.pop("version"), r"manifest version None"),
        (lambda m: m.pop("dtype"), r"dtype: missing \(Manifest needs it\); tokenise"),
        (lambda m: m.update(surprise=1), r"surprise: unknown key; allowed: .*; tokenise again"),
        (lambda m: m.update(dtype="<f4"), r"dtype: '<f4' is not allowed; choose one of <u2, <u4"),
        (lambda m: m["splits"].pop("validation"), r"splits.validation: missing; tokenise again"),
        (lambda m: m["splits"]["train"]["shards"][0].pop("sha256"), r"splits.train.shards\[0\].sha256: missing"),
        (lambda m: m.update(tokenizer_sha256="0"), r"the shards were made with 0; delete .*copy and tokenise again"),
    ],
)
def test_another_manifest_is_refused(damaged, change, words):
    path = damaged / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=words) as caught:
        Shards.open(damaged)
    assert "\n" not in str(caught.value)


def test_a_manifest_that_is_no_json_is_refused(damaged):
    path = damaged / "manifest.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(DataError, match=r"manifest.json cannot be read as JSON"):
        Shards.open(damaged)


def full(*arguments):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("fails_at", ["train-00000.bin", "train-00001.bin", "validation-00000.bin", "manifest.json"])
def test_a_full_disk_leaves_nothing_that_could_be_taken_for_whole(tmp_path, monkeypatch, fails_at):
    folder = tmp_path / "shards"

    def open_or_fail(path, mode):
        file = open(path, mode)  # noqa: SIM115 - handed on
        if path.name == fails_at:
            file.write(b"half")
            file.close()
            full()
        return file

    monkeypatch.setattr(writing, "open", open_or_fail, raising=False)
    if fails_at == "manifest.json":
        monkeypatch.setattr(shards, "write_text_atomically", full)
    with pytest.raises(
        DataError, match=r"shards: the disk is full while writing .*No space left on device.*free some space"
    ):
        write_shards(folder, TRAIN, VALIDATION, byte_tokenizer(), shard_tokens=20)
    monkeypatch.undo()
    with pytest.raises(DataError, match="not a shard folder"):
        Shards.open(folder)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"file.*cannot write"):
        write_shards(tmp_path / "file", TRAIN, VALIDATION, byte_tokenizer())


def test_empty_splits_and_bad_requests_are_refused(tmp_path, shards):
    with pytest.raises(DataError, match="the validation split has no documents, it needs at least 1"):
        write_shards(tmp_path, TRAIN, [], byte_tokenizer())
    assert not (tmp_path / "manifest.json").exists()
    with pytest.raises(ConfigError, match="split is 'test'; allowed are train, validation"):
        shards.tokens("test")
