"""The scripts of `benchmarks/`: what they compare computes the same or has equal sizes, and their figures add up."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from difftransformer.ops import differential_attention
from difftransformer_lab.bench import models
from difftransformer_lab.bench.attention import AttentionShape, draw
from difftransformer_lab.bench.settings import Settings
from difftransformer_lab.results import Bench, read_result
from tests.support.cases import threads

FOLDER = Path(__file__).parents[2] / "benchmarks"
DOCS = Path(__file__).parents[2] / "docs"
QUICK = Settings(repeats=3, seconds=1.0, threads=1)
B, H, N, D = 2, 3, 16, 4
SMALL = {"vocab_size": 50, "hidden_size": 18, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 4}
ATTN_IMPLEMENTATIONS = ("sdpa", "eager")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_losses_agree(script):
    loss = script("loss")
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    targets, found = torch.randint(50, (300,)), {}
    for name, one in loss.LOSSES.items():
        value = one(hidden, weight, targets)
        found[name] = [value.detach(), *torch.autograd.grad(value, (hidden, weight))]
    for name, values in found.items():
        for value, expected in zip(values, found[loss.WHOLE], strict=True):
            assert torch.allclose(value, expected, atol=1e-6), name


def test_figures_are_drawn(script, tmp_path):
    script("figures").main(DOCS / "results" / "bench-h100.json", tmp_path)
    assert (tmp_path / "attention.svg").read_text().startswith("<?xml")


@pytest.mark.slow
def test_the_chunked_loss_takes_less_memory(script):
    loss, fresh = script("loss"), script("memory").in_a_fresh_process
    shape = loss.Shape(2048, 128, 4096)
    whole, chunked = (fresh(loss.peak_in_this_process, name, shape, "fp32", 1) for name in ("whole logits", "chunked"))
    assert whole > 2 * 4 * shape.tokens * shape.vocab_size
    assert chunked <= 0.4 * whole


def shape(mode="forward+backward", length=N, heads=2, width=8, dtype="fp32"):
    return AttentionShape(dtype, mode, 1, length, heads, width)


@pytest.mark.slow
def test_memory_of_attention(script):
    """Linear in the chunked backend: one map at 8k alone would hold 256 MiB a head in fp32; quadratic in the reference."""
    memory = script("memory")

    def peak(name, length):
        return memory.in_a_fresh_process(memory.peak_of_attention, name, shape(length=length, heads=1, width=64), 1)

    peaks = [peak("diff chunked", length) for length in (2048, 4096, 8192)]
    assert peaks[0] < peaks[1] < peaks[2] < 8192 * 8192 * 4
    assert peaks[2] - peaks[1] < 2.6 * (peaks[1] - peaks[0])
    assert peak("diff reference", 2048) > 2 * 2048 * 2048 * 4


@pytest.mark.parametrize("attn_implementation", ATTN_IMPLEMENTATIONS)
def test_diffllama_computes_causal_differential_attention(attn_implementation, script):
    """transformers' core and our reference, joined by what the paper says of head pairs, norm and lambda."""
    torch.manual_seed(0)
    length, heads, width = 24, 3, 8
    query, key, value = (torch.randn(1, length, 2 * heads * width) for _ in range(3))
    core = script("peers").DiffLlamaCore(query, key, value, head_dim=width, attn_implementation=attn_implementation)
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
def test_diffllama_runs_both_calls_and_no_rotation(attn_implementation, script, monkeypatch):
    """Two calls of the attention that was named, gradients for q, k, v and four vectors, and their module as it was."""
    from transformers.models.diffllama import modeling_diffllama

    calls = []
    name = "scaled_dot_product_attention" if attn_implementation == "sdpa" else "softmax"
    honest = getattr(torch.nn.functional, name)
    monkeypatch.setattr(
        torch.nn.functional, name, lambda *args, **options: calls.append(args[0]) or honest(*args, **options)
    )
    rotate = modeling_diffllama.apply_rotary_pos_emb
    one = shape(dtype="bf16")
    out = script("peers").diffllama_call(attn_implementation, one, draw(one, "cpu"))()
    assert modeling_diffllama.apply_rotary_pos_emb is rotate
    assert [call.shape[:3] for call in calls] == [(1, 4, 16)] * 2
    assert (out.shape, out.dtype) == ((1, 16, 32), torch.bfloat16)


def test_peers_are_timed_in_turns(script, monkeypatch):
    rows = script("peers").time_peers(shape(), QUICK)
    names = ["torch sdpa", "diff cpu", "normed cpu", "DiffLlama sdpa", "DiffLlama eager"]
    assert [row.implementation for row in rows if row.timing] == names
    monkeypatch.setitem(models.SIZES, "tiny", (SMALL | {"hidden_size": 16, "num_attention_heads": 4}, 2, 12))
    built = script("peers").build_all_models("tiny")
    # Four lambda vectors a layer of 4 numbers each; ours has the gain of the head norm beside them, 8 numbers.
    twin = built["twin"].num_parameters()
    sizes = [built[name].num_parameters() - twin for name in ("DIFF", "DiffLlama sdpa", "DiffLlama eager")]
    assert sizes == [2 * 24, 2 * 16, 2 * 16]


@pytest.fixture
def generation(script, monkeypatch):
    one = script("generation")
    monkeypatch.setattr(one, "MODEL", one.MODEL | SMALL)
    monkeypatch.setattr(one, "CACHED_TOKENS", 40)
    return one


@torch.inference_mode()
def test_diff_and_diffllama_are_one_model(generation):
    built = generation.build_equal_models()
    ids = torch.randint(50, (2, 30), generator=torch.Generator().manual_seed(0))
    expected = built["DiffLlama sdpa"](ids).logits
    for name in ("DIFF", "DiffLlama eager"):
        torch.testing.assert_close(built[name].eval()(ids).logits, expected, rtol=1e-4, atol=1e-5)
    twin = built["Transformer"]
    assert twin.config.attention_type == "softmax"
    # But for lambda's four vectors a layer; the norm has no gain on either side.
    assert built["DIFF"].num_parameters() - twin.num_parameters() == 2 * 4 * 4
    assert built["DIFF"].num_parameters() == built["DiffLlama sdpa"].num_parameters()


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_step_is_one_token_behind_the_cache(kind, generation, monkeypatch):
    made = []
    name = "StaticCache" if kind == "static" else "DynamicCache"
    cache_class = getattr(generation, name)
    monkeypatch.setattr(generation, name, lambda *a, **options: made.append(cache_class(*a, **options)) or made[-1])
    built = generation.build_equal_models()
    for model in built.values():
        call = generation.next_token_work(model, 40, kind)
        for seen in (41, 42):
            assert call().shape == (1, 1, 50)
            assert int(made[-1].get_seq_length()) == seen
    assert len(made) == len(built)


def test_generation_is_timed_with_either_cache(generation):
    rows = generation.measure("fp32", QUICK)
    names = ["DIFF", "DiffLlama sdpa", "DiffLlama eager", "Transformer"]
    assert [(row.implementation, row.shape["cache"]) for row in rows] == [
        (name, f"{kind} cache") for kind in ("static", "dynamic") for name in names
    ]
    assert all(row.timing.rounds == 3 and row.figures["cpu_seconds"] > 0 for row in rows)


def test_variants_have_equal_parameters(script, monkeypatch):
    fields = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    monkeypatch.setitem(models.SIZES, "tiny", (fields, 2, 12))
    sizes = {name: model.num_parameters() for name, model in script("variants").build_variants("tiny").items()}
    assert set(sizes) >= {"softmax", "diff", "diff_v2", "grouped_diff", "grouped_diff_v2", "dex"}
    # Half of the weights of one more of intermediate_size.
    assert all(abs(size - sizes["softmax"]) <= 3 * 16 * 2 / 2 for size in sizes.values())
    rows = script("variants").measure("tiny", "fp32", "prefill", QUICK)
    assert {row.implementation: row.figures["parameters"] for row in rows} == sizes


@pytest.mark.slow
def test_shares_of_the_training_loop(script):
    (row,) = script("overhead").measure("0.5M", "fp32", Settings(repeats=8, seconds=1.0))
    figures = row.figures
    assert figures["steps"] == 8 - script("overhead").SAVES - 1
    assert 0 < figures["loader_share"] < 0.5
    assert 0 < figures["log_share"] < 0.5
    assert figures["save_share"] < 0.5
    assert figures["ratio_to_bare"] == pytest.approx(figures["step_seconds"] / figures["bare_seconds"], rel=0.5)


def plain(heads, width, value_width):
    """Forward and backward: seven products."""
    query, key = (torch.randn(B, heads, N, width) for _ in range(2))
    value, grad = (torch.randn(B, heads, N, value_width) for _ in range(2))
    _ = (query @ key.mT).softmax(-1) @ value
    probabilities = (query @ key.mT).softmax(-1)
    grad_s = probabilities * (grad @ value.mT)
    return probabilities.mT @ grad, grad_s @ key, grad_s.mT @ query


def fused():
    """Both maps in one kernel: backward dP and dV once."""
    queries, keys = ([torch.randn(B, H, N, D) for _ in range(2)] for _ in range(2))
    value, grad = (torch.randn(B, H, N, 2 * D) for _ in range(2))
    _ = [(q @ k.mT).softmax(-1) @ value for q, k in zip(queries, keys, strict=True)]
    maps = [(q @ k.mT).softmax(-1) for q, k in zip(queries, keys, strict=True)]
    grad_p = grad @ value.mT
    _ = (maps[0] - maps[1]).mT @ grad
    return [((p * grad_p) @ k, (p * grad_p).mT @ q) for p, q, k in zip(maps, queries, keys, strict=True)]


def test_flops_and_bytes_of_the_roofline(script):
    """FLOPs by PyTorch's counter, half of what a call without causal mask does; every tensor moved once a pass."""
    roofline = script("roofline")
    shape = AttentionShape("bf16", "forward+backward", B, N, H, D)
    for units, work in ((roofline.PLAIN, lambda: plain(2 * H, D, D)), (roofline.FUSED, fused)):
        with FlopCounterMode(display=False) as counter:
            work()
        assert roofline.attention_flops(shape, units) == counter.get_total_flops() / 2
    assert roofline.attention_bytes(shape) == 12 * 2 * torch.empty(B, H, N, 2 * D).numel()
    peak = roofline.Peak(1e12, 1e15)
    found = roofline.rates(shape, "diff triton", 2.0, peak)
    assert found["teraflops_per_second"] == roofline.attention_flops(shape) / 2e12
    assert found["time_over_roofline"] == pytest.approx(2e12 / roofline.attention_flops(shape, roofline.FUSED))


@pytest.mark.parametrize("name", ["peaked", "diffllama"])
def test_a_script_runs(name, script, tmp_path, monkeypatch):
    """All that it measures, at small sizes."""
    one = script(name)
    if name == "peaked":
        monkeypatch.setattr(one, "LENGTH_TOKENS", N)
    else:
        monkeypatch.setattr(one, "MODEL", one.MODEL | SMALL | {"hidden_size": 16, "num_hidden_layers": 1})
        monkeypatch.setattr(one, "CONTEXT_TOKENS", N)
        monkeypatch.setattr(one, "CACHED_TOKENS", N)
    words = ["--dtypes", "fp32", "--repeats", "3", "--seconds", "0", "--threads", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    with threads(1):
        script("script").run(one.steps, "")
    result = read_result(tmp_path / f"{name}.json", Bench)
    assert result.command.endswith(f"--out {tmp_path}")
    assert {row.part for row in result.rows} == {name}
    assert all(row.timing.rounds == 3 for row in result.rows)
