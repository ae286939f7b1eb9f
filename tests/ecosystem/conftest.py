"""For tools that others build on transformers: they are there, or under CI it is a failure. Nothing comes from a hub."""

import importlib
import os
import subprocess
import sys

import pytest
import torch

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
