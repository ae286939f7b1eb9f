"""Examples: each token says what is learned from it, through shards, packing, mixtures and any number of ranks."""

import gzip
import json
from itertools import pairwise

import numpy as np
import pytest
import torch

from difftransformer.data import (
    DataConfig,
    Document,
    Example,
    Loader,
    RetrievalMix,
    Shards,
    SourceConfig,
    Tokenizer,
    byte_tokenizer,
    id_tokenizer,
    prepare_shards,
    read_documents,
    validation_rows,
)
from difftransformer.errors import ConfigError, DataError
from tests.data.conftest import request, stored
from tests.support.shards import write_shards

IDS = 50


def examples_of(seed, count, *, length=None, longest=70):
    """Examples whose targets are no function of their inputs; about a third counts, and the first one of each."""
    draw, made = np.random.default_rng(seed), []
    for index in range(count):
        size = length or int(draw.integers(1, longest))
        targets = np.where(draw.random(size) < 0.3, draw.integers(0, IDS, size), -100)
        targets[0] = draw.integers(0, IDS)
        made.append(Example(f"{seed}/{index}", draw.integers(0, IDS, size), targets))
    return made


def written(folder, examples, tokenizer=None, **options):
    write_shards(folder, examples, examples_of(99, 9), tokenizer or id_tokenizer(IDS), **options)
    return Shards.open(folder)


def pairs(example):
    return tuple(zip(example.inputs.tolist(), example.targets.tolist(), strict=True))


def loader_of(shards, *, context=64, rows=4, **options):
    options = {"seed": 3, "pack_documents": True} | options
    return Loader(shards, batch_tokens=rows * context, context_stages=[(0, context)], **options)


def met_in(batch):
    """The documents of a batch: (input, target) pairs from each position 0 on. Padding comes last in a row."""
    found = []
    for ids, targets, positions in zip(batch.input_ids, batch.targets, batch.position_ids, strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
        for begin, end in pairwise(starts):
            found.append(tuple(zip(ids[begin:end].tolist(), targets[begin:end].tolist(), strict=True)))
    return found


def epoch_of(loader):
    """The batches of an epoch, of which the last may begin the next one."""
    rows = loader._feed(0, 0).per_epoch
    return rows, [loader.batch(step) for step in range(-(-rows // len(loader.batch(0).input_ids)))]


def test_examples_come_back_whole_with_their_targets(tmp_path):
    examples = examples_of(1, 300, longest=60)
    shards = written(tmp_path, examples, shard_tokens=1000)
    assert len(shards.manifest.splits["train"].shards) > 5
    loader = loader_of(shards, context=64, rows=1)
    rows, batches = epoch_of(loader)
    pad = (shards.tokenizer.pad, -100)
    met = [document for batch in batches for document in met_in(batch) if pad not in document]
    assert sorted(met) == sorted(map(pairs, examples))
    total = sum(len(example.inputs) for example in examples)
    assert rows < 1.05 * total / 64


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_the_targets_of_a_step_are_counted_over_all_ranks(tmp_path, count):
    shards = written(tmp_path, examples_of(2, 200, longest=60))
    whole = loader_of(shards, rows=24)
    ranks = [loader_of(shards, rows=24, rank=rank, world_size=count) for rank in range(count)]
    unequal = 0
    for step in range(5):
        batch, parts = whole.batch(step), [loader.batch(step) for loader in ranks]
        counts = [int((part.targets != -100).sum()) for part in parts]
        assert batch.step_targets == sum(counts) == int((batch.targets != -100).sum())
        assert {part.step_targets for part in parts} == {batch.step_targets}
        unequal += len(set(counts)) > 1
        for name in ("input_ids", "targets", "position_ids"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
    assert unequal


def test_an_example_as_long_as_a_row_is_a_row_and_an_epoch_takes_each_once(tmp_path):
    examples = examples_of(3, 48, length=32)
    shards = written(tmp_path, examples)
    orders = []
    for seed in (3, 4):
        loader = loader_of(shards, context=32, rows=8, seed=seed)
        for first in (0, 6):  # two epochs of six steps
            batches = [loader.batch(step) for step in range(first, first + 6)]
            assert all(torch.equal(batch.position_ids, torch.arange(32).expand(8, 32)) for batch in batches)
            orders.append([document for batch in batches for document in met_in(batch)])
    assert len(orders[0]) == 48
    assert len(set(map(tuple, orders))) == 4
    assert {tuple(sorted(order)) for order in orders} == {tuple(sorted(map(pairs, examples)))}


def test_a_long_example_is_cut_into_rows(tmp_path):
    (long,) = examples_of(4, 1, length=150)
    batches = epoch_of(loader_of(written(tmp_path, [long]), context=64, rows=1))[1]
    pieces = sorted((met_in(batch)[0] for batch in batches), key=len)
    assert sorted(pieces) == sorted([pairs(long)[:64], pairs(long)[64:128], pairs(long)[128:]])


def scored(name, *targets):
    """An example of inputs 1, 2, 3 ... and these targets, of which 0 does not count."""
    targets = np.array([target or -100 for target in targets])
    return Example(name, np.arange(1, len(targets) + 1), targets)


def test_rows_with_nothing_to_learn_are_left_out(tmp_path, monkeypatch):
    """Rows of 4, by hand: of a, the second of three; of b, the first two; of c, the last; of d and e, none."""
    examples = [
        scored("a", 9, 0, 0, 0, 0, 0, 0, 0, 0, 8), scored("b", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7),
        scored("c", 0, 0, 0, 6, 0, 0, 0), scored("d", 0, 0, 0, 5), scored("e", 0, 4),
    ]  # fmt: skip
    shards = written(tmp_path, examples)
    loader = loader_of(shards, context=4, rows=1)
    said = r"left out 4 of the parts into which rows of 4 tokens cut examples, since .* \(5 rows remain\)"
    with pytest.warns(UserWarning, match=said):
        rows, batches = epoch_of(loader)
    assert rows == 5
    pad = (shards.tokenizer.pad, -100)
    a, b, c, d, e = map(pairs, examples)
    met = [document for batch in batches for document in met_in(batch) if pad not in document]
    assert sorted(met) == sorted([a[:4], a[8:], b[8:], c[:4], d, e])
    assert [batch.step_targets for batch in batches] == [int((batch.targets != -100).sum()) for batch in batches]
    assert sum(batch.step_targets for batch in batches) == 6
    assert all(batch.step_targets for batch in batches)
    whole = loader_of(shards, context=12, rows=1)
    assert sum(batch.step_targets for batch in epoch_of(whole)[1]) == 6  # and nothing is said

    blocks = loader_of(shards, context=4, rows=1)  # each example in a block of its own
    monkeypatch.setattr("difftransformer.data.packing.BLOCK_DOCUMENTS", 1)
    with pytest.warns(UserWarning, match=r"left out 4 .*\(6 rows remain"):
        batches = epoch_of(blocks)[1]
    assert sorted(document for batch in batches for document in met_in(batch) if pad not in document) == sorted(met)


def test_a_mixture_of_text_and_examples(tmp_path):
    text = [Document(f"t{index}", "x" * (5 + index % 30)) for index in range(100)]
    write_shards(tmp_path / "text", text, text, byte_tokenizer())
    examples = examples_of(5, 80, longest=60)
    shards = written(tmp_path / "examples", examples, byte_tokenizer())
    parts = (Shards.open(tmp_path / "text"), shards)
    mixed = Shards.mix([(SourceConfig(source=part.folder.name), part) for part in parts])
    batches = [loader_of(mixed, rows=2).batch(step) for step in range(20)]
    met = {document for batch in batches for document in met_in(batch) if 257 not in dict(document)}
    of_examples = met & set(map(pairs, examples))
    of_text = {document for document in met if {token for token, _ in document} <= {ord("x"), 256}}
    assert len(of_examples) > 20
    assert len(of_text) > 10
    assert met == of_examples | of_text
    assert all(batch.step_targets == (batch.targets != -100).sum() for batch in batches)
    state = loader_of(mixed).state_dict()
    assert state["data"]["examples"] == shards.manifest.fingerprint
    rows = validation_rows(mixed, 64, 10_000)
    expected = validation_rows(shards, 64, 10_000)
    assert torch.equal(rows[-len(expected) :], expected)
    assert len(rows) == len(expected) + (len(mixed.sources[0][1].tokens("validation")) - 1) // 64


def test_validation_rows_are_the_examples(tmp_path):
    shards = written(tmp_path, examples_of(6, 20))
    rows = validation_rows(shards, 80, 100)
    assert torch.equal(rows, validation_rows(shards, 80, 100))
    counted = sum(int((example.targets != -100).sum()) for example in examples_of(99, 9))
    assert int((rows[:, 1] != -100).sum()) == counted
    assert len(validation_rows(shards, 80, 2)) == 2


def test_the_fingerprint_covers_what_is_learned(tmp_path):
    examples = examples_of(7, 30)
    first = written(tmp_path / "a", examples).manifest
    assert written(tmp_path / "b", examples, shard_tokens=2**20).manifest.fingerprint == first.fingerprint
    changed = examples[5].targets.copy()
    changed[0] = -100
    examples[5] = Example(examples[5].name, examples[5].inputs, changed)
    assert written(tmp_path / "c", examples).manifest.fingerprint != first.fingerprint
    assert first.splits["train"].tokens == sum(len(example.inputs) for example in examples)


@pytest.mark.parametrize("labels", [True, False])
def test_rows_of_ids_and_labels_are_shifted_as_in_transformers(tmp_path, labels):
    """Whose models compare the logits at t with the label at t + 1."""
    draw, rows = np.random.default_rng(8), []
    for index in range(60):
        ids = draw.integers(0, IDS, draw.integers(3, 20))
        row = {"input_ids": ids.tolist(), "name": f"n{index}"}
        if labels:
            row["labels"] = [-100, *ids[1:-1].tolist(), 7]
        rows.append(row)
    with gzip.open(tmp_path / "rows.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    config = request(tmp_path, tmp_path / "shards", tokenizer=f"ids:{IDS}")
    shards = prepare_shards(config)
    assert shards.tokenizer.vocab_size == IDS + 2
    expected = [list(zip(row["input_ids"][:-1], row.get("labels", row["input_ids"])[1:], strict=True)) for row in rows]
    assert stored(shards) == sorted(expected)
    assert prepare_shards(config).folder == shards.folder
    assert Tokenizer.load(shards.folder / "tokenizer").sha256 == shards.tokenizer.sha256


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"input_ids": [1, 2], "labels": [1]}, "line 2 has 2 input_ids and 1 labels"),
        ({"input_ids": [1]}, "at least 2"),
        ({"input_ids": [1, -1]}, r"line 2: input_ids is \[1, -1\]"),
        ({"input_ids": [1, 2.5]}, "list of token ids"),
        ({"input_ids": "12"}, "list of token ids"),
        ({"input_ids": [1, 2], "labels": [1, -5]}, "line 2: labels is"),
        ({"input_ids": [1, 2], "labels": [1, -100]}, "nothing is learned"),
        ({"input_ids": [1, 60]}, "rows.jsonl:2 holds the token id 60, and the tokenizer has 52"),
        ({"text": "word"}, "rows.jsonl:2 holds text, and what comes before it token ids; .*data.mixture"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, words):
    rows = [{"input_ids": [1, 2]}, row, *[{"input_ids": [1, 2]}] * 9]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    config = request(tmp_path / "rows.jsonl", tmp_path / "s", tokenizer="ids:50", validation_share=0.3)
    with pytest.raises(DataError, match=words) as met:
        prepare_shards(config)
    assert "\n" not in str(met.value)


def test_what_examples_cannot_do_is_refused(tmp_path):
    shards = written(tmp_path / "shards", examples_of(9, 20))
    with pytest.raises(ConfigError, match="set pack_documents to true"):
        loader_of(shards, pack_documents=False)
    with pytest.raises(ConfigError, match=r"retrieval: needle documents take text, and .* holds examples"):
        loader_of(Shards.mix([(SourceConfig(source="a"), shards)]), retrieval=RetrievalMix(share=0.5, digits=1))
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2]}\n' * 5)
    with pytest.raises(DataError, match=r"no BPE can be trained.*ids:N"):
        prepare_shards(request(tmp_path / "rows.jsonl", tmp_path / "other", tokenizer="bpe", validation_share=0.5))
    with pytest.raises(DataError, match="holds token ids and no text"):
        read_documents(str(tmp_path / "rows.jsonl"))
    with pytest.raises(ConfigError, match=r"tokenizer=ids:0: give ids:N"):
        prepare_shards(DataConfig(source=str(tmp_path / "rows.jsonl"), tokenizer="ids:0"))


def test_a_tokenizer_of_ids_takes_no_words(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "Words."}\n' * 20)
    with pytest.raises(DataError, match=r"rows.jsonl holds text, and the ids of its tokenizer stand for no text"):
        prepare_shards(request(tmp_path / "rows.jsonl", tmp_path / "s", tokenizer="ids:50"))
