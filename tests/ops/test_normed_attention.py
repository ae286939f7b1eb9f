"""`normed_differential_attention` on every backend against the equations and an RMSNorm written by hand."""

import dataclasses

import pytest
import torch

from difftransformer.errors import ConfigError, ShapeError
from difftransformer.ops import backends, differential_attention, normed_differential_attention
from tests.support import oracle
from tests.support.cases import (
    BACKENDS,
    BY_NAME,
    EPS,
    FACTOR,
    SLOW_TRITON,
    TRITON,
    assert_as_good_as_eager,
    assert_close,
    by_name,
    eager,
    needs_kernels,
    norm_by_hand,
    normed_by_equations,
    normed_op,
    normed_results,
    with_backends,
)
from tests.support.oracle import Case

NAMES = [
    "63 own heads causal",
    "257 window",
    "grouped, cross, narrow value",
    "one query",
    "shared key",
    "mask with empty rows",
    "left padding",
    "both ends, mask",
    "long documents",
]
DECODING = Case("decoding", B=3, H=4, G=2, T=2, S=300, D=8, E=33, lam="query", kwargs={"is_causal": True})
CASES = [*(BY_NAME[name] for name in NAMES), DECODING]


@pytest.mark.parametrize(
    ("case", "backend"),
    with_backends(CASES, "grouped, cross, narrow value", "one query", "shared key", "left padding"),
)
def test_equals_the_equations(case, backend):
    results = normed_results(normed_op(case, backend), case, torch.float32)
    assert results["out"].dtype == results["weight"].dtype == torch.float32
    # eps keeps a head whose output is near zero from being divided by it; such heads amplify what went before.
    assert_close(results, normed_by_equations(case), 1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("gain", "eps"), [(False, EPS), (True, 0.5)])
def test_without_a_gain_and_with_a_large_eps(backend, gain, eps):
    case = BY_NAME["grouped, cross, narrow value"]
    results = normed_results(normed_op(case, backend, eps), case, torch.float32, gain=gain)
    assert_close(results, normed_by_equations(case, eps=eps, gain=gain), 5e-5)


# Triton's interpreter rounds to bf16 towards zero; test_triton.py has fp16, test_triton_gpu.py both.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend is not TRITON])
@pytest.mark.parametrize(
    "case", [*(BY_NAME[name] for name in ("63 own heads causal", "257 window", "shared key")), DECODING], ids=by_name
)
def test_low_precision(case, backend, dtype):
    """As for the attention alone; three times for sdpa, which subtracts rounded terms."""
    results = normed_results(normed_op(case, backend), case, dtype)
    assert results["out"].dtype == results["weight"].dtype == dtype
    assert_as_good_as_eager(
        results,
        normed_results(norm_by_hand(case, eager(case)), case, dtype),
        normed_by_equations(case, of=dtype),
        dtype,
        times=3 if backend == "sdpa" else 2,
    )


@pytest.mark.parametrize("backend", [*BACKENDS[:-1], SLOW_TRITON])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mask with empty rows", "left padding"])
def test_a_query_that_sees_nothing_gives_zeros_with_zero_gradients(name, dtype, backend):
    case = BY_NAME[name]
    empty = ~oracle.dense_mask(case).any(-1)
    query, key, value, lam, _ = case.inputs(dtype)
    weight = torch.ones(case.E, requires_grad=True)
    out = normed_op(case, backend)(query, key, value, lam, weight)
    assert (out[empty] == 0).all()
    inputs = (query, key, value, lam, weight)
    grads = torch.autograd.grad(out, inputs, empty.unsqueeze(-1).expand_as(out).to(dtype), retain_graph=True)
    assert all((grad == 0).all() for grad in grads)
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert (grads[0][empty] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)


@needs_kernels
def test_the_kernels_round_once():
    """The head is normalised before it is rounded: the fused pass differs from the fp32 result by that rounding alone."""
    case = Case("x", B=2, H=4, T=65, S=65, D=16, E=32, kwargs={"is_causal": True})
    query, key, value, lam, _ = case.inputs(torch.float16, requires_grad=False)
    wide = normed_op(case, "cpu")(query.float(), key.float(), value.float(), lam, None)
    fused = normed_op(case, "cpu")(query, key, value, lam, None)
    assert torch.equal(fused, wide.half())
    apart = oracle.rms_norm(differential_attention(query, key, value, lam, **case.kwargs).float(), None, EPS, FACTOR)
    assert not torch.equal(apart.half(), wide.half())


@pytest.mark.parametrize("name", ["reference", "mine"])
def test_the_backends_own_pass_is_taken_where_there_is_one(name, monkeypatch):
    calls = []

    def run(call):
        calls.append(call.norm)
        return call.value[:, :, :1]

    mine = dataclasses.replace(backends.BACKENDS["reference"], name="mine", run=run, norms=True)
    monkeypatch.setitem(backends.BACKENDS, "mine", mine)
    query, key, value, lam, _ = Case("x").inputs()
    weight = torch.ones(8)
    normed_differential_attention(query, key, value, lam, weight, eps=0.25, factor=3.0, backend=name)
    assert calls == ([(weight, 0.25, 3.0)] if name == "mine" else [])


@pytest.mark.parametrize("backend", BACKENDS)
def test_refusals(backend):
    query, key, value, lam, _ = Case("x").inputs()
    for shape in ((), (4,), (1, 8), (2, 1, 8)):
        with pytest.raises(ShapeError, match=r"weight: shape .*; it must be \(E,\) = \(8,\)"):
            normed_differential_attention(query, key, value, lam, torch.ones(shape), eps=EPS, backend=backend)
    with pytest.raises(ShapeError, match="value: shape"):
        normed_differential_attention(query, key, value[:, :, 1:], lam, None, eps=EPS, backend=backend)
    with pytest.raises(ConfigError, match="window=3 needs"):
        normed_differential_attention(query, key, value, lam, None, eps=EPS, window=3, backend=backend)
