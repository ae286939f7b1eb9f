"""The `flash` backend: how calls of flash-attn are put together, and which packages it takes, with stand-ins for them.

`test_conformance.py` has the numbers, with a stand-in and on a GPU with the package itself.
"""

import dataclasses
import sys
import types

import pytest
import torch

from difftransformer.errors import BackendUnavailable
from difftransformer.ops import BACKENDS, differential_attention, flash, select_backend, softmax_attention
from tests.support.cases import BY_NAME, CAUSAL, assert_close, exact, ints, op, problem
from tests.support.op_backends import FlashPackage, install_flash
from tests.support.oracle import Case, output_and_gradients, relative_error


@pytest.fixture
def package(monkeypatch):
    made = FlashPackage()
    install_flash(monkeypatch, made)
    return made


@pytest.mark.parametrize(
    ("name", "kind", "count"),
    [
        ("257 causal", "func", 4), ("grouped, cross, narrow value", "func", 2), ("shared key", "func", 2),
        ("softmax", "func", 1), ("softmax 130, wide value", "func", 3), ("documents", "varlen_func", 4),
        ("softmax, documents", "varlen_func", 2), ("cache", "with_kvcache", 4), ("softmax, cache", "with_kvcache", 2),
    ],
)  # fmt: skip
def test_number_of_calls(name, kind, count, package):
    with torch.no_grad():
        op(BY_NAME[name], "flash")(*BY_NAME[name].inputs()[:4])
    assert package.calls == [f"flash_attn_{kind}"] * count


def test_a_cache_whose_last_dimension_is_strided(package):
    case = BY_NAME["cache"]
    query, key, value, lam, _ = case.inputs(requires_grad=False)
    out = op(case, "flash")(query, key.mT.contiguous().mT, value.mT.contiguous().mT, lam)
    assert relative_error(out, exact(case)["out"]) < 2e-5


@pytest.mark.parametrize("documents", [False, True])
def test_the_fork_takes_the_value_in_one_piece(monkeypatch, documents):
    narrow, wide = FlashPackage(), FlashPackage("flex_head_fa", pairs=((32, 64),))
    install_flash(monkeypatch, narrow, wide)
    kwargs = CAUSAL | ({"cu_seqlens": ints(0, 2, 5)} if documents else {})
    case = Case("wide", H=4, G=2, T=5, S=5, D=32, E=64, lam="query", kwargs=kwargs)
    assert_close(output_and_gradients(op(case, "flash"), case, torch.float32), exact(case), 2e-5)
    assert wide.calls == ["flash_attn_varlen_func" if documents else "flash_attn_func"] * 2
    assert not narrow.calls
    # Other pairs, and caches, go the other way.
    other = dataclasses.replace(case, E=65)
    op(other, "flash")(*other.inputs()[:4])
    cache = dataclasses.replace(case, kwargs=CAUSAL | {"kv_lengths": ints(3)})
    op(cache, "flash")(*cache.inputs(requires_grad=False)[:4])
    assert len(wide.calls) == 2
    assert len(narrow.calls) == 6 + 4


def test_the_fork_alone(monkeypatch):
    install_flash(monkeypatch, FlashPackage("flex_head_fa", pairs=((32, 64),)))
    assert flash.supports(problem(width=32, value_width=64)) is None
    assert "flash_attn cannot be imported" in flash.supports(problem(width=32, value_width=32))
    assert "flash_attn cannot be imported" in flash.supports(problem(width=32, value_width=64, kv_range=True))


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_a_scale_that_is_not_positive(scale, package):
    case = Case("x", T=6, S=9, kwargs=CAUSAL | {"scale": scale})
    results = output_and_gradients(op(case, "flash"), case, torch.float32)
    assert all(relative_error(results[part], exact(case)[part]) < 2e-5 for part in ("out", "value"))
    assert all(x.isfinite().all() for x in results.values())


def test_one_document_of_one_position_beside_empty_ones(package):
    """flash-attn fails where the longest document is said to be 1 and another is empty."""
    case = Case("x", H=4, G=2, T=1, S=1, kwargs=CAUSAL | {"cu_seqlens": ints(0, 0, 1)})
    inputs = case.inputs(requires_grad=False)[:4]
    assert relative_error(op(case, "flash")(*inputs), exact(case)["out"]) < 2e-5


def test_what_it_cannot_run(package, monkeypatch):
    assert flash.supports(problem()) is None
    assert not BACKENDS["flash"].has_quadratic_memory(problem(100_000))
    assert "takes no attn_mask" in flash.supports(problem(attn_mask=True))
    assert "takes no kv_start" in flash.supports(problem(kv_range=True, kv_start=True))
    assert "no backward pass" in flash.supports(problem(kv_range=True, needs_grad=True))
    assert flash.supports(problem(kv_range=True)) is None
    assert "at most 256" in flash.supports(problem(width=257))
    assert "no queries" in flash.supports(problem(0))
    assert "not float64" in flash.supports(problem(dtype=torch.float64))
    assert "not on xpu" in flash.supports(problem(device_type="xpu"))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "inside torch.compile" in flash.supports(problem(kv_range=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (None, r"flash_attn cannot be imported \(.*\): pip install flash-attn"),
        ({"__version__": "2.5.4.post1"}, r"flash_attn 2\.5\.4\.post1; at least 2\.5\.5 is needed: pip install"),
        ({"flash_attn_func": None}, "flash_attn has no flash_attn_func, so it is not FlashAttention-2"),
    ],
)
def test_a_package_that_is_missing_old_or_another(change, words, monkeypatch):
    members = {"__version__": "2.8.3", "flash_attn_func": 1, "flash_attn_varlen_func": 1} | (change or {})
    module = types.ModuleType("flash_attn")
    vars(module).update({name: member for name, member in members.items() if member is not None})
    install_flash(monkeypatch, module)
    if change is None:
        monkeypatch.setitem(sys.modules, "flash_attn", None)
    query, key, value, lam, _ = Case("x").inputs()
    with pytest.raises(BackendUnavailable, match=rf"'flash' cannot .*flash: {words}"):
        differential_attention(query, key, value, lam, backend="flash")
    with pytest.raises(BackendUnavailable, match=words):
        softmax_attention(query, query, query, backend="flash")


def test_the_cpu_is_refused_before_the_package_is_looked_for(monkeypatch):
    monkeypatch.setattr(flash, "_outcome", None)
    assert flash.supports(problem()) == "runs on CUDA, not on cpu"
    assert flash.supports(problem(device_type="cuda")) == "takes bfloat16 and float16, not float32"
    with pytest.raises(BackendUnavailable, match="flash: runs on CUDA"):
        select_backend(problem(dtype=torch.bfloat16), "flash")
