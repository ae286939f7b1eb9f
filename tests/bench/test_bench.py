"""`difftransformer bench`: what is timed, and ratios by hand."""

import time

import pytest
import torch

from difftransformer import DiffTransformerConfig
from difftransformer.errors import ConfigError, DiffTransformerError
from difftransformer.train import build_model
from difftransformer_lab.bench import attention, timing
from difftransformer_lab.bench.attention import (
    AttentionShape,
    attention_call,
    attention_shapes,
    attention_steps,
    draw,
    time_attention,
)
from difftransformer_lab.bench.models import decode_work, model_steps, prefill_work, training_work
from difftransformer_lab.bench.settings import MIN_ROUNDS, Settings
from difftransformer_lab.bench.tables import time_tables
from difftransformer_lab.bench.timing import time_interleaved, time_rows
from difftransformer_lab.cli.bench import measure_and_write
from difftransformer_lab.cli.main import main
from difftransformer_lab.results import Bench, BenchRow, Timing, read_result
from difftransformer_lab.studies.costs import measure_costs, peak_training_bytes
from tests.support.environment import ENVIRONMENT

QUICK = Settings(repeats=3, seconds=1.0, threads=1)


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the work moves."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def test_interleaved_times_by_hand(clock):
    """Durations are known, so medians and quartiles are; the warm-up round is not among them."""
    order = []
    durations = {"a": [100.0, 4.0, 1.0, 2.0, 3.0, 5.0], "b": [100.0, 8.0, 2.0, 4.0, 6.0, 10.0]}

    def work(name):
        def call():
            order.append(name)
            clock[0] += durations[name].pop(0)

        return call

    times = time_interleaved({"a": work("a"), "b": work("b")}, rounds=5)
    assert order == ["a", "b"] * 6
    assert times == {
        "a": Timing(median_seconds=3, low_seconds=2, high_seconds=4, rounds=5),
        "b": Timing(median_seconds=6, low_seconds=4, high_seconds=8, rounds=5),
    }


@pytest.mark.parametrize(("budget_seconds", "rounds"), [(0.0, MIN_ROUNDS), (9.5, 4), (1e9, 7)])
def test_rounds_end_with_the_budget(budget_seconds, rounds, clock):
    """Rounds of 2 s after a warm-up of 2 s: at 9.5 s the round that began at 8 s is finished, and is the last."""

    def call():
        clock[0] += 2.0

    times = time_interleaved({"a": call}, rounds=7, budget_seconds=budget_seconds)
    assert times["a"].rounds == rounds


def test_a_slower_candidate_is_slower():
    times = time_interleaved({"fast": lambda: time.sleep(0.002), "slow": lambda: time.sleep(0.02)}, rounds=3)
    assert times["slow"].median_seconds > 3 * times["fast"].median_seconds


def shape(mode="forward", length_tokens=16, heads=2, head_dim=8, dtype="fp32"):
    return AttentionShape(dtype, mode, 1, length_tokens, heads, head_dim)


@pytest.mark.parametrize("mode", ["forward", "forward+backward", "decode"])
@pytest.mark.parametrize(
    ("implementation", "function", "heads", "width"),
    [
        ("diff chunked", "differential_attention", 2, 16),
        ("softmax chunked", "softmax_attention", 4, 8),
        ("torch sdpa", "F.scaled_dot_product_attention", 4, 8),
    ],
)
def test_a_call_is_the_attention_of_same_size_models(implementation, function, heads, width, mode, monkeypatch):
    """All hold as many numbers, H heads of 2 D or 2 H heads of D; every input gets a gradient, lambda among them."""
    seen = {}
    *place, name = function.split(".")
    module = getattr(attention, place[0]) if place else attention
    honest = getattr(module, name)
    grad = torch.autograd.grad

    def listen(query, key, value, *lam, **options):
        seen.update(query=query, key=key, value=value, lam=lam, options=options)
        return honest(query, key, value, *lam, **options)

    def listen_grad(out, inputs, grad_out):
        seen.update(inputs=inputs)
        return grad(out, inputs, grad_out)

    monkeypatch.setattr(module, name, listen)
    monkeypatch.setattr(torch.autograd, "grad", listen_grad)
    one = shape(mode, dtype="bf16")
    out = attention_call(implementation, one, draw(one, "cpu"))()
    queries = 1 if mode == "decode" else 16
    assert seen["query"].shape == out.shape == (1, heads, queries, width)
    assert seen["key"].shape == seen["value"].shape == (1, heads, 16, width)
    assert seen["query"].dtype == torch.bfloat16
    assert [lam.shape for lam in seen["lam"]] == ([(2,)] if implementation.startswith("diff") else [])
    backward = mode == "forward+backward"
    assert out.requires_grad is backward
    inputs = [seen["query"], seen["key"], seen["value"], *seen["lam"]]
    assert len(seen.get("inputs", ())) == (len(inputs) if backward else 0)
    assert all(a is b for a, b in zip(seen.get("inputs", ()), inputs, strict=False))
    # PyTorch aligns causal top-left: its one query of decoding must not be told so.
    assert seen["options"]["is_causal"] is not (implementation == "torch sdpa" and mode == "decode")


def test_what_a_backend_refuses_is_left_out_with_the_reason():
    rows = time_attention(shape(), Settings(repeats=3, seconds=0.1, backends=["reference", "cudnn"]))
    timed = {row.implementation for row in rows if row.timing}
    assert timed == {"torch sdpa", "softmax cpu", "diff reference"}
    (left,) = (row for row in rows if row.left_out)
    assert left.implementation == "diff cudnn"
    assert "CUDA" in left.left_out
    assert rows[0].shape == {"batch": 1, "length_tokens": 16, "heads": 2, "head_dim": 8}


def test_other_errors_are_raised_on_the_cpu():
    def fail():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        time_rows({"a": lambda: fail}, QUICK, BenchRow)


def test_what_is_timed_by_default():
    """Lengths with their heads, both passes, decoding; models; a GPU is filled at every length."""
    shapes = attention_shapes(Settings(dtypes=["bf16"], head_dims=[32]))
    assert [(one.mode, one.length_tokens, one.heads) for one in shapes] == [
        (mode, n, h) for mode in ("forward", "forward+backward", "decode") for n, h in ((512, 8), (2048, 4), (8192, 2))
    ]
    works = ("training step", "prefill", "decoding")
    assert [*model_steps(Settings(dtypes=["bf16"]))] == [
        f"{work} of {size}, bf16" for work in works for size in ("0.5M", "5M", "20M")
    ]
    on_gpu = attention_shapes(Settings(device="cuda", modes=["forward", "decode"]))
    assert {one.dtype for one in on_gpu} == {"bf16"}
    assert {one.heads * one.head_dim for one in on_gpu} == {1024}
    tokens = [one.batch * one.length_tokens for one in on_gpu if one.mode == "forward"]
    assert tokens == [16_384] * 4 + [32_768] * 2
    (only,) = attention_steps(Settings(dtypes=["fp32"], modes=["decode"], lengths=[64], head_dims=[8]))
    assert only == "fp32 decode 1x64/8/8"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [0]}, r"--lengths \[0\]: give whole numbers of at least 1"),
        ({"repeats": 2}, "--repeats 2: give at least 3"),
    ],
)
def test_wrong_settings(options, message):
    with pytest.raises(ConfigError, match=message):
        Settings(**options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give attention|models; see difftransformer bench --help"),
        (["attention", "--backends", "flying"], "--backends: 'flying' is unknown; choose from reference, "),
        (["models", "--sizes", "1B"], "--sizes"),
    ],
)
def test_wrong_words(words, message, capsys):
    assert main(["bench", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


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
    monkeypatch.setattr("difftransformer_lab.studies.costs.REPEATS", 2)
    monkeypatch.setattr("difftransformer_lab.studies.costs.peak_training_bytes", lambda config, **_: 7)
    rows = measure_costs(
        {"diff": small, "softmax": small.twin()}, rows=2, context_tokens=32, labels={"diff": "DIFF Transformer"}
    )
    assert [row.model for row in rows] == ["diff", "softmax", "diff-62%"]
    assert [row.label for row in rows][:2] == ["DIFF Transformer", "softmax"]
    assert [row.peak_training_bytes for row in rows] == [7, 7, None]
    for row in rows[:2]:
        model = build_model(small if row.model == "diff" else small.twin(), seed=0)
        assert row.parameters == sum(p.numel() for p in model.parameters())


def test_a_measurement_that_fails_says_why(small, warm_children):
    with pytest.raises(DiffTransformerError, match=r"the memory measurement failed: .*negative dimension"):
        peak_training_bytes(small, rows=-1, context_tokens=8, threads=1)


def attention_row(name, length, milliseconds, dtype="fp32", left_out=None):
    seconds = milliseconds / 1e3
    times = Timing(median_seconds=seconds, low_seconds=0.9 * seconds, high_seconds=1.2 * seconds, rounds=3)
    sizes = {"batch": 1, "length_tokens": length, "heads": 2, "head_dim": 8}
    return BenchRow(part="attention", work="forward", dtype=dtype, shape=sizes, implementation=name,
                    timing=None if left_out else times, left_out=left_out)  # fmt: skip


def test_tables_by_hand():
    """Ratios to the base and to the faster of two, no mean over fewer shapes, a dash where nothing was timed."""
    rows = [attention_row(name, n, ms) for n in (16, 32) for name, ms in (("torch sdpa", 10), ("softmax cpu", 5))]
    rows += [
        attention_row("diff cpu", 16, 2.5),
        attention_row("diff cpu", 32, 10),
        attention_row("diff sdpa", 16, 40),
        attention_row("diff sdpa", 32, 0, left_out="too large"),
        attention_row("torch sdpa", 16, 1, dtype="bf16"),
    ]
    bench = Bench(command="", created="", environment=ENVIRONMENT, foreign_cpu_share=0.25, rows=rows)
    pairs = [("diff cpu over the faster", "diff cpu", ("softmax cpu", "diff sdpa")), ("unknown", "x", ("diff cpu",))]
    (table,) = time_tables(bench, pairs)
    assert table.header() == ["", "torch sdpa, ms", "softmax cpu", "diff cpu", "diff sdpa", "diff cpu over the faster"]
    assert table.rows == [
        ["fp32 16/2/8", "10.00", "0.50", "0.25", "4.00", "0.50"],
        ["fp32 32/2/8", "10.00", "0.50", "1.00", "-", "2.00"],
        ["fp32 geometric mean", "", "0.50", "0.50", "-", "1.00"],
        ["bf16 16/2/8", "1.00", "-", "-", "-", "-"],
    ]


def test_what_was_left_out_and_a_busy_machine_are_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("difftransformer_lab.environment.foreign_cpu_share", lambda: lambda: 0.25)
    rows = [attention_row("torch sdpa", 16, 10), attention_row("diff sdpa", 16, 0, left_out="too large")]
    measure_and_write({"a": lambda: rows}, tmp_path / "a.json", "cpu")
    text = capsys.readouterr().out
    assert "Left out: diff sdpa of forward fp32 16/2/8: too large" in text
    assert "Other processes took 25% of this machine meanwhile" in text


def test_the_verb(tmp_path, capsys):
    words = ["--lengths", "32,64", "--head_dims", "8", "--dtypes", "fp32", "--backends", "chunked"]
    words += ["--repeats", "3", "--seconds", "0.1", "--threads", "1"]
    before = torch.get_num_threads()
    try:
        assert main(["bench", "attention", *words, "--out", str(tmp_path)]) == 0
    finally:
        torch.set_num_threads(before)
    text = capsys.readouterr().out
    result = read_result(tmp_path / "attention.json", Bench)
    assert {(row.work, row.shape["length_tokens"]) for row in result.rows} == {
        (work, n) for work in ("forward", "forward+backward", "decode") for n in (32, 64)
    }
    assert {row.implementation for row in result.rows} == {"torch sdpa", "softmax cpu", "diff chunked"}
    assert all(row.timing.rounds == 3 for row in result.rows)
    assert result.environment.threads == 1
    for said in ("Attention, forward+backward", "Attention, decode", "geometric mean", "6 of 6: fp32 decode"):
        assert said in text
