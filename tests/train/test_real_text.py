"""Training on real text, and the check of the data that such tests read."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from difftransformer.data import prepare_shards
from difftransformer.train import read_metrics
from difftransformer_lab.studies import recipe_from, train_run
from tests import check_data


@pytest.mark.slow
def test_tinyshakespeare(tmp_path, toy):
    """A small model soon knows more of held-out Shakespeare than how often each token occurs."""
    if problem := check_data.missing("tinyshakespeare"):
        pytest.skip(problem)
    source = Path(os.environ[check_data.VARIABLE]) / "tinyshakespeare" / "input.txt"
    toy["data"] = {
        "source": str(source),
        "vocab_size": 512,
        "folder": str(tmp_path / "shards"),
        "validation_share": 0.1,
    }
    toy["training"] |= {"steps": 200, "batch_tokens": 1024, "context_stages": [[0, 64]], "retrieval": None}
    toy["training"] |= {
        "validate_every": 100,
        "checkpoint_every": 200,
        "validation_windows": 64,
        "optimizer": {"learning_rate": 0.01},
    }
    recipe = recipe_from(toy, source="toy")
    shards = prepare_shards(recipe.data)
    train_run(tmp_path / "run", recipe, shards)
    steps, validations = read_metrics(tmp_path / "run" / "metrics.jsonl")
    # logits begin as independent normals of variance 1, whose exponentials have the mean e^(1/2)
    assert steps[0].loss_nats == pytest.approx(math.log(shards.tokenizer.vocab_size) + 0.5, abs=0.1)
    counts = np.bincount(shards.tokens("validation")[:], minlength=512)
    shares = counts[counts > 0] / counts.sum()
    assert validations[-1].validation_loss_nats < -(shares * np.log(shares)).sum() - 0.3
    assert validations[-1].validation_loss_nats < validations[0].validation_loss_nats


def run_check(**environment):
    environment = {"PATH": os.environ["PATH"], **environment}
    return subprocess.run(
        [sys.executable, check_data.__file__], env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def full(tmp_path):
    for files in check_data.SETS.values():
        for file in files:
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text("text")
    return tmp_path


def test_data_that_is_there(full):
    done = run_check(DIFFTRANSFORMER_DATA=str(full), DIFFTRANSFORMER_CI="1")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "".join(f"{name}: found\n" for name in check_data.SETS),
        "",
    )


def test_a_named_folder_that_lacks_a_set(full):
    (full / "wikitext2" / "test.txt").unlink()
    done = run_check(DIFFTRANSFORMER_DATA=str(full))
    assert done.returncode == 1
    lines = [
        f"{name}: {f'{full} lacks wikitext2/test.txt' if name == 'wikitext2' else 'found'}" for name in check_data.SETS
    ]
    assert done.stdout.splitlines() == lines
    assert done.stderr.count("\n") == 1
    assert "wikitext2" in done.stderr


def test_data_that_nobody_named():
    done = run_check()
    assert done.returncode == 0
    assert done.stdout.count("DIFFTRANSFORMER_DATA is not set") == len(check_data.SETS) == 5
    assert run_check(DIFFTRANSFORMER_CI="1").returncode == 1
