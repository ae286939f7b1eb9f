"""The Triton kernels in Triton's interpreter: any shape and restriction in every form, nothing read that is not to be read.

The interpreter rounds to bf16 towards zero, so what is here is fp32 and fp16; `test_triton_gpu.py` has bf16.
"""

import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import given, settings

from difftransformer.ops import softmax_attention
from tests.support import fused_calls, oracle
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
    needs_interpreter,
    new_memory_is_nan,
    norm_by_hand,
    normed_by_equations,
    normed_op,
    normed_results,
    op,
    overflow_is_fine,
    random_mask,
    slow_but_for,
)
from tests.support.fused_calls import (
    UNSEEN,
    assert_any_call_as_good,
    assert_same_bits,
    assert_unseen_keys_are_not_read,
    by_equations,
    calls,
    in_float64,
    in_layouts,
    layouts,
    quick,
    tensors,
    unseen_keys,
    with_unseen,
)
from tests.support.oracle import Case, output_and_gradients, relative_error

configs = pytest.importorskip("difftransformer.ops.triton_kernels.configs")
launch = pytest.importorskip("difftransformer.ops.triton_kernels.launch")

pytestmark = [needs_interpreter, overflow_is_fine]

DTYPES = (torch.float32, torch.float16)
FORMS = pytest.mark.parametrize("form", ["both_maps", "split", "atomic"])  # a forward without gradients, two backwards
run = partial(fused_calls.run, "triton")
bits = partial(fused_calls.bits, "triton")
assert_as_good = partial(fused_calls.assert_as_good, "triton")


# Shapes and restrictions.


HALF = ("grouped, cross, narrow value", "shared key", "mask with empty rows", "documents, free", "softmax")


@pytest.mark.parametrize("case", slow_but_for(CASES, *HALF), ids=by_name)
def test_half_precision(case):
    """fp32 is in test_attention.py."""
    results = run(case, torch.float16)
    eager_results = output_and_gradients(eager(case), case, torch.float16)
    assert results["out"].dtype == torch.float16
    assert_as_good_as_eager(results, eager_results, expected(case.name, of=torch.float16), torch.float16)


OTHER_FORMS = ("grouped, cross, narrow value", "shared key", "cache, window", "long documents", "softmax, mask")


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", slow_but_for(CASES, *OTHER_FORMS), ids=by_name)
def test_a_backward_that_adds(case, dtype, take):
    taken = take("atomic")
    results, exact = run(case, dtype), expected(case.name, of=dtype)
    assert taken == ["by_map", "atomic"]
    if dtype == torch.float32:
        assert_close(results, exact, 2e-5)
    else:
        assert_as_good_as_eager(results, output_and_gradients(eager(case), case, dtype), exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case", slow_but_for([case for case in CASES if case.lam is not None], *OTHER_FORMS), ids=by_name
)
def test_both_maps_in_one_loop(case, dtype, take):
    """Without gradients."""
    taken = take("both_maps")
    results, exact = run(case, dtype, gradients=False), {"out": expected(case.name, of=dtype)["out"]}
    assert taken == ["both_maps"]
    if dtype == torch.float32:
        assert_close(results, exact, 2e-5)
    else:
        eager_results = output_and_gradients(eager(case), case, dtype, gradients=False)
        assert_as_good_as_eager(results, eager_results, exact, dtype)


NORMED = [
    Case("grouped", H=4, G=2, T=9, S=9, D=8, E=16, lam="query", kwargs=CAUSAL),
    Case("left padding", B=2, T=40, S=40, E=33, kwargs=CAUSAL | {"kv_start": ints(0, 9)}),
    Case("wide", H=2, G=1, T=35, S=70, D=8, E=140, lam="scalar"),
]


@FORMS
@pytest.mark.parametrize("case", slow_but_for(NORMED, "grouped", "wide"), ids=by_name)
def test_the_norm_in_every_form(case, form, take):
    """Heads of more than 128 numbers are normalised by a kernel of their own; test_normed_attention.py has more of fp32."""
    taken = take(form)
    how = {"gradients": form != "both_maps"}
    results = normed_results(normed_op(case, "triton"), case, torch.float32, **how)
    assert taken == (["by_map", form] if how["gradients"] else [form])
    assert_close(results, normed_by_equations(case, **how), 1e-4)
    if form == "split" and case.name != "wide":
        return
    assert_as_good_as_eager(
        normed_results(normed_op(case, "triton"), case, torch.float16, **how),
        normed_results(norm_by_hand(case, eager(case)), case, torch.float16, **how),
        normed_by_equations(case, of=torch.float16, **how),
        torch.float16,
    )


LENGTHS = (31, 32, 33, 64, 65, 129)
WAYS = (
    {},
    CAUSAL,
    CAUSAL | {"window": 40},
    {"kv_start": ints(31), "kv_lengths": ints(64)},
    CAUSAL | {"kv_start": ints(33)},
    CAUSAL | {"kv_lengths": ints(65), "window": 64},
)


QUICK_EDGES = {(31, 33), (33, 32), (32, 65), (65, 64), (64, 64), (65, 129), (33, 129), (129, 31)}


@pytest.mark.parametrize(
    ("queries", "keys"),
    [
        pytest.param(queries, keys, marks=() if (queries, keys) in QUICK_EDGES else pytest.mark.slow)
        for queries in LENGTHS
        for keys in LENGTHS
    ],
)
def test_block_edges(queries, keys):
    """In the interpreter a tile is 32 x 64, or 64 x 32 in one of the backward's kernels."""
    kwargs = dict(WAYS[(LENGTHS.index(queries) + LENGTHS.index(keys)) % len(WAYS)])
    for limit in kwargs.keys() & {"kv_start", "kv_lengths"}:
        kwargs[limit] = kwargs[limit].clamp(max=keys)
    case = Case("x", H=1, G=1, T=queries, S=keys, D=5, E=7, lam="query", kwargs=kwargs)
    assert_close(run(case), in_float64(case), 2e-5)


@pytest.mark.parametrize(
    ("length", "kwargs"),
    [
        (33, {}),
        (65, CAUSAL),
        (129, CAUSAL | {"window": 33}),
        pytest.param(129, {}, marks=pytest.mark.slow),
        pytest.param(129, CAUSAL, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_block_edges_of_documents(length, kwargs):
    cuts = [cut for cut in (1, 31, 31, 32, 64) if cut <= length]
    case = Case("x", H=1, G=1, T=length, S=length, kwargs=kwargs | {"cu_seqlens": ints(0, *cuts, length)})
    assert_close(run(case), in_float64(case), 2e-5)


SHAPES = [
    *(Case(f"D = {width}", H=2, G=1, T=35, S=70, D=width, E=2 * width, kwargs=CAUSAL) for width in (32, 64, 96, 128)),
    *(Case(f"E = D = {width}", T=35, S=70, D=width, E=width, lam="query") for width in (32, 96)),
    Case("shared key of 64", H=4, G=2, T=35, S=70, D=64, E=128, shared_key=True, kwargs=CAUSAL),
    Case("odd", H=3, G=1, T=35, S=70, D=5, E=7, lam="scalar"),
    Case("E = 1", D=1, E=1, T=70, S=70, kwargs=CAUSAL),
    Case("E = 255", D=31, E=255, T=35, S=70, lam="vector"),
    Case("softmax of 128", H=4, G=1, T=35, S=70, D=128, E=128, lam=None, kwargs=CAUSAL),
    Case("many heads of few queries", H=24, G=2, T=3, S=40, D=3, E=5, kwargs=CAUSAL),
    Case("one key", H=3, G=1, T=100, S=1, D=8, E=8),
]


WIDE = ("E = D = 96", "shared key of 64", "E = 255", "softmax of 128")


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", slow_but_for(SHAPES, *WIDE), ids=by_name)
def test_widths_and_groups(case, dtype, take):
    """Half of them, and all in fp16, by a backward that adds; without gradients by both maps in one loop."""
    if dtype == torch.float16 or case.H == case.G:
        take("atomic")
    assert_as_good(case, dtype)
    take("both_maps")
    assert_as_good(case, dtype, gradients=False)


@settings(quick, max_examples=8)
@given(calls(batch=2, groups=2, heads_per_group=2), layouts)
def test_any_call_equals_the_equations(case, how):
    results = output_and_gradients(in_layouts("triton", case, how), case, torch.float32)
    assert_close(results, by_equations(case), 2e-5)


@pytest.mark.slow
@settings(quick, max_examples=10)
@given(calls(batch=2, groups=2, heads_per_group=1), layouts)
def test_any_call_in_half_precision(case, how):
    assert_any_call_as_good("triton", case, how, torch.float16)


SMALL = Case("x", B=2, H=2, G=1, T=9, S=11, D=8, E=6, lam="head", kwargs=CAUSAL)


@pytest.mark.parametrize("lam", [0.0, -0.8, 3.0])
@FORMS
def test_any_lam(lam, form, take):
    """Zero, negative and large; with zero, the gradient of lam is not."""
    take(form)
    case = dataclasses.replace(SMALL, B=1, H=2, G=1, lam="query" if form == "atomic" else "head")
    query, key, value, drawn, grad = case.inputs()
    case.inputs = lambda *_, **__: (query, key, value, torch.full_like(drawn, lam), grad)
    how = {"gradients": form != "both_maps"}
    assert_close(run(case, **how), by_equations(case, **how), 2e-5)


@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_any_scale(scale):
    case = dataclasses.replace(SMALL, kwargs=CAUSAL | {"scale": scale})
    assert_close(run(case), by_equations(case), 2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@FORMS
@pytest.mark.parametrize("logit", [-60.0, 60.0])
@pytest.mark.parametrize("kwargs", [{}, CAUSAL | {"kv_start": ints(3)}, {"kv_lengths": ints(17)}], ids=" ".join)
def test_logits_far_from_zero_beside_keys_that_are_not_there(kwargs, logit, form, dtype, take):
    """Keys beyond the tensor or the range count as zeros, whose logit of 0 is far above all others, or far below."""
    take(form)
    case = Case("x", H=1, G=1, T=20, S=20, D=16, E=16, kwargs=kwargs)
    query, key, value, lam, grad = case.inputs(dtype, requires_grad=False)
    query[..., :: case.D], key[..., :: case.D] = 8.0, logit / 2
    case.inputs = lambda *_, **__: (query, key, value, lam, grad)
    how = {"gradients": form != "both_maps"}
    assert_close(run(case, dtype, **how), by_equations(case, of=dtype, **how), 1e-4 if dtype == torch.float32 else 2e-2)


# Decoding: no gradient is wanted, and there are few queries.


def decoding(name, **fields):
    """More keys than a tile for each of the interpreter's three shares."""
    return Case(name, **({"B": 2, "H": 4, "G": 2, "T": 1, "S": 150, "D": 17, "E": 19, "kwargs": CAUSAL} | fields))


DECODING = [
    decoding("one group", G=1),
    decoding("own heads", G=4),
    decoding("two queries", T=2, lam="query"),
    decoding("eight queries", H=2, T=8, lam="query"),
    decoding("64 rows", H=8, G=1, T=8, lam="head"),
    decoding("31 keys", S=31),
    decoding("33 keys", S=33),
    decoding("97 keys, wide", S=97, D=128, E=256, lam="scalar"),
    decoding("shared key", shared_key=True, T=2, lam="vector"),
    decoding("float", lam="float", kwargs={"scale": -0.3}),
    decoding("softmax", lam=None),
    decoding("padding", B=3, kwargs=CAUSAL | {"kv_start": ints(3, 140, 150)}),
    decoding("cache", B=4, T=2, kwargs=CAUSAL | {"kv_lengths": ints(1, 150, 97, 0)}),
    decoding("both ends", T=2, kwargs=CAUSAL | {"kv_start": ints(64, 5), "kv_lengths": ints(127, 6)}),
    decoding("crossed ends", kwargs={"kv_start": ints(64, 5), "kv_lengths": ints(60, 50)}),
    decoding("window", T=2, kwargs=CAUSAL | {"window": 70}),
    decoding("cache, window", T=3, kwargs=CAUSAL | {"kv_lengths": ints(40, 131), "window": 33}),
    decoding("mask", kwargs={"attn_mask": random_mask(2, 4, 1, 150)}),
    decoding("mask of keys", T=2, lam=None, kwargs={"attn_mask": random_mask(150)}),
    decoding("empty shares", kwargs={"attn_mask": torch.arange(150) > 140}),
    decoding("more queries than keys", T=9, S=5, lam="query"),
    decoding("documents", B=1, T=15, S=15, kwargs=CAUSAL | {"cu_seqlens": ints(0, 5, 15)}),
]


LOW_TOO = ("own heads", "97 keys, wide", "cache")
AT_ONCE = (
    "eight queries", "33 keys", "shared key", "float", "softmax", "both ends", "cache, window", "mask", "empty shares",
    "more queries than keys", "documents",
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "dtype", "norm"),
    [
        pytest.param(case, dtype, norm, marks=() if is_quick else pytest.mark.slow)
        for case in DECODING
        for dtype in DTYPES
        for norm in (False, True)
        for is_quick in [case.name in LOW_TOO if norm else case.name in AT_ONCE and dtype == torch.float32]
    ],
    ids=lambda x: x.name if isinstance(x, Case) else str(x),
)
def test_few_queries_without_a_gradient(case, dtype, norm, monkeypatch):
    if norm and case.lam is None:
        return
    monkeypatch.setattr(launch, "choose", None)  # not the kernels of longer calls
    inputs = case.inputs(dtype, requires_grad=False)[:4]
    exact_inputs = [x.double() if isinstance(x, torch.Tensor) else x for x in inputs]
    if norm:
        weight = torch.linspace(0.5, 1.5, case.E).to(dtype)
        out = normed_op(case, "triton")(*inputs, weight)
        exact = normed_op(case, "reference")(*exact_inputs, weight.double())
        by_hand = norm_by_hand(case, eager(case))(*inputs, weight)
    else:
        out = op(case, "triton")(*inputs)
        exact, by_hand = op(case, "reference")(*exact_inputs), eager(case)(*inputs)
    assert out.dtype == dtype
    if dtype == torch.float32:
        assert relative_error(out, exact) < (1e-4 if norm else 2e-5)
    else:
        assert_as_good_as_eager({"out": out}, {"out": by_hand}, {"out": exact}, dtype)


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_any_number_of_shares(splits, monkeypatch):
    monkeypatch.setattr(launch, "decode_splits", lambda *_: splits)
    case = decoding("cache", T=2, kwargs=CAUSAL | {"kv_lengths": ints(150, 40)})
    inputs = case.inputs(requires_grad=False)[:4]
    assert relative_error(op(case, "triton")(*inputs), op(case, "reference")(*(x.double() for x in inputs))) < 2e-5


@pytest.mark.parametrize("case", [SMALL, NORMED[2]], ids=by_name)
def test_many_queries_without_a_gradient(case, take, monkeypatch):
    """The kernels of training's forward, which then keep nothing: the same bits."""
    monkeypatch.setattr(launch, "DECODE_ROWS", 0)
    taken = take("by_map")
    leaves, lam, _ = tensors(case)
    for attend in (op(case, "triton"), lambda *inputs: normed_op(case, "triton")(*inputs, None)):
        with torch.no_grad():
            out = attend(*leaves[:3], lam)
        assert torch.equal(out, attend(*leaves[:3], lam).detach())
    assert taken == ["by_map"] * 4


def test_rows_up_to_which_a_call_is_split(monkeypatch):
    split = []
    monkeypatch.setattr(launch, "_decode", lambda inputs, norm: split.append(inputs.queries) or inputs.query)
    monkeypatch.setattr(launch, "_forward", lambda *_: launch.Forward(*(torch.empty(0) for _ in range(5))))
    for queries in (1, 32, 33):
        query = torch.zeros(1, 4, queries, 8)
        with torch.no_grad():
            softmax_attention(query, query[:, :2], query[:, :2], backend="triton")
        softmax_attention(query.requires_grad_(), query[:, :2], query[:, :2], backend="triton")
    assert split == [1, 32]  # two heads a group


# What is read, and what is not.


RANGES = {
    "start": Case("x", B=2, H=1, G=1, T=33, S=70, kwargs=CAUSAL | {"kv_start": ints(5, 65)}),
    "both": Case("x", B=3, H=1, G=1, T=9, S=70, kwargs={"kv_start": ints(3, 2, 9), "kv_lengths": ints(31, 66, 7)}),
    "length": Case("x", B=3, H=1, G=1, T=9, S=70, kwargs=CAUSAL | {"kv_lengths": ints(33, 66, 0)}),
    "softmax": Case("x", H=1, G=1, T=9, S=70, lam=None, kwargs={"kv_start": ints(3), "kv_lengths": ints(66)}),
}


@FORMS
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("start", "length")), "both", "softmax"]
)
def test_keys_outside_the_range_are_not_read(name, form, take):
    """In the interpreter additions too are in one order, so that the bits are the same."""
    take(form)
    how = {"norm": name != "softmax" and form == "atomic", "gradients": form != "both_maps"}
    assert_unseen_keys_are_not_read(RANGES[name], lambda case: bits(case, **how))


@pytest.mark.slow
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNSEEN)
def test_keys_outside_longer_ranges_are_not_read(name, dtype, norm):
    if norm and UNSEEN[name].lam is None:
        return
    assert_unseen_keys_are_not_read(UNSEEN[name], lambda case: bits(case, dtype, norm))


@pytest.mark.parametrize("name", RANGES)
def test_keys_outside_the_range_are_not_read_when_decoding(name):
    case = dataclasses.replace(RANGES[name], T=3)
    outs = []
    for fill in (0.0, torch.nan, torch.inf):
        inputs = with_unseen(case, fill).inputs(requires_grad=False)[:4]
        outs.append(op(case, "triton")(*inputs))
        assert inputs[1].transpose(1, 2)[unseen_keys(case)].isnan().all() == (fill != fill)
    assert_same_bits(outs[1:], outs[:1] * 2)


@FORMS
@pytest.mark.parametrize("name", [pytest.param("left padding", marks=pytest.mark.slow), "more queries than keys"])
def test_rows_that_see_nothing_are_zero(name, form, take):
    """With the norm too, however large 1 / sqrt(eps) is; without a gradient too."""
    take(form)
    case = BY_NAME[name]
    empty = ~oracle.dense_mask(case).any(-1)
    leaves, lam, _ = tensors(case, torch.float16)
    weight = torch.ones(case.E, requires_grad=True)
    with torch.no_grad():
        assert (op(case, "triton")(*leaves[:3], lam)[empty] == 0).all()
        assert (normed_op(case, "triton", 1e-12)(*leaves[:3], lam, weight)[empty] == 0).all()
    out = normed_op(case, "triton", 1e-12)(*leaves[:3], lam, weight)
    assert (out[empty] == 0).all()
    into_empty = empty.unsqueeze(-1).expand_as(out).to(out.dtype)
    for grad in torch.autograd.grad(out, [*leaves, weight], into_empty, retain_graph=True):
        assert (grad == 0).all()
    assert (torch.autograd.grad(out, leaves[0], torch.ones_like(out))[0][empty] == 0).all()


POISONED = [
    dataclasses.replace(BY_NAME["left padding"], H=1, G=1),
    Case("window", H=1, G=1, T=20, S=70, D=5, E=7, lam="query", kwargs=CAUSAL | {"window": 9}),
    dataclasses.replace(BY_NAME["softmax, mask"], H=1, G=1),
    decoding("cache", H=2, T=2, kwargs=CAUSAL | {"kv_lengths": ints(1, 97)}),
]


@FORMS
@pytest.mark.parametrize("case", slow_but_for(POISONED, "window"), ids=by_name)
def test_no_uninitialised_memory(case, form, take):
    """With and without the norm, and without a gradient."""
    take(form)

    def everything():
        hows = [{"gradients": False}, {}] + [{"gradients": False, "norm": True}, {"norm": True}] * (
            case.lam is not None
        )
        return [x for how in hows for x in bits(case, **how)]

    usual = everything()
    with new_memory_is_nan():
        assert_same_bits(everything(), usual)


# Sizes, layouts.


STRIDED = {
    "ranges": Case("x", B=3, T=9, S=40, kwargs={"kv_start": ints(3, 3, 3), "kv_lengths": ints(33, 33, 33)}),
    "documents": Case("x", T=21, S=21, kwargs=CAUSAL | {"cu_seqlens": ints(0, 5, 13, 21)}),
    "mask": Case("x", B=2, T=9, S=11, kwargs={"attn_mask": random_mask(11, 9).mT}),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", STRIDED)
def test_restrictions_and_gains_in_any_layout(name, grad):
    """One length for the whole batch, expanded; every second number of a tensor."""
    case = STRIDED[name]
    query, key, value, lam, _ = case.inputs(torch.float32)
    weight = torch.linspace(0.5, 1.5, 2 * case.E)[::2]
    one = {limit: x[:1].expand_as(x) if limit[:2] == "kv" else x for limit, x in case.kwargs.items()}
    second = {limit: x.repeat_interleave(2)[::2] if limit != "attn_mask" else x for limit, x in one.items()
              if isinstance(x, torch.Tensor)}  # fmt: skip
    with torch.set_grad_enabled(grad):
        usual = normed_op(case, "reference")(query, key, value, lam, weight)
        for kwargs in (one, one | second):
            changed = dataclasses.replace(case, kwargs=kwargs)
            out = normed_op(changed, "triton")(query, key, value, lam, weight)
            assert relative_error(out, usual) < 1e-4


def test_the_norm_rounds_once():
    """Where both maps are at hand, heads are normalised before they are rounded."""
    case = Case("x", B=2, H=4, T=33, S=33, D=16, E=32, kwargs=CAUSAL)
    query, key, value, lam, _ = case.inputs(torch.float16)
    wide = normed_op(case, "triton")(query.float(), key.float(), value.float(), lam, None)
    # The products' weights are rounded on the way, so the two differ by that, but seldom by more than a step.
    fused = normed_op(case, "triton")(query, key, value, lam, None)
    apart = oracle.rms_norm(op(case, "triton")(query, key, value, lam).float(), None, 1e-5, 0.37).half()
    assert (fused.float() - wide).abs().mean() < (apart.float() - wide).abs().mean()
