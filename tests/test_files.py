"""Locks on folders, held by other processes; errors of the operating system that name their file."""

import errno
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from difftransformer.errors import FolderInUse
from difftransformer.files import locked, naming, write_atomically
from tests.support.full_disk import room

# A holder of its own: it knows nothing of the package but the file's name and how a holder writes itself into it.
HOLDER = """
import fcntl, os, socket, sys, time
file = open(sys.argv[1], "a+")
fcntl.flock(file, fcntl.LOCK_EX)
file.write(f"{os.getpid()} {socket.gethostname()}" if len(sys.argv) < 3 else sys.argv[2])
file.flush()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def hold():
    """Hold the lock of a folder in another process."""
    processes = []

    def run(folder, *words, name=".lock"):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-c", HOLDER, str(folder / name), *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield run
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_second_process_is_told_who_holds_the_folder(tmp_path, hold):
    holder = hold(tmp_path / "run")
    begun = time.monotonic()
    with pytest.raises(FolderInUse) as caught, locked(tmp_path / "run"):
        pytest.fail("two holders")
    assert time.monotonic() - begun < 1
    assert str(caught.value) == (
        f"{tmp_path / 'run'}: process {holder.pid} on {socket.gethostname()} is working in it; "
        "wait until it ends, or name another folder"
    )
    hold(tmp_path / "far", "77 another-host")
    with pytest.raises(FolderInUse, match="process 77 on another-host is working in it"), locked(tmp_path / "far"):
        pytest.fail("two holders")
    for number, words in enumerate(("", "no number", "7 \x1b[31m")):
        hold(tmp_path / str(number), words)
        with pytest.raises(FolderInUse, match="another process is working in it"), locked(tmp_path / str(number)):
            pytest.fail("two holders")


def test_a_killed_holder_leaves_no_lock(tmp_path, hold):
    holder = hold(tmp_path / "run")
    holder.kill()
    holder.wait()
    assert (tmp_path / "run" / ".lock").exists()
    with locked(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").read_text() == f"{os.getpid()} {socket.gethostname()}\n"
        with pytest.raises(FolderInUse), locked(tmp_path / "run"):
            pytest.fail("two holders")
    assert list((tmp_path / "run").iterdir()) == []


def test_waiting_ends_when_the_lock_is_released(tmp_path, hold):
    holder = hold(tmp_path)
    timer = threading.Timer(0.5, holder.kill)
    timer.start()
    with locked(tmp_path, wait=True):
        assert holder.wait(timeout=10) == -9


def test_only_a_folder_that_was_made_and_stayed_empty_is_removed(tmp_path):
    (tmp_path / "old").mkdir()
    with pytest.raises(ValueError, match="x"), locked(tmp_path / "new"), locked(tmp_path / "old"):
        raise ValueError("x")
    with locked(tmp_path / "filled"):
        (tmp_path / "filled" / "file").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "filled", "old"]


def test_a_file_system_without_locks(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with locked(tmp_path), locked(tmp_path):
        pass
    assert f"{tmp_path}: this file system has no locks; use the folder in one process at a time" in caplog.text


def copy(path):
    with room(8192):
        (path.parent / "source").write_bytes(b"x" * 8192)
    shutil.copyfile(path.parent / "source", path)


WRITERS = {
    "write": lambda path: path.write_bytes(b"x" * 8192),
    "safetensors": lambda path: save_file({"x": torch.zeros(4096)}, path),
    "copy": copy,
}


@pytest.mark.parametrize("of_a_folder", [False, True])
@pytest.mark.parametrize("writer", WRITERS)
def test_an_error_names_the_file_that_was_written(tmp_path, writer, of_a_folder):
    path = tmp_path / "model.safetensors"
    of = tmp_path if of_a_folder else path
    (tmp_path / "older").touch()
    with pytest.raises(OSError, match="File too large") as caught, room(4096), naming(of):
        WRITERS[writer](path)
    assert caught.value.filename == str(path)
    assert caught.value.errno == errno.EFBIG


def test_other_errors_stay_as_they_are(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path / "none" / "x"))), naming(tmp_path):
        (tmp_path / "none" / "x").write_text("")
    with pytest.raises(SafetensorError, match="invalid header"), naming(tmp_path):
        raise SafetensorError("invalid header")
    with pytest.raises(ValueError, match="x"), naming(tmp_path):
        raise ValueError("x")


WRITER = """
import os, sys
from pathlib import Path
from difftransformer.files import write_atomically
os.fsync = lambda descriptor: (print("writing", flush=True), sys.stdin.read())
write_atomically(Path(sys.argv[1]), b"half")
"""


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    path = tmp_path / "a[1].json"
    path.write_text("old")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path)], **pipes) for _ in range(2)]
    try:
        assert [writer.stdout.readline() for writer in writers] == ["writing\n"] * 2
        writers[0].kill()
        writers[0].wait()
        others = [f".{path.name}.{writers[0].pid}@elsewhere.tmp", f".{path.name}.notes.tmp"]
        for name in others:
            (tmp_path / name).touch()
        assert len(list(tmp_path.glob(".*@*.tmp"))) == 3
        assert path.read_text() == "old"
        write_atomically(path, b"new")
        (running,) = [name for name in os.listdir(tmp_path) if f".{writers[1].pid}@" in name]
        assert sorted(os.listdir(tmp_path)) == sorted([path.name, running, *others])
        assert path.read_text() == "new"
        writers[1].communicate()
        assert writers[1].returncode == 0
        assert path.read_text() == "half"
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
            writer.stdin.close()
            writer.stdout.close()
