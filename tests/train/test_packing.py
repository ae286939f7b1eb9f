"""Packed training: the loss of a row is that of its documents by themselves, and accumulation changes nothing."""

import dataclasses
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from difftransformer.data import Loader
from difftransformer.model.nll import next_token_nll
from difftransformer.train.loop import build_model, train


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


def test_a_packed_run_has_the_same_losses_with_accumulation(small, toy_shards, tmp_path):
    config = small.model_config(vocab_size=toy_shards.tokenizer.vocab_size)

    def losses(accumulation):
        met = []
        training = dataclasses.replace(small.training, accumulation=accumulation, steps=4)
        train(training, config, toy_shards, tmp_path / str(accumulation), on_metrics=met.append)
        return [line.loss_nats for line in met if hasattr(line, "loss_nats")]

    whole = losses(1)
    assert len(whole) == 4
    assert losses(2) == pytest.approx(whole, rel=1e-5)
