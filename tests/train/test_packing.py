"""Packed training: the loss of a row is that of its documents by themselves, and accumulation changes nothing.

Of examples, the loss is the mean over the targets of the whole step that count.
"""

import dataclasses
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from difftransformer.data import Example, Loader, Shards, id_tokenizer, validation_rows
from difftransformer.errors import DataError
from difftransformer.model.nll import next_token_nll
from difftransformer.train import LogsConfig, ValidationMetrics, build_model, train
from difftransformer.train.metrics import InsideMetrics
from difftransformer.train.parallel import Mesh
from difftransformer.train.trainer import validate
from tests.support.shards import write_shards


@pytest.fixture
def small(toy_recipe):
    training = dataclasses.replace(toy_recipe.training, pack_documents=True, retrieval=None, context_stages=[(0, 128)])
    return dataclasses.replace(toy_recipe, training=training)


@pytest.mark.parametrize("attention_type", ["diff", "softmax"])
def test_packed_documents_do_not_see_each_other(small, toy_shards, attention_type):
    recipe = small.with_model(attention_type)
    model = build_model(recipe.model_config(vocab_size=toy_shards.tokenizer.vocab_size), 0).eval()
    # Documents shorter than a row, so that several share one.
    loader = Loader(toy_shards, batch_tokens=4096, context_stages=[(0, 1024)], seed=0, pack_documents=True)
    batch = loader.batch(0)
    with torch.no_grad():
        nll = next_token_nll(model, batch.input_ids, batch.targets, position_ids=batch.position_ids)
    documents = 0
    for ids, targets, positions, losses in zip(batch.input_ids, batch.targets, batch.position_ids, nll, strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for begin, end in pairwise(starts):
            if targets[begin] == -100:
                assert losses[begin:end].abs().max() == 0
                continue
            documents += 1
            with torch.no_grad():
                logits = model(input_ids=ids[None, begin:end], use_cache=False).logits[0]
            alone = F.cross_entropy(logits, targets[begin:end], reduction="none")
            torch.testing.assert_close(losses[begin:end], alone, rtol=1e-5, atol=1e-5)
    assert documents > len(ids) / 1024


def test_a_packed_run_has_the_same_losses_with_accumulation(small, toy_shards, tmp_path, listening):
    config = small.model_config(vocab_size=toy_shards.tokenizer.vocab_size)

    def losses(accumulation):
        met = []
        training = dataclasses.replace(small.training, accumulation=accumulation, steps=4)
        train(training, config, toy_shards, tmp_path / str(accumulation), callbacks=[listening(met.append)])
        return [line.loss_nats for line in met if hasattr(line, "loss_nats")]

    whole = losses(1)
    assert len(whole) == 4
    assert losses(2) == pytest.approx(whole, rel=1e-5)


def test_the_loss_of_examples_is_the_mean_over_what_counts(small, tmp_path, listening):
    """In the whole step, whose parts have unequal numbers of targets; computed here example by example."""
    draw, examples = np.random.default_rng(0), []
    for index in range(24):
        size = int(draw.integers(2, 64))
        targets = np.where(draw.random(size) < (0.9 if index % 3 else 0.1), draw.integers(0, 50, size), -100)
        targets[-1] = 7
        examples.append(Example(str(index), draw.integers(0, 50, size), targets))
    write_shards(tmp_path / "shards", examples, examples[:7], id_tokenizer(50))
    shards = Shards.open(tmp_path / "shards")
    config = small.model_config(vocab_size=shards.tokenizer.vocab_size)
    model = build_model(config, small.training.seed).eval()
    training = dataclasses.replace(small.training, batch_tokens=2048, context_stages=[(0, 64)], steps=1)

    def nll(ids, targets):
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
        return F.cross_entropy(logits.double(), targets, reduction="sum").item(), int((targets != -100).sum())

    def mean(found):
        return sum(total for total, _ in found) / sum(count for _, count in found)

    loader = Loader(shards, batch_tokens=2048, context_stages=[(0, 64)], seed=small.training.seed, pack_documents=True)
    batch, alone, counts = loader.batch(0), [], []
    for row in range(32):
        starts = [*(batch.position_ids[row] == 0).nonzero().flatten().tolist(), 64]
        found = [nll(batch.input_ids[row, a:b], batch.targets[row, a:b]) for a, b in pairwise(starts)]
        alone += found
        counts.append(sum(count for _, count in found))
    assert sum(counts[:8]) != sum(counts[8:16])
    for accumulation in (1, 4):
        met = []
        run = tmp_path / str(accumulation)
        train(
            dataclasses.replace(training, accumulation=accumulation),
            config,
            shards,
            run,
            callbacks=[listening(met.append)],
        )
        assert met[0].loss_nats == pytest.approx(mean(alone), rel=1e-5)
    held = [nll(torch.from_numpy(example.inputs), torch.from_numpy(example.targets)) for example in examples[:7]]
    training = dataclasses.replace(training, validation_windows=100)
    assert validate(model, shards, training, Mesh()) == pytest.approx(mean(held), rel=1e-5)


@pytest.mark.parametrize("every", [0, 1])
def test_a_first_validation_example_without_targets_is_no_error(small, tmp_path, listening, every):
    """Each example fills a row; the one that comes first gets no target."""

    def shards(unscored):
        examples = [
            Example(str(index), np.full(64, index), np.full(64, -100 if index == unscored else index))
            for index in range(4)
        ]
        folder = tmp_path / f"shards {unscored}"
        write_shards(folder, [Example("learned", np.full(64, 1), np.full(64, 1))], examples, id_tokenizer(50))
        return Shards.open(folder)

    first = int(validation_rows(shards(None), 64, 1)[0, 0, 0])
    given = shards(first)
    training = dataclasses.replace(
        small.training, batch_tokens=128, context_stages=[(0, 64)], steps=1, validation_windows=4
    )
    config = small.model_config(vocab_size=given.tokenizer.vocab_size)
    met = []
    train(
        training,
        config,
        given,
        tmp_path / "run",
        logs=LogsConfig(inside_every=every),
        callbacks=[listening(met.append)],
    )
    assert sum(isinstance(line, InsideMetrics) for line in met) == every
    (validation,) = [line for line in met if isinstance(line, ValidationMetrics)]
    assert math.isfinite(validation.validation_loss_nats)


def test_a_run_without_a_validation_target_is_refused_before_it_trains(small, tmp_path):
    examples = [Example(str(index), np.full(64, index), np.full(64, index)) for index in range(4)]
    unscored = [Example("none", np.full(64, 1), np.full(64, -100))]
    write_shards(tmp_path / "shards", examples, unscored, id_tokenizer(50))
    given = Shards.open(tmp_path / "shards")
    with pytest.raises(DataError, match="no token of the validation split counts in the loss"):
        train(small.training, small.model_config(vocab_size=given.tokenizer.vocab_size), given, tmp_path / "run")
    assert not (tmp_path / "run").exists()
