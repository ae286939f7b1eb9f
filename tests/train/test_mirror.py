"""A run in an object store: where the folder is lost, it continues bitwise from the newest whole checkpoint there."""

import shutil

import fsspec
import pytest

from difftransformer.errors import CheckpointError, ConfigError
from difftransformer.train import Interrupted, checkpoints
from difftransformer.train.config import CheckpointConfig
from tests.train.test_resume import stop_after


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.tools)])
def url(request, tmp_path, monkeypatch):
    if request.param == "s3":
        pytest.importorskip("s3fs")
        server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        server.start()
        host, port = server.get_host_and_port()
        access = {"endpoint_url": f"http://{host}:{port}", "key": "any", "secret": "any"}
        monkeypatch.setitem(fsspec.config.conf, "s3", access)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket/run"
        server.stop()
    elif request.param == "local":
        yield f"file://{tmp_path / 'store' / 'run'}"
    else:
        fsspec.filesystem("memory").store.clear()
        yield "memory://bucket/run"


def test_a_lost_folder_continues_from_the_store(url, tmp_path, train_toy, read_run):
    mirrored = {"checkpoint": CheckpointConfig(mirror=url), "checkpoint_every": 2, "keep_checkpoints": 1}
    fs, root = fsspec.core.url_to_fs(url)
    train_toy(tmp_path / "whole", checkpoint_every=2, keep_checkpoints=1)
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "first", **mirrored, on_metrics=stop_after(5))
    assert [path.rpartition("/")[2] for path in fs.glob(f"{root}/checkpoints/*")] == ["step-000005"]
    # A copy that was cut short is none.
    fs.makedirs(f"{root}/checkpoints/step-000006")
    fs.pipe_file(f"{root}/checkpoints/step-000006/model.safetensors", b"half")
    shutil.rmtree(tmp_path / "first")
    train_toy(tmp_path / "second", **mirrored)
    assert read_run(tmp_path / "second") == read_run(tmp_path / "whole")
    files = [
        {file.name: file.read_bytes() for file in checkpoints(tmp_path / name)[-1].iterdir()}
        for name in ("second", "whole")
    ]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert files[0][file] == files[1][file]
    assert [path.rpartition("/")[2] for path in fs.glob(f"{root}/checkpoints/*")] == ["step-000008"]
    there = fs.find(f"{root}/checkpoints/step-000008")
    assert {path.rpartition("/")[2]: fs.cat_file(path) for path in there} == files[0]


def test_a_store_that_fails_is_a_warning(tmp_path, train_toy, monkeypatch):
    fs = fsspec.filesystem("memory")
    monkeypatch.setattr(fs, "put_file", lambda *given, **options: (_ for _ in ()).throw(PermissionError("not allowed")))
    with pytest.warns(
        UserWarning, match=r"memory://b/r: the checkpoint was not copied \(not allowed\); training goes on"
    ):
        train_toy(tmp_path, steps=1, checkpoint=CheckpointConfig(mirror="memory://b/r"))
    assert checkpoints(tmp_path)
    monkeypatch.setattr(fs, "glob", lambda *given, **options: (_ for _ in ()).throw(KeyError("no\nkeys")))  # as of boto
    with pytest.raises(CheckpointError, match=r"memory://b/r: cannot be read \(.*no.*keys.*\); check the store") as met:
        train_toy(tmp_path / "third", steps=1, checkpoint=CheckpointConfig(mirror="memory://b/r"))
    assert "\n" not in str(met.value)
    with pytest.raises(ConfigError, match="mirror: nosuch://b/r cannot be opened"):
        train_toy(tmp_path / "other", steps=1, checkpoint=CheckpointConfig(mirror="nosuch://b/r"))
