"""Validation loss: uniform model, parts, and the sum written out."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from difftransformer.errors import ConfigError, DataError
from difftransformer.evals import NllConfig, evaluate_nll
from tests.support.fakes import TensorModel


def test_a_uniform_model(uniform, toy_shards):
    result = evaluate_nll(uniform, toy_shards, NllConfig(windows=5), context_tokens=100)
    assert result.nll_nats_per_token == pytest.approx(math.log(400), rel=1e-12)
    assert result.tokens == 500
    # Bytes counted by decoding the windows' targets, ends of text left out.
    stream = np.asarray(toy_shards.tokens("validation")[:]).astype(np.int64)
    fitting = (len(stream) - 1) // 100
    count = 0
    for index in range(5):
        start = index * fitting // 5 * 100
        targets = stream[start + 1 : start + 101]
        text = targets[targets != toy_shards.tokenizer.end_of_text]
        count += len(toy_shards.tokenizer.decode(text).encode())
    assert result.bytes == count
    assert result.bits_per_byte == pytest.approx(500 * math.log2(400) / count, rel=1e-12)


class Sloped(TensorModel):
    """A loss that tells where it was: position plus a hundredth of the target."""

    def nll(self, input_ids, targets):
        return torch.arange(targets.shape[1]).expand(targets.shape) + 0.01 * targets


def test_parts_add_up(toy_shards):
    result = evaluate_nll(Sloped(), toy_shards, NllConfig(windows=6, position_buckets=7), context_tokens=100)
    total = result.nll_nats_per_token * result.tokens
    assert sum(b.nll_nats_per_token * b.tokens for b in result.by_position) == pytest.approx(total, rel=1e-9)
    assert sum(document.nll_nats for document in result.documents) == pytest.approx(total, rel=1e-9)
    for name in ("tokens", "bytes"):
        assert sum(getattr(document, name) for document in result.documents) == getattr(result, name)
    assert sum(bucket.tokens for bucket in result.by_position) == result.tokens
    edges = [(bucket.start_tokens, bucket.end_tokens) for bucket in result.by_position]
    assert edges[0][0] == 0
    assert edges[-1][1] == 100
    assert all(a[1] == b[0] for a, b in pairwise(edges))
    assert len(edges) == 7
    # Positions rise by one a token, targets are worth at most 4: a bucket's mean lies beside its middle.
    for bucket in result.by_position:
        middle = (bucket.start_tokens + bucket.end_tokens - 1) / 2
        assert middle <= bucket.nll_nats_per_token <= middle + 4


def test_more_buckets_than_positions(toy_shards):
    result = evaluate_nll(Sloped(), toy_shards, NllConfig(windows=2, position_buckets=50), context_tokens=9)
    assert [(b.start_tokens, b.end_tokens) for b in result.by_position] == [(i, i + 1) for i in range(9)]


def test_validation_text_shorter_than_the_context(uniform, toy_shards):
    with pytest.raises(DataError, match="validation split has"):
        evaluate_nll(uniform, toy_shards, NllConfig(), context_tokens=10**7)


@pytest.mark.parametrize("fields", [{"windows": 0}, {"position_buckets": 0}])
def test_impossible_sizes_are_refused(fields):
    with pytest.raises(ConfigError):
        NllConfig(**fields)
