"""Readers and the split."""

import gzip
import json
import os
import random
import re
import sys
import types

import pytest

from difftransformer.data import DataConfig, Document, prepare_shards, read_documents
from difftransformer.data.held_out import HeldOutLines
from difftransformer.data.text import iter_split
from difftransformer.errors import ConfigError, DataError
from tests.support.shards import split_documents


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_folder_is_read_recursively_in_the_order_of_names(tmp_path):
    write(tmp_path / "b.txt", "second")
    write(tmp_path / "a" / "z.md", "first\r\n")
    write(tmp_path / "c.jsonl", '{"text": "third"}\n\n{"text": "fourth", "name": "named"}\n')
    write(tmp_path / "d.py", "fifth")
    write(tmp_path / "picture.png", b"\x89PNG")
    write(tmp_path / ".git" / "hidden.txt", "hidden")
    write(tmp_path / ".hidden.txt", "hidden")
    assert read_documents(str(tmp_path)) == [
        Document("a/z.md", "first\r\n"),
        Document("b.txt", "second"),
        Document("c.jsonl:1", "third"),
        Document("named", "fourth"),
        Document("d.py", "fifth"),
    ]


def test_all_formats_have_one_rule_for_missing_text_and_for_names(tmp_path):
    """A document without text is left out and counted, and a suffix may be in upper case."""
    rows = [{"text": "one"}, {"text": ""}, {"text": None}, {"text": " "}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    write(tmp_path / "rows" / "a.JSONL", lines)
    write(tmp_path / "rows" / "b.Jsonl.GZ", gzip.compress(lines.encode()))
    names = [path.name for path in sorted((tmp_path / "rows").iterdir())]
    for name in names:
        write(tmp_path / "text" / f"{name}-0.TXT", "one")
        write(tmp_path / "text" / f"{name}-1.Md", "")
        write(tmp_path / "text" / f"{name}-2.PY", "")
        write(tmp_path / "text" / f"{name}-3.txt", " ")
        path = tmp_path / "rows" / name
        with pytest.warns(UserWarning, match=rf"^{path}: 2 of 4 documents have no text, and are left out$"):
            documents = read_documents(str(path))
        assert documents == [Document(f"{name}:1", "one"), Document(f"{name}:4", " ")]
    for folder in ("rows", "text"):
        with pytest.warns(
            UserWarning, match=rf"^{tmp_path / folder}: 4 of 8 documents have no text, and are left out$"
        ):
            assert [document.text for document in read_documents(str(tmp_path / folder))] == ["one", " "] * 2


def test_linked_folders_are_read_once(tmp_path):
    """What is below the folder itself keeps its name, and links that lead back end."""
    for name in ("in/z", "out/deep"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "text.txt").write_text(name)
    for link, target in (
        ("in/a", "in/z"),
        ("in/b", "out"),
        ("in/z/back", "in"),
        ("out/deep/up", "out"),
        ("in/c.txt", "out/deep/text.txt"),
    ):
        (tmp_path / link).symlink_to(tmp_path / target)
    found = {document.name: document.text for document in read_documents(str(tmp_path / "in"))}
    assert found == {"b/deep/text.txt": "out/deep", "c.txt": "out/deep", "z/text.txt": "in/z"}


def test_a_broken_link_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"b.txt: cannot be read \(No such file"):
        read_documents(str(tmp_path))


def test_a_name_that_is_null_is_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one", "name": null}\n{"text": "two"}\n')
    assert [document.name for document in read_documents(str(tmp_path / "a.jsonl"))] == ["a.jsonl:1", "a.jsonl:2"]


def test_a_file_name_that_is_not_utf8(tmp_path):
    write(tmp_path / "a.txt", "first\n")
    try:
        write(tmp_path / os.fsdecode(b"b\xff.txt"), "second\n")
    except OSError:
        pytest.skip("the file system has UTF-8 names alone")
    shards = prepare_shards(
        DataConfig(source=str(tmp_path), tokenizer="byte", folder=str(tmp_path / "shards"), validation_share=0.5)
    )
    assert sum(split.documents for split in shards.manifest.splits.values()) == 2


def test_a_text_file_is_one_document_without_its_byte_order_mark(tmp_path):
    path = write(tmp_path / "one.txt", b"\xef\xbb\xbfcaf\xc3\xa9\n")
    assert read_documents(str(path)) == [Document("one.txt", "café\n")]


def test_jsonl_keeps_line_separators_inside_a_text(tmp_path):
    text = "one\u2028two\x85three\ntab\t"
    path = write(tmp_path / "rows.jsonl", json.dumps({"text": text}, ensure_ascii=False) + "\r\n")
    assert read_documents(str(path)) == [Document("rows.jsonl:1", text)]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("bad.txt", b"good \xff bad", ["bad.txt", "not UTF-8", "byte 0xff at offset 5", "convert"]),
        ("cut.txt", b"caf\xc3", ["cut.txt", "byte 0xc3 at offset 3"]),
        ("empty.txt", b"", ["empty.txt", "the file has no text"]),
        ("empty.jsonl", b"\n\n", ["empty.jsonl", "the file has no text", '"text"']),
        ("a.jsonl", b'{"text": "x"}\n{"text": ', ["a.jsonl", "line 2 is not JSON", "column 10"]),
        ("b.jsonl", b'{"body": "x"}', ["line 1", 'no string "text"', "['body']"]),
        ("c.jsonl", b'["x"]', ["line 1", "is a JSON list"]),
        ("d.jsonl", b'{"text": ""}', ["d.jsonl: the file has no text"]),
        ("e.jsonl", b'{"text": "x", "name": 3}', ["line 1", '"name" 3', "must be a string"]),
        ("f.jsonl", b'\n{"text": "\\ud800"}', ["line 2", "surrogate"]),
        ("g.pdf", b"x", ["g.pdf", "'.pdf' are not read", "python-stdlib", "hf:NAME"]),
    ],
)
def test_a_bad_file_is_named_with_the_place(tmp_path, name, content, words):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError) as caught:
        read_documents(str(path))
    assert all(word in str(caught.value) for word in [*words, str(path)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["", "no-such-folder", "no-such.txt", "wikipedia"])
def test_an_unknown_source_lists_what_is_allowed(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"no such file or folder; allowed are python-stdlib; .*hf:NAME"):
        read_documents(source)


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no \.txt, \.md, \.py, \.jsonl, \.jsonl\.gz file"):
        read_documents(str(tmp_path))
    write(tmp_path / "empty.py", "")
    with pytest.raises(DataError, match="all 1 text files are empty"):
        read_documents(str(tmp_path))


def test_python_stdlib_holds_sources_and_neither_tests_nor_tables():
    documents = read_documents("python-stdlib")
    by_name = {document.name: document.text for document in documents}
    assert len(by_name) == len(documents)
    assert list(by_name) == sorted(by_name)
    assert by_name["json/decoder.py"].startswith('"""Implementation of JSONDecoder')
    parts = {part for name in by_name for part in name.split("/")[:-1]}
    skipped = {
        "test",
        "tests",
        "idlelib",
        "site-packages",
        "__pycache__",
        "ensurepip",
        "turtledemo",
        "encodings",
        "pydoc_data",
    }
    assert not parts & skipped
    assert sum(len(text) for text in by_name.values()) > 5_000_000
    assert all(by_name.values())
    assert documents == read_documents("python-stdlib")
    lines = HeldOutLines()
    for _ in lines.over(iter_split(documents, validation_share=0.05, seed=0)):
        pass
    shares = lines.shares()
    assert shares.seen < 0.15
    assert shares.tables < 0.02


def fake_datasets(monkeypatch, columns, calls):
    class Rows(list):
        column_names = list(columns)

        def select_columns(self, names):
            return Rows({name: row[name] for name in names} for row in self)

    def load_dataset(name, config, *, split, revision):
        calls.append((name, config, split))
        if name == "missing":
            raise RuntimeError("not on the hub\nsecond line")
        return Rows(dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))


@pytest.mark.parametrize(
    ("source", "call", "name"),
    [
        ("hf:org/set", ("org/set", None, "train"), "org/set/train/1"),
        ("hf:set:config", ("set", "config", "train"), "set/train/1"),
        ("hf:set:config:test", ("set", "config", "test"), "set/test/1"),
        ("hf:set::test", ("set", None, "test"), "set/test/1"),
    ],
)
def test_a_hugging_face_name_is_read_by_datasets(monkeypatch, source, call, name):
    calls = []
    fake_datasets(monkeypatch, {"text": ["", "one", None]}, calls)
    with pytest.warns(UserWarning, match=f"^source '{source}': 2 of 3 documents have no text, and are left out$"):
        assert read_documents(source) == [Document(name, "one")]
    assert calls == [call]


def test_what_datasets_cannot_give_is_said_in_one_line(monkeypatch):
    fake_datasets(monkeypatch, {"body": ["x"]}, [])
    with pytest.raises(DataError, match=r'no column "text" or "input_ids" \(met \[\'body\'\]\)'):
        read_documents("hf:set")
    with pytest.raises(DataError, match=r"cannot load missing \(not on the hub\); check") as caught:
        read_documents("hf:missing")
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"is written hf:NAME\[:CONFIG\]\[:SPLIT\]"):
        read_documents("hf:a:b:c:d")
    fake_datasets(monkeypatch, {"text": ["", ""]}, [])
    with pytest.raises(DataError, match="holds no text"):
        read_documents("hf:set")
    fake_datasets(monkeypatch, {"text": [3]}, [])
    with pytest.raises(DataError, match=r'row 0 has no string "text" \(met 3\)'):
        read_documents("hf:set")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'difftransformer\[data\]'"):
        read_documents("hf:set")


def sides(documents, **keywords):
    train, validation = split_documents(documents, **{"validation_share": 0.3, "seed": 0, **keywords})
    assert len(train) + len(validation) == len(documents)
    return {document.name for document in validation}


def test_a_document_keeps_its_side_whatever_else_is_there():
    documents = [Document(f"name-{index}", "text") for index in range(400)]
    everything = sides(documents)
    assert 80 < len(everything) < 160  # 120 expected, standard deviation 9
    shuffled = random.Random(0).sample(documents, 200)
    assert sides(shuffled) == everything & {document.name for document in shuffled}
    renamed_text = [Document(document.name, "other text") for document in documents]
    assert sides(renamed_text) == everything
    assert sides(documents, seed=1) != everything
    # A larger share only adds to the validation side.
    assert sides(documents, validation_share=0.1) < everything


def test_the_split_is_this_one_on_every_machine():
    documents = [Document(f"name-{index}", "text") for index in range(12)]
    assert sides(documents) == {"name-2", "name-3", "name-7", "name-8"}


def test_a_single_document_is_cut_at_a_line_end():
    text = "".join(f"line {index}\n" for index in range(100))
    (train,), (validation,) = split_documents([Document("one", text)], validation_share=0.2, seed=3)
    assert train.text + validation.text == text
    assert train.text.endswith("\n")
    assert 0.15 < len(validation.text) / len(text) < 0.25
    (train,), (validation,) = split_documents([Document("one", "x" * 50)], validation_share=0.2, seed=3)
    assert (len(train.text), len(validation.text)) == (40, 10)


def test_a_split_with_an_empty_side_is_refused():
    with pytest.raises(DataError, match=r"of 3 documents leaves none for validation; set validation_share to") as met:
        split_documents(documents := [Document(name, "x") for name in "abc"], validation_share=1e-9, seed=0)
    share = float(re.search(r"set validation_share to (\S+), which holds out 1 of them", str(met.value))[1])
    assert len(sides(documents, validation_share=share)) == 1
    with pytest.raises(DataError, match=r"of 2 documents leaves none for training; set validation_share to"):
        split_documents(documents[:2], validation_share=0.9999, seed=0)
    with pytest.raises(DataError, match=r"of 2 documents leaves none for validation; give more documents"):
        split_documents([documents[0]] * 2, validation_share=1e-9, seed=0)  # one name, one side
    with pytest.raises(DataError, match="of 0 documents"):
        split_documents([], validation_share=0.5, seed=0)
    with pytest.raises(DataError, match="one document of 1 characters cannot be split"):
        split_documents([Document("a", "x")], validation_share=0.5, seed=0)
    for share in (0.0, 1.0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="between 0 and 1"):
            split_documents([Document("a", "x")], validation_share=share, seed=0)
