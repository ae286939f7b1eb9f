"""What every backend of the op promises beside its numbers: layouts, NaN, what is not read, autograd, tracing, refusals."""

import dataclasses
import json

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from difftransformer.errors import BackendUnavailable
from difftransformer.ops import attention_maps, differential_attention, isolation
from difftransformer.ops.problem import Call, Restrictions
from tests.support import fresh, oracle
from tests.support.calls import (
    OPCHECK,
    UNSEEN,
    assert_same_bits,
    assert_unseen_keys_are_not_read,
    bits,
    operator_inputs,
    tensors,
    unseen_keys,
    with_unseen,
)
from tests.support.cases import (
    BY_NAME,
    CAUSAL,
    assert_close,
    exact,
    ints,
    new_memory_is_nan,
    normed_op,
    op,
    random_mask,
)
from tests.support.op_backends import FLOAT64, FORMS, FUSED, PLAIN, each
from tests.support.oracle import Case, output_and_gradients, relative_error

SMALL = Case("small", B=2, H=2, G=1, T=9, S=11, D=8, E=6, kwargs=CAUSAL)
DECODING = Case("decoding", B=2, H=4, G=2, T=1, S=150, D=17, E=19, kwargs=CAUSAL)


# Layouts and sizes.


@each(PLAIN, [BY_NAME["one group, decoding"], BY_NAME["documents"]])
def test_takes_transposed_views(backend, case):
    """Layers pass (B, T, H, D) projections transposed; the last dimension may be a slice."""

    def strided(x):
        wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)
        return torch.cat((x, wide[..., :3]), -1).transpose(1, 2).contiguous().transpose(1, 2)[..., : x.shape[-1]]

    def function(query, key, value, lam):
        return backend.attend(case)(strided(query), strided(key), strided(value), lam)

    assert_close(output_and_gradients(function, case, torch.float32), exact(case), 2e-5)


@each(("reference", "chunked", *FUSED))
@pytest.mark.parametrize("sizes", [{"B": 0}, {"H": 0}, {"T": 0}, {"S": 0}, {"T": 0, "S": 0}], ids=str)
@pytest.mark.parametrize("norm", [False, True])
def test_sizes_of_zero(backend, sizes, norm):
    case, dtype = dataclasses.replace(SMALL, **sizes), backend.low[0]
    leaves, lam, _ = tensors(case, dtype)
    out, *grads = bits(backend.name, case, dtype, norm)
    assert (out.shape, out.dtype) == ((case.B, case.H, case.T, case.E), dtype)
    assert (out == 0).all()
    for leaf, grad in zip(leaves, grads, strict=norm is False):
        assert grad.shape == leaf.shape
    assert all((grad == 0).all() for grad in grads)
    with torch.no_grad():
        assert torch.equal(backend.attend(case)(*leaves[:3], lam), out)


@each(("sdpa",), [dataclasses.replace(SMALL, H=0)])
def test_no_heads(backend, case):
    """PyTorch's attention takes no other size of zero, and `supports` says so."""
    assert all((x == 0).all() for x in bits(backend.name, case))


@each(FUSED, dtypes="both")
def test_a_row_does_not_depend_on_the_batch(backend, dtype):
    case = Case("x", B=3, H=2, G=1, T=9 if backend.is_heavy else 70, S=70, D=16, E=24, kwargs=CAUSAL)
    query, key, value, lam, _ = case.inputs(dtype)
    for attend in (backend.attend(case), torch.no_grad()(backend.attend(case))):
        whole = attend(query, key, value, lam)
        for b in range(3):
            assert torch.equal(whole[b], attend(query[b : b + 1], key[b : b + 1], value[b : b + 1], lam)[0])


@each(FUSED, dtypes="both")
def test_an_expanded_gradient(backend, dtype):
    leaves, lam, _ = tensors(SMALL, dtype)
    out = backend.attend(SMALL)(*leaves[:3], lam)
    ones = torch.ones((), dtype=out.dtype).expand_as(out)
    expanded = torch.autograd.grad(out, leaves, ones, retain_graph=True)
    assert_same_bits(torch.autograd.grad(out, leaves, ones.contiguous()), expanded)


@each(FUSED, [dataclasses.replace(SMALL, G=2), DECODING], heavy=("decoding",))
def test_expanded_inputs(backend, case):
    """One key and value for all positions, groups or rows of a batch, without a copy; in training and in decoding."""
    query, key, value, lam, _ = case.inputs(requires_grad=False)
    query.requires_grad_(case is not DECODING)
    attend = backend.attend(case)
    for index in ((slice(1),), (slice(None), slice(1)), (..., slice(1), slice(None))):
        one_key, one_value = key[index].expand_as(key), value[index].expand_as(value)
        assert 0 in one_key.stride()
        out = attend(query, one_key, one_value, lam)
        assert torch.equal(out, attend(query, one_key.contiguous(), one_value.contiguous(), lam))


STRIDED = [
    Case("ranges", B=3, T=9, S=40, kwargs={"kv_start": ints(3, 3, 3), "kv_lengths": ints(33, 33, 33)}),
    Case("documents", T=21, S=21, kwargs=CAUSAL | {"cu_seqlens": ints(0, 5, 13, 21)}),
    Case("mask", B=2, T=9, S=11, kwargs={"attn_mask": random_mask(11, 9).mT}),
]


@each(FUSED, STRIDED)
def test_restrictions_and_gains_in_any_layout(backend, case):
    """One length for the whole batch, expanded; every second number of a tensor. Only a mask is read as it lies."""
    inputs = *case.inputs()[:4], torch.linspace(0.5, 1.5, 2 * case.E)[::2]
    one = {limit: x[:1].expand_as(x) if limit[:2] == "kv" else x for limit, x in case.kwargs.items()}
    second = {
        limit: x.repeat_interleave(2)[::2]
        for limit, x in one.items()
        if isinstance(x, torch.Tensor) and limit != "attn_mask"
    }
    usual = normed_op(case, "reference")(*inputs)
    for kwargs in (one, one | second):
        attend = backend.normed(dataclasses.replace(case, kwargs=kwargs))
        assert relative_error(attend(*inputs), usual) < 1e-4
        if case.name == "mask":
            assert relative_error(torch.no_grad()(attend)(*inputs), usual) < 1e-4  # which Triton decodes


WHOLE = [
    Case("more queries", H=4, G=2, T=9, S=5, kwargs=CAUSAL),
    Case("few keys", B=2, H=4, G=2, T=5, S=9, kwargs=CAUSAL | {"kv_lengths": ints(1, 9)}),
]


@each((*PLAIN, "sdpa"), WHOLE)
def test_the_widest_window_leaves_nothing_out(backend, case):
    """Positions are int32 in kernels, in which a position less the window may not be a number."""
    widest = dataclasses.replace(case, kwargs=case.kwargs | {"window": 2**31 - 1})
    for gradients in (True, False):  # which fused backends decode
        results = backend.results(widest, gradients=gradients)
        assert_close(results, {part: exact(case)[part] for part in results}, 2e-5)


# NaN, and what is not read.

ISOLATED = [
    Case("causal", T=70, S=70, kwargs=CAUSAL),
    Case("window", H=4, T=70, S=70, kwargs=CAUSAL | {"window": 9}),
    Case("mask", H=4, T=9, S=70, kwargs={"attn_mask": random_mask(1, 1, 9, 70)}),
    Case("mask by head", B=2, H=4, T=9, S=70, kwargs=CAUSAL | {"attn_mask": random_mask(4, 9, 70)}),
    Case("mask of keys", T=9, S=70, kwargs={"attn_mask": torch.arange(70) != 33}),
    Case("mask of queries", T=9, S=70, kwargs=CAUSAL | {"attn_mask": random_mask(9, 1)}),
    Case("mask of queries by row", B=2, H=4, T=9, S=70, kwargs={"attn_mask": random_mask(2, 1, 9, 1)}),
    Case("mask of rows", B=2, T=9, S=70, kwargs={"attn_mask": torch.tensor([True, False]).view(2, 1, 1, 1)}),
    Case("mask of nothing", T=9, S=70, kwargs={"attn_mask": torch.tensor(False)}),
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


def assert_isolated(case, name, function):
    zeros, zeros_grads, sees = spoiled(case, name, 0.0, function)
    for fill in (torch.nan, torch.inf):
        out, grads, _ = spoiled(case, name, fill, function)
        assert torch.equal(out[~sees], zeros[~sees])
        assert not out[sees].isfinite().any()
        assert_same_bits(grads, zeros_grads)


@each(FLOAT64, ISOLATED)
@pytest.mark.parametrize("name", ["key", "value"])
def test_nan_reaches_only_queries_that_may_attend_to_it(backend, case, name):
    """The other outputs, and the gradients that come from them, keep every bit."""
    assert_isolated(case, name, backend.attend(case))


@each(("chunked",), [case for case in ISOLATED if case.name in ("mask", "mask by head")])
@pytest.mark.parametrize("pairs", [1, 1500])
def test_nan_is_kept_away_some_rows_at_a_time(backend, case, pairs, monkeypatch):
    monkeypatch.setattr(isolation, "PAIRS_AT_ONCE", pairs)
    assert_isolated(case, "value", backend.attend(case))


class LargestTensor(TorchDispatchMode):
    """The most bytes of a tensor that an operator makes; views of another one are not made."""

    def __init__(self, other):
        super().__init__()
        self.bytes, self.others = 0, other.untyped_storage().data_ptr()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        out = function(*arguments, **(keywords or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() != self.others:
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("shape", [(512,), (2, 1, 1, 512), (512, 1), (2, 3, 1, 1), (512, 512), (3, 512, 512)], ids=str)
@pytest.mark.parametrize("kwargs", [CAUSAL, {"kv_start": ints(5, 9)}], ids=["causal", "start"])
def test_keeping_nan_away_takes_no_map(shape, kwargs, monkeypatch):
    """Only a mask of queries and keys is as large as a map, by itself."""
    monkeypatch.setattr(isolation, "PAIRS_AT_ONCE", 1 << 13)
    case = Case("x", B=2, H=3, G=1, T=512, S=512, D=2, E=2, kwargs=kwargs)
    query, key, value, lam, _ = case.inputs(requires_grad=False)
    value[:, :, 33] = torch.nan
    mask = random_mask(*shape)
    call = Call(query, key, value, lam.view(1, -1, 1), Restrictions(attn_mask=mask, **kwargs), 0.5)
    with LargestTensor(mask) as largest:
        out = isolation.isolated(lambda call: torch.zeros_like(call.query[..., :2]), call)
    assert largest.bytes < case.T * case.S // 2
    seen = (
        torch.ones(512, 512).tril().bool()
        if kwargs is CAUSAL
        else torch.arange(512) >= kwargs["kv_start"].view(2, 1, 1, 1)
    )
    sees = (seen & mask).expand(2, 3, 512, 512)[..., 33]
    assert torch.equal(out.isnan().all(-1), sees)


@each(("reference", "chunked"), [case for case in ISOLATED if case.name in ("mask of queries by row", "mask of rows")])
def test_nan_is_kept_away_under_vmap(backend, case):
    """With a mask for each sample."""
    query, key, value, lam, _ = case.inputs(requires_grad=False)
    sees, right = oracle.dense_mask(case)[..., 33], oracle.attention(case, query, key, value, lam)

    def sample(*inputs):
        q, k, v, mask = (x[None] for x in inputs)
        return differential_attention(q, k, v, lam, attn_mask=mask, backend=backend.name)[0]

    spoiled = value.index_fill(2, torch.tensor(33), torch.nan)
    out = torch.func.vmap(sample)(query, key, spoiled, case.kwargs["attn_mask"])
    assert torch.equal(out.isnan().any(-1), sees)
    assert relative_error(out[~sees], right[~sees]) < 2e-5


@each(("chunked",), [case for case in ISOLATED if case.name in ("mask", "length", "window", "mask of queries")])
def test_nan_is_kept_away_in_a_compiled_graph(backend, case):
    torch.compiler.reset()
    assert_isolated(case, "value", torch.compile(backend.attend(case), fullgraph=True, backend="aot_eager"))


@each(FLOAT64)
def test_a_gradient_of_nan_is_not_lost(backend):
    query, key, value, lam, _ = ISOLATED[0].inputs()
    with torch.no_grad():
        value[:, :, 33] = torch.nan
    backend.attend(ISOLATED[0])(query, key, value, lam).square().sum().backward()
    assert query.grad[:, :, 33:].isnan().all()
    assert query.grad[:, :, :33].isfinite().all()


@each(FUSED, dtypes="both")
@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_nan_in_what_a_query_sees_reaches_its_output(backend, which, dtype):
    case = Case("tiles", B=2, T=9, S=80, kwargs=CAUSAL)
    query, key, value, lam, _ = case.inputs(dtype, requires_grad=False)
    t, j, attend = case.T - 1, 3, backend.attend(case)
    spoiled = {"query": query, "key": key, "value": value}
    spoiled[which][1, 1, t if which == "query" else j, -1] = torch.nan
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out = attend(*leaves, lam)
    for x in (out, attend(*(x.detach() for x in leaves), lam)):
        assert x[0].isfinite().all()
        if which == "value":
            assert x[1, 1, :, -1].isnan().all()
            assert x[1, 1, :, :-1].isfinite().all()
        else:
            assert x[1, 1, t].isnan().all()
        if which == "query":
            assert x[1, 1, :t].isfinite().all()
    with torch.autograd.set_detect_anomaly(False):
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert grads[0][1, 1, t].isnan().any()
    assert all(grad[0].isfinite().all() for grad in grads)


@each(PLAIN)
def test_future_and_foreign_keys_do_not_matter(backend):
    """Changing what a query may not see changes no bit of its output."""
    case = Case("x", B=2, T=70, S=70, kwargs=CAUSAL | {"kv_start": ints(0, 5)})
    query, key, value, lam, _ = case.inputs(requires_grad=False)
    before = backend.attend(case)(query, key, value, lam)
    for x, late, early in ((key, 7.0, 9.0), (value, -3.0, 11.0)):
        x[:, :, 40:], x[1, :, :5] = late, early
    after = backend.attend(case)(query, key, value, lam)
    assert torch.equal(before[:, :, :40], after[:, :, :40])
    assert not torch.equal(before[:, :, 40:], after[:, :, 40:])


@each(("cpu",), list(UNSEEN.values()), [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm", [False, True])
def test_keys_outside_the_range_are_not_read(backend, case, dtype, norm):
    assert_unseen_keys_are_not_read(case, lambda case: bits(backend.name, case, dtype, norm))


RANGES = [
    Case("start", B=2, H=1, G=1, T=33, S=70, kwargs=CAUSAL | {"kv_start": ints(5, 65)}),
    Case("both", B=3, H=1, G=1, T=9, S=70, kwargs={"kv_start": ints(3, 2, 9), "kv_lengths": ints(31, 66, 7)}),
    Case("length", B=3, H=1, G=1, T=9, S=70, kwargs=CAUSAL | {"kv_lengths": ints(33, 66, 0)}),
    Case("softmax", H=1, G=1, T=9, S=70, lam=None, kwargs={"kv_start": ints(3), "kv_lengths": ints(66)}),
]


@each(FORMS, [*RANGES, UNSEEN["odd width"]], heavy=("both",))
def test_keys_outside_the_range_are_not_read_in_any_form(backend, case):
    """In the interpreter additions too are in one order, so that the bits are the same."""
    how = {"norm": str(backend) == "atomic triton", "gradients": backend.differentiates(case)}
    assert_unseen_keys_are_not_read(case, lambda case: bits("triton", case, **how))


@each(("triton",), [dataclasses.replace(case, T=3) for case in RANGES], heavy=("both", "softmax"))
def test_keys_outside_the_range_are_not_read_when_decoding(backend, case):
    outs = []
    for fill in (0.0, torch.nan, torch.inf):
        inputs = with_unseen(case, fill).inputs(requires_grad=False)[:4]
        outs.append(backend.attend(case)(*inputs))
        assert inputs[1].transpose(1, 2)[unseen_keys(case)].isnan().all() == (fill != fill)
    assert_same_bits(outs[1:], outs[:1] * 2)


NEW_MEMORY = [
    *(BY_NAME[name] for name in ("one position", "257 window", "left padding", "mask with empty rows", "documents")),
    *(BY_NAME[name] for name in ("softmax", "softmax, mask", "cache")),
    Case("window", H=1, G=1, T=20, S=70, D=5, E=7, lam="query", kwargs=CAUSAL | {"window": 9}),
    Case("odd window", H=3, G=1, T=65, S=200, D=9, E=17, lam="scalar", kwargs=CAUSAL | {"window": 70}),
    Case("shared key", H=4, G=2, T=127, S=300, shared_key=True, D=33, E=64, kwargs=CAUSAL),
    Case("wide", H=2, G=1, T=70, S=130, D=128, E=256, lam="query"),
    dataclasses.replace(DECODING, name="two queries", H=8, T=2, S=300, lam="query"),
    dataclasses.replace(DECODING, name="long decoding", B=1, H=8, S=5000, D=64, E=128),
]


THREE_QUERIES = dataclasses.replace(DECODING, name="three queries", T=3, lam="query")


@each(FORMS, [NEW_MEMORY[4], *NEW_MEMORY[8:10], THREE_QUERIES], heavy=("window",))
def test_no_uninitialised_memory_in_any_form(backend, case):
    test_no_uninitialised_memory(backend, case, torch.float32, True)


@each(("chunked", "cpu"), NEW_MEMORY, "both")
@pytest.mark.parametrize("norm", [False, True])
def test_no_uninitialised_memory(backend, case, dtype, norm):
    """With and without gradients. `standalone.cpp` gives the C++ kernels such memory in every case of its own, too."""
    hows = [{"norm": norm, "gradients": gradients} for gradients in {False, backend.differentiates(case)}]
    usual = [bits(backend.name, case, dtype, **how) for how in hows]
    with new_memory_is_nan():
        for how, before in zip(hows, usual, strict=True):
            assert_same_bits(bits(backend.name, case, dtype, **how), before)


def raw(backend, save, query, key, value, lam, **changes):
    """The operator itself."""
    arguments = {"mask": None, "is_causal": True, "window": None, "kv_start": None, "kv_lengths": None, "bounds": None}
    rest = (0.5, None, None, 1.0, *([save] if backend.name == "triton" else []))
    operator = getattr(torch.ops.difftransformer, f"{backend.name}_attention")
    return operator(query, key, value, lam, *(arguments | changes).values(), *rest)[0]


@each(FUSED)
@pytest.mark.parametrize("save", [False, True])
def test_ranges_that_nobody_checked_stay_inside_the_tensors(backend, save):
    """On a device, and before a compiled call, they are not read."""
    query, key, value, lam, _ = Case("x", B=2, T=9, S=140).inputs(requires_grad=False)
    backend.attend(SMALL)(*SMALL.inputs()[:4])  # registers the operator
    lam, both = torch.full((1, 1, 1), 0.5), (query, key, value)
    wild = raw(backend, save, *both, lam, kv_start=ints(-7, 2**30), kv_lengths=ints(2**30, 10**9))
    assert torch.equal(wild, raw(backend, save, *both, lam, kv_start=ints(0, 140), kv_lengths=ints(140, 140)))
    one = [x[:1, :, :9] for x in both]
    wild = raw(backend, save, *one, lam, bounds=ints(-5, 3, 10**9))
    assert torch.equal(wild, raw(backend, save, *one, lam, bounds=ints(0, 3, 9)))


# Autograd, tracing, checkpoints.


@each(PLAIN)
def test_autocast_does_not_reach_inside(backend):
    case = BY_NAME["63 own heads causal"]
    query, key, value, lam, grad = case.inputs()
    with torch.autocast("cpu", torch.bfloat16):
        out = backend.attend(case)(query, key, value, lam)
        maps = attention_maps(query, key, is_causal=True)
    assert out.dtype == maps[0].dtype == torch.float32
    assert relative_error(out, exact(case)["out"]) < 2e-5
    out.backward(grad)
    assert relative_error(query.grad, exact(case)["query"]) < 2e-5


@each(FUSED)
def test_only_one_input_wants_a_gradient(backend):
    *inputs, grad = SMALL.inputs(requires_grad=False)
    inputs.append(torch.linspace(0.5, 1.5, SMALL.E))
    for wants, whole in zip(inputs, bits(backend.name, SMALL, norm=True)[1:], strict=True):
        leaf = wants.clone().requires_grad_()
        backend.normed(SMALL)(*(leaf if x is wants else x for x in inputs)).backward(grad)
        assert torch.equal(leaf.grad, whole)


@each(FUSED)
def test_nothing_wants_a_gradient(backend):
    query, key, value, lam, _ = SMALL.inputs(requires_grad=False)
    attend = backend.attend(SMALL)
    usual = attend(query, key, value, lam)
    assert not usual.requires_grad
    with torch.inference_mode():
        assert torch.equal(attend(query, key, value, lam), usual)
    with torch.no_grad():
        assert not attend(query.requires_grad_(), key, value, lam).requires_grad


@each(FUSED)
def test_activation_checkpointing_changes_no_bit(backend):
    leaves, lam, grad = tensors(SMALL)
    out = checkpoint(backend.attend(SMALL), *leaves[:3], lam, use_reentrant=False)
    assert_same_bits([out.detach(), *torch.autograd.grad(out, leaves, grad)], bits(backend.name, SMALL))


@each(FUSED)
def test_second_derivatives_are_refused(backend):
    leaves, lam, _ = tensors(SMALL)
    out = backend.attend(SMALL)(*leaves[:3], lam)
    (first,) = torch.autograd.grad(out.square().sum(), leaves[0], create_graph=True)
    refused = f"'{backend}' has no second derivatives; name backend='reference'"
    with pytest.raises(BackendUnavailable, match=refused):
        torch.autograd.grad(first.square().sum(), leaves[0])


COMPILED = [BY_NAME[name] for name in ("both ends, causal mask", "documents", "shared key", "softmax", "cache, window")]


@each(PLAIN, [DECODING, *COMPILED], quick=("both ends, causal mask",), heavy=("documents",))
def test_compiles_to_the_same_numbers(backend, case):
    """Without a graph break; fused backends to the same bits. With the norm, but for a cache."""
    torch.compiler.reset()
    norm = case.name != "cache, window" and case.lam is not None
    leaves, lam, grad = tensors(case)
    weight = [torch.linspace(0.5, 1.5, case.E).requires_grad_()] * norm
    attend = backend.normed(case) if norm else backend.attend(case)
    compiled = torch.compile(lambda *inputs: 2 * attend(*inputs), fullgraph=True, backend="aot_eager")
    outs = [compiled(*leaves[:3], lam, *weight), 2 * attend(*leaves[:3], lam, *weight)]
    assert outs[0].stride() == outs[1].stride() or str(backend) not in FUSED
    found, plain = ([out.detach(), *torch.autograd.grad(out, leaves + weight, grad)] for out in outs)
    if str(backend) in FUSED:
        assert_same_bits(found, plain)
    assert all(relative_error(x, y) < 1e-6 for x, y in zip(found, plain, strict=True))


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_compiles_where_torch_cannot_trace_which_devices_have_autocast(backend, monkeypatch):
    """As torch 2.11."""
    torch.compiler.reset()
    untraceable = torch.compiler.disable(torch.amp.is_autocast_available)
    monkeypatch.setattr(torch.amp, "is_autocast_available", untraceable)
    attend, inputs = op(SMALL, backend), SMALL.inputs(requires_grad=False)[:4]
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*inputs), attend(*inputs))


@each(("triton",))
def test_a_compiled_decoding_step_reads_the_lengths_of_each_call(backend):
    torch.compiler.reset()
    case = dataclasses.replace(DECODING, H=2, kwargs=CAUSAL | {"kv_lengths": ints(40, 150)})
    inputs = case.inputs(requires_grad=False)[:4]
    compiled = torch.compile(backend.attend(case), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), backend.attend(case)(*inputs))
    case.kwargs["kv_lengths"].copy_(ints(97, 3))
    assert torch.equal(compiled(*inputs), backend.attend(case)(*inputs))


@each(("chunked", *FUSED), OPCHECK, quick=("own keys", "softmax"))
def test_opcheck(backend, case):
    """What torch.library says of the custom operators, in a lower dtype with a gain and in fp32 without one."""
    backend.attend(SMALL)(*SMALL.inputs()[:4])  # registers the operator
    norms = ("gain",)
    if case.name in ("documents", "shared key", "softmax"):
        norms = (None,) if backend.name == "chunked" else (None, "no gain")  # chunked leaves the norm to the caller
    for norm in norms:
        check_operators(backend, *operator_inputs(case, backend.low[0] if norm == "gain" else torch.float32, norm))


def check_operators(backend, inputs, grad):
    ops = torch.ops.difftransformer
    forward, backward = (getattr(ops, f"{backend.name}_attention{end}").default for end in ("", "_backward"))
    if backend.name == "chunked":
        inputs = inputs[:11]
    save = [True] * (backend.name == "triton")
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
    torch.library.opcheck(forward, (*inputs, *save))
    if save:
        torch.library.opcheck(forward, (*plain, False))
    saved = {"chunked": lambda *_: [], "cpu": lambda *x: forward(*x)[1:], "triton": forward}[backend.name](
        *plain, *save
    )
    torch.library.opcheck(backward, (grad, *saved, *plain, *save))


@pytest.mark.parametrize("backend", ["auto", pytest.param("sdpa", marks=pytest.mark.slow)])
def test_symbolic_lengths_compile(backend):
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q, k, v, lam: differential_attention(q, k, v, lam, is_causal=True, backend=backend),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    for length in (5, 70, 90):
        case = Case("x", T=length, S=length, kwargs=CAUSAL)
        assert_close(output_and_gradients(compiled, case, torch.float32), exact(case), 2e-5)


@pytest.mark.parametrize("backend", [*FLOAT64, "auto"])
def test_meta_tensors_give_shapes(backend):
    query, key = torch.empty(2, 4, 5, 8, device="meta"), torch.empty(2, 2, 7, 8, device="meta")
    for shape in (None, (), (7,), (5, 1), (2, 1, 1, 1), (2, 4, 5, 7)):
        mask = None if shape is None else torch.empty(shape, dtype=torch.bool, device="meta")
        for is_causal in (True, False):
            how = {"attn_mask": mask, "is_causal": is_causal, "backend": backend}
            out = differential_attention(query, key, key[..., :6], 0.5, **how)
            assert (out.shape, out.device.type) == ((2, 4, 5, 6), "meta")


MEMORY_PROGRAM = """
import json, torch
from difftransformer.ops import differential_attention
torch.set_num_threads(1)
def peak(length):
    q, k, v = (torch.randn(1, 4, length, 64, requires_grad=True) for _ in range(3))
    lam = torch.full((4,), 0.3, requires_grad=True)
    differential_attention(q, k, v, lam, is_causal=True, backend="cpu").sum().backward()
    # Not getrusage: there a child starts from its parent's peak.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
print(json.dumps([peak(n) for n in (512, 4096, 8192)]))
"""


@each(("cpu",))
def test_memory_grows_linearly(backend):
    """Peak of forward + backward in a fresh process; one 8192 x 8192 map of one head alone would be 256 MiB."""
    baseline, at_4k, at_8k = json.loads(fresh.run(MEMORY_PROGRAM))
    # From 512 on: 2.1 times where memory grows with the length, 4.1 times where it grows with its square.
    assert at_8k - baseline < 3 * (at_4k - baseline), (baseline, at_4k, at_8k)
    assert at_8k - baseline < 200, (baseline, at_4k, at_8k)
