"""What the fused backends, `cpu` and `triton`, promise alike: layouts, sizes of zero, NaN, ranges, autograd, checkpoints."""

import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from difftransformer.errors import BackendUnavailable
from difftransformer.ops import normed_differential_attention
from tests.support.cases import CAUSAL, TRITON, ints, needs_kernels, op
from tests.support.fused_calls import assert_same_bits, bits, tensors
from tests.support.oracle import Case

pytestmark = pytest.mark.parametrize("backend", [pytest.param("cpu", marks=needs_kernels), TRITON])

SMALL = Case("x", B=2, H=2, G=1, T=9, S=11, D=8, E=6, lam="head", kwargs=CAUSAL)
DECODING = Case("decoding", B=2, H=4, G=2, T=1, S=150, D=17, E=19, kwargs=CAUSAL)
HALF = {"cpu": torch.bfloat16, "triton": torch.float16}


@pytest.mark.parametrize("sizes", [{"B": 0}, {"H": 0}, {"T": 0}, {"S": 0}, {"T": 0, "S": 0}], ids=str)
@pytest.mark.parametrize("norm", [False, True])
def test_sizes_of_zero(backend, sizes, norm):
    case, dtype = dataclasses.replace(SMALL, **sizes), HALF[backend]
    leaves, lam, _ = tensors(case, dtype)
    out, *grads = bits(backend, case, dtype, norm)
    assert (out.shape, out.dtype) == ((case.B, case.H, case.T, case.E), dtype)
    assert (out == 0).all()
    for leaf, grad in zip(leaves, grads, strict=norm is False):
        assert grad.shape == leaf.shape
    assert all((grad == 0).all() for grad in grads)
    with torch.no_grad():
        assert torch.equal(op(case, backend)(*leaves[:3], lam), out)


@pytest.mark.parametrize("half", [False, True])
def test_a_row_does_not_depend_on_the_batch(backend, half):
    case = Case("x", B=3, H=2, G=1, T=9 if backend == "triton" else 70, S=70, D=16, E=24, kwargs=CAUSAL)
    query, key, value, lam, _ = case.inputs(HALF[backend] if half else torch.float32)
    for attend in (op(case, backend), torch.no_grad()(op(case, backend))):
        whole = attend(query, key, value, lam)
        for b in range(3):
            assert torch.equal(whole[b], attend(query[b : b + 1], key[b : b + 1], value[b : b + 1], lam)[0])


@pytest.mark.parametrize("half", [False, True])
def test_an_expanded_gradient(backend, half):
    leaves, lam, _ = tensors(SMALL, HALF[backend] if half else torch.float32)
    out = op(SMALL, backend)(*leaves[:3], lam)
    ones = torch.ones((), dtype=out.dtype).expand_as(out)
    expanded = torch.autograd.grad(out, leaves, ones, retain_graph=True)
    assert_same_bits(torch.autograd.grad(out, leaves, ones.contiguous()), expanded)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("case", [dataclasses.replace(SMALL, G=2), DECODING], ids=lambda case: case.name)
def test_expanded_inputs(backend, case, grad):
    """One key and value for all positions, groups or rows of a batch, without a copy."""
    query, key, value, lam, _ = case.inputs(requires_grad=False)
    query.requires_grad_(grad)
    for index in (
        (slice(1), slice(None), slice(None)),
        (slice(None), slice(1), slice(None)),
        (..., slice(1), slice(None)),
    ):
        one_key, one_value = key[index].expand_as(key), value[index].expand_as(value)
        assert 0 in one_key.stride()
        out = op(case, backend)(query, one_key, one_value, lam)
        assert torch.equal(out, op(case, backend)(query, one_key.contiguous(), one_value.contiguous(), lam))


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("half", [False, True])
def test_nan_in_what_a_query_sees_reaches_its_output(backend, which, half):
    case = Case("tiles", B=2, T=9, S=80, kwargs=CAUSAL)
    query, key, value, lam, _ = case.inputs(HALF[backend] if half else torch.float32, requires_grad=False)
    t, j = case.T - 1, 3
    spoiled = {"query": query, "key": key, "value": value}
    spoiled[which][1, 1, t if which == "query" else j, -1] = torch.nan
    leaves = [x.requires_grad_() for x in (query, key, value)]
    for out in (op(case, backend)(*leaves, lam), op(case, backend)(*(x.detach() for x in leaves), lam)):
        assert out[0].isfinite().all()
        if which == "value":
            assert out[1, 1, :, -1].isnan().all()
            assert out[1, 1, :, :-1].isfinite().all()
        else:
            assert out[1, 1, t].isnan().all()
        if which == "query":
            assert out[1, 1, :t].isfinite().all()
    out = op(case, backend)(*leaves, lam)
    with torch.autograd.set_detect_anomaly(False):
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert grads[0][1, 1, t].isnan().any()
    assert all(grad[0].isfinite().all() for grad in grads)


def raw(backend, save, query, key, value, lam, **changes):
    """The operator itself."""
    arguments = {"mask": None, "is_causal": True, "window": None, "kv_start": None, "kv_lengths": None, "bounds": None}
    rest = (0.5, None, None, 1.0, *([save] if backend == "triton" else []))
    return getattr(torch.ops.difftransformer, f"{backend}_attention")(
        query, key, value, lam, *(arguments | changes).values(), *rest
    )[0]


@pytest.mark.parametrize("save", [False, True])
def test_ranges_that_nobody_checked_stay_inside_the_tensors(backend, save):
    """On a device, and before a compiled call, they are not read."""
    query, key, value, lam, _ = Case("x", B=2, T=9, S=140).inputs(requires_grad=False)
    op(SMALL, backend)(*SMALL.inputs()[:4])  # registers the operator
    lam, both = torch.full((1, 1, 1), 0.5), (query, key, value)
    wild = raw(backend, save, *both, lam, kv_start=ints(-7, 2**30), kv_lengths=ints(2**30, 10**9))
    assert torch.equal(wild, raw(backend, save, *both, lam, kv_start=ints(0, 140), kv_lengths=ints(140, 140)))
    one = [x[:1, :, :9] for x in both]
    wild = raw(backend, save, *one, lam, bounds=ints(-5, 3, 10**9))
    assert torch.equal(wild, raw(backend, save, *one, lam, bounds=ints(0, 3, 9)))


@pytest.mark.parametrize("name", ["query", "key", "value", "lam", "weight"])
def test_only_one_input_wants_a_gradient(backend, name):
    names = ("query", "key", "value", "lam", "weight")
    whole = dict(zip(names, bits(backend, SMALL, norm=True)[1:], strict=True))
    query, key, value, lam, grad = SMALL.inputs(requires_grad=False)
    inputs = dict(zip(names, (query, key, value, lam, torch.linspace(0.5, 1.5, SMALL.E)), strict=True))
    inputs[name].requires_grad_()
    how = {"eps": 1e-5, "factor": 0.4, "backend": backend, "is_causal": True}
    normed_differential_attention(*inputs.values(), **how).backward(grad)
    assert torch.equal(inputs[name].grad, whole[name])


def test_nothing_wants_a_gradient(backend):
    query, key, value, lam, _ = SMALL.inputs(requires_grad=False)
    attend = op(SMALL, backend)
    usual = attend(query, key, value, lam)
    assert not usual.requires_grad
    with torch.inference_mode():
        assert torch.equal(attend(query, key, value, lam), usual)
    with torch.no_grad():
        assert not attend(query.requires_grad_(), key, value, lam).requires_grad


@pytest.mark.parametrize("case", [SMALL, DECODING], ids=lambda case: case.name)
def test_activation_checkpointing_changes_no_bit(backend, case):
    leaves, lam, grad = tensors(case)
    out = checkpoint(op(case, backend), *leaves[:3], lam, use_reentrant=False)
    assert_same_bits([out.detach(), *torch.autograd.grad(out, leaves, grad)], bits(backend, case))


def test_second_derivatives_are_refused(backend):
    leaves, lam, _ = tensors(SMALL)
    out = op(SMALL, backend)(*leaves[:3], lam)
    (first,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    with pytest.raises(BackendUnavailable, match=f"'{backend}' has no second derivatives; name backend='reference'"):
        torch.autograd.grad(first.square().sum(), leaves[0])
