"""The scripts of `benchmarks/`: what they compare computes the same or has equal sizes, and their figures add up."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from difftransformer_lab.bench import Settings, models
from difftransformer_lab.bench.attention_work import AttentionShape
from difftransformer_lab.results import Bench, read_result
from tests.support.cases import threads

FOLDER = Path(__file__).parents[2] / "benchmarks"
QUICK = Settings(repeats=3, seconds=1.0, threads=1)
B, H, N, D = 2, 3, 16, 4


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


@pytest.mark.slow
def test_the_chunked_loss_takes_less_memory(script):
    shape = script("loss").Shape(2048, 128, 4096)
    with script("loss").fresh_process() as pool:
        whole = pool.apply(script("loss").peak_in_this_process, ("whole logits", shape, "fp32", 1))
    with script("loss").fresh_process() as pool:
        chunked = pool.apply(script("loss").peak_in_this_process, ("chunked", shape, "fp32", 1))
    assert whole > 2 * 4 * shape.tokens * shape.vocab_size
    assert chunked <= 0.4 * whole


def test_variants_have_equal_parameters(script, monkeypatch):
    fields = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    monkeypatch.setitem(models.SIZES, "tiny", models.ModelSize(fields, 2, 12))
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
    shape = AttentionShape(dtype="bf16", mode="forward+backward", length_tokens=N, heads=H, head_dim=D, batch=B)
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
        monkeypatch.setattr(one, "AttentionShape", lambda **sizes: AttentionShape(**sizes | {"length_tokens": N}))
    else:
        small = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 4}
        monkeypatch.setattr(one, "MODEL", one.MODEL | small)
        monkeypatch.setattr(one, "CONTEXT_TOKENS", N)
        monkeypatch.setattr(one, "CACHED_TOKENS", N)
    words = ["--dtypes", "fp32", "--repeats", "3", "--seconds", "0", "--threads", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    with threads(1):
        script("script").run(one.steps, "")
    result = read_result(tmp_path / "results.json", Bench)
    assert result.command.endswith(f"--out {tmp_path}")
    assert {row.part for row in result.rows} == {name}
    assert all(row.timing.rounds == 3 for row in result.rows)
