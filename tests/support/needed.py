"""What the machine lacks for a test: then the test is skipped, and under CI (DIFFTRANSFORMER_CI=1) it fails."""

import os
from pathlib import Path

import pytest


def lacking(what):
    """Skip or fail a test, and say what is not there."""
    (pytest.fail if os.environ.get("DIFFTRANSFORMER_CI") == "1" else pytest.skip)(what)


def real_data(file):
    """Path of a file of a published set, in the folder that DIFFTRANSFORMER_DATA names."""
    path = Path(os.environ.get("DIFFTRANSFORMER_DATA", ""), file)
    if not path.is_file():
        lacking(f"DIFFTRANSFORMER_DATA names no folder that holds {file}")
    return path
