"""The source `python-packages`, from wheels made here, and the shares of held-out lines by hand."""

import hashlib
import zipfile

import pytest

from difftransformer.data import packages
from difftransformer.data.documents import Document
from difftransformer.data.held_out import HeldOutLines
from difftransformer.errors import DataError


def lines(word, count):
    return "".join(f"def {word}_{chr(97 + i % 26)}{chr(97 + i // 26)}(self, argument): pass\n" for i in range(count))


def wheel(folder, package, **files):
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as made:
        for name, text in files.items():
            made.writestr(f"{package}/{name}.py", text)


def test_what_is_read(tmp_path):
    table = "".join(f"    0x{i:04x}: 'a character of a table',\n" for i in range(20))
    wheel(tmp_path, "dask", own=lines("held", 20), copied=lines("one", 12) + lines("two", 4))
    wheel(
        tmp_path,
        "apple",
        a=lines("one", 30),
        b=lines("one", 5) + lines("more", 20),
        table=table,
        latin="é".encode("latin-1"),
    )
    wheel(tmp_path, "zebra", same=lines("one", 30))
    documents = list(packages.read(tmp_path))
    # The table, the copies and what is not UTF-8 are left out; a fifth of b stood in a.
    assert [document.name for document in documents] == ["apple/apple/a.py", "apple/apple/b.py", "dask/dask/own.py"]
    assert [split for split, _ in packages.split(documents)] == ["train", "train", "validation"]


def test_shares_of_held_out_lines():
    collected = HeldOutLines()
    train = lines("train", 4) + "short line\n"
    held = lines("train", 2) + lines("own", 5) + "    0x1F, 0x2E, 0x3D, 0x4C, 0x5B, 0x6A,\n" + "short line\n"
    documents = [("train", Document("a", train)), ("validation", Document("b", held))]
    assert list(collected.over(documents)) == documents
    assert collected.shares() == (8, 2 / 8, 1 / 8)


def test_the_list_and_a_fetch_that_fails(tmp_path, monkeypatch):
    listed = packages.listed()
    assert len(listed) == len(packages.LIST.read_text("utf-8").splitlines()) > 25
    assert all(len(sha256) == 64 for sha256 in listed.values())
    assert {name.rpartition("-")[0] for name in listed} >= set(packages.HELD_OUT)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "list").write_text(f"no-such-package-here==1 --hash=sha256:{hashlib.sha256().hexdigest()}\n", "utf-8")
    monkeypatch.setattr(packages, "LIST", tmp_path / "list")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    with pytest.raises(
        DataError, match=r"python-packages: pip cannot fetch the packages .*; connect to a package index"
    ):
        packages.fetch()
    assert not list((tmp_path / "difftransformer").glob(f"*{packages.NAME}*"))
