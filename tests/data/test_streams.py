"""Compressed, columnar and large files: read piece by piece to the same documents, and damage is named with its place."""

import gzip
import json
import random
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
from tests.data.conftest import request
from tests.support.shards import split_documents

ROWS = [{"text": f"row {index} \u2028 \u00e9\n" * 30, "name": f"n{index}"} for index in range(400)]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()
DOCUMENTS = [Document(row["name"], row["text"]) for row in ROWS]


@pytest.mark.parametrize(
    "content", [gzip.compress(LINES), gzip.compress(LINES[:777]) + gzip.compress(LINES[777:]) + b"\0" * 600]
)
def test_compressed_lines_are_those_of_the_plain_file(tmp_path, content):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    (tmp_path / "b.jsonl").write_bytes(LINES)
    assert read_documents(str(tmp_path / "a.jsonl.gz")) == DOCUMENTS
    assert read_documents(str(tmp_path)) == DOCUMENTS * 2


def test_broken_files_are_named_with_the_place(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    lines = [json.dumps({"text": random.Random(i).randbytes(500).hex()}) for i in range(900)]
    whole = gzip.compress("\n".join(lines).encode())
    for damaged in (whole[: len(whole) // 2], b"x" * 300, whole[:2000] + b"\xff" * 3000 + whole[5000:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"broken compressed data after line [\d,]+ \(") as caught:
            list(iter_documents(str(path)))
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)
    path.write_bytes(whole[:-9])
    with pytest.raises(DataError, match=r"after line [1-9][\d,]+ \(.*end-of-stream"):
        list(iter_documents(str(path)))


def test_bad_lines_of_compressed_files_are_named(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(LINES + b'{"text": 3}\n'))
    with pytest.raises(DataError, match=r'a.jsonl.gz: line 401 has no string "text"'):
        list(iter_documents(str(path)))
    path.write_bytes(gzip.compress(LINES + b'{"text": "\xff"}\n'))
    with pytest.raises(DataError, match=r"line 401 is not UTF-8 text \(byte 0xff at offset 10 of the line\)"):
        list(iter_documents(str(path)))


def parquet(path, columns):
    pytest.importorskip("datasets")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=150)
    return path


@pytest.mark.parametrize("prefix", ["hf", "hf-stream"])
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_datasets_reads_local_files(tmp_path, monkeypatch, prefix, kind):
    """Rows keep their order, and names of their own, by which they are held out: the same at every time."""
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    path = parquet(tmp_path / "data" / "a.parquet", {"other": range(400), "text": [row["text"] for row in ROWS]})
    name = path if kind == "file" else path.parent
    met = read_documents(f"{prefix}:{name}")
    assert met == [Document(f"{name}/train/{index}", row["text"]) for index, row in enumerate(ROWS)]
    assert text.source_bytes(f"{prefix}:{path}") == path.stat().st_size
    config = request(f"{prefix}:{name}", tmp_path / "shards")
    shards = prepare_shards(config)
    assert shards.manifest.splits["train"].documents + shards.manifest.splits["validation"].documents == 400
    assert prepare_shards(config).folder == shards.folder


def test_datasets_reads_a_csv_of_the_current_folder(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text('text,label\n"One, two.",1\nThree.,0\n')
    assert [one.text for one in read_documents("hf:a.csv")] == ["One, two.", "Three."]


def test_broken_sets_are_one_line(tmp_path, monkeypatch):
    """Also where a stream breaks after its first rows."""
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = parquet(tmp_path / "a.parquet", {"text": [random.Random(i).randbytes(500).hex() for i in range(900)]})
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    for prefix in ("hf", "hf-stream"):
        with pytest.raises(DataError, match=rf"^source '{prefix}:{path}': datasets cannot load {path} \(") as met:
            list(iter_documents(f"{prefix}:{path}"))
        assert "\n" not in str(met.value)
    folder = tmp_path / "two"
    folder.mkdir()
    (folder / "a.parquet").write_bytes(whole)
    middle = len(whole) // 2
    (folder / "b.parquet").write_bytes(whole[:middle] + b"\xff" * 3000 + whole[middle + 3000 :])
    rows = iter_documents(f"hf-stream:{folder}")
    assert [next(rows).name for _ in range(900)] == [f"{folder}/train/{index}" for index in range(900)]
    with pytest.raises(DataError, match=rf"^source 'hf-stream:{folder}': datasets cannot read all rows \(") as met:
        list(rows)
    assert "\n" not in str(met.value)


def test_what_datasets_reads_is_named_by_what_it_takes(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(DataError, match=r"'.parquet' are not read; allowed are .* such as CSV or Parquet\)"):
        read_documents(str(tmp_path / "a.parquet"))
    with pytest.raises(DataError, match=rf"no .txt, .* file in this folder; .* or write hf:{tmp_path} to read other"):
        read_documents(str(tmp_path))


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
