"""The loader: a pure function of seed and step, shared exactly by ranks, resumed exactly."""

import dataclasses
import json
import re
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from difftransformer.data import CITIES_SEEN, Loader, RetrievalMix, Shards, TokenStream, validation_windows
from difftransformer.errors import ConfigError, DataError

MIX = RetrievalMix(share=0.3, min_needles=1, max_needles=2, asks=2, digits=4)
SETTINGS = {"batch_tokens": 1536, "context_stages": [(0, 192), (4, 384)], "seed": 11, "retrieval": MIX}


def loader_of(shards, **keywords):
    return Loader(shards, **{**SETTINGS, **keywords})


def rows_of(batch):
    return torch.cat([batch.input_ids, batch.targets[:, -1:]], dim=1)


def counting(shards, length):
    """Shards whose training tokens are 0, 1, 2 ..., so that a row tells where it came from; in two files."""
    whole = np.arange(length, dtype=np.uint32)
    stream = TokenStream([whole[: length // 3], whole[length // 3 :]])
    return Shards(Path("counting"), shards.manifest, shards.tokenizer, {"train": stream, "validation": stream})


def test_shapes_and_targets(shards):
    loader = loader_of(shards)
    for step, context in ((0, 192), (3, 192), (4, 384), (100, 384)):
        batch = loader.batch(step)
        assert batch.input_ids.shape == batch.targets.shape == (1536 // context, context)
        assert batch.input_ids.dtype == batch.targets.dtype == torch.int64
        assert batch.input_ids.is_contiguous()
        assert torch.equal(batch.input_ids[:, 1:], batch.targets[:, :-1])
        assert batch.is_retrieval.shape == (1536 // context,)


def test_a_batch_is_a_function_of_seed_and_step(shards):
    loader = loader_of(shards)
    in_order = [rows_of(next(loader)) for _ in range(7)]
    again = loader_of(shards)
    for step in (6, 0, 3, 5, 4, 1, 2):
        assert torch.equal(rows_of(again.batch(step)), in_order[step])
    other = loader_of(shards, seed=12)
    assert not any(torch.equal(rows_of(other.batch(step)), in_order[step]) for step in range(7))


def test_reading_ahead_changes_no_batch(shards):
    """In order, from a saved position, and after a jump, with one batch read ahead in a thread."""
    plain, ahead = loader_of(shards), loader_of(shards, prefetch=True)
    for _ in range(3):
        assert torch.equal(rows_of(next(ahead)), rows_of(next(plain)))
    assert [thread for thread in threading.enumerate() if thread.name.startswith("loader")]
    assert ahead.state_dict() == plain.state_dict()
    for loader in (plain, ahead):
        loader.load_state_dict(plain.state_dict() | {"step": 1})
    assert torch.equal(rows_of(next(ahead)), rows_of(next(plain)))
    plain.step = ahead.step = 6
    for _ in range(2):
        assert torch.equal(rows_of(next(ahead)), rows_of(next(plain)))
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_two_seeds_differ_in_plain_rows_and_in_retrieval_rows(shards, share):
    mix = dataclasses.replace(MIX, share=share)
    one, two = (loader_of(shards, seed=seed, retrieval=mix) for seed in (11, 12))
    assert not any(torch.equal(rows_of(one.batch(step)), rows_of(two.batch(step))) for step in range(7))


@pytest.mark.parametrize("cut", range(7))
def test_any_cut_goes_on_exactly(shards, shards_folder, cut):
    loader = loader_of(shards)
    for _ in range(cut):
        next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["step"] == cut
    rest = [rows_of(next(loader)) for _ in range(4)]
    resumed = loader_of(Shards.open(shards_folder))
    resumed.load_state_dict(state)
    assert all(torch.equal(rows_of(next(resumed)), expected) for expected in rest)


@pytest.mark.parametrize("retrieval_share", [0.0, 0.25])
def test_an_epoch_takes_every_window_once(shards, retrieval_share):
    context, length = 192, 192 * 20 + 77
    retrieval = dataclasses.replace(MIX, share=retrieval_share)
    loader = Loader(
        counting(shards, length) if retrieval_share == 0 else shards,
        batch_tokens=context * 5,
        context_stages=[(0, context)],
        seed=3,
        retrieval=retrieval,
    )
    if retrieval_share:
        plain = [row for step in range(9) for row in plain_rows(loader.batch(step))]
        without = Loader(shards, batch_tokens=context * 5, context_stages=[(0, context)], seed=3)
        expected = [row for step in range(9) for row in plain_rows(without.batch(step))]
        # Retrieval rows put plain rows off; they do not take the place of any.
        assert plain == expected[: len(plain)]
        assert len(plain) == 45 - 11
        return
    windows = (length - context) // context
    starts = [int(row[0]) for step in range(2 * windows) for row in rows_of(loader.batch(step))]
    epochs = [starts[index * windows : (index + 1) * windows] for index in range(4)]
    shifts = set()
    for epoch in epochs:
        assert len({start % context for start in epoch}) == 1
        assert sorted(epoch) == list(range(min(epoch), min(epoch) + windows * context, context))
        assert epoch != sorted(epoch)
        shifts.add(min(epoch))
    assert len(shifts) > 1
    assert len({tuple(epoch) for epoch in epochs}) == 4
    for row in rows_of(loader.batch(0)):
        assert row.tolist() == list(range(int(row[0]), int(row[0]) + context + 1))


def plain_rows(batch):
    return [row.tolist() for row, flag in zip(rows_of(batch), batch.is_retrieval, strict=True) if not flag]


@pytest.mark.parametrize("length", [17, 18, 31, 32, 33, 48])
def test_a_short_stream_is_read_inside_its_bounds(shards, length):
    loader = Loader(counting(shards, length), batch_tokens=16, context_stages=[(0, 16)], seed=0)
    seen = set()
    for step in range(60):
        (row,) = rows_of(loader.batch(step)).tolist()
        assert row == list(range(row[0], row[0] + 17))
        assert 0 <= row[0] <= length - 17
        seen |= set(row)
    assert seen == set(range(length))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 1.0])
def test_the_share_of_retrieval_rows_is_the_one_stated(shards, share):
    loader = loader_of(shards, context_stages=[(0, 192)], retrieval=dataclasses.replace(MIX, share=share))
    total = rows = 0
    for step in range(25):
        batch = loader.batch(step)
        for row, flag in zip(rows_of(batch), batch.is_retrieval, strict=True):
            text = shards.tokenizer.decode(row)
            found = re.findall(r"The special magic ([A-Z][a-z]+) number is: (\d{4})\b", text)
            assert bool(flag) == (len(found) > len(set(found)))
            assert {city for city, _ in found} <= set(CITIES_SEEN)
        total += int(batch.is_retrieval.sum())
        rows += len(batch.is_retrieval)
        assert abs(total - share * rows) <= 1
    assert rows == 200


def test_retrieval_rows_are_drawn_afresh(shards):
    loader = loader_of(shards, retrieval=dataclasses.replace(MIX, share=1.0))
    rows = {tuple(row.tolist()) for step in range(8) for row in rows_of(loader.batch(step))}
    assert len(rows) == 4 * 8 + 4 * 4
    assert rows.isdisjoint(
        tuple(row.tolist())
        for row in rows_of(loader_of(shards, seed=12, retrieval=dataclasses.replace(MIX, share=1.0)).batch(0))
    )


def test_the_mix_reaches_the_documents(shards):
    def questions(**changes):
        loader = loader_of(shards, retrieval=dataclasses.replace(MIX, share=1.0, **changes))
        texts = [shards.tokenizer.decode(row) for step in range(4, 8) for row in rows_of(loader.batch(step))]
        return [len(re.findall(r"The special magic [A-Z][a-z]+ number is: \d{4}\b", text)) for text in texts]

    assert max(questions()) <= 2 + 2
    assert min(questions(dense=1.0)) > 2 + 2
    assert min(questions(terse=1.0)) == 0
    assert min(questions(min_needles=4, max_needles=4)) >= 4 + 1


def test_a_position_of_another_run_is_refused(shards):
    state = loader_of(shards).state_dict()
    changes = {
        "seed": {"seed": 12},
        "batch_tokens": {"batch_tokens": 3072},
        "context_stages": {"context_stages": [(0, 192)]},
        "retrieval": {"retrieval": None},
        "split": {"split": "validation"},
    }
    for key, change in changes.items():
        with pytest.raises(DataError, match=f"does not fit: {key} was .* now; resume with"):
            loader_of(shards, **change).load_state_dict(state)
    manifest = dataclasses.replace(shards.manifest, tokenizer_sha256="another")
    other = Shards(shards.folder, manifest, shards.tokenizer, {"train": shards.tokens("train")})
    with pytest.raises(DataError, match="does not fit: fingerprint was"):
        loader_of(other).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_tokens": 1500}, r"batch_tokens=1500: from step 0 it must be a multiple of 192"),
        ({"world_size": 3}, r"batch_tokens=1536: from step 0 it must be a multiple of 576"),
        ({"batch_tokens": 0}, r"batch_tokens=0"),
        ({"context_stages": []}, r"context_stages=\[\]"),
        ({"context_stages": [(1, 192)]}, r"ascending steps from 0"),
        ({"context_stages": [(0, 192), (0, 384)]}, r"ascending steps from 0"),
        ({"context_stages": [(0, 0)]}, r"context 0"),
        ({"rank": 2, "world_size": 2}, r"rank 2 of world_size 2"),
        ({"seed": -1}, r"seed is -1"),
        ({"split": "test"}, r"split is 'test'"),
    ],
)
def test_contradictions_are_refused(shards, change, words):
    with pytest.raises(ConfigError, match=words):
        loader_of(shards, **change)


def test_bad_mixes_are_refused():
    with pytest.raises(ConfigError, match=r"retrieval share is 1\.5"):
        RetrievalMix(share=1.5)
    for name in ("dense", "terse"):
        with pytest.raises(ConfigError, match=f"retrieval {name} is -1"):
            RetrievalMix(share=0.5, **{name: -1})


def test_contexts_that_do_not_fit_are_refused_before_training(shards):
    with pytest.raises(DataError, match=r"needle documents are longer than the context: .* \(context 32 from step 0\)"):
        loader_of(shards, context_stages=[(0, 32), (5, 384)])
    loader_of(shards, context_stages=[(0, 32), (5, 384)], retrieval=None)
    with pytest.raises(DataError, match=r"counting: the train split has 100 tokens, a window takes 193"):
        loader_of(counting(shards, 100))
    with pytest.raises(ConfigError, match="step is -1"):
        loader_of(shards).batch(-1)


def test_validation_windows_are_fixed_and_evenly_spread(shards):
    stream = shards.tokens("validation")
    everything = list(validation_windows(shards, 64))
    assert len(everything) == (len(stream) - 1) // 64
    joined = np.concatenate([window[:-1] for window in everything])
    assert joined.tolist() == stream[: len(joined)].tolist()
    for window, following in pairwise(everything):
        assert window[-1] == following[0]
    counted = counting(shards, 64 * 50 + 9)
    few = list(validation_windows(counted, 64, 8))
    assert all(window.dtype == np.int64 and window.tolist() == list(range(window[0], window[0] + 65)) for window in few)
    starts = [int(window[0]) for window in few]
    assert starts == [int(window[0]) for window in validation_windows(counted, 64, 8)]
    gaps = np.diff(starts)
    assert (len(few), starts[0]) == (8, 0)
    assert set(gaps.tolist()) <= {64 * 6, 64 * 7}
    assert len(list(validation_windows(counted, 64, 1000))) == 50
    assert next(validation_windows(shards, 64, 1, split="train")).tolist() == shards.tokens("train")[:65].tolist()


def test_validation_windows_refuse_what_cannot_be(shards):
    with pytest.raises(DataError, match=r"the validation split has 50 tokens, a window takes 65"):
        validation_windows(counting(shards, 50), 64)
    assert len(list(validation_windows(counting(shards, 65), 64))) == 1
    with pytest.raises(ConfigError, match="max_windows 0"):
        validation_windows(shards, 64, 0)
