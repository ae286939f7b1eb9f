"""Mixtures and packed documents: every row is found from seed and index, and ranks only slice."""

import hashlib
import json
import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from difftransformer.data import (
    Loader,
    Manifest,
    RetrievalMix,
    Shards,
    SourceConfig,
    TokenStream,
    byte_tokenizer,
    document_positions,
    packing,
)
from difftransformer.data.loader import Allocation
from difftransformer.data.packing import best_fit
from difftransformer.data.shards import ShardFile, SplitManifest
from difftransformer.errors import ConfigError, DataError

EOT = 256
CONTEXT = 96
RETRIEVAL = RetrievalMix(share=0.2, max_needles=1, asks=1, digits=1)
LONG = {"long_tokens": 70, "long_times": 3}


def shards_of(documents, *, parts=2):
    """Shards of documents given as lists of tokens, in several files."""
    tokens = np.array([token for document in documents for token in [*document, EOT]], "<u2")
    stream = TokenStream(np.array_split(tokens, parts))
    digest = hashlib.sha256(tokens.tobytes()).hexdigest()
    file = ShardFile(file="0.bin", tokens=len(tokens), sha256=digest)
    split = SplitManifest(documents=len(documents), tokens=len(tokens), bytes=0, shards=[file])
    manifest = Manifest(
        version=1, source=digest[:4], request={}, tokenizer_sha256="", vocab_size=258, end_of_text=EOT, dtype="<u2",
        splits={"train": split, "validation": split},
    )  # fmt: skip
    return Shards(Path(digest[:8]), manifest, byte_tokenizer(), {"train": stream, "validation": stream})


def documents_of(seed, count, longest=120, letters=(1, 250)):
    draw = np.random.default_rng(seed)
    return [draw.integers(*letters, draw.integers(1, longest)).tolist() for _ in range(count)]


def mixture_of(**options):
    """Three sources whose tokens tell them apart: 1 to 50, 51 to 100, 101 to 150."""
    sources = []
    for index, (weight, count) in enumerate([(0.5, 40), (0.3, 90), (0.2, 20)]):
        shards = shards_of(documents_of(index, count, letters=(50 * index + 1, 50 * index + 51)))
        sources.append((SourceConfig(source=f"source-{index}", weight=weight, **options), shards))
    return Shards.mix(sources)


def loader_of(shards, **options):
    defaults = {"batch_tokens": 48 * CONTEXT, "context_stages": [(0, CONTEXT), (3, 2 * CONTEXT)], "seed": 5}
    return Loader(shards, **(defaults | options))


def global_batch(shards, step, ranks, **options):
    """The batch of a step, put together from those of its ranks; every field."""
    found = [loader_of(shards, rank=rank, world_size=ranks, **options).batch(step) for rank in range(ranks)]
    assert len({batch.step_targets for batch in found}) == 1
    fields = ("input_ids", "targets", "is_retrieval", "position_ids")
    there = [name for name in fields if getattr(found[0], name) is not None]
    joined = [torch.cat([getattr(batch, name) for batch in found]) for name in there]
    return [*joined, torch.tensor(found[0].step_targets)]


@pytest.mark.parametrize(
    ("retrieval", "pack", "long"),
    [(None, False, LONG), (None, True, {}), (RETRIEVAL, False, {}), (RETRIEVAL, True, LONG)],
)
def test_ranks_only_slice_the_global_batch(retrieval, pack, long):
    shards = mixture_of(**long)
    options = {"retrieval": retrieval, "pack_documents": pack}
    for step in (0, 2, 3, 40):
        whole = global_batch(shards, step, 1, **options)
        assert len(whole[0]) == (48 if step < 3 else 24)
        for ranks in (2, 3, 4, 8):
            parts = global_batch(shards, step, ranks, **options)
            assert all(torch.equal(one, other) for one, other in zip(whole, parts, strict=True))


@pytest.mark.parametrize("pack", [False, True])
def test_the_state_is_the_step(pack):
    loader = loader_of(mixture_of(), pack_documents=pack)
    expected = [next(loader).input_ids for _ in range(6)]
    loader = loader_of(mixture_of(), pack_documents=pack)
    for _ in range(4):
        next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = loader_of(mixture_of(), pack_documents=pack, rank=1, world_size=2)
    resumed.load_state_dict(state)
    assert torch.equal(next(resumed).input_ids, expected[4][len(expected[4]) // 2 :])


def test_a_mixture_gives_every_source_its_share_and_its_own_epochs():
    shards = mixture_of()
    loader = loader_of(shards, context_stages=[(0, CONTEXT)])
    rows = torch.cat([loader.batch(step).input_ids for step in range(20)])
    texts = rows.masked_fill(rows == EOT, 0).max(1).values
    source = ((texts - 1) // 50).tolist()
    shares = np.array([source.count(index) for index in range(3)]) / len(source)
    assert np.abs(shares - [0.5, 0.3, 0.2]).max() < 0.003
    for index, (_, one) in enumerate(shards.sources):
        alone = [row.tolist() for row, met in zip(rows, source, strict=True) if met == index]
        stream = one.tokens("train")[:].tolist()
        windows = (len(stream) - CONTEXT) // CONTEXT
        assert len(alone) > windows
        epoch = alone[:windows]
        # One epoch covers the stream once, in windows that follow one another.
        starts = sorted(next(i for i in range(len(stream)) if stream[i : i + CONTEXT] == row) for row in epoch)
        assert np.diff(starts).tolist() == [CONTEXT] * (windows - 1)


@settings(deadline=None, max_examples=50)
@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_rows_are_divided_without_state(weights, seed):
    allocation = Allocation(weights, np.random.default_rng(seed))
    counts = [0] * len(weights)
    for row in range(300):
        source, index = allocation.place(row)
        assert index == counts[source]
        counts[source] += 1
        shares = np.array(weights) / sum(weights) * (row + 1)
        assert np.abs(counts - shares).max() <= len(weights)


@pytest.mark.parametrize("weights", [[1e-12, 3e-12], [3e-12, 1e-12], [1e-300, 1e-300]])
def test_small_weights_are_weights(weights):
    allocation = Allocation(weights, np.random.default_rng(0))
    met = Counter(allocation.place(row)[0] for row in range(400))
    assert [met[0], met[1]] == pytest.approx([400 * weight / sum(weights) for weight in weights], abs=2)


def naive_best_fit(sizes, capacity):
    rows = []
    for size in sizes:
        rooms = [capacity - sum(row) for row in rows]
        fitting = [index for index, room in enumerate(rooms) if room >= size]
        if fitting:
            rows[min(fitting, key=lambda index: rooms[index])].append(size)
        else:
            rows.append([size])
    return rows


@settings(deadline=None, max_examples=100)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=60))
def test_the_plan_is_best_fit_decreasing(sizes):
    sizes = sorted(sizes, reverse=True)
    placed = best_fit(np.array(sizes), 30)
    rows = [[size for size, row in zip(sizes, placed, strict=True) if row == index] for index in range(max(placed) + 1)]
    # Rows that are equally full may change places, so the rows themselves may differ.
    assert sorted(map(sum, rows)) == sorted(map(sum, naive_best_fit(sizes, 30)))
    assert sorted(size for row in rows for size in row) == sizes[::-1]


@pytest.mark.parametrize(("long_tokens", "times"), [(0, 1), (80, 3)])
@pytest.mark.parametrize("block", [None, {"BLOCK_TOKENS": 400}, {"BLOCK_DOCUMENTS": 3}])
def test_an_epoch_of_packed_rows_holds_every_document(monkeypatch, long_tokens, times, block):
    for name, value in ({"GROUP_BLOCKS": 2} | block if block else {}).items():
        monkeypatch.setattr(packing, name, value)
    documents = documents_of(7, 60, longest=150)
    config = SourceConfig(source="one", long_tokens=long_tokens, long_times=times)
    shards = Shards.mix([(config, shards_of(documents))])
    loader = loader_of(shards, context_stages=[(0, CONTEXT)], batch_tokens=CONTEXT, pack_documents=True)
    rows = loader._feed(0, 0).per_epoch
    assert rows < (1.4 if block else 1.1) * sum(len(document) + 1 for document in documents) / CONTEXT * times
    epochs = []
    for epoch in range(2):
        pieces, order = Counter(), []
        for step in range(epoch * rows, (epoch + 1) * rows):
            batch = loader.batch(step)
            inputs, targets, positions = (t[0].tolist() for t in (batch.input_ids, batch.targets, batch.position_ids))
            assert batch.step_targets == sum(target != -100 for target in targets)
            bounds = [at for at, position in enumerate(positions) if position == 0] + [CONTEXT]
            for begin, end in pairwise(bounds):
                assert positions[begin:end] == list(range(end - begin))
                if targets[begin] == -100:
                    assert (set(inputs[begin:end]), set(targets[begin:end])) == ({257}, {-100})
                    assert end == CONTEXT
                    continue
                assert inputs[begin + 1 : end] == targets[begin : end - 1]
                piece = (inputs[begin], *targets[begin:end])
                pieces[piece] += 1
                order.append(piece)
        expected = Counter()
        for document in documents:
            whole = [EOT, *document, EOT]
            copies = times if long_tokens and len(document) + 1 >= long_tokens else 1
            for begin in range(0, len(whole) - 1, CONTEXT):
                expected[tuple(whole[begin : begin + CONTEXT + 1])] += copies
        assert pieces == expected
        epochs.append(order)
    assert epochs[0] != epochs[1]


def test_a_document_longer_than_a_block_is_cut_into_the_rows_that_it_has_anyway(monkeypatch):
    shards = shards_of(documents_of(3, 12, longest=900))
    options = {"context_stages": [(0, CONTEXT)], "batch_tokens": CONTEXT, "pack_documents": True}

    def epoch():
        loader = loader_of(shards, **options)
        rows = [loader.batch(step) for step in range(loader._feed(0, 0).per_epoch)]
        return sorted(tuple(row.input_ids[0].tolist()) for row in rows if (row.position_ids[0].diff() == 1).all())

    whole = epoch()
    monkeypatch.setattr(packing, "BLOCK_TOKENS", 2 * CONTEXT)
    assert len(whole) > 20
    assert set(whole) <= set(epoch())


def test_the_plan_does_not_grow_with_the_text(monkeypatch):
    monkeypatch.setattr(packing, "BLOCK_TOKENS", 30_000)
    monkeypatch.setattr(packing, "BLOCK_DOCUMENTS", 5000)
    monkeypatch.setattr(packing, "GROUP_BLOCKS", 2)
    lengths = np.random.default_rng(0).integers(1, 9, 400_000)
    tokens = np.ones(lengths.sum(), np.uint16)
    tokens[np.cumsum(lengths) - 1] = EOT
    peaks = []
    for count in (50_000, 400_000):
        stream = TokenStream([tokens[: lengths[:count].sum()]])
        tracemalloc.start()
        packs = packing.Packs(stream, context=64, key=(1,), end_of_text=EOT, pad=EOT)
        for epoch in range(2):
            packs.row(epoch * packs.per_epoch)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0], peaks


def test_long_documents_are_read_more_often_in_windows_too():
    documents = documents_of(3, 60, longest=150)
    config = SourceConfig(source="one", long_tokens=100, long_times=3)
    shards = Shards.mix([(config, shards_of(documents))])
    loader = loader_of(shards, context_stages=[(0, CONTEXT)], batch_tokens=CONTEXT)
    length = sum((len(document) + 1) * (3 if len(document) >= 99 else 1) for document in documents)
    per_epoch = (length - CONTEXT) // CONTEXT
    seen = torch.cat([loader.batch(step).input_ids for step in range(per_epoch)]).flatten().tolist()
    assert abs(seen.count(EOT) - sum(3 if len(document) >= 99 else 1 for document in documents)) <= 2
    text = ",".join(map(str, seen))
    middles = [",".join(map(str, document[20:40])) for document in documents]
    found = {length: [text.count(middle) for document, middle in zip(documents, middles, strict=True)
                      if (len(document) >= 99) == length and len(document) >= 40] for length in (False, True)}  # fmt: skip
    # Where a window is cut inside these 20 tokens, they are not found.
    assert max(found[False]) == 1
    assert max(found[True]) == 3
    assert np.mean(found[True]) > 2 * np.mean(found[False])


def test_a_single_source_gives_the_batches_of_earlier_releases():
    tokens = np.random.default_rng(0).integers(32, 127, 9001).astype("<u2")
    stream = TokenStream([tokens[:4000], tokens[4000:]])
    shards = shards_of([[1]])
    shards = Shards(shards.folder, shards.manifest, shards.tokenizer, {"train": stream, "validation": stream})
    expected = {
        0.0: "8bb0be60faf9c2fe3f40d4036a0368a1e90636884f2c8c7f7caf9b12e125f166",
        0.3: "cb04d943b8b69e616c886a818eaceef30ada30ad868cd20aca5fdb467db72be2",  # since needles take every number
    }
    for share, known in expected.items():
        mix = RetrievalMix(share=share, max_needles=2, asks=2, digits=4)
        loader = Loader(shards, batch_tokens=1536, context_stages=[(0, 192), (4, 384)], seed=11, retrieval=mix)
        digest = hashlib.sha256()
        for step in range(12):
            batch = loader.batch(step)
            for tensor in (batch.input_ids, batch.targets, batch.is_retrieval):
                digest.update(tensor.numpy().tobytes())
        assert digest.hexdigest() == known


def test_positions_restart_at_each_end_of_text():
    windows = torch.tensor([[5, 6, EOT, 7, EOT, EOT, 8], [EOT, 1, 2, 3, 4, 5, 6]])
    expected = [[0, 1, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6]]
    assert document_positions(windows, EOT).tolist() == expected


def test_other_data_are_refused_by_name():
    state = loader_of(mixture_of()).state_dict()
    shards = mixture_of()
    changed = [*shards.sources[:1], (shards.sources[1][0], shards_of(documents_of(9, 30))), shards.sources[2]]
    with pytest.raises(DataError, match=r"fingerprint was .* now \(other data in source-1\); resume with the data"):
        loader_of(Shards.mix(changed)).load_state_dict(state)
    heavier = [(SourceConfig(source="source-0", weight=2), shards.sources[0][1]), *shards.sources[1:]]
    with pytest.raises(DataError, match=r"does not fit: mixture was"):
        loader_of(Shards.mix(heavier)).load_state_dict(state)
    with pytest.raises(DataError, match=r"does not fit: pack_documents was None and is True now"):
        loader_of(shards, pack_documents=True).load_state_dict(state)
    moved = [(SourceConfig(source=f"moved-{i}", weight=c.weight), s) for i, (c, s) in enumerate(shards.sources)]
    loader_of(Shards.mix(moved)).load_state_dict(state)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weight": 0.0}, r"weight=0.0: give a weight above 0, or leave books out"),
        ({"weight": -1.0}, r"weight=-1.0"),
        ({"long_tokens": -1}, r"long_tokens=-1"),
        ({"long_times": 0}, r"long_times=0"),
    ],
)
def test_impossible_sources_are_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        SourceConfig(source="books", **fields)


def test_a_source_shorter_than_a_window_is_named():
    shards = mixture_of()
    short = shards_of([[1] * 10])
    words = rf"{short.folder}: the train split has 11 tokens, a window takes {CONTEXT + 1}"
    with pytest.raises(DataError, match=words):
        loader_of(Shards.mix([*shards.sources, (SourceConfig(source="short"), short)]))
