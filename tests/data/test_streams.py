"""Compressed, columnar and large files: read piece by piece to the same documents, and damage is named with its place."""

import gzip
import json
import random
import sys
import time

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from difftransformer.data import (
    DataConfig,
    Document,
    Tokenizer,
    byte_tokenizer,
    documents,
    iter_documents,
    prepare,
    prepare_shards,
    read_documents,
    text,
    writing,
)
from difftransformer.data.documents import LargeDocument, cut_text
from difftransformer.data.writing import cut_parts
from difftransformer.errors import DataError
from difftransformer.progress import shown_by
from tests.support.shards import split_documents

ROWS = [{"text": f"row {index} \u2028 \u00e9\n" * 30, "name": f"n{index}"} for index in range(400)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
DOCUMENTS = [Document(row["name"], row["text"]) for row in ROWS]


def zstd(content):
    return pytest.importorskip("pyarrow").compress(content, codec="zstd", asbytes=True)


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("a.jsonl.gz", gzip.compress),
        ("a.jsonl.gz", lambda content: gzip.compress(content[:777]) + gzip.compress(content[777:]) + b"\0" * 600),
        ("a.jsonl.zst", zstd),
        ("a.jsonl.zst", lambda content: zstd(content[:777]) + zstd(content[777:])),
    ],
)
def test_compressed_lines_are_those_of_the_plain_file(tmp_path, name, compress):
    (tmp_path / name).write_bytes(compress(LINES))
    (tmp_path / "b.jsonl").write_bytes(LINES)
    assert read_documents(str(tmp_path / name)) == DOCUMENTS
    assert read_documents(str(tmp_path)) == DOCUMENTS * 2


def parquet(path, columns):
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=150)
    return path


def test_parquet_rows_are_documents(tmp_path):
    path = parquet(
        tmp_path / "a.parquet", {"name": [row["name"] for row in ROWS], "text": [row["text"] for row in ROWS]}
    )
    assert read_documents(str(path)) == DOCUMENTS
    path = parquet(tmp_path / "b.parquet", {"other": [1, 2, 3], "text": ["one", None, "three"]})
    with pytest.warns(UserWarning, match="1 of 3 documents have no text"):
        assert read_documents(str(path)) == [Document("b.parquet:1", "one"), Document("b.parquet:3", "three")]


@pytest.mark.parametrize(
    ("name", "compress"), [("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstd), ("a.parquet", None)]
)
def test_broken_files_are_named_with_the_place(tmp_path, name, compress):
    path = tmp_path / name
    if compress is None:
        whole = parquet(path, {"text": [random.Random(i).randbytes(500).hex() for i in range(900)]}).read_bytes()
        place = r"broken Parquet data after row \d+ \("
    else:
        lines = [json.dumps({"text": random.Random(i).randbytes(500).hex()}) for i in range(900)]
        whole, place = compress("\n".join(lines).encode()), r"broken compressed data after line [\d,]+ \("
    cases = [whole[: len(whole) // 2], b"x" * 300]
    if name != "a.jsonl.zst":  # which may decompress to other text, where the JSON is then refused
        cases.append(whole[:2000] + b"\xff" * 3000 + whole[5000:])
    for damaged in cases:
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=place) as caught:
            list(iter_documents(str(path)))
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    if compress is not None:
        path.write_bytes(whole[:-9])
        with pytest.raises(DataError, match=r"after line [1-9][\d,]+ \(.*(end-of-stream|Truncated)"):
            list(iter_documents(str(path)))


def test_bad_lines_of_compressed_files_are_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(LINES + b'{"text": 3}\n'))
    with pytest.raises(DataError, match=r'a.jsonl.gz: line 401 has no string "text"'):
        list(iter_documents(str(path)))
    path.write_bytes(gzip.compress(LINES + b'{"text": "\xff"}\n'))
    with pytest.raises(DataError, match=r"line 401 is not UTF-8 text \(byte 0xff at offset 10 of the line\)"):
        list(iter_documents(str(path)))


def test_a_parquet_file_without_text_lists_its_columns(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"body": ["x"]})
    with pytest.raises(DataError, match=r"a.parquet: no column 'text' \(met \['body'\]\)"):
        read_documents(str(path))


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.parquet"])
def test_a_missing_library_is_one_line(tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pyarrow; run pip install 'difftransformer\[data\]'"):
        read_documents(str(tmp_path / name))


def test_a_stream_of_datasets_gives_the_rows_of_the_set(tmp_path):
    pytest.importorskip("datasets")
    parquet(tmp_path / "train.parquet", {"text": [row["text"] for row in ROWS]})
    expected = [document.text for document in DOCUMENTS]
    assert [document.text for document in iter_documents(f"hf-stream:{tmp_path}")] == expected
    assert text.source_bytes(f"hf-stream:{tmp_path}") == (tmp_path / "train.parquet").stat().st_size


def test_progress_counts_the_bytes_of_a_large_file_as_they_are_tokenised(tmp_path, monkeypatch):
    """Not when the file is opened: its text is read several times before it is tokenised."""
    monkeypatch.setattr(text, "LARGE_BYTES", 5000)
    monkeypatch.setattr(prepare, "_LARGE_BYTES", 0)
    monkeypatch.setattr(writing, "PIECE_CHARACTERS", 700)
    (tmp_path / "a.txt").write_text("a line of \u00e9 words\n" * 1000)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    for name in ("a.txt", "b.jsonl.gz"):
        met = []
        config = DataConfig(source=str(tmp_path / name), tokenizer="byte", folder=str(tmp_path / "shards"))
        with shown_by(lambda done, total, title, met=met: met.append((done, total))):
            prepare_shards(config)
        size = (tmp_path / name).stat().st_size
        done = [one for one, _ in met]
        assert (done[-1], {total for _, total in met}) == (size, {size})
        assert done == sorted(done)
        if name == "a.txt":
            assert len(done) > 20
            assert done[0] < size / 10


def words(draw, count, space):
    return space.join("".join(draw.choices("etaoinshrdlu\u00e9\u96ea", k=draw.randint(1, 9))) for _ in range(count))


TEXTS = {
    "lines": lambda draw: "\n".join(words(draw, 12, " ") for _ in range(300)),
    "windows lines": lambda draw: "\r\n".join(words(draw, 12, " ") for _ in range(300)),
    "no spaces": lambda draw: words(draw, 3000, ""),
    "numbers": lambda draw: "\n\n".join(f"  {draw.random()}  {draw.random()}" for _ in range(900)),
}


def pretrained_like(kind):
    """Tokenizers whose tokens change at a cut: a space or a mark is put before every text."""
    if kind == "metaspace":
        vocabulary = {"\u2581": 0, "<unk>": 1, "</s>": 2}
        for letter in "etaoinshrdlu\u00e9\u96ea0123456789.\n\r":
            vocabulary[letter] = len(vocabulary)
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        backend = tokenizers.Tokenizer.from_str(byte_tokenizer().backend.to_str())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        backend.decoder = decoders.ByteLevel()
        return Tokenizer(backend)
    return Tokenizer(backend, end_of_text="</s>", pad="</s>")


@pytest.mark.parametrize("kind", ["bpe", "byte", "prefix space", "metaspace"])
@pytest.mark.parametrize("kind_of_text", TEXTS)
def test_a_large_file_has_the_tokens_of_its_whole_text(tmp_path, monkeypatch, bpe, kind, kind_of_text):
    monkeypatch.setattr(documents, "PART_CHARACTERS", 1000)
    monkeypatch.setattr(writing, "PIECE_CHARACTERS", 700)
    monkeypatch.setattr(text, "LARGE_BYTES", 5000)
    whole = TEXTS[kind_of_text](random.Random(3))
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + whole.encode())
    (document,) = iter_documents(str(tmp_path / "a.txt"))
    assert isinstance(document, LargeDocument)
    assert (document.text, document.size_bytes) == (whole, len(whole.encode()))
    tokenizer = {"bpe": bpe, "byte": byte_tokenizer()}.get(kind) or pretrained_like(kind)
    parts = list(cut_parts("train", document.parts(), tokenizer))
    assert "".join(part.text for part in parts) == whole
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
    assert [token for part in parts for token in tokenizer.encode(part.text)] == tokenizer.encode(whole)
    if kind in ("bpe", "byte"):
        assert max(len(part.text) for part in parts) < 3000
    elif kind_of_text == "no spaces":
        assert len(parts) == 1  # any cut puts a space into the text
    inside = Document("a.txt", whole)
    assert list(inside.parts()) == list(document.parts())


def test_a_long_text_in_memory_is_cut_in_linear_time():
    """Into the parts that are found by cutting one off after another."""
    line = "Words and text, é ☃ of\na line here.\n\n"
    expected, rest = [], line * 20
    while len(rest) > 32:
        expected.append(next(cut_text([rest[:33]], 32)))
        rest = rest[len(expected[-1]) :]
    assert list(cut_text([line * 20], 32)) == [*expected, rest]
    whole = line * 100_000
    started = time.process_time()
    assert "".join(cut_text([whole], 32)) == whole
    assert time.process_time() - started < 10


def test_a_large_file_is_cut_for_validation_where_a_small_one_is(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PART_CHARACTERS", 1000)
    for made in TEXTS.values():
        whole = made(random.Random(4))
        (tmp_path / "a.txt").write_text(whole, newline="")
        monkeypatch.setattr(text, "LARGE_BYTES", 2**24)
        expected = split_documents(read_documents(str(tmp_path / "a.txt")), validation_share=0.13, seed=0)
        monkeypatch.setattr(text, "LARGE_BYTES", 5000)
        (large,) = iter_documents(str(tmp_path / "a.txt"))
        assert isinstance(large, LargeDocument)
        assert split_documents([large], validation_share=0.13, seed=0) == expected


def test_a_large_file_that_is_not_utf8_is_named_with_the_place(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "PART_CHARACTERS", 1000)
    monkeypatch.setattr(text, "LARGE_BYTES", 5000)
    path = tmp_path / "a.txt"
    for content, place in ((b"good " * 3000 + b"\xff bad", 15000), (b"good " * 3000 + b"\xc3", 15000)):
        path.write_bytes(content)
        (document,) = iter_documents(str(path))
        with pytest.raises(DataError, match=rf"a.txt: not UTF-8 text: byte 0x.. at offset {place} "):
            list(document.parts())
