"""Labelled examples: the public sets' own files and names, a user's files, and what is wrong with them."""

import json
import logging
import sys
from types import SimpleNamespace

import pytest

from difftransformer.errors import DataError
from difftransformer_lab.evals.sets import labelled
from difftransformer_lab.evals.sets.labelled import Example, LabelledSet, read_labelled, read_labelled_files


@pytest.fixture
def folder(tmp_path):
    """The three sets as their authors publish them, with a few rows."""
    for name in ("trec", "banking77", "clinc150"):
        (tmp_path / name).mkdir()
    trec = "DESC:manner How did it ?\nNUM:ord Which place ?\nENTY:cremat What film is in Orl\xe9ans ?\n"
    (tmp_path / "trec/train_5500.label").write_bytes(trec.encode("latin-1"))
    (tmp_path / "trec/TREC_10.label").write_bytes(b"NUM:ord Which ?\n")
    banking = 'text,category\n"Is it, or\n is it not?",card_arrival\nRefund?,Refund_not_showing_up\n'
    (tmp_path / "banking77/train.csv").write_text(banking)
    (tmp_path / "banking77/test.csv").write_text("text,category\nWhere?,card_arrival\n")
    clinc = {"train": [["say hi", "greeting"], ["tip", "tell_joke"]], "test": [["hey", "greeting"]]}
    clinc["oos_test"] = [["?", "oos"]]
    (tmp_path / "clinc150/data_full.json").write_text(json.dumps(clinc))
    return tmp_path


def test_public_sets_in_a_folder(folder):
    sets = {name: read_labelled(name, str(folder)) for name in labelled.LABELLED_SETS}
    assert sets["trec"].labels == ("description", "entity", "numeric")
    assert sets["trec-fine"].labels == ("description manner", "entity creation", "numeric order")
    assert sets["trec-fine"].train[2] == Example("What film is in Orl\xe9ans ?", "entity creation")
    first, second = sets["banking77"].train
    assert first == Example("Is it, or is it not?", "card arrival")
    assert second == Example("Refund?", "Refund not showing up")
    assert sets["clinc150"].labels == ("greeting", "tell joke")
    assert [len(found.test) for found in sets.values()] == [1, 1, 1, 1]


def test_public_sets_by_name(folder, monkeypatch):
    """The library's rows, with their class numbers, are the same examples as the files'."""
    published = {
        "CogComp/trec": (
            {"train": [("How ?", 0), ("Which ?", 1)], "test": [("Which ?", 1)]},
            {"coarse_label": ["DESC", "NUM"], "fine_label": ["DESC:manner", "NUM:ord"]},
        ),
        "PolyAI/banking77": ({"train": [("Is it?", 1)], "test": [("Is it?", 1)]}, {"label": ["x", "card_arrival"]}),
        "clinc/clinc_oos": (
            {"train": [("hi", 0), ("?", 1)], "test": [("hi", 0), ("?", 1)]},
            {"intent": ["tell_joke", "oos"]},
        ),
    }
    asked = []

    class Rows(dict):
        def __init__(self, rows, names):
            texts, numbers = zip(*rows, strict=True)
            super().__init__({"text": texts} | dict.fromkeys(names, numbers))
            self.features = {name: SimpleNamespace(int2str=classes.__getitem__) for name, classes in names.items()}

    def load_dataset(path, config, *, split, revision):
        asked.append((config, revision))
        rows, names = published[path]
        return Rows(rows[split], names)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert read_labelled("trec").train == (Example("How ?", "description"), Example("Which ?", "numeric"))
    assert read_labelled("trec-fine").labels == ("description manner", "numeric order")
    assert read_labelled("banking77").test == (Example("Is it?", "card arrival"),)
    (folder / "clinc150/data_full.json").unlink()
    assert read_labelled("clinc150", str(folder)).train == (Example("hi", "tell joke"),)  # without what is out of scope
    assert asked[0] == (None, "refs/convert/parquet")
    assert asked[-1] == ("plus", None)

    published["CogComp/trec"] = ({"train": [("A?", 0)], "test": [("A?", 0)]}, {"other": ["x"]})
    form = r"trec: CogComp/trec has another form than expected \('coarse_label'\), or name"
    with pytest.raises(DataError, match=form):
        read_labelled("trec")

    def refuse(path, config, **options):
        assert not logging.getLogger("huggingface_hub").isEnabledFor(logging.WARNING)  # "Retrying in 8s"
        raise OSError("no network\nmore")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=refuse))
    refused = r"trec: datasets cannot load CogComp/trec \(no network\); check .* network, or name a f"
    with pytest.raises(DataError, match=refused):
        read_labelled("trec")
    assert logging.getLogger("huggingface_hub").isEnabledFor(logging.WARNING)
    monkeypatch.setitem(sys.modules, "datasets", None)
    missing = r"clinc150: the package datasets is not installed.*or put clinc150/data_full.json"
    with pytest.raises(DataError, match=missing):
        read_labelled("clinc150", str(folder))
    with pytest.raises(DataError, match=r"nowhere: no such folder; name one that holds trec/train_5500.label"):
        read_labelled("trec", "nowhere")


@pytest.mark.parametrize(("name", "file", "content"), [
    ("trec", "trec/train_5500.label", b"DESC:manner\n"), ("trec", "trec/train_5500.label", b"WHAT:manner How ?\n"),
    ("banking77", "banking77/test.csv", b"text,label\nx,y\n"), ("clinc150", "clinc150/data_full.json", b"[]"),
    ("clinc150", "clinc150/data_full.json", b"{"),
])  # fmt: skip
def test_a_damaged_public_file_is_named(name, file, content, folder):
    (folder / file).write_bytes(content)
    with pytest.raises(DataError, match=rf"{file}: not the published file .*fetch the set again"):
        read_labelled(name, str(folder))


def test_own_files(tmp_path):
    table, lines = tmp_path / "a.csv", tmp_path / "b.jsonl"
    table.write_text('\ufefftext,label,more\n"one, two", yes ,x\nthree,no,\n')
    lines.write_text('{"text": "four", "label": "no"}\n\n{"text": "five", "label": "yes"}\n')
    found = read_labelled_files(str(table), str(lines))
    assert found.train == (Example("one, two", "yes"), Example("three", "no"))
    assert found.test == (Example("four", "no"), Example("five", "yes"))
    assert found.name == "a.csv, b.jsonl"


def test_one_file_is_split_by_its_texts(tmp_path):
    """About a fifth is for testing, equal texts are on one side, another seed splits otherwise, rows added change nothing."""
    rows = [{"text": f"text {number % 400}", "label": str(number % 2)} for number in range(800)]
    path = tmp_path / "a.jsonl"

    def split(rows, seed):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = read_labelled_files(str(path), seed=seed)
        return {e.text for e in found.train}, {e.text for e in found.test}

    train, test = split(rows, 0)
    assert not train & test
    assert len(train | test) == 400
    assert 50 < len(test) < 110
    assert split(rows, 1)[1] != test
    assert test <= split([{"text": "new", "label": "0"}, *rows], 0)[1]


@pytest.mark.parametrize(("name", "content", "words"), [
    ("a.csv", b"text,kind\nx,y\n", r'line 2 has no text in "label" \(met kind, text\)'),
    ("a.csv", b"text,label\n,y\n", r'line 2 has no text in "text"'),
    ("a.csv", b'text,label\nx,"y\nz"\n', r"line 3 ends a label of several lines, 'y\\nz'"),
    ("a.csv", b"text,label\n", r"no examples; give rows"),
    ("a.csv", b"text,label\nOrl\xe9ans,y\n", r"not UTF-8 text: byte 0xe9 at offset 14"),
    ("a.jsonl", b'{"text": "x"}\n', r'line 1 has no text in "label"'), ("a.jsonl", b"", r"the file is empty"),
    ("a.txt", b"x", r"files ending in '.txt' are not read; give .csv or .jsonl"),
])  # fmt: skip
def test_bad_files_are_named(name, content, words, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: {words}"):
        read_labelled_files(str(path), str(path))


def test_impossible_sets():
    one, other = Example("x", "yes"), Example("y", "no")
    with pytest.raises(DataError, match="mine: no train examples; give at least one"):
        LabelledSet(name="mine", train=(), test=(one,))
    with pytest.raises(DataError, match="mine: no test examples"):
        LabelledSet(name="mine", train=(one,), test=())
    with pytest.raises(DataError, match=r"mine: the label 'no' of 2 test examples never occurs in train"):
        LabelledSet(name="mine", train=(one,), test=(other, one, other))
