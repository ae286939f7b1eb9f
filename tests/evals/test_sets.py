"""Documents and problems: a user's files, the public sets' columns, and what is wrong on which line."""

import json
import sys
import types

import pytest

from difftransformer.errors import ConfigError, DataError
from difftransformer_lab.evals.sets.grounded import GROUNDED_SETS, read_grounded, read_grounded_file

ROW = {"document": "A.", "reference": "B.", "question": "C?"}


@pytest.fixture
def lines(tmp_path):
    """Write a JSONL file of objects or raw lines."""

    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def hub(monkeypatch):
    """A `datasets` library that holds what a test gives it."""
    held, asked = {}, []

    def load_dataset(name, config=None, *, split, revision=None):
        asked.append((name, config, split, revision))
        if name not in held:
            raise ConnectionError("cannot reach the hub\nat all")
        return held[name]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return held, asked


def test_items_of_a_file(lines):
    path = lines(ROW, "", ROW | {"document": "D.", "more": 1})
    (first, second) = read_grounded_file(path, "qa")
    assert (first.document, first.question, first.reference) == ("A.", "C?", "B.")
    assert (second.document, second.name) == ("D.", "3")
    assert read_grounded_file(path, "summary")[0].question is None


def test_a_draw_is_the_seeds_and_in_order(lines):
    path = lines(*(ROW | {"document": str(index)} for index in range(50)))
    draws = [[int(item.document) for item in read_grounded_file(path, "qa", 10, seed)] for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert draws[0] == sorted(set(draws[0]))
    assert len(draws[0]) == 10
    assert len(read_grounded_file(path, "qa", 100)) == 50


@pytest.mark.parametrize(("row", "words"), [
    ({"document": "A.", "reference": "B."}, 'rows.jsonl: line 2 has no text in "question" .met document, reference.', ),
    (ROW | {"reference": ""}, "line 2 has no text in \"reference\" .it holds ''"),
    (ROW | {"document": ["A."]}, 'line 2 has no text in "document"'),
    ("{", "line 2 is not JSON"),
    ("[1]", "line 2 is a JSON list; give one JSON object per line"),
])  # fmt: skip
def test_a_bad_line_is_named(lines, row, words):
    with pytest.raises(DataError, match=words):
        read_grounded_file(lines(ROW, row), "qa")


def test_files_that_cannot_be(lines, tmp_path):
    with pytest.raises(DataError, match=r"no such file; name a .jsonl file"):
        read_grounded_file(str(tmp_path / "none.jsonl"), "qa")
    with pytest.raises(DataError, match=r"the file is empty"):
        read_grounded_file(lines("", ""), "qa")
    with pytest.raises(ConfigError, match=r"set 'xsums': choose from xsum, .*--file"):
        read_grounded("xsums")


GROUNDED_ROWS = {
    "xsum": {"document": "D", "summary": "R", "id": "1"}, "cnn_dm": {"article": "D", "highlights": "R", "id": "1"},
    "multinews": {"question": "", "context": "D", "answers": ["R"]},
    "qasper": {"question": "Q", "context": "D", "answers": ["R", "S"]},
    "hotpotqa": {"question": "Q", "context": "D", "answers": ["R"]},
    "2wikimqa": {"question": "Q", "context": "D", "answers": ["R"]},
}  # fmt: skip


@pytest.mark.parametrize("name", GROUNDED_SETS)
def test_public_documents(hub, name):
    held, asked = hub
    held[GROUNDED_SETS[name].public.hub_name] = [GROUNDED_ROWS[name]]
    (item,) = read_grounded(name)
    assert (item.document, item.reference) == ("D", "R | S" if name == "qasper" else "R")
    assert item.question == ("Q" if "question" in GROUNDED_ROWS[name] and name != "multinews" else None)
    assert asked[0][2] == "test"


def test_public_sets_that_cannot_be_had(hub, monkeypatch):
    held, _ = hub
    with pytest.raises(DataError, match=r"xsum: datasets cannot load EdinburghNLP/xsum \(cannot reach the hub\)"):
        read_grounded("xsum")
    held |= {"EdinburghNLP/xsum": [{"text": "D"}], "abisee/cnn_dailymail": []}
    with pytest.raises(DataError, match=r'xsum: row 0 of EdinburghNLP/xsum has no text in "document" \(met text\)'):
        read_grounded("xsum")
    with pytest.raises(DataError, match=r"cnn_dm: .* holds no items"):
        read_grounded("cnn_dm")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"the package datasets is not installed"):
        read_grounded("xsum")
