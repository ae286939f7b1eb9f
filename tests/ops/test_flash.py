"""The `flash` backend: how calls of flash-attn are put together, with a stand-in for the package that knows its rules.

The stand-in is written from what the package's README says of its three functions, in float64 and a loop over batch, head
and query. Tests marked `gpu` run the package itself.
"""

import dataclasses
import sys
import types

import pytest
import torch

from difftransformer.errors import BackendUnavailable
from difftransformer.ops import differential_attention, flash, select_backend, softmax_attention
from tests.support.cases import (
    BY_NAME,
    CASES,
    CAUSAL,
    assert_as_good_as_eager,
    assert_close,
    by_name,
    eager,
    expected,
    ints,
    op,
    problem,
)
from tests.support.oracle import Case, attention, dense_mask, output_and_gradients, relative_error


def one_row(q, k, v, scale, causal, window):
    """(T, H, D), (S, G, D), (S, G, C) -> (T, H, C). Keys from i + S - T - left to i + S - T + right; causal: right = 0."""
    T, H, S, G = *q.shape[:2], *k.shape[:2]
    left, right = window
    right = 0 if causal else right
    heads = []
    for h in range(H):
        rows = []
        for i in range(T):
            first = 0 if left < 0 else max(0, i + S - T - left)
            last = S if right < 0 else min(S, i + S - T + right + 1)
            if first >= last:
                rows.append(0 * q[i, h].sum() + torch.zeros(v.shape[-1], dtype=torch.float64))
                continue
            g = h // (H // G)
            weights = torch.softmax(scale * (k[first:last, g].double() @ q[i, h].double()), 0)
            rows.append(weights @ v[first:last, g].double())
        heads.append(torch.stack(rows))
    return torch.stack(heads, 1).to(q.dtype)


class Package(types.ModuleType):
    """A stand-in for flash_attn, or for flex_head_fa with the pairs of widths that this compiles."""

    __version__ = "2.8.3"

    def __init__(self, name, pairs=()):
        super().__init__(name)
        self.pairs, self.calls = pairs, []

    def _check(self, name, q, k, v, scale):
        self.calls.append(name)
        assert k.shape[-1] == q.shape[-1] <= 256
        assert (q.shape[-1], v.shape[-1]) in self.pairs or v.shape[-1] == q.shape[-1]
        assert q.shape[-2] % k.shape[-2] == 0
        assert scale > 0

    def flash_attn_func(self, q, k, v, *, softmax_scale, causal, window_size, deterministic):
        self._check("flash_attn_func", q, k, v, softmax_scale)
        return torch.stack([one_row(*row, softmax_scale, causal, window_size) for row in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(
        self, q, k, v, bounds_q, bounds_k, longest_q, longest_k, *, softmax_scale, causal, window_size, deterministic
    ):
        self._check("flash_attn_varlen_func", q, k, v, softmax_scale)
        assert bounds_q.dtype == bounds_k.dtype == torch.int32
        pieces = []
        for (a, b), (c, d) in zip(*(bounds.unfold(0, 2, 1).tolist() for bounds in (bounds_q, bounds_k)), strict=True):
            assert b - a <= longest_q > 1
            assert d - c <= longest_k > 1
            if b > a:
                pieces.append(one_row(q[a:b], k[c:d], v[c:d], softmax_scale, causal, window_size))
        return torch.cat(pieces)

    def flash_attn_with_kvcache(self, q, k_cache, v_cache, *, cache_seqlens, softmax_scale, causal, window_size):
        self._check("flash_attn_with_kvcache", q, k_cache, v_cache, softmax_scale)
        assert cache_seqlens.dtype == torch.int32
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1
        rows = zip(q, k_cache, v_cache, cache_seqlens.tolist(), strict=True)
        return torch.stack(
            [one_row(q, k[:n], v[:n], softmax_scale, causal, window_size) for q, k, v, n in rows]
        ).detach()


@pytest.fixture
def packages(monkeypatch):
    """Install stand-ins; the CPU passes for a GPU, and fp32 for a dtype that the package takes."""
    monkeypatch.setattr(flash, "_is_gpu", lambda device_type: device_type in ("cpu", "cuda"))
    monkeypatch.setattr(flash, "DTYPES", (torch.float32, torch.bfloat16, torch.float16))
    monkeypatch.setitem(sys.modules, "flex_head_fa", None)
    flash._outcome.cache_clear()

    def install(package):
        monkeypatch.setitem(sys.modules, package.__name__, package)
        return package

    yield install
    flash._outcome.cache_clear()


@pytest.fixture
def package(packages):
    return packages(Package("flash_attn"))


def can(case, *others):
    return not {"attn_mask", "kv_start", *others} & case.kwargs.keys()


NUMBER_OF_CALLS = {
    "257 causal": 4,
    "257 free": 2,
    "grouped, cross, narrow value": 2,
    "shared key": 2,
    "documents": 4,
    "softmax": 1,
    "softmax 130, wide value": 3,
    "softmax, documents": 2,
}


@pytest.mark.parametrize("case", [case for case in CASES if can(case, "kv_lengths")], ids=by_name)
def test_equals_the_equations(case, package):
    results = output_and_gradients(op(case, "flash"), case, torch.float32)
    assert_close(results, expected(case.name), 2e-5)
    assert results["out"].dtype == torch.float32
    assert len(package.calls) == NUMBER_OF_CALLS.get(case.name, 4)
    assert set(package.calls) == {"flash_attn_varlen_func" if "cu_seqlens" in case.kwargs else "flash_attn_func"}


@pytest.mark.parametrize("case", [case for case in CASES if can(case) and "kv_lengths" in case.kwargs], ids=by_name)
def test_a_partly_filled_cache(case, package):
    inputs = case.inputs(requires_grad=False)[:4]
    assert relative_error(op(case, "flash")(*inputs), expected(case.name)["out"]) < 2e-5
    assert package.calls == ["flash_attn_with_kvcache"] * (2 if case.lam is None else 4)


def test_a_cache_whose_last_dimension_is_strided(package):
    case = BY_NAME["cache"]
    query, key, value, lam, _ = case.inputs(requires_grad=False)
    out = op(case, "flash")(query, key.mT.contiguous().mT, value.mT.contiguous().mT, lam)
    assert relative_error(out, expected(case.name)["out"]) < 2e-5


@pytest.mark.parametrize("documents", [False, True])
def test_the_fork_takes_the_value_in_one_piece(packages, documents):
    narrow = packages(Package("flash_attn"))
    wide = packages(Package("flex_head_fa", pairs=((32, 64),)))
    kwargs = CAUSAL | ({"cu_seqlens": ints(0, 2, 5)} if documents else {})
    case = Case("wide", H=4, G=2, T=5, S=5, D=32, E=64, lam="query", kwargs=kwargs)
    exact = output_and_gradients(lambda *x: attention(case, *x), case, torch.float64, of=torch.float32)
    assert_close(output_and_gradients(op(case, "flash"), case, torch.float32), exact, 2e-5)
    assert wide.calls == ["flash_attn_varlen_func" if documents else "flash_attn_func"] * 2
    assert not narrow.calls
    # Other pairs, and caches, go the other way.
    other = dataclasses.replace(case, E=65)
    op(other, "flash")(*other.inputs()[:4])
    cache = dataclasses.replace(case, kwargs=CAUSAL | {"kv_lengths": ints(3)})
    op(cache, "flash")(*cache.inputs(requires_grad=False)[:4])
    assert len(wide.calls) == 2
    assert len(narrow.calls) == 6 + 4


def test_the_fork_alone(packages):
    packages(Package("flex_head_fa", pairs=((32, 64),)))
    sys.modules["flash_attn"] = None
    try:
        assert flash.supports(problem(width=32, value_width=64)) is None
        assert "flash_attn cannot be imported" in flash.supports(problem(width=32, value_width=32))
        assert "flash_attn cannot be imported" in flash.supports(problem(width=32, value_width=64, kv_range=True))
    finally:
        del sys.modules["flash_attn"]


@pytest.mark.parametrize("name", ["63 own heads causal", "grouped, cross, narrow value", "shared key"])
def test_low_precision(name, package):
    """Three times the error of eager PyTorch, as for `sdpa`: rounded terms may be larger than their difference."""
    case = BY_NAME[name]
    results = output_and_gradients(op(case, "flash"), case, torch.bfloat16)
    eager_results = output_and_gradients(eager(case), case, torch.bfloat16)
    assert results["out"].dtype == torch.bfloat16
    assert_as_good_as_eager(results, eager_results, expected(name, of=torch.bfloat16), torch.bfloat16, times=3)


def test_lam_stays_in_fp32(package):
    """A lam that bf16 cannot hold: with both maps equal the output is (1 - lam) V, and 1 - lam would round to 0."""
    query, value = torch.zeros(1, 1, 4, 8).bfloat16(), torch.ones(1, 1, 4, 8).bfloat16()
    lam = torch.tensor(0.9995, requires_grad=True)
    out = differential_attention(query, query, value, lam, backend="flash")
    torch.testing.assert_close(out.float(), torch.full_like(out, 0.0005).float(), rtol=1e-2, atol=0)
    out.sum().backward()
    torch.testing.assert_close(lam.grad, torch.tensor(-32.0))


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_a_scale_that_is_not_positive(scale, package):
    case = Case("x", T=6, S=9, kwargs=CAUSAL | {"scale": scale})
    exact = output_and_gradients(lambda *x: attention(case, *x), case, torch.float64, of=torch.float32)
    results = output_and_gradients(op(case, "flash"), case, torch.float32)
    assert relative_error(results["out"], exact["out"]) < 2e-5
    assert relative_error(results["value"], exact["value"]) < 2e-5
    assert all(x.isfinite().all() for x in results.values())


def test_a_query_that_sees_nothing_gives_zeros(package):
    case = BY_NAME["more queries than keys"]
    empty = ~dense_mask(case).any(-1)
    query, key, value, lam, _ = case.inputs()
    out = op(case, "flash")(query, key, value, lam)
    assert (out[empty] == 0).all()
    grads = torch.autograd.grad(out, (query, key, value, lam), empty.unsqueeze(-1).expand_as(out).float())
    assert all((grad == 0).all() for grad in grads)


def test_one_document_of_one_position_beside_empty_ones(package):
    """flash-attn fails where the longest document is said to be 1 and another is empty."""
    case = Case("x", H=4, G=2, T=1, S=1, kwargs=CAUSAL | {"cu_seqlens": ints(0, 0, 1)})
    inputs = case.inputs(requires_grad=False)[:4]
    assert relative_error(op(case, "flash")(*inputs), attention(case, *(x.double() for x in inputs))) < 2e-5


@pytest.mark.parametrize(
    "name",
    ["shared key", *(pytest.param(name, marks=pytest.mark.slow) for name in ("more queries than keys", "softmax"))],
)
def test_compiles_without_a_graph_break(name, package):
    torch.compiler.reset()
    case = BY_NAME[name]
    inputs = case.inputs(requires_grad=False)[:4]
    out = torch.compile(op(case, "flash"), fullgraph=True, backend="eager")(*inputs)
    assert relative_error(out, expected(name)["out"]) < 2e-5


def test_what_it_cannot_run(package, monkeypatch):
    assert flash.supports(problem()) is None
    assert not flash.has_quadratic_memory(problem(100_000))
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
def test_a_package_that_is_missing_old_or_another(change, words, packages, monkeypatch):
    if change is None:
        monkeypatch.setitem(sys.modules, "flash_attn", None)
    else:
        members = {"__version__": "2.8.3", "flash_attn_func": 1, "flash_attn_varlen_func": 1} | change
        module = types.ModuleType("flash_attn")
        for name, member in members.items():
            if member is not None:
                setattr(module, name, member)
        packages(module)
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


ON_A_GPU = [
    *(dataclasses.replace(BY_NAME[name], D=64, E=128) for name in ("257 window", "documents", "cache, window")),
    *(dataclasses.replace(BY_NAME[name], D=16, E=24) for name in ("more queries than keys", "shared key", "softmax")),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ON_A_GPU, ids=by_name)
def test_on_a_gpu(case, dtype):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    pytest.importorskip("flash_attn")
    exact = output_and_gradients(lambda *inputs: attention(case, *inputs), case, torch.float64, of=dtype)
    eager_results = output_and_gradients(eager(case), case, dtype)
    moved = dataclasses.replace(
        case, kwargs={name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in case.kwargs.items()}
    )

    def on_gpu(*inputs):
        return op(moved, "flash")(*(x.cuda() if isinstance(x, torch.Tensor) else x for x in inputs)).cpu()

    if "kv_lengths" in case.kwargs:
        results = {"out": on_gpu(*case.inputs(dtype, requires_grad=False)[:4])}
        exact, eager_results = {"out": exact["out"]}, {"out": eager_results["out"]}
    else:
        results = output_and_gradients(on_gpu, case, dtype)
    assert_as_good_as_eager(results, eager_results, exact, dtype, times=3)
