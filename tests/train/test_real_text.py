"""Training on real text."""

import math

import numpy as np
import pytest

from difftransformer.data import prepare_shards
from difftransformer.train import read_metrics
from difftransformer_lab.studies import recipe_from, train_run
from tests.support.needed import real_data


@pytest.mark.slow
def test_tinyshakespeare(tmp_path, toy):
    """A small model soon knows more of held-out Shakespeare than how often each token occurs."""
    source = real_data("tinyshakespeare/input.txt")
    toy["data"] = {
        "source": str(source),
        "vocab_size": 512,
        "folder": str(tmp_path / "shards"),
        "validation_share": 0.1,
    }
    toy["training"] |= {"steps": 200, "batch_tokens": 1024, "context_stages": [[0, 64]], "retrieval": None}
    toy["training"] |= {"validate_every": 100, "checkpoint_every": 200, "validation_windows": 64}
    toy["training"]["optimizer"] = {"learning_rate": 0.01}
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
