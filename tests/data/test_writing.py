"""Shards written from a stream: in one pass, begun again after a stop, and with flat memory."""

import gzip
import itertools
import json
import os
import random
import sys
import threading
from functools import partial

import numpy as np
import pytest

from difftransformer import data
from difftransformer.data import DataConfig, Document, bpe, prepare, prepare_shards, text, writing
from difftransformer.errors import ConfigError, DataError
from difftransformer.typed import build
from tests.data.conftest import request
from tests.support import fresh
from tests.support.shards import split_documents, write_shards


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Batches and files so small that a test has many of them."""
    monkeypatch.setattr(text, "_RECENT_SECONDS", 0)
    monkeypatch.setattr(writing, "BATCH_CHARACTERS", 2000)
    monkeypatch.setattr(prepare, "write_documents", partial(writing.write_documents, shard_tokens=1000))


def lines_file(path, documents, *, seed=0):
    draw = random.Random(seed)
    texts = [" ".join(draw.choices(["alpha", "beta", "gamma", "delta"], k=60)) for _ in range(documents)]
    rows = [{"text": text} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.utime(path, (1, 1))
    return path


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


def test_one_pass_writes_what_two_lists_give(tmp_path, corpus, bpe):
    train, validation = split_documents(corpus, validation_share=0.3, seed=1)
    write_shards(tmp_path / "lists", train, validation, bpe, shard_tokens=1000)
    source = tmp_path / "text"
    source.mkdir()
    for document in corpus:
        (source / f"{document.name}.txt").write_text(document.text, encoding="utf-8")
    bpe.save(tmp_path / "tokenizer")
    fields = {"tokenizer": str(tmp_path / "tokenizer"), "validation_share": 0.3, "split_seed": 1}
    config = request(source, tmp_path / "shards", **fields)
    names = [document.name + ".txt" for document in corpus]
    renamed = [Document(name, document.text) for name, document in zip(names, corpus, strict=True)]
    train, validation = split_documents(renamed, validation_share=0.3, seed=1)
    expected = write_shards(tmp_path / "named", train, validation, bpe, shard_tokens=1000)
    streamed = prepare_shards(config)
    assert len(contents(streamed.folder)) > 10
    assert contents(streamed.folder) == contents(tmp_path / "named")
    assert streamed.manifest.splits == expected.splits


class Stopped(BaseException):
    """Stands for Ctrl-C."""


@pytest.mark.parametrize("fault", ["stop", "bad line"])
def test_what_is_not_complete_is_begun_again(tmp_path, monkeypatch, fault):
    path = lines_file(tmp_path / "a.jsonl", 120)
    whole = prepare_shards(request(path, tmp_path / "whole"))
    shards, good = tmp_path / "shards", path.read_text()

    def reader(*arguments):
        yield from itertools.islice(text.iter_documents(*arguments), 119)
        assert list(shards.glob("*/train-00001.bin"))
        raise Stopped

    with monkeypatch.context() as patch:
        if fault == "stop":
            patch.setattr(prepare, "iter_documents", reader)
        else:
            path.write_text(good + "{\n")
        with pytest.raises(Stopped if fault == "stop" else DataError):
            prepare_shards(request(path, shards))
    assert not list(shards.rglob("*"))
    path.write_text(good)
    again = prepare_shards(request(path, shards))
    assert contents(again.folder) == contents(whole.folder)
    assert again.manifest.fingerprint == whole.manifest.fingerprint


KILLED = """
    import os, signal, sys
    from difftransformer.data import DataConfig, prepare, prepare_shards, writing
    from functools import partial

    prepare.write_documents = partial(writing.write_documents, shard_tokens=1000)
    writing.BATCH_CHARACTERS = 2000
    add, left = writing._SplitWriter.add, [int(sys.argv[3])]

    def killing(self, tokens):
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        add(self, tokens)

    writing._SplitWriter.add = killing
    prepare_shards(DataConfig(source=sys.argv[1], tokenizer="byte", validation_share=0.2, folder=sys.argv[2]))
"""


def test_a_killed_process_leaves_nothing_that_counts(tmp_path):
    path = lines_file(tmp_path / "a.jsonl", 120)
    killed = fresh.Fresh(KILLED, path, tmp_path / "shards", 40)
    assert killed.finish(timeout=500).returncode == -9
    assert list((tmp_path / "shards").glob("making-*/train-00001.bin"))
    again = prepare_shards(request(path, tmp_path / "shards"))
    assert contents(again.folder) == contents(prepare_shards(request(path, tmp_path / "whole")).folder)
    assert [item.name for item in (tmp_path / "shards").iterdir()] == [again.folder.name]


def test_processes_of_a_study_do_not_look_at_the_text(tmp_path, monkeypatch):
    path = lines_file(tmp_path / "a.jsonl", 40)
    config = request(path, tmp_path / "shards")
    made = prepare_shards(config)
    path.unlink()
    assert prepare_shards(config, made=made.folders).manifest == made.manifest


def recipe_mixture(tmp_path, **fields):
    sources = [lines_file(tmp_path / f"{name}.jsonl", 60, seed=seed) for seed, name in enumerate("ab")]
    document = {
        "mixture": [{"source": str(sources[0]), "weight": 3.0}, {"source": str(sources[1])}],
        "tokenizer": "byte", "validation_share": 0.2, "folder": str(tmp_path / "shards"),
    }  # fmt: skip
    return build(DataConfig, document | fields, source="recipe", error=ConfigError)


def test_a_mixture_shares_the_shards_of_its_sources(tmp_path):
    config = recipe_mixture(tmp_path)
    mixed = prepare_shards(config)
    alone = [prepare_shards(request(one.source, tmp_path / "shards")) for one in config.mixture]
    assert mixed.folders == [shards.folder for shards in alone]
    assert [source.weight for source, _ in mixed.sources] == [3.0, 1.0]
    for split in ("train", "validation"):
        expected = list(itertools.chain.from_iterable(shards.tokens(split)[:].tolist() for shards in alone))
        assert mixed.tokens(split)[:].tolist() == expected
        assert mixed.manifest.splits[split].documents == sum(s.manifest.splits[split].documents for s in alone)
    assert prepare_shards(config, made=mixed.folders).manifest == mixed.manifest


def test_a_mixture_has_one_bpe_of_all_its_text(tmp_path, monkeypatch):
    config = recipe_mixture(tmp_path, tokenizer="bpe", vocab_size=280)
    trained = []
    train = bpe.train_on_sources
    monkeypatch.setattr(bpe, "train_on_sources", lambda *arguments: trained.append(1) or train(*arguments))
    mixed = prepare_shards(config)
    again = prepare_shards(config)
    assert (len(trained), again.manifest) == (1, mixed.manifest)
    texts = [document.text for one in config.mixture
             for document in split_documents(text.read_documents(one.source), validation_share=0.2, seed=0)[0]]  # fmt: skip
    assert mixed.tokenizer.sha256 == data.train_bpe(texts, 280).sha256
    lines_file(tmp_path / "b.jsonl", 61, seed=7)
    changed = prepare_shards(config)
    assert len(trained) == 2
    assert changed.folders[1] != mixed.folders[1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mixture": [{"source": "a", "weight": 0.0}]}, r"\[0\]: weight=0.0: give a weight above 0, or leave a out"),
        ({"mixture": [{"source": "a", "weight": -2}]}, r"mixture\[0\]: weight=-2.0"),
        ({"mixture": [{"source": "a"}, {"source": "a"}]}, r"mixture: a is given twice"),
        ({"mixture": [{"weight": 1.0}]}, r"mixture\[0\].source: missing"),
        ({"mixture": [{"source": "a"}], "source": "b"}, r"source=b is given beside a mixture"),
    ],
)
def test_impossible_mixtures_are_refused(tmp_path, fields, words):
    with pytest.raises(ConfigError, match=words):
        recipe_mixture(tmp_path, **fields)


def test_an_empty_or_missing_source_of_a_mixture_is_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    for name, words in (("empty.jsonl", "empty.jsonl: the file has no text"), ("none.txt", "no such file or folder")):
        config = recipe_mixture(tmp_path, mixture=[{"source": str(tmp_path / one)} for one in ("a.jsonl", name)])
        with pytest.raises(DataError, match=words) as caught:
            prepare_shards(config)
        assert name in str(caught.value)


def test_a_large_text_teaches_a_bpe_by_parts_spread_over_it(tmp_path, monkeypatch):
    path = lines_file(tmp_path / "a.jsonl", 200)
    monkeypatch.setattr(bpe, "BPE_CHARACTERS", path.stat().st_size // 4)
    config = request(path, tmp_path)
    chosen = list(bpe.training_text(config, [str(path)]))
    train, _ = split_documents(text.read_documents(str(path)), validation_share=0.2, seed=0)
    places = [[document.text for document in train].index(part) for part in chosen]
    assert len(places) == len(train) // 4
    assert set(np.diff(places).tolist()) <= {4}


@pytest.mark.parametrize("order", [("large", "small"), ("small", "large")])
def test_a_bpe_of_a_mixture_sees_every_source(tmp_path, monkeypatch, order):
    """Also where a source before is compressed, and so larger than its file."""
    rows = [json.dumps({"text": "alpha beta " * 50}) for _ in range(200)]
    with gzip.open(tmp_path / "large.jsonl.gz", "wt") as file:
        file.write("\n".join(rows))
    (tmp_path / "small.jsonl").write_text("".join(json.dumps({"text": "zebra " * 20}) + "\n" for _ in range(50)))
    paths = {"large": str(tmp_path / "large.jsonl.gz"), "small": str(tmp_path / "small.jsonl")}
    monkeypatch.setattr(bpe, "BPE_CHARACTERS", 20_000)
    mixture = [{"source": paths[name]} for name in order]
    chosen = list(bpe.training_text(recipe_mixture(tmp_path, mixture=mixture), [paths[name] for name in order]))
    found = {letter: sum(len(part) for part in chosen if part.startswith(letter)) for letter in "az"}
    train, _ = split_documents(text.read_documents(paths["small"]), validation_share=0.2, seed=0)
    assert found["z"] == sum(len(document.text) for document in train)
    assert 17_000 < found["a"] + found["z"] < 21_000


MEMORY = """
    import resource, sys
    from difftransformer.data import DataConfig, Tokenizer, prepare_shards

    def encode_batch(self, texts, **options):  # the ids of the byte tokenizer, in a hundredth of its time
        return [list(text.encode()) for text in texts]

    Tokenizer.encode_batch = encode_batch
    prepare_shards(DataConfig(source=sys.argv[1], tokenizer="byte", folder=sys.argv[2]))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["txt", "jsonl"])
def test_memory_does_not_grow_with_the_text(tmp_path, suffix):
    line = " ".join(f"{index}th" for index in range(900))
    line = line + "\n" if suffix == "txt" else json.dumps({"text": line}) + "\n"
    peaks = []
    for megabytes in (20, 100):
        path = tmp_path / f"{megabytes}.{suffix}"
        path.write_text(line * (megabytes * 2**20 // len(line)), encoding="utf-8")
        found = fresh.run(MEMORY, path, tmp_path / f"shards-{megabytes}")
        peaks.append(int(found.split()[-1]) / 1024)
    # How many batches are under way at once differs by some 20 MiB. Text or tokens that were held would add 80 or more.
    assert peaks[1] < peaks[0] + 40, peaks


def python_instructions(function):
    """Count the instructions of Python that a call executes, in all threads."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
        threading.settrace(None)
    return count


def test_python_does_little_for_a_token(tmp_path, monkeypatch, corpus, bpe):
    """A loop over tokens would take several instructions for each."""
    monkeypatch.undo()
    bpe.save(tmp_path / "tokenizer")
    tokens, instructions = [], []
    for times in (1, 4):
        texts = [document.text for document in corpus] * times
        path = tmp_path / f"{times}.jsonl"
        path.write_text("".join(json.dumps({"text": one}) + "\n" for one in texts), encoding="utf-8")
        config = request(path, tmp_path / str(times), tokenizer=str(tmp_path / "tokenizer"))
        tokens.append(sum(len(one.ids) for one in bpe.backend.encode_batch_fast(texts, add_special_tokens=False)))
        instructions.append(python_instructions(partial(prepare_shards, config)))
    assert instructions[1] - instructions[0] < 2 * (tokens[1] - tokens[0])
