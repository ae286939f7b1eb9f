"""Shards in a store: read from a copy that is made once, and refused in one line."""

import errno
import os
import urllib.request
from importlib.util import find_spec

import fsspec
import pytest

from difftransformer.data import Shards, SourceConfig, prepare, prepare_shards
from difftransformer.data.shards import MANIFEST_FILE
from difftransformer.errors import ConfigError, DataError
from difftransformer.progress import shown_by
from difftransformer.stores import local_copy
from difftransformer_lab.cli.main import main
from tests.data.conftest import request
from tests.support import fresh


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def contents_there(url):
    fs, root = fsspec.core.url_to_fs(url)
    return {path.removeprefix(f"{root}/"): fs.cat_file(path) for path in fs.find(root)}


def put(folder, url):
    """Copy a folder to a store, as a user does."""
    fs, root = fsspec.core.url_to_fs(url)
    for name, content in contents(folder).items():
        if getattr(fs, "local_file", False):
            fs.makedirs(f"{root}/{name}".rpartition("/")[0], exist_ok=True)
        fs.pipe_file(f"{root}/{name}", content)


@pytest.fixture
def stored(store, text, tmp_path):
    """The URL of shards in a store."""
    put(prepare_shards(request(text, tmp_path / "local")).folder, f"{store}/mine")
    return f"{store}/mine"


def test_what_tokenize_wrote_is_read_elsewhere_once_it_is_copied(store, text, tmp_path, monkeypatch):
    words = [
        "tokenize",
        str(text),
        "--tokenizer",
        "byte",
        "--validation-share",
        "0.2",
        "--out",
        str(tmp_path / "local"),
    ]
    assert main(words) == 0
    local = prepare_shards(request(text, tmp_path / "local"))
    put(tmp_path / "local", f"{store}/shards")
    text.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(prepare, "iter_documents", lambda *given: pytest.fail("the text was read"))
    for opened in (
        prepare_shards(request(text, f"{store}/shards")),
        Shards.open(f"{store}/shards/{local.folder.name}"),
    ):
        assert opened.url == f"{store}/shards/{local.folder.name}"
        assert opened.manifest == local.manifest
        assert opened.text_bytes("train") == local.text_bytes("train")
        assert contents(opened.folder) == contents(local.folder)


@pytest.mark.parametrize("store", ["memory", "local"], indirect=True)
def test_nothing_is_made_in_a_store(stored, store, text):
    before = contents_there(store)
    words = rf"^{store} holds no shards of this request; make them with difftransformer tokenize in a folder of this machine"
    for fields in (
        {"split_seed": 1},
        {"mixture": [SourceConfig(source=str(text))], "source": "python-stdlib", "tokenizer": "bpe"},
    ):
        with pytest.raises(DataError, match=words):
            prepare_shards(request(text, store, **fields))
    assert contents_there(store) == before


@pytest.mark.parametrize("folder", ["memory://shards", "shards"])
def test_a_plan_names_no_missing_text_where_a_store_may_hold_its_shards(folder, capsys):
    words = ["train", "demo", "--dry-run", "--set", "data.source=nowhere.txt", "--set", f"data.folder={folder}"]
    assert main(words) == 0
    line = "missing: data.source: nowhere.txt does not exist"
    assert (line in capsys.readouterr().out) == (folder == "shards")


def test_a_mixture_reads_its_tokenizer_there(store, text, tmp_path):
    (tmp_path / "b.txt").write_text("another source of other words\n" * 200)
    mixture = [SourceConfig(source=str(text)), SourceConfig(source=str(tmp_path / "b.txt"), weight=2)]
    fields = {"mixture": mixture, "source": "python-stdlib", "tokenizer": "bpe", "vocab_size": 300}
    local = prepare_shards(request(text, tmp_path / "local", **fields))
    put(tmp_path / "local", f"{store}/shards")
    text.rename(tmp_path / "elsewhere")
    elsewhere = prepare_shards(request(text, f"{store}/shards", **fields))
    assert elsewhere.manifest.fingerprint == local.manifest.fingerprint


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_copy_that_is_damaged_is_made_again(stored, tmp_path):
    first = Shards.open(stored)
    before = contents(first.folder)
    (first.folder / "train-00000.bin").write_bytes(b"damaged")
    again = Shards.open(stored)
    assert contents(again.folder) == before
    assert [path.name for path in again.folder.parent.iterdir()] == [again.folder.name]
    made = again.folder.stat().st_ino
    of_another_process = local_copy(stored, MANIFEST_FILE, tmp_path / "copies", Shards.open, is_damaged=True)
    assert of_another_process.stat().st_ino == made


def test_another_index_is_another_copy(stored):
    first = Shards.open(stored)
    fs, root = fsspec.core.url_to_fs(stored)
    manifest = contents_there(stored)["manifest.json"]
    fs.pipe_file(f"{root}/manifest.json", manifest.replace(b'"source": "', b'"source": "of '))
    second = Shards.open(stored)
    assert second.manifest.source == f"of {first.manifest.source}"
    assert second.folder != first.folder


def test_damaged_and_partial_shards_are_refused_and_leave_no_copy(stored, tmp_path):
    fs, root = fsspec.core.url_to_fs(stored)
    whole = contents_there(stored)
    shard = whole["train-00000.bin"]
    fs.pipe_file(f"{root}/train-00000.bin", shard[:-1] + b"?")
    with pytest.raises(DataError, match=f"^{stored}/train-00000.bin: wrong checksum: expected sha256 [^\n]*$"):
        Shards.open(stored)
    fs.rm_file(f"{root}/train-00000.bin")
    words = f"^{stored}/train-00000.bin: the file is missing, but the manifest lists it[^\n]*$"
    with pytest.raises(DataError, match=words):
        Shards.open(stored)
    fs.rm_file(f"{root}/manifest.json")
    with pytest.raises(DataError, match=rf"^{stored}/manifest.json: not found \([^\n]*\); check the URL$"):
        Shards.open(stored)
    assert not [path for path in (tmp_path / "copies").rglob("*") if path.is_file()]


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_name_that_leads_out_of_the_folder_is_refused(stored, tmp_path):
    fs, root = fsspec.core.url_to_fs(stored)
    fs.store[f"{root}/tokenizer/../../../out"] = fs.store[f"{root}/manifest.json"]
    with pytest.raises(DataError, match=r"cannot be read \(.*/out leads out of the folder\)"):
        Shards.open(stored)
    assert not (tmp_path / "copies" / "out").exists()


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_progress_is_that_of_bytes(stored):
    reports = []
    with shown_by(lambda *report: reports.append(report)):
        folder = Shards.open(stored).folder
    size = sum(map(len, contents(folder).values()))
    assert reports == [(size, size, "copying")]


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_full_disk_is_told_as_one(stored, tmp_path, monkeypatch):
    def full(self, path, copy, **options):
        open(copy, "wb").close()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "get_file", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*/copies/.*'"):
        Shards.open(stored)
    assert not [path for path in (tmp_path / "copies").rglob("*") if path.is_file()]


@pytest.mark.skipif(find_spec("s3fs") is not None, reason="s3fs is installed")
def test_a_store_without_its_package():
    with pytest.raises(ConfigError, match=r"^s3://bucket cannot be opened \([^\n]*s3fs[^\n]*'difftransformer\[s3\]'$"):
        Shards.open("s3://bucket/x")
    with pytest.raises(ConfigError, match=r"nosuch://bucket cannot be opened \(Protocol not known: nosuch\); install"):
        Shards.open("nosuch://bucket/x")


@pytest.mark.tools
@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_a_bucket_that_is_missing_or_closed(store, text):
    for place in ("s3://bukcet/shards", "s3://bukcet"):
        words = rf"^{place}: not found \(The specified bucket does not exist\); check the URL$"
        with pytest.raises(DataError, match=words):
            prepare_shards(request(text, place))
    assert not fsspec.filesystem("s3").exists("bukcet")
    address = f"{fsspec.config.conf['s3']['endpoint_url']}/moto-api/reset-auth"

    def allow(actions):
        post = urllib.request.Request(address, data=actions, headers={"Content-Type": "text/plain"})
        urllib.request.urlopen(post).close()

    allow(b"0")
    words = rf"^{store}: cannot be read \(The AWS Access Key .*\); check the store and its keys$"
    try:
        with pytest.raises(DataError, match=words):
            prepare_shards(request(text, store))
    finally:
        allow(b"inf")


READER = """
    import logging, sys
    logging.basicConfig(level="INFO", stream=sys.stdout)
    from difftransformer.data import Shards
    print(Shards.open(sys.argv[1]).folder)
"""


@pytest.mark.parametrize("store", ["local"], indirect=True)
def test_processes_of_a_machine_share_a_copy(stored, tmp_path):
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "cache")}
    done = fresh.finished([fresh.Fresh(READER, stored, **environment) for _ in range(3)])
    assert "".join(one.stdout for one in done).count("copying") == 1
    (folder,) = {one.stdout.splitlines()[-1] for one in done}
    assert folder.startswith(str(tmp_path / "cache"))
