"""What the tests of the op ask for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from difftransformer.files import locked
from tests.support import peak_memory
from tests.support.op_backends import force_forms


@pytest.fixture
def backend(request, monkeypatch):
    """A row of the table of backends, made available."""
    request.param.provide(monkeypatch)
    return request.param


@pytest.fixture
def take(monkeypatch):
    """`force_forms` for one test."""
    return lambda *names: force_forms(monkeypatch, *names)


@pytest.fixture(scope="session")
def distribution(tmp_path_factory):
    """The folder where `make dist` has put a wheel and a source package, once for all processes of pytest.

    Its file `peaks` has the memory that each compiler took.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "distribution"
    with locked(shared, name="distribution.lock", wait=True):
        if not folder.is_dir():
            folder.mkdir()
            # With this environment as it is: `make` is not to install anything.
            words = ["make", "-o", ".venv/.ready-dev", "PY=", f"RUN={sys.executable}", f"DIST={folder}", "dist"]
            compiler = f"{sys.executable} {peak_memory.__file__} {folder / 'peaks'} c++"
            root = Path(__file__).parents[2]
            environment = os.environ | {"CXX": compiler, "PYTHONPATH": str(root / "src")}
            done = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True)
            (folder / "log").write_text(done.stdout + done.stderr)
    assert list(folder.glob("*.whl")), (folder / "log").read_text()
    return folder
