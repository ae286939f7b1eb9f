"""The op under torch.func, as by autograd and by the equations, and in programs of torch.export."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.export import Dim
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from transformers.exporters.utils import apply_patches

import difftransformer.model  # noqa: F401  # tells transformers' exporters what they replace
from difftransformer.errors import BackendUnavailable
from difftransformer.ops import differential_attention, normed_differential_attention
from tests.support import oracle
from tests.support.cases import BY_NAME, CAUSAL, SLOW_TRITON, assert_close, exact, ints, needs_kernels, op
from tests.support.oracle import Case, relative_error

# What torch.func.jvp loads on its first use.
jvp_is_old = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated:DeprecationWarning")
FUSED = ("chunked", pytest.param("cpu", marks=needs_kernels), SLOW_TRITON)
CASE = Case("grouped", B=3, H=4, G=2, T=5, S=5, D=4, E=3, lam="query", kwargs=CAUSAL)


def tensors(case, dtype=torch.float32):
    return case.inputs(dtype, requires_grad=False)


@pytest.mark.parametrize("backend", ["reference", "sdpa", *FUSED])
@pytest.mark.parametrize("name", ["mask with empty rows", "cache, window", "documents", "softmax", "one query"])
def test_gradients_equal_the_equations(name, backend):
    case = BY_NAME[name]
    *inputs, direction = tensors(case)
    places = tuple(place for place, x in enumerate(inputs) if isinstance(x, torch.Tensor))
    found = grad(lambda *x: (op(case, backend)(*x) * direction).sum(), argnums=places)(*inputs)
    results = dict(zip(("query", "key", "value", "lam"), found, strict=False))
    reference = {key: x for key, x in exact(BY_NAME[name]).items() if key != "out"}
    assert_close(results, reference, 2e-5)


@pytest.mark.parametrize("backend", FUSED)
def test_the_norm_and_the_chain_rule_equal_autograd(backend):
    query, key, value, lam, direction = tensors(CASE)
    weight = torch.linspace(0.5, 2, CASE.E)

    def loss(projection, lam, weight):
        out = normed_differential_attention(
            query @ projection, key, value, lam, weight, eps=1e-5, factor=0.7, is_causal=True, backend=backend
        )
        return (out * direction).sum()

    inputs = (torch.eye(8) + 0.1, lam, weight)
    leaves = [x.clone().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(loss(*leaves), leaves)
    _, pull = vjp(loss, *inputs)
    for found in (grad(loss, argnums=(0, 1, 2))(*inputs), pull(torch.ones(()))):
        for x, y in zip(found, wanted, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", FUSED)
def test_rows_of_the_jacobian(backend):
    small = Case("rows", B=1, H=2, G=1, T=3, S=3, D=2, E=2, lam="head", kwargs=CAUSAL)
    query, key, value, lam, _ = tensors(small)
    found = jacrev(lambda q: differential_attention(q, key, value, lam, is_causal=True, backend=backend))(query)
    wide = [x.double() for x in (query, key, value, lam)]
    wanted = torch.autograd.functional.jacobian(lambda q: oracle.attention(small, q, *wide[1:]), wide[0])
    assert relative_error(found, wanted) < 2e-5


@pytest.mark.parametrize("backend", FUSED)
def test_samples_of_a_batch(backend):
    """Outputs and gradients of each sample, with a padding of its own, as one batch gives them."""
    query, key, value, lam, direction = tensors(CASE)
    starts = ints(0, 3, 1)

    def sample(q, k, v, lam, start, direction):
        out = differential_attention(
            q[None], k[None], v[None], lam[None], is_causal=True, kv_start=start[None], backend=backend
        )
        return (out[0] * direction).sum(), out[0]

    arguments = (query, key, value, lam, starts, direction)
    differentiated = grad(sample, argnums=(0, 1, 2, 3), has_aux=True)
    found, outs = vmap(differentiated)(*arguments)
    leaves = [x.double().requires_grad_() for x in arguments[:4]]
    padded = Case("padded", B=3, H=4, G=2, T=5, S=5, D=4, E=3, lam="query", kwargs=CAUSAL | {"kv_start": starts})
    wanted = oracle.attention(padded, *leaves)
    assert relative_error(outs, wanted) < 2e-5
    for x, y in zip(found, torch.autograd.grad((wanted * direction).sum(), leaves), strict=True):
        assert relative_error(x, y) < 2e-5
    swapped = (x if x is starts else x.transpose(0, 1) for x in arguments)
    assert torch.equal(vmap(differentiated, in_dims=(1, 1, 1, 1, 0, 1))(*swapped)[1], outs)


@pytest.mark.parametrize("backend", ["reference", *FUSED])
def test_the_gradient_of_a_batch_of_samples(backend):
    small = Case("small", B=2, H=2, G=1, T=3, S=3, D=2, E=2, lam="float", kwargs=CAUSAL)
    query, key, value, lam, direction = tensors(small)

    def sample(*inputs):
        return op(small, backend)(*(x[None] for x in inputs), lam)[0]

    found = grad(lambda v: (vmap(sample)(query, key, v) * direction).sum())(value)
    leaf = value.double().requires_grad_()
    out = oracle.attention(small, query.double(), key.double(), leaf, lam)
    assert relative_error(found, torch.autograd.grad(out, leaf, direction.double())[0]) < 2e-5


@pytest.mark.parametrize("backend", ["reference", *FUSED])
def test_no_samples(backend):
    """Empty outputs and gradients, of the shapes that each sample would have."""
    query, key, value, lam, _ = (x[:0] for x in tensors(CASE))
    starts = ints(0)[:0]

    def sample(q, k, v, lam, start):
        how = {"is_causal": True, "kv_start": start[None], "backend": backend}
        out = differential_attention(q[None], k[None], v[None], lam[None], **how)[0]
        return out.sum(), out

    arguments = (query, key, value, lam, starts)
    found, outs = vmap(grad(sample, argnums=(0, 1, 2, 3), has_aux=True))(*arguments)
    assert outs.shape == (0, 4, 5, 3)
    assert [x.shape for x in found] == [x.shape for x in arguments[:4]]
    by_vmap = grad(lambda v: vmap(sample)(query, key, v, lam, starts)[0].sum())(value)
    assert by_vmap.shape == value.shape


@jvp_is_old
@pytest.mark.parametrize("backend", FUSED)
def test_what_has_no_formula_is_refused(backend):
    """Forward mode would otherwise give tangents of zero."""
    query, key, value, lam, _ = tensors(CASE)

    def loss(q):
        return differential_attention(q, key, value, lam, is_causal=True, backend=backend).sum()

    forward = f"backend '{backend}' has no forward-mode derivatives; name backend='reference'"
    with pytest.raises(BackendUnavailable, match=forward):
        jvp(loss, (query,), (query,))
    with forward_ad.dual_level(), pytest.raises(BackendUnavailable, match=forward):
        loss(forward_ad.make_dual(query, query))
    with pytest.raises(BackendUnavailable, match=f"backend '{backend}' has no second derivatives"):
        grad(lambda q: grad(loss)(q).square().sum())(query)


@jvp_is_old
def test_every_derivative_of_the_reference():
    small = Case("small", B=1, H=1, G=1, T=2, S=2, D=2, E=2, lam="float")
    query, key, value, lam, _ = tensors(small, torch.float64)

    def by(function):
        return lambda q: function(q).square().sum()

    def ours(q):
        return differential_attention(q, key, value, lam, backend="reference")

    found = hessian(by(ours))(query)
    wanted = torch.autograd.functional.hessian(by(lambda q: oracle.attention(small, q, key, value, lam)), query)
    assert relative_error(found, wanted) < 1e-12
    tangent = jvp(ours, (query,), (key,))[1]
    wanted = torch.autograd.functional.jvp(lambda q: oracle.attention(small, q, key, value, lam), query, key)[1]
    assert relative_error(tangent, wanted) < 1e-12


@pytest.mark.slow
@needs_kernels
def test_inside_a_compiled_graph():
    """The operators' gradients cannot be traced there, so `auto` takes a backend of plain PyTorch."""
    query, key, value, lam, direction = tensors(CASE)

    def loss(q, backend):
        return (differential_attention(q, key, value, lam, is_causal=True, backend=backend) * direction).sum()

    torch._dynamo.reset()
    traced = torch.compile(lambda q: grad(loss)(q, "auto"), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(traced(query), grad(loss)(query, "cpu"), rtol=1e-5, atol=1e-6)


class SelfAttention(torch.nn.Module):
    def __init__(self, backend="auto"):
        super().__init__()
        self.backend = backend

    def forward(self, x):
        return differential_attention(x, x, x, 0.3, is_causal=True, backend=self.backend)


def has_own_operators(program):
    return any("difftransformer" in str(node.target) for node in program.graph.nodes)


def exported(backend="auto"):
    sizes = {0: Dim("B"), 2: Dim("T")}
    return torch.export.export(SelfAttention(backend), (torch.randn(2, 1, 9, 4),), dynamic_shapes=(sizes,))


def test_an_exported_program_takes_any_length_and_needs_this_package_only_where_it_was_asked_for():
    """Also beyond the length from which `auto` takes no backend with a mask: a bound would be part of the program.

    tests/ecosystem/test_onnx.py computes with the result.
    """
    program = exported()
    assert not has_own_operators(program)
    for x in (torch.randn(3, 1, 5, 4), torch.randn(1, 1, 1100, 4)):
        torch.testing.assert_close(program.module()(x), SelfAttention()(x))


@needs_kernels
def test_a_named_backend_keeps_its_operator():
    assert has_own_operators(exported("cpu"))


@pytest.mark.parametrize("runtime", ["onnx", "executorch"])
def test_transformers_exporters_get_operators_that_other_runtimes_know(runtime):
    with apply_patches(runtime):
        assert not has_own_operators(exported())
