"""Benchmarks: ratios by hand, memory that grows with the length, costs by formula."""

import os
import time

import pytest
import torch

from difftransformer import DiffTransformerConfig
from difftransformer.bench import peak_attention_bytes, time_interleaved
from difftransformer.bench import timing as timing_module
from difftransformer.bench.costs import measure_costs
from difftransformer.bench.work import attention_work, decode_work, prefill_work, training_work
from difftransformer.cli.main import main
from difftransformer.errors import DiffTransformerError
from difftransformer.results import Bench, read_result
from difftransformer.train import build_model


def test_interleaved_ratios_by_hand(monkeypatch):
    """A clock that only the work moves: durations are known, so medians, quartiles and ratios are."""
    now, order = [0.0], []
    monkeypatch.setattr(timing_module.time, "perf_counter", lambda: now[0])
    durations = {"a": [100.0, 4.0, 1.0, 2.0, 3.0, 5.0], "b": [100.0, 8.0, 2.0, 4.0, 6.0, 10.0]}

    def work(name):
        def call():
            order.append(name)
            now[0] += durations[name].pop(0)

        return call

    a, b = time_interleaved({"a": work("a"), "b": work("b")}, against="a", repeats=5)
    assert order == ["a", "b"] * 6
    assert (a.name, a.against, a.median_seconds, a.low_seconds, a.high_seconds, a.ratio) == ("a", "a", 3, 2, 4, 1)
    assert (b.name, b.against, b.median_seconds, b.low_seconds, b.high_seconds, b.ratio) == ("b", "a", 6, 4, 8, 2)
    assert a.repeats == b.repeats == 5


def test_a_slower_candidate_is_slower():
    fast, slow = time_interleaved(
        {"fast": lambda: time.sleep(0.002), "slow": lambda: time.sleep(0.02)}, against="fast", repeats=3
    )
    assert fast.ratio == 1.0
    assert slow.ratio > 3


@pytest.mark.parametrize("op", ["diff", "softmax"])
@pytest.mark.parametrize("backward", [False, True])
def test_attention_work_is_the_attention_of_same_size_models(op, backward, monkeypatch):
    """Both sides hold as many numbers: H heads of 2d, or 2 H heads of d."""
    import difftransformer.bench.work as work_module

    seen = {}
    name = "differential_attention" if op == "diff" else "softmax_attention"
    honest = getattr(work_module, name)

    def listen(query, key, value, *args, **options):
        seen.update(query=query, value=value, options=options)
        return honest(query, key, value, *args, **options)

    monkeypatch.setattr(work_module, name, listen)
    attention_work(op, "chunked" if op == "diff" else "sdpa", 2, 16, 8, "bf16", backward=backward)()
    assert seen["query"].shape == seen["value"].shape == ((1, 2, 16, 16) if op == "diff" else (1, 4, 16, 8))
    assert seen["query"].dtype == torch.bfloat16
    assert seen["query"].requires_grad is backward
    assert seen["options"]["is_causal"] is True


@pytest.fixture
def small():
    fields = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return DiffTransformerConfig(**fields, max_position_embeddings=64)


def test_training_work_trains(small):
    model = build_model(small, seed=0)
    before = [p.detach().clone() for p in model.parameters()]
    training_work(model, 2, 16)()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


def test_decoding_can_be_repeated(small):
    """Every round decodes after the same context: the cache is cut back."""
    model = build_model(small, seed=0)
    seen = []
    honest = model.forward

    def listen(*args, **options):
        cache = options.get("past_key_values")
        seen.append(None if cache is None else cache.get_seq_length())
        return honest(*args, **options)

    model.forward = listen
    prefill_work(model, 2, 16)()
    call = decode_work(model, 2, 16, 3)
    call()
    call()
    assert seen == [None, None, 16, 17, 18, 16, 17, 18]


def test_costs_of_a_pair(small, monkeypatch):
    """The measured columns come from the clock and the fresh process; the smaller model has none."""
    monkeypatch.setattr("difftransformer.bench.costs.REPEATS", 2)
    monkeypatch.setattr("difftransformer.bench.costs.peak_training_bytes", lambda config, **_: 7)
    rows = measure_costs(
        {"diff": small, "softmax": small.twin()}, rows=2, context_tokens=32, labels={"diff": "DIFF Transformer"}
    )
    assert [row.model for row in rows] == ["diff", "softmax", "diff-62%"]
    assert [row.label for row in rows][:2] == ["DIFF Transformer", "softmax"]
    assert [row.peak_training_bytes for row in rows] == [7, 7, None]
    for row in rows[:2]:
        model = build_model(small if row.model == "diff" else small.twin(), seed=0)
        assert row.parameters == sum(p.numel() for p in model.parameters())


def test_a_measurement_that_fails_says_why():
    with pytest.raises(DiffTransformerError, match=r"the memory measurement failed: .*flying"):
        peak_attention_bytes(
            op="diff", backend="flying", heads=1, length_tokens=64, head_dim=8, dtype="fp32", threads=1
        )


@pytest.mark.slow
def test_memory_of_the_chunked_backend_grows_linearly():
    """Peak over inputs at 2k, 4k and 8k; one map at 8k alone would hold 256 MiB a head in fp32."""
    peaks = [
        peak_attention_bytes(
            op="diff", backend="chunked", heads=1, length_tokens=length, head_dim=64, dtype="fp32", threads=1
        )
        for length in (2048, 4096, 8192)
    ]
    assert peaks[0] < peaks[1] < peaks[2]
    assert peaks[2] - peaks[1] < 2.6 * (peaks[1] - peaks[0])
    assert peaks[2] < 8192 * 8192 * 4


@pytest.mark.slow
def test_memory_of_the_reference_is_quadratic():
    """The measurement itself sees a map: the test above could fail."""
    peak = peak_attention_bytes(
        op="diff", backend="reference", heads=1, length_tokens=2048, head_dim=64, dtype="fp32", threads=1
    )
    assert peak > 2 * 2048 * 2048 * 4


@pytest.mark.slow
def test_the_verb(tmp_path, capsys):
    before = torch.get_num_threads()
    try:
        assert main(["bench", "--repeats", "2", "--threads", "1", "--out", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(before)
    result = read_result(tmp_path / "results.json", Bench)
    assert "Peak memory" in capsys.readouterr().out
    by_name = {timing.name: timing for timing in result.timings}
    for timing in result.timings:
        assert timing.repeats == 2
        assert timing.ratio == pytest.approx(timing.median_seconds / by_name[timing.against].median_seconds)
    assert {timing.name for timing in result.timings if timing.name.endswith("training step: diff")} == {
        "fp32 training step: diff", "bf16 training step: diff"
    }  # fmt: skip
    assert [point.length_tokens for point in result.memory] == [2048, 4096, 8192]
    assert result.environment.threads == 1
    assert os.path.exists(tmp_path / "results.json")
