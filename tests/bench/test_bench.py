"""`difftransformer bench`: what is timed, ratios by hand, memory that grows with the length."""

import re
import time
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from difftransformer import DiffTransformerConfig
from difftransformer.errors import ConfigError, DiffTransformerError
from difftransformer.ops import backend_names, differential_attention
from difftransformer.train import build_model
from difftransformer_lab.bench import (
    Settings,
    attention,
    attention_work,
    peak_attention_bytes,
    settings,
    steps_of,
    time_attention,
    time_interleaved,
    timing,
)
from difftransformer_lab.bench.attention import MAP_COPIES, implementations
from difftransformer_lab.bench.attention_work import AttentionShape
from difftransformer_lab.bench.diffllama import ATTN_IMPLEMENTATIONS, DiffLlamaCore
from difftransformer_lab.bench.model_work import decode_work, prefill_work, training_work
from difftransformer_lab.bench.timing import MIN_ROUNDS
from difftransformer_lab.cli.main import main
from difftransformer_lab.report.bench import bench_tables, print_bench
from difftransformer_lab.report.bench_figures import bench_drawings
from difftransformer_lab.results import Bench, BenchRow, Timing, read_result
from difftransformer_lab.studies.costs import measure_costs
from tests.support.environment import ENVIRONMENT

DEFAULTS = settings.DEFAULTS
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
    return AttentionShape(dtype=dtype, mode=mode, length_tokens=length_tokens, heads=heads, head_dim=head_dim)


@pytest.mark.parametrize("mode", ["forward", "forward+backward", "decode"])
@pytest.mark.parametrize(
    ("implementation", "function", "heads", "width"),
    [
        ("diff chunked", "differential_attention", 2, 16),
        ("softmax chunked", "softmax_attention", 4, 8),
        ("torch sdpa", "F.scaled_dot_product_attention", 4, 8),
    ],
)
def test_attention_work_is_the_attention_of_same_size_models(implementation, function, heads, width, mode, monkeypatch):
    """All hold as many numbers, H heads of 2 D or 2 H heads of D; every input gets a gradient, lambda among them."""
    seen = {}
    *place, name = function.split(".")
    module = getattr(attention_work, place[0]) if place else attention_work
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
    out = attention_work.attention_work(implementation, shape(mode, dtype="bf16"))()
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


@pytest.mark.parametrize("attn_implementation", ATTN_IMPLEMENTATIONS)
def test_diffllama_computes_causal_differential_attention(attn_implementation):
    """transformers' core and our reference, joined by what the paper says of head pairs, norm and lambda."""
    torch.manual_seed(0)
    length, heads, width = 24, 3, 8
    query, key, value = (torch.randn(1, length, 2 * heads * width) for _ in range(3))
    core = DiffLlamaCore(query, key, value, head_dim=width, attn_implementation=attn_implementation)
    q1, k1, q2, k2 = (dict(core.layer.named_parameters())[f"lambda_{name}"] for name in ("q1", "k1", "q2", "k2"))
    lam = torch.exp(q1 @ k1) - torch.exp(q2 @ k2) + 0.2

    def pairs(x):  # head i holds their heads i and H + i
        first, second = x.view(1, length, 2, heads, width).permute(2, 0, 3, 1, 4)
        return torch.cat([first, second], -1)

    out = differential_attention(pairs(query), pairs(key), pairs(value), lam, is_causal=True, backend="reference")
    expected = 0.8 * torch.nn.functional.rms_norm(out, (2 * width,), eps=1e-5)
    torch.testing.assert_close(
        core(), expected.transpose(1, 2).reshape(1, length, -1), rtol=1e-5, atol=1e-5, check_stride=False
    )
    assert len(core.parameters()) == 4


@pytest.mark.parametrize("attn_implementation", ATTN_IMPLEMENTATIONS)
def test_diffllama_runs_both_calls_and_no_rotation(attn_implementation, monkeypatch):
    """Two calls of the attention that was asked for, gradients for q, k, v and four vectors, and their module as it was."""
    from transformers.models.diffllama import modeling_diffllama

    calls = []
    name = "scaled_dot_product_attention" if attn_implementation == "sdpa" else "softmax"
    honest = getattr(torch.nn.functional, name)
    monkeypatch.setattr(
        torch.nn.functional, name, lambda *args, **options: calls.append(args[0]) or honest(*args, **options)
    )
    rotate = modeling_diffllama.apply_rotary_pos_emb
    out = attention_work.attention_work(f"DiffLlama {attn_implementation}", shape("forward+backward", dtype="bf16"))()
    assert modeling_diffllama.apply_rotary_pos_emb is rotate
    assert [call.shape[:3] for call in calls] == [(1, 4, 16)] * 2
    assert (out.shape, out.dtype) == ((1, 16, 32), torch.bfloat16)


def test_every_implementation_is_timed_or_left_out(monkeypatch):
    monkeypatch.setitem(DEFAULTS, "cpu", replace(DEFAULTS["cpu"], kernel="chunked"))
    rows = time_attention(shape(), QUICK)
    assert all((row.timing is None) is (row.left_out is not None) for row in rows)
    timed = {row.implementation for row in rows if row.timing}
    ours = {"softmax chunked", "diff reference", "diff sdpa", "normed chunked"}
    assert timed >= ours | {"torch sdpa", "DiffLlama eager"}
    assert rows[0].shape == {"batch": 1, "length_tokens": 16, "heads": 2, "head_dim": 8}
    monkeypatch.setattr(attention, "explain", lambda problem: dict.fromkeys(backend_names(), f"no {problem.op} today"))
    reasons = {row.implementation: row.left_out for row in time_attention(shape(), replace(QUICK, peers=False))}
    assert reasons["diff chunked"] == "no differential today"
    assert reasons["softmax chunked"] == "no softmax today"
    assert reasons["torch sdpa"] is None


def test_what_is_left_out_is_said():
    """Five fp32 copies of 2 x 2 maps of 8,192 x 8,192 are 5 GiB; n x n backends run above 1,024 tokens only if named."""
    reasons = implementations(shape(length_tokens=8192), Settings())
    assert "5.0 GiB, more than the budget of 2 GiB" in reasons["DiffLlama eager"]
    assert "above 1,024 tokens only where --backends names it" in reasons["diff reference"]
    assert reasons["DiffLlama sdpa"] is reasons["torch sdpa"] is None
    named = Settings(backends=["reference"])
    reasons = implementations(shape(length_tokens=2048, heads=4), replace(named, peers=False))
    assert reasons.keys() == {"torch sdpa", "softmax cpu", "diff reference"}
    assert reasons["diff reference"] is None
    assert "GiB" in implementations(shape(length_tokens=8192), named)["diff reference"]


def test_the_steps_of_all():
    """Lengths with their heads, both passes, decoding, memory, models; long memory for our kernel alone."""
    labels = [step.label for step in steps_of("all", Settings(dtypes=["bf16"], head_dims=[32]))]
    assert labels[:8] == [
        *(f"attention, bf16 {mode} n={n} h={h} d=32" for mode in ("forward", "forward+backward")
          for n, h in ((512, 8), (2048, 4), (8192, 2))),
        *(f"attention, bf16 decode n=16384 h={h} d=64" for h in (2, 8)),
    ]  # fmt: skip
    assert {f"memory of {name}, fp32 forward+backward n={n} h=4 d=64"
            for n in (2048, 8192) for name in ("diff cpu", "diff chunked", "torch sdpa")} < {*labels}  # fmt: skip
    assert labels[-10:-1] == [
        f"{work} of {size}, bf16" for work in ("training step", "prefill", "decoding") for size in ("0.5M", "5M", "20M")
    ]
    assert labels[-1] == "decoding by whole models, bf16"
    long = [step.label for step in steps_of("memory", Settings(long_memory=True))][-2:]
    assert long == [f"memory of diff cpu, fp32 forward+backward n={n} h=4 d=64" for n in (32768, 65536)]
    (only,) = steps_of("attention", Settings(dtypes=["fp32"], modes=["decode"], lengths=[64], backends=["sdpa"]))[1:]
    assert only.label == "attention, fp32 decode n=64 h=8 d=64"


def test_one_value_needs_no_brackets(tmp_path, monkeypatch):
    from difftransformer_lab.cli import bench as command

    seen = []
    monkeypatch.setattr(command, "measure_and_write", lambda steps, *_: seen.extend(step.label for step in steps))
    words = ["--dtypes", "fp32", "--modes", "decode", "--lengths", "64,96", "--head-dims", "8", "--threads", "1"]
    assert main(["bench", "attention", *words, "--out", str(tmp_path)]) == 0
    assert seen == [f"attention, fp32 decode n={n} h={h} d=64" for n in (64, 96) for h in (2, 8)]


@pytest.mark.parametrize(
    ("part", "options", "message"),
    [
        ("all", {"backends": ["flying"]}, "--backends: 'flying' is unknown; choose from reference, "),
        ("models", {"sizes": ["1B"]}, r"--sizes: '1B' is unknown; choose from 0\.5M, "),
        ("attention", {"lengths": [0]}, r"--lengths \[0\]: give whole numbers of at least 1"),
        ("attention", {"repeats": 2}, "--repeats 2: give at least 3"),
    ],
)
def test_wrong_settings(part, options, message):
    with pytest.raises(ConfigError, match=message):
        steps_of(part, Settings(**options))


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


def test_a_measurement_that_fails_says_why(warm_children):
    with pytest.raises(DiffTransformerError, match=r"the memory measurement failed: .*flying"):
        peak_attention_bytes("diff flying", shape(), threads=1)


@pytest.mark.slow
def test_memory_of_the_chunked_backend_grows_linearly():
    """Peak over inputs at 2k, 4k and 8k; one map at 8k alone would hold 256 MiB a head in fp32."""
    peaks = [
        peak_attention_bytes("diff chunked", shape("forward+backward", length, 1, 64), threads=1)
        for length in (2048, 4096, 8192)
    ]
    assert peaks[0] < peaks[1] < peaks[2]
    assert peaks[2] - peaks[1] < 2.6 * (peaks[1] - peaks[0])
    assert peaks[2] < 8192 * 8192 * 4


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["diff reference", "DiffLlama eager"])
def test_memory_of_maps_is_quadratic_and_within_the_estimate(implementation):
    """The measurement itself sees a map: the test above could fail. And the rule for what is left out errs on its side."""
    peak = peak_attention_bytes(implementation, shape("forward+backward", 2048, 1, 64), threads=1)
    maps = 2 * 2048 * 2048 * 4
    assert maps < peak < MAP_COPIES * maps


def attention_row(name, length, milliseconds, dtype="fp32", left_out=None):
    seconds = milliseconds / 1e3
    times = Timing(median_seconds=seconds, low_seconds=0.9 * seconds, high_seconds=1.2 * seconds, rounds=3)
    shown = None if left_out else times
    return BenchRow(part="attention", work="forward", dtype=dtype, shape=shape(length_tokens=length).sizes,
                    implementation=name, timing=shown, left_out=left_out)  # fmt: skip


def test_tables_by_hand(capsys):
    """Ratios to both bases, a star where a mean is over fewer shapes, a dash where nothing was timed."""
    rows = [attention_row(name, n, ms) for n in (16, 32) for name, ms in (("torch sdpa", 10), ("softmax cpu", 5))]
    rows += [
        attention_row("diff cpu", 16, 2.5),
        attention_row("diff cpu", 32, 10),
        attention_row("DiffLlama eager", 16, 40),
    ]
    rows += [attention_row("normed cpu", 16, 4), attention_row("DiffLlama sdpa", 16, 20)]
    rows += [
        attention_row("DiffLlama eager", 32, 0, left_out="too large"),
        attention_row("torch sdpa", 16, 1, dtype="bf16"),
    ]
    bench = Bench(command="", created="", environment=ENVIRONMENT, foreign_cpu_share=0.25, rows=rows)
    (table,) = bench_tables(bench)
    assert table.header() == [
        "", "torch sdpa, ms", "softmax cpu", "diff cpu", "DiffLlama eager", "normed cpu", "DiffLlama sdpa",
        "diff cpu over softmax cpu", "normed cpu over the faster DiffLlama",
    ]  # fmt: skip
    assert table.rows == [
        ["fp32 16/2/8", "10.00", "0.50", "0.25", "4.00", "0.40", "2.00", "0.50", "0.20"],
        ["fp32 32/2/8", "10.00", "0.50", "1.00", "-", "-", "-", "2.00", "-"],
        ["fp32 geometric mean", "", "0.50", "0.50", "4.00*", "0.40*", "2.00*", "1.00", "0.20*"],
        ["bf16 16/2/8", "1.00", "-", "-", "-", "-", "-", "-", "-"],
    ]
    (drawing,) = bench_drawings(bench)
    assert drawing.name == "attention"
    assert drawing.svg.startswith("<?xml")
    print_bench(bench, Console(width=160))
    text = capsys.readouterr().out
    assert "Left out: DiffLlama eager of forward fp32 32/2/8: too large" in text
    assert "Other processes took 25% of this machine meanwhile" in text


def run_verb(*words):
    before = torch.get_num_threads()
    try:
        return main(["bench", *map(str, words), "--threads", "1"])
    finally:
        torch.set_num_threads(before)


def test_the_verb(tmp_path, capsys, monkeypatch):
    """A toy of two parts: rows of every implementation, tables, figure, and what was left out."""
    monkeypatch.setattr(attention, "peak_attention_bytes", lambda *_, **__: 3 * 2**20)
    monkeypatch.setattr(attention, "MAPS_BUDGET_BYTES", 5 * 2 * 8 * 48 * 48 * 4)
    words = ("--lengths", "[32,64]", "--head_dims", "[8]", "--dtypes", "[fp32]", "--repeats", 3, "--seconds", 0.1)
    assert run_verb("attention", *words, "--out", tmp_path) == 0
    text = capsys.readouterr().out
    result = read_result(tmp_path / "results.json", Bench)
    assert {(row.work, row.shape["length_tokens"]) for row in result.rows} == {
        (work, n) for work in ("forward", "forward+backward", "decode") for n in (32, 64)
    }
    assert all(row.timing.rounds == 3 for row in result.rows if row.timing)
    assert {"diff chunked", "diff sdpa", "diff reference", "DiffLlama sdpa", "DiffLlama eager"} <= {
        row.implementation for row in result.rows if row.timing
    }
    left_out = (
        "Left out: DiffLlama eager of forward fp32 64/8/8, forward+backward fp32 64/8/8: 5 copies of its n x n maps"
    )
    assert left_out in text
    for said in ("Attention, forward+backward", "Attention, decode", "geometric"):
        assert said in text
    assert re.search(r"8 of 8: attention, fp32 decode .*, about \d+ s left\n", text)
    assert (tmp_path / "attention.svg").read_text().startswith("<?xml")
    assert result.environment.threads == 1
    assert run_verb("memory", "--backends", "[chunked]", "--out", tmp_path) == 0
    result = read_result(tmp_path / "results.json", Bench)
    assert {row.figures["peak_bytes"] for row in result.rows} == {3 * 2**20}
    assert "Memory, forward+backward: peak memory, MiB" in capsys.readouterr().out
