"""`differential_attention` and `softmax_attention` on every backend against the equations, and their refusals."""

import json

import pytest
import torch
import torch.nn.functional as F

from difftransformer.errors import BackendUnavailable, ConfigError, ShapeError
from difftransformer.ops import (
    attention_maps,
    chunked,
    differential_attention,
    normed_differential_attention,
    observe_inputs,
    softmax_attention,
    softmax_maps,
)
from tests.support import fresh, oracle
from tests.support.cases import (
    BACKENDS,
    BY_NAME,
    CASES,
    CAUSAL,
    FLOAT64_BACKENDS,
    READS_LENGTHS,
    TRITON,
    assert_as_good_as_eager,
    assert_close,
    by_name,
    eager,
    expected,
    ints,
    needs_kernels,
    new_memory_is_nan,
    op,
    peaked,
    random_mask,
    with_backends,
)
from tests.support.oracle import Case, output_and_gradients, relative_error

IN_INTERPRETER = (
    "one position", "63 own heads causal", "grouped, cross, narrow value", "one query", "shared key", "mask with empty rows",
    "both ends, causal mask", "cache, window", "documents, window, mask", "softmax, mask",
)  # fmt: skip


@pytest.mark.parametrize(("case", "backend"), with_backends(CASES, *IN_INTERPRETER))
def test_equals_the_equations(case, backend):
    results = output_and_gradients(op(case, backend), case, torch.float32)
    assert_close(results, expected(case.name), 2e-5)
    assert results["out"].dtype == torch.float32


@pytest.mark.parametrize("case", READS_LENGTHS, ids=by_name)
def test_chunked_where_lengths_cannot_be_read(case, monkeypatch):
    """What a GPU does: no value is read, masks stand in."""

    def refuse(tensor):
        raise AssertionError("read a value")

    monkeypatch.setattr(chunked, "_is_host", lambda device: False)
    query, key, value, lam, grad = case.inputs()
    function = op(case, "chunked")
    with monkeypatch.context() as patch:
        # The checks of the public function read values on the CPU; the backend alone must not.
        for module in ("problem", "isolation"):
            patch.setattr(f"difftransformer.ops.{module}.is_readable", lambda tensor: False)
        for method in ("tolist", "item", "__bool__", "__int__"):
            patch.setattr(torch.Tensor, method, refuse)
        out = function(query, key, value, lam)
        out.backward(grad)
    results = {"out": out.detach(), "query": query.grad, "key": key.grad, "value": value.grad}
    if lam is not None:
        results["lam"] = lam.grad
    assert_close(results, expected(case.name), 2e-5)


@pytest.mark.parametrize(
    "name", ["63 own heads causal", "both ends, mask", "mask by head", "grouped, cross, narrow value"]
)
def test_chunked_in_small_tiles(name, monkeypatch):
    monkeypatch.setattr(chunked, "CPU_TILE_ELEMENTS", 1)
    monkeypatch.setattr(chunked, "BLOCK_ROWS", 4)
    monkeypatch.setattr(chunked, "MIN_BLOCK_POSITIONS", 3)
    assert_close(output_and_gradients(op(BY_NAME[name], "chunked"), BY_NAME[name], torch.float32), expected(name), 2e-5)


@pytest.mark.parametrize(
    "name", ["257 window", "left padding", "mask with empty rows", "documents", "softmax", "cache"]
)
def test_chunked_reads_no_uninitialised_memory(name):
    """torch fills new tensors with NaN in this mode."""
    with new_memory_is_nan():
        results = output_and_gradients(op(BY_NAME[name], "chunked"), BY_NAME[name], torch.float32)
    assert_close(results, expected(name), 2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["one group, decoding", "documents"])
def test_takes_transposed_views(name, backend):
    """Layers pass (B, T, H, D) projections transposed; the last dimension may be a slice."""
    case = BY_NAME[name]

    def strided(x):
        wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)
        return torch.cat((x, wide[..., :3]), -1).transpose(1, 2).contiguous().transpose(1, 2)[..., : x.shape[-1]]

    function = op(case, backend)
    results = output_and_gradients(
        lambda q, k, v, lam: function(strided(q), strided(k), strided(v), lam), case, torch.float32
    )
    assert_close(results, expected(name), 2e-5)


# test_triton.py has Triton's.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend is not TRITON])
@pytest.mark.parametrize(
    "name", ["63 own heads causal", "257 causal", "257 window", "grouped, cross, narrow value", "shared key", "softmax"]
)
def test_low_precision(name, backend, dtype):
    """At most twice the error of eager PyTorch in the same dtype, or half a unit in the last place.

    Three times for sdpa, which subtracts rounded terms that may be larger than their difference, and says so.
    """
    case = BY_NAME[name]
    reference = expected(name, of=dtype)
    results = output_and_gradients(op(case, backend), case, dtype)
    eager_results = output_and_gradients(eager(case), case, dtype)
    assert results["out"].dtype == dtype
    assert_as_good_as_eager(results, eager_results, reference, dtype, times=3 if backend == "sdpa" else 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("factor", [8, 60])
@pytest.mark.parametrize("case", [Case("20 free", T=20, S=40, D=32, E=64), BY_NAME["wide window"]], ids=by_name)
def test_peaked_scores(case, factor, backend, dtype):
    """In low precision at most twice the error of eager PyTorch, three times for sdpa; with lambda of both signs.

    In fp32, a score of 400 that is rounded changes its weight by up to 400 eps / 2 = 2.4e-5, and is rounded a few times.
    """
    for sign in (1, -1):
        drawn = peaked(case, factor, sign)
        exact = output_and_gradients(lambda *inputs: oracle.attention(case, *inputs), drawn, torch.float64, of=dtype)
        results = output_and_gradients(op(drawn, backend), drawn, dtype)
        if dtype == torch.float32:
            assert_close(results, exact, 2e-5 if factor == 8 else 1e-4)
        else:
            eager_results = output_and_gradients(eager(drawn), drawn, dtype)
            assert_as_good_as_eager(results, eager_results, exact, dtype, times=3 if backend == "sdpa" else 2)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_key_gives_no_gradient_to_scores(backend, sign):
    """Its weight is 1 whatever its score. In bf16 too, where queries of 60 would multiply what rounding leaves."""
    case = peaked(BY_NAME["one position"], 60, sign)
    results = output_and_gradients(op(case, backend), case, torch.bfloat16)
    # fp32 sums of products of 8 numbers, times 60.
    assert results["query"].abs().max() < 1e-5
    assert results["key"].abs().max() < 2e-4


ISOLATED = [
    Case("causal", T=70, S=70, kwargs=CAUSAL),
    Case("window", H=4, T=70, S=70, kwargs=CAUSAL | {"window": 9}),
    Case("mask", H=4, T=9, S=70, kwargs={"attn_mask": random_mask(1, 1, 9, 70)}),
    Case("mask by head", B=2, H=4, T=9, S=70, kwargs=CAUSAL | {"attn_mask": random_mask(4, 9, 70)}),
    Case("mask of keys", T=9, S=70, kwargs={"attn_mask": torch.arange(70) != 33}),
    Case("start", B=2, T=9, S=70, kwargs={"kv_start": ints(40, 3)}),
    Case("length", B=2, T=9, S=70, kwargs=CAUSAL | {"kv_lengths": ints(30, 70)}),
    Case("documents", T=70, S=70, kwargs={"cu_seqlens": ints(0, 20, 70)}),
    Case("more queries", T=70, S=40, kwargs=CAUSAL),
    Case("softmax", H=4, T=70, S=70, lam=None, kwargs=CAUSAL),
]


def spoiled(case, name, fill, function):
    """Output and gradients with `fill` in position 33 of the key or value, the loss being of the queries that miss it."""
    query, key, value, lam, grad = case.inputs(requires_grad=False)
    sees = oracle.dense_mask(case)[..., 33]
    assert not sees.all()
    {"key": key, "value": value}[name][:, :, 33] = fill
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = function(*leaves, lam)
    grads = torch.autograd.grad(out, leaves, grad.masked_fill(sees.unsqueeze(-1), 0)) if out.requires_grad else ()
    return out.detach(), grads, sees


@pytest.mark.parametrize("name", ["key", "value"])
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        pytest.param(case, backend, marks=pytest.mark.slow if is_slow else (), id=f"{case.name}-{backend}")
        for case in ISOLATED
        for backend in (*FLOAT64_BACKENDS, "flex")
        for is_slow in [backend == "flex" and case.name not in ("window", "mask of keys", "softmax")]
    ],
)
def test_nan_reaches_only_queries_that_may_attend_to_it(case, backend, name):
    """The other outputs, and the gradients that come from them, keep every bit."""

    def function(*inputs):
        with torch.set_grad_enabled(backend != "flex"):
            return op(case, backend)(*inputs)

    zeros, zeros_grads, sees = spoiled(case, name, 0.0, function)
    for fill in (torch.nan, torch.inf):
        out, grads, _ = spoiled(case, name, fill, function)
        assert torch.equal(out[~sees], zeros[~sees])
        assert not out[sees].isfinite().any()
        assert all(torch.equal(x, y) for x, y in zip(grads, zeros_grads, strict=True))


@pytest.mark.parametrize("backend", FLOAT64_BACKENDS)
def test_a_gradient_of_nan_is_not_lost(backend):
    case = ISOLATED[0]
    query, key, value, lam, _ = case.inputs()
    with torch.no_grad():
        value[:, :, 33] = torch.nan
    op(case, backend)(query, key, value, lam).square().sum().backward()
    assert query.grad[:, :, 33:].isnan().all()
    assert query.grad[:, :, :33].isfinite().all()


@pytest.mark.parametrize("case", [case for case in ISOLATED if case.name in ("mask", "length", "window")], ids=by_name)
def test_nan_is_kept_away_in_a_compiled_graph(case):
    torch.compiler.reset()
    compiled = torch.compile(op(case, "chunked"), fullgraph=True, backend="aot_eager")
    zeros, zeros_grads, sees = spoiled(case, "value", 0.0, compiled)
    out, grads, _ = spoiled(case, "value", torch.nan, compiled)
    assert torch.equal(out[~sees], zeros[~sees])
    assert all(torch.equal(x, y) for x, y in zip(grads, zeros_grads, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_lam_stays_in_fp32(backend):
    """A lam that bf16 cannot hold: with both maps equal the output is (1 - lam) V, and 1 - lam would round to 0."""
    query, key = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8)
    value = torch.ones(1, 1, 4, 8)
    lam = torch.tensor(0.9995, requires_grad=True)
    out = differential_attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), lam, backend=backend)
    torch.testing.assert_close(out.float(), torch.full_like(out, 0.0005).float(), rtol=1e-2, atol=0)
    out.sum().backward()
    assert lam.grad.dtype == torch.float32
    torch.testing.assert_close(lam.grad, torch.tensor(-32.0))


GRAD_CASES = [
    Case("own keys", B=2, H=2, G=1, T=3, S=5, D=2, E=3, kwargs=CAUSAL),
    Case("shared key", H=2, G=2, T=3, S=4, D=2, E=2, shared_key=True, lam="query", kwargs={"kv_start": ints(1)}),
    Case("empty row", H=2, G=1, T=4, S=3, D=2, E=2, lam="scalar", kwargs=CAUSAL | {"attn_mask": random_mask(4, 3)}),
    Case("softmax", H=2, G=1, T=3, S=4, D=2, E=3, lam=None, kwargs=CAUSAL),
]


@pytest.mark.parametrize("backend", FLOAT64_BACKENDS)
@pytest.mark.parametrize("case", GRAD_CASES, ids=by_name)
def test_gradcheck(case, backend):
    *inputs, _ = case.inputs(torch.float64)
    assert torch.autograd.gradcheck(op(case, backend), inputs)


@pytest.mark.parametrize("case", GRAD_CASES, ids=by_name)
def test_reference_differentiates_twice(case):
    *inputs, _ = case.inputs(torch.float64)
    assert torch.autograd.gradgradcheck(op(case, "reference"), inputs, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", ["mask with empty rows", "left padding", "more queries than keys", "cache, window", "both ends, mask"]
)
def test_a_query_that_sees_nothing_gives_zeros_with_zero_gradients(name, backend):
    case = BY_NAME[name]
    empty = ~oracle.dense_mask(case).any(-1)
    assert empty.any()
    assert not empty.all()
    query, key, value, lam, _ = case.inputs()
    out = op(case, backend)(query, key, value, lam)
    assert (out[empty] == 0).all()
    assert (out[~empty] != 0).any()
    # A gradient that enters by such queries alone reaches nothing.
    grads = torch.autograd.grad(
        out, (query, key, value, lam), empty.unsqueeze(-1).expand_as(out).float() * 3, retain_graph=True
    )
    assert all((grad == 0).all() for grad in grads)
    grads = torch.autograd.grad(out, (query, key, value, lam), torch.ones_like(out))
    assert (grads[0][empty] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "sdpa"])
@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 0)])
def test_no_queries_or_no_keys(backend, sizes):
    case = Case("empty", T=sizes[0], S=sizes[1])
    query, key, value, lam, _ = case.inputs()
    out = op(case, backend)(query, key, value, lam)
    assert out.shape == (1, 2, sizes[0], 8)
    assert (out == 0).all()
    for x, grad in zip((query, key, value), torch.autograd.grad(out.sum(), (query, key, value)), strict=True):
        assert grad.shape == x.shape
        assert (grad == 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits_stay_finite(backend):
    case = Case("large", T=9, S=9, kwargs=CAUSAL)
    query, key, value, lam, grad = case.inputs()
    with torch.no_grad():
        query *= 30
        key *= 30
    out = op(case, backend)(query, key, value, lam)
    exact = oracle.attention(case, query.double(), key.double(), value.double(), lam.double())
    assert relative_error(out, exact) < 2e-4
    assert all(x.isfinite().all() for x in torch.autograd.grad(out, (query, key, value, lam), grad))


@pytest.mark.parametrize("backend", BACKENDS)
def test_future_and_foreign_keys_do_not_matter(backend):
    """Changing what a query may not see changes no bit of its output."""
    query, key, value, lam, _ = Case("x", B=2, T=70, S=70).inputs(requires_grad=False)
    arguments = {"is_causal": True, "kv_start": ints(0, 5), "backend": backend}
    before = differential_attention(query, key, value, lam, **arguments)
    other_key, other_value = key.clone(), value.clone()
    other_key[:, :, 40:] = 7.0
    other_value[:, :, 40:] = -3.0
    other_key[1, :, :5] = 9.0
    other_value[1, :, :5] = 11.0
    after = differential_attention(query, other_key, other_value, lam, **arguments)
    assert torch.equal(before[:, :, :40], after[:, :, :40])
    assert not torch.equal(before[:, :, 40:], after[:, :, 40:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_equals_torch(backend, causal):
    query, key, value, _, _ = Case("x", B=2, H=4, G=4, T=65, S=65, D=8, E=8, lam=None).inputs(requires_grad=False)
    torch.testing.assert_close(
        softmax_attention(query, key, value, is_causal=causal, backend=backend),
        F.scaled_dot_product_attention(query, key, value, is_causal=causal),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_the_second_map_it_is_softmax_attention(backend):
    case = Case("x", B=2, H=4, G=2, T=33, S=33, lam="float", kwargs=CAUSAL)
    query, key, value, _, _ = case.inputs(requires_grad=False)
    torch.testing.assert_close(
        differential_attention(query, key, value, 0.0, is_causal=True, backend=backend),
        softmax_attention(query[..., :4], key[..., :4], value, is_causal=True, backend=backend),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_does_not_reach_inside(backend):
    case = BY_NAME["63 own heads causal"]
    query, key, value, lam, grad = case.inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = op(case, backend)(query, key, value, lam)
        maps = attention_maps(query, key, is_causal=True)
    assert out.dtype == maps[0].dtype == torch.float32
    assert relative_error(out, expected(case.name)["out"]) < 2e-5
    out.backward(grad)
    assert relative_error(query.grad, expected(case.name)["query"]) < 2e-5


@pytest.mark.parametrize("name", ["grouped, cross, narrow value", "shared key", "mask with empty rows", "documents"])
def test_attention_maps(name):
    """The maps, applied to V as the equation says, are the output; rows sum to 1 or, where nothing is seen, to 0."""
    case = BY_NAME[name]
    query, key, value, lam, _ = case.inputs(torch.bfloat16, requires_grad=False)
    map_1, map_2 = attention_maps(query, key, **case.kwargs)
    assert map_1.dtype == map_2.dtype == torch.float32
    assert map_1.shape == map_2.shape == (case.B, case.H, case.T, case.S)
    seen = oracle.dense_mask(case)
    for one_map in (map_1, map_2):
        torch.testing.assert_close(one_map.sum(-1), seen.any(-1).float())
        assert (one_map[~seen] == 0).all()
    lam = lam.unsqueeze(-1) if lam.dim() == 3 else lam.view(1, -1, 1, 1)
    out = (map_1 - lam * map_2) @ value.float().repeat_interleave(case.H // case.G, 1)
    assert relative_error(out, expected(name, of=torch.bfloat16)["out"]) < 2e-5


def test_softmax_maps():
    case = BY_NAME["softmax, cache"]
    query, key, value, _, _ = case.inputs(requires_grad=False)
    weights = softmax_maps(query, key, **case.kwargs)
    assert relative_error(weights @ value, expected(case.name)["out"]) < 2e-5
    assert softmax_maps(query.double(), key.double(), **case.kwargs).dtype == torch.float64


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name",
    [
        "both ends, causal mask",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("documents", "shared key", "softmax")),
    ],
)
def test_compiles_without_a_graph_break(name, backend):
    torch.compiler.reset()
    case = BY_NAME[name]
    compiled = torch.compile(op(case, backend), fullgraph=True, backend="aot_eager")
    results = output_and_gradients(compiled, case, torch.float32)
    plain = output_and_gradients(op(case, backend), case, torch.float32)
    assert_close(results, plain, 1e-6)


def test_auto_compiles_with_symbolic_lengths():
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q, k, v, lam: differential_attention(q, k, v, lam, is_causal=True),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for length in (5, 70, 90):
        case = Case("x", T=length, S=length, kwargs=CAUSAL)
        assert_close(
            output_and_gradients(compiled, case, torch.float32),
            output_and_gradients(op(case, "reference"), case, torch.float32),
            2e-5,
        )


MEMORY_PROGRAM = """
import json, sys, torch
from difftransformer.ops import differential_attention
torch.set_num_threads(1)
def peak(length):
    q, k, v = (torch.randn(1, 4, length, 64, requires_grad=True) for _ in range(3))
    lam = torch.full((4,), 0.3, requires_grad=True)
    differential_attention(q, k, v, lam, is_causal=True, backend=sys.argv[1]).sum().backward()
    # Not getrusage: there a child starts from its parent's peak.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
print(json.dumps([peak(n) for n in (512, 4096, 8192)]))
"""


@pytest.mark.parametrize(
    "backend", [pytest.param("chunked", marks=pytest.mark.slow), pytest.param("cpu", marks=needs_kernels)]
)
def test_memory_grows_linearly(backend):
    """Peak of forward + backward in a fresh process; one 8192 x 8192 map of one head alone would be 256 MiB."""
    done = fresh.run(MEMORY_PROGRAM, backend)
    assert done.returncode == 0, done.stderr
    baseline, at_4k, at_8k = json.loads(done.stdout)
    # From 512 on: 2.1 times where memory grows with the length, 4.1 times where it grows with its square.
    assert at_8k - baseline < 3 * (at_4k - baseline), (baseline, at_4k, at_8k)
    assert at_8k - baseline < 200, (baseline, at_4k, at_8k)


def call(**changes):
    """A valid call with changes; for what must raise."""
    arguments = {
        "query": torch.zeros(2, 4, 5, 8),
        "key": torch.zeros(2, 2, 7, 8),
        "value": torch.zeros(2, 2, 7, 6),
        "lam": 0.5,
    } | changes
    return differential_attention(**arguments)


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


PACKED = {"query": zeros(1, 2, 6, 8), "key": zeros(1, 2, 6, 8), "value": zeros(1, 2, 6, 8)}
REFUSED = [
    (ShapeError, {"query": zeros(4, 5, 8)}, "query: shape .* has 3 dimensions"),
    (ShapeError, {"value": zeros(2, 2, 7)}, "value: shape .* must have 4"),
    (ShapeError, {"query": zeros(2, 4, 5, 7)}, "query: last dimension is 7; it must be even"),
    (ShapeError, {"query": zeros(2, 4, 5, 0)}, "no width"),
    (ShapeError, {"key": zeros(2, 2, 7, 6)}, "key: shape .* width = 8 or 4"),
    (ShapeError, {"key": zeros(1, 2, 7, 8)}, "key: shape .* B = 2"),
    (ShapeError, {"key": zeros(2, 3, 7, 8)}, "H = 4 heads and key G = 3 groups; H must be a multiple"),
    (ShapeError, {"value": zeros(2, 2, 6, 8)}, "value: shape .* does not fit key"),
    (ShapeError, {"value": zeros(2, 4, 7, 8)}, "value: shape .* does not fit key"),
    (ShapeError, {"key": zeros(2, 2, 7, 8, dtype=torch.bfloat16)}, "key: dtype torch.bfloat16, query is torch.float32"),
    (ShapeError, {"query": zeros(2, 4, 5, 8, dtype=torch.int32)}, "query: dtype torch.int32"),
    (ShapeError, {"key": torch.zeros(2, 2, 7, 8, device="meta")}, "key: on meta, query is on cpu"),
    (ShapeError, {"lam": zeros(3)}, r"lam: shape \(3,\); it must be a scalar, \(H,\) = \(4,\)"),
    (ShapeError, {"lam": zeros(2, 4)}, "lam: shape"),
    (ShapeError, {"lam": torch.tensor(1)}, "lam: dtype torch.int64; it must be floating"),
    (ShapeError, {"attn_mask": zeros(5, 7)}, "attn_mask: dtype torch.float32; it must be bool"),
    (ShapeError, {"attn_mask": zeros(5, 6).bool()}, r"attn_mask: shape \(5, 6\) does not broadcast"),
    (ShapeError, {"attn_mask": zeros(1, 2, 4, 5, 7).bool()}, "attn_mask: shape .* does not broadcast"),
    (ConfigError, {"window": 3}, "window=3 needs is_causal=True"),
    (ConfigError, {"window": 0, "is_causal": True}, "window=0; it must be at least 1"),
    (
        ConfigError,
        {"window": 2**70, "is_causal": True},
        r"window=1180591620717411303424; it must be at most 2147483647",
    ),
    (ShapeError, {"kv_start": zeros(2)}, "kv_start: dtype torch.float32; it must be int32"),
    (ShapeError, {"kv_lengths": ints(7)}, r"kv_lengths: shape \(1,\); it must be \(B,\) = \(2,\)"),
    (ShapeError, {"kv_lengths": ints(7, 8)}, r"kv_lengths: values \[7, 8\]; each must lie between 0 and S = 7"),
    (ShapeError, {"kv_start": ints(-1, 0)}, r"kv_start: values \[-1, 0\]"),
    (ShapeError, {"cu_seqlens": ints(0, 5)}, "cu_seqlens: B = 2, T = 5, S = 7; .* need B = 1 and T = S"),
    (ConfigError, PACKED | {"cu_seqlens": ints(0, 6), "kv_lengths": ints(6)}, "cu_seqlens and kv_start/kv_lengths"),
    (ShapeError, PACKED | {"cu_seqlens": ints(0, 5)}, r"cu_seqlens: values \[0, 5\]; they must rise from 0 to T = 6"),
    (ShapeError, PACKED | {"cu_seqlens": ints(0, 4, 3, 6)}, "cu_seqlens: values"),
    (ShapeError, PACKED | {"cu_seqlens": ints(1, 6)}, "cu_seqlens: values"),
    (ShapeError, PACKED | {"cu_seqlens": ints(0)}, r"cu_seqlens: shape \(1,\); it must be \(N \+ 1,\)"),
    (ShapeError, PACKED | {"cu_seqlens": zeros(2)}, "cu_seqlens: dtype torch.float32"),
    *((ShapeError, {name: None}, f"{name}: None; it must be a tensor") for name in ("query", "key", "value")),
    *(
        (ShapeError, {name: x.to_sparse()}, f"{name}: layout sparse_coo; it must be strided: convert it with .to_dense")
        for name, x in {"query": zeros(2, 4, 5, 8), "lam": zeros(4), "attn_mask": zeros(5, 7).bool()}.items()
    ),
    (ShapeError, {"query": [[1.0]]}, "query: a list; it must be a tensor"),
    (ShapeError, {"value": 3}, "value: 3; it must be a tensor"),
    (ShapeError, {"lam": None}, "lam: None; it must be a float or a tensor"),
    (ShapeError, {"lam": [0.5] * 4}, "lam: a list; it must be a float or a tensor"),
    (ShapeError, {"attn_mask": [[True]]}, "attn_mask: a list; it must be a tensor"),
    (ShapeError, {"kv_start": [0, 0]}, "kv_start: a list; it must be a tensor"),
    (ShapeError, {"kv_lengths": 7}, "kv_lengths: 7; it must be a tensor"),
    (ShapeError, PACKED | {"cu_seqlens": [0, 6]}, "cu_seqlens: a list; it must be a tensor"),
    (ConfigError, {"window": 2.5, "is_causal": True}, "window: 2.5; it must be an int"),
    (ConfigError, {"window": [2], "is_causal": True}, "window: a list; it must be an int"),
    (ConfigError, {"window": True, "is_causal": True}, "window: True; it must be an int"),
    (ConfigError, {"is_causal": None}, "is_causal: None; it must be True or False"),
    (ConfigError, {"is_causal": "yes"}, "is_causal: a str; it must be True or False"),
    (ConfigError, {"scale": "big"}, "scale: a str; it must be a finite number"),
    (ConfigError, {"scale": torch.ones(2)}, "scale: a Tensor; it must be a finite number"),
    (ConfigError, {"scale": float("nan")}, "scale: nan; it must be a finite number"),
    *(
        (ShapeError, {name: x.to("meta")}, f"{name}: on meta, query is on cpu; move both to one device")
        for name, x in {
            "value": zeros(2, 2, 7, 6),
            "lam": zeros(4),
            "attn_mask": zeros(5, 7).bool(),
            "kv_start": ints(0, 0),
            "kv_lengths": ints(7, 7),
        }.items()
    ),
    (ShapeError, PACKED | {"cu_seqlens": ints(0, 6).to("meta")}, "cu_seqlens: on meta, query is on cpu"),
]
REFUSED_NORMS = [
    (ShapeError, {"weight": zeros(6).to("meta")}, "weight: on meta, value is on cpu; move both to one device"),
    (ShapeError, {"weight": [1.0] * 6}, "weight: a list; it must be a tensor"),
    (ShapeError, {"weight": zeros(5)}, r"weight: shape \(5,\); it must be \(E,\) = \(6,\)"),
    (ShapeError, {"weight": zeros(6).long()}, "weight: dtype torch.int64; it must be floating"),
    (ShapeError, {"lam": None}, "lam: None; it must be a float or a tensor"),
    (ConfigError, {"eps": None}, "eps: None; it must be a finite number of at least 0"),
    (ConfigError, {"eps": -1.0}, "eps: -1.0; it must be"),
    (ConfigError, {"factor": "2"}, "factor: a str; it must be a finite number"),
]


@pytest.mark.parametrize("backend", [*FLOAT64_BACKENDS, "cpu", "triton", "flex"])
@pytest.mark.parametrize(
    ("error", "changes", "words"), REFUSED_NORMS, ids=lambda x: None if isinstance(x, type) else ""
)
def test_refusals_of_the_norm(error, changes, words, backend):
    arguments = {"lam": 0.5, "weight": zeros(6), "eps": 1e-5} | changes
    inputs = zeros(2, 4, 5, 8), zeros(2, 2, 7, 8), zeros(2, 2, 7, 6)
    with pytest.raises(error, match=words) as caught:
        normed_differential_attention(*inputs, **arguments, backend=backend)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", [None, ["cpu"], 3])
def test_a_backend_that_is_no_name(backend):
    with pytest.raises(BackendUnavailable, match="no backend is named"):
        call(backend=backend)


@pytest.mark.parametrize("backend", ["auto", *FLOAT64_BACKENDS, "cpu", "triton", "flex"])
@pytest.mark.parametrize(("error", "changes", "words"), REFUSED, ids=lambda x: None if isinstance(x, type) else "")
def test_refusals_say_what_to_do(error, changes, words, backend):
    with pytest.raises(error, match=words) as caught:
        call(**changes, backend=backend)
    assert "\n" not in str(caught.value)


def test_the_call_that_refusals_change_is_valid():
    assert call().shape == (2, 4, 5, 6)
    assert call(**PACKED, cu_seqlens=ints(0, 6)).shape == (1, 2, 6, 8)


def test_softmax_and_maps_refuse_too():
    with pytest.raises(ShapeError, match=r"key: shape .* width = 8"):
        softmax_attention(zeros(1, 2, 5, 8), zeros(1, 2, 5, 4), zeros(1, 2, 5, 8))
    with pytest.raises(ShapeError, match="must be even"):
        attention_maps(zeros(1, 2, 5, 7), zeros(1, 2, 5, 7))
    with pytest.raises(ConfigError, match="window=2 needs"):
        softmax_maps(zeros(1, 2, 5, 8), zeros(1, 2, 5, 8), window=2)


@pytest.mark.parametrize("backend", [*FLOAT64_BACKENDS, "auto"])
def test_meta_tensors_give_shapes(backend):
    query = torch.empty(2, 4, 5, 8, device="meta")
    key = torch.empty(2, 2, 7, 8, device="meta")
    out = differential_attention(query, key, key[..., :6], 0.5, is_causal=True, backend=backend)
    assert out.shape == (2, 4, 5, 6)
    assert out.device.type == "meta"


@pytest.mark.parametrize("shared", [False, True], ids=["two keys", "one key"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_watched_inputs_are_those_of_the_maps(shared, scale):
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 6, generator=generator)
    key, value = (
        torch.randn(2, 2, 7, 3 if shared else 6, generator=generator),
        torch.randn(2, 2, 7, 3, generator=generator),
    )
    seen = []
    with observe_inputs(lambda *inputs: seen.append(inputs)):
        found = differential_attention(query, key, value, 0.4, is_causal=True, scale=scale)
        softmax_attention(query[..., :3], key[..., :3], value, window=2, is_causal=True)
    assert torch.equal(differential_attention(query, key, value, 0.4, is_causal=True, scale=scale), found)
    assert len(seen) == 2
    allowed = torch.ones(5, 7, dtype=torch.bool).tril(2)
    maps, restrictions, used = seen[0]
    assert restrictions.is_causal
    expected = attention_maps(query, key, is_causal=True, scale=scale)
    for (q, k), map_BHTS in zip(maps, expected, strict=True):
        logits = (used * q @ k.repeat_interleave(2, 1).mT).masked_fill(~allowed, -torch.inf)
        torch.testing.assert_close(logits.softmax(-1), map_BHTS)
    ((q, k),), restrictions, used = seen[1]
    assert (q.shape[-1], k.shape, restrictions.window, used) == (3, (2, 2, 7, 3), 2, 3**-0.5)
