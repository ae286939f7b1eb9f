"""Every backend of the op, in every dtype and restriction, forward and gradients, against the equations in float64.

`tests/support/op_backends.py` has the table of backends, `tests/support/cases.py` the cases.
"""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import oracle
from tests.support.calls import assert_any_call_as_good, calls, in_layouts, layouts, quick, windowed_calls
from tests.support.cases import (
    BY_NAME,
    CASES,
    CAUSAL,
    assert_close,
    by_name,
    eager,
    exact,
    ints,
    norm_by_hand,
    normed_results,
    peaked,
    random_mask,
    with_inputs,
)
from tests.support.op_backends import FLOAT64, FORMS, FUSED, LABELS, PLAIN, each
from tests.support.oracle import Case, output_and_gradients, relative_error

FP32 = [torch.float32]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("case", [case for case in CASES if case.T < 100], ids=by_name)
def test_the_mask_of_a_call_has_every_restriction(case):
    """The oracle's mask of all queries and keys at once, which long calls have too, against one query and one key."""
    whole = oracle.dense_mask(case)
    for place in itertools.product(*map(range, whole.shape)):
        assert whole[place] == oracle.may_attend(case, *place), place


# The cases.

HEAVY = (
    "one position", "63 own heads causal", "grouped, cross, narrow value", "one query", "shared key", "mask with empty rows",
    "both ends, causal mask", "cache, window", "documents, window, mask", "softmax, mask",
)  # fmt: skip
OF_FORMS = (
    "grouped, cross, narrow value",
    "shared key",
    "mask with empty rows",
    "cache, window",
    "documents, window, mask",
)


@each(cases=CASES, dtypes=FP32, heavy=HEAVY, few=dict.fromkeys(FORMS[1:], OF_FORMS))
def test_equals_the_equations(backend, case, dtype):
    backend.assert_right(case, dtype)


LOW = (
    "63 own heads causal", "257 causal", "257 window", "grouped, cross, narrow value", "shared key", "softmax",
)  # fmt: skip


@each(cases=[BY_NAME[name] for name in LOW], dtypes="low", heavy=LOW[3:])
def test_low_precision(backend, case, dtype):
    """By the rule of flash-attention: at most twice the error of eager PyTorch, or half a unit in the last place."""
    backend.assert_right(case, dtype)


@each(("triton",), [case for case in CASES if case.name not in LOW], "low", heavy=())
def test_every_other_case_in_low_precision(backend, case, dtype):
    backend.assert_right(case, dtype)


def decoding(name, **fields):
    """A call of few rows a group and more keys than a kernel's tile."""
    return Case(name, **({"B": 2, "H": 4, "G": 2, "T": 1, "S": 150, "D": 17, "E": 19, "kwargs": CAUSAL} | fields))


# The norm is apart from the forms of Triton's backward pass, and `attend` adds it to the other backends.
WITH_NORM = (*PLAIN, "both_maps triton", "triton on CUDA")
NORMED = [
    *(BY_NAME[name] for name in ("63 own heads causal", "257 window", "grouped, cross, narrow value", "one query")),
    *(BY_NAME[name] for name in ("shared key", "mask with empty rows", "left padding", "both ends, mask")),
    BY_NAME["long documents"],
    decoding("decoding", B=3, T=2, S=300, D=8, E=33, lam="query"),
    Case("wide", H=2, G=1, T=35, S=70, D=8, E=140, lam="scalar"),  # normalised by a kernel of its own in Triton
]
QUICK_NORMED = ("grouped, cross, narrow value", "one query", "left padding", "wide")


@each(WITH_NORM, NORMED, FP32, heavy=QUICK_NORMED)
def test_the_norm_equals_the_equations(backend, case, dtype):
    backend.assert_right(case, dtype, norm=True)


LOW_NORMED = [
    case for case in NORMED if case.name in ("63 own heads causal", "257 window", "shared key", "decoding", "wide")
]


@each(WITH_NORM, LOW_NORMED, "low", heavy=("wide",), few={"both_maps triton": ("shared key", "wide")})
def test_the_norm_in_low_precision(backend, case, dtype):
    backend.assert_right(case, dtype, norm=True)


@each(PLAIN)
@pytest.mark.parametrize(("gain", "eps"), [(False, 1e-5), (True, 0.5)])
def test_the_norm_without_a_gain_and_with_a_large_eps(backend, gain, eps):
    case = BY_NAME["grouped, cross, narrow value"]
    by_hand = norm_by_hand(lambda *inputs: oracle.attention(case, *inputs), eps)
    right = normed_results(by_hand, case, torch.float64, of=torch.float32, gain=gain)
    assert_close(normed_results(backend.normed(case, eps), case, torch.float32, gain=gain), right, 5e-5)


# Tiles and blocks: of the CPU kernels a tile is 128 keys and a block 64 rows, of Triton's in the interpreter 32 x 64.


def narrow_window(length, window):
    """Blocks have rows that see no key of a tile."""
    name, kwargs = f"{length} positions, window {window}", CAUSAL | {"window": window}
    return Case(name, H=4, G=2, T=length, S=length, kwargs=kwargs)


SIZES = [
    Case("own heads", B=2, T=129, S=129, D=16, E=32, kwargs=CAUSAL),
    Case("window", H=3, G=1, T=65, S=200, D=9, E=17, lam="scalar", kwargs=CAUSAL | {"window": 70}),
    Case("shared key of 64", H=4, G=2, T=35, S=130, D=64, E=128, shared_key=True, kwargs=CAUSAL),
    Case("wide", H=2, G=1, T=70, S=130, D=128, E=256, lam="query"),
    Case("E = D = 96", T=35, S=70, D=96, E=96, lam="query"),
    Case("E = 1", D=1, E=1, T=70, S=70, kwargs=CAUSAL),
    Case("E = 255", D=31, E=255, T=35, S=70, lam="vector"),
    Case("one key", H=3, G=1, T=100, S=1, D=8, E=8),
    Case("softmax of 128", H=4, G=1, T=35, S=70, D=128, E=128, lam=None, kwargs=CAUSAL),
    Case("mask", B=2, T=65, S=131, kwargs={"attn_mask": random_mask(2, 1, 65, 131)}),
    Case("ranges", B=3, T=65, S=200, kwargs=CAUSAL | {"kv_start": ints(0, 65, 131), "kv_lengths": ints(65, 200, 150)}),
    Case("documents", H=3, G=1, T=300, S=300, kwargs=CAUSAL | {"cu_seqlens": ints(0, 1, 66, 130, 131, 300)}),
    Case("documents, window", T=300, S=300, kwargs=CAUSAL | {"cu_seqlens": ints(0, 131, 300), "window": 64}),
    *(narrow_window(129, window) for window in (1, 3, 9)),
]
WIDE = ("E = D = 96", "shared key of 64", "E = 255", "softmax of 128")
IN_FORMS = (*WIDE, "ranges", "documents, window", "129 positions, window 3")


@each(("cpu", *FORMS), SIZES, FP32, heavy=("shared key of 64", "E = 255"), few=dict.fromkeys(FORMS[1:], IN_FORMS))
def test_several_tiles_and_blocks(backend, case, dtype):
    backend.assert_right(case, dtype)


@each(("cpu", "triton"), SIZES, "low", heavy=(), few={"triton": (*WIDE, "own heads", "ranges", "documents, window")})
def test_several_tiles_and_blocks_in_low_precision(backend, case, dtype):
    backend.assert_right(case, dtype)


WAYS = (
    {},
    CAUSAL,
    CAUSAL | {"window": 40},
    {"kv_start": ints(31), "kv_lengths": ints(64)},
    CAUSAL | {"kv_start": ints(33)},
    CAUSAL | {"kv_lengths": ints(65), "window": 64},
)
EDGES = {"cpu": (1, 63, 64, 65, 127, 128, 129, 200, 300), "triton": (31, 32, 33, 64, 65, 129)}
QUICK_EDGES = {(31, 33), (33, 32), (32, 65), (65, 64), (64, 64), (65, 129), (33, 129), (129, 31)}


def edge(lengths, queries, keys, heads):
    kwargs = dict(WAYS[(lengths.index(queries) + lengths.index(keys) + heads) % len(WAYS)])
    kwargs |= {limit: kwargs[limit].clamp(max=keys) for limit in kwargs.keys() & {"kv_start", "kv_lengths"}}
    return Case(f"{queries} x {keys}", H=heads, G=1, T=queries, S=keys, D=5, E=7, lam="query", kwargs=kwargs)


def assert_edge(backend, case):
    expected = output_and_gradients(eager(case), case, torch.float64, of=torch.float32)
    assert_close(backend.results(case), expected, 2e-5)


@each(("cpu",))
@pytest.mark.parametrize("queries", EDGES["cpu"])
def test_block_edges(backend, queries):
    for keys, heads in itertools.product(EDGES["cpu"], (1, 3)):
        assert_edge(backend, edge(EDGES["cpu"], queries, keys, heads))


@each(
    ("triton",),
    [edge(EDGES["triton"], T, S, 1) for T in EDGES["triton"] for S in EDGES["triton"]],
    heavy=[f"{queries} x {keys}" for queries, keys in QUICK_EDGES],
)
def test_block_edges_in_the_interpreter(backend, case):
    assert_edge(backend, case)


CUTS = [(33, {}), (65, CAUSAL), (129, CAUSAL | {"window": 33}), (129, {}), (129, CAUSAL)]
PACKED = [
    Case(f"{length}, {number}", H=1, G=1, T=length, S=length,
         kwargs=kwargs | {"cu_seqlens": ints(0, *(cut for cut in (1, 31, 31, 32, 64) if cut <= length), length)})
    for number, (length, kwargs) in enumerate(CUTS)
]  # fmt: skip


@each(("cpu", "triton"), PACKED, FP32, heavy=("33, 0", "65, 1", "129, 2"))
def test_block_edges_of_documents(backend, case, dtype):
    backend.assert_right(case, dtype)


# Keys, values and gradients of a group of 2 MiB and more: threads of the CPU kernels share a group, and from 2 D + E = 384 on
# their backward takes blocks of 128 rows and tiles of 64 keys.
LARGE = [
    Case("wide heads", H=2, G=1, T=200, S=920, D=96, E=192, lam="query", kwargs=CAUSAL),
    Case("wide heads, window", H=2, G=1, T=450, S=920, D=96, E=192, kwargs=CAUSAL | {"window": 300}),
    Case("wide heads, softmax", T=130, S=1850, D=97, E=290, lam=None),
    Case("long", B=2, T=150, S=1400, D=64, E=128, kwargs=CAUSAL | {"kv_start": ints(3, 700)}),
    Case("many heads", H=96, G=2, T=3, S=40, D=3, E=5, kwargs=CAUSAL),
    narrow_window(513, 3),
]


@each(("cpu",), LARGE, DTYPES)
def test_calls_too_large_for_the_interpreter(backend, case, dtype):
    backend.assert_right(case, dtype)


# Decoding.

DECODING = [
    decoding("one group", H=8, G=1), decoding("own heads", G=4), decoding("two queries", T=2, lam="query"),
    decoding("eight queries", H=2, T=8, lam="query"), decoding("64 rows", H=8, G=1, T=8, lam="head"),
    decoding("31 keys", S=31), decoding("129 keys", H=8, S=129),
    decoding("97 keys, wide", S=97, D=128, E=256, lam="scalar"), decoding("shared key", shared_key=True, T=2, lam="vector"),
    decoding("float", lam="float", kwargs={"scale": -0.3}), decoding("softmax", lam=None),
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
]  # fmt: skip
# More keys than several of the CPU kernels' tiles.
LONG_DECODING = [
    decoding("whole chunks", H=8, S=512, D=16, E=64), decoding("wide values", H=8, S=257, E=140, lam="scalar"),
    decoding("5000 keys", B=1, H=8, S=5000, D=64, E=128),
    decoding("long both ends", T=2, S=600, kwargs=CAUSAL | {"kv_start": ints(257, 5), "kv_lengths": ints(511, 6)}),
    decoding("long empty chunks", H=8, S=300, kwargs={"attn_mask": torch.arange(300) > 290}),
]  # fmt: skip
AT_ONCE = (
    "eight queries", "shared key", "float", "softmax", "both ends", "cache, window", "mask", "empty shares",
    "more queries than keys", "documents",
)  # fmt: skip


@each(("cpu",), [*DECODING, *LONG_DECODING], DTYPES)
def test_few_queries_and_many_keys(backend, case, dtype):
    backend.assert_right(case, dtype)


@pytest.fixture
def no_longer_calls(monkeypatch):
    """Kernels of longer calls than decoding are not taken."""
    from difftransformer.ops.triton_kernels import launch

    monkeypatch.setattr(launch, "choose", None)


@each(("triton",), DECODING, FP32, heavy=AT_ONCE)
@pytest.mark.usefixtures("no_longer_calls")
def test_few_queries_without_a_gradient(backend, case, dtype):
    backend.assert_right(case, dtype, gradients=False)


@each(("triton",), DECODING, [torch.float16], heavy=("eight queries", "shared key", "softmax"))
@pytest.mark.usefixtures("no_longer_calls")
def test_few_queries_with_the_norm_in_low_precision(backend, case, dtype):
    """Unless there is one map."""
    backend.assert_right(case, dtype, norm=case.lam is not None, gradients=False)


# Calls drawn at random.


@each(FUSED)
def test_any_call_equals_the_equations(backend):
    small = {"batch": 2, "groups": 2, "heads_per_group": 2} if backend.is_heavy else {}

    @settings(quick, max_examples=5 if backend.is_heavy else 50)
    @given(calls(**small), layouts)
    def check(case, how):
        assert_close(output_and_gradients(in_layouts(backend, case, how), case, torch.float32), exact(case), 2e-5)

    check()


@pytest.mark.slow
@each(FUSED)
def test_any_call_in_low_precision(backend):
    small = {"batch": 2, "groups": 2, "heads_per_group": 1} if backend.is_heavy else {}

    @settings(quick, max_examples=10 if backend.is_heavy else 25)
    @given(calls(**small), layouts, st.sampled_from(backend.low))
    def check(case, how, dtype):
        assert_any_call_as_good(backend, case, how, dtype)

    check()


@each(("cpu",))
def test_several_blocks_and_short_windows(backend):
    @settings(quick, max_examples=40)
    @given(windowed_calls(), st.sampled_from((torch.float32, *backend.low)))
    def check(case, dtype):
        backend.assert_right(case, dtype)

    check()


# Scores and lambda.


@each(PLAIN, [Case("20 free", T=20, S=40, D=32, E=64), BY_NAME["wide window"]], heavy=("wide window",))
@pytest.mark.parametrize(
    ("factor", "dtype"), [(8, torch.float32), (60, torch.float32), (60, torch.bfloat16), (60, torch.float16)]
)
def test_peaked_scores(backend, case, factor, dtype):
    """With lambda of both signs. A score of 400 that is rounded in fp32 changes its weight by up to 400 eps / 2 = 2.4e-5."""
    for sign in (1, -1):
        drawn = peaked(case, factor, sign)
        if dtype != torch.float32:
            backend.assert_right(drawn, dtype)
        else:
            assert_close(backend.results(drawn), exact(drawn), 2e-5 if factor == 8 else 1e-4)


@each(("reference", "chunked", "cpu"), dtypes=[torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [{"T": 70, "S": 70}, {"T": 1, "S": 300}], ids=str)
@pytest.mark.parametrize("exponent", [13, 33, 66])
def test_huge_scores(backend, sizes, exponent, dtype):
    """Whole numbers times a power of two, so that the scores are exact: keys share a query equally or have none of it.

    Kernels that scale a score inside the exponent, PyTorch's own and Triton's here, round such scores.
    """
    case = Case("huge", H=2, G=2, **sizes, kwargs=CAUSAL)
    case = with_inputs(case, lambda q, k, *rest: ((2 * q).round() * 2.0**exponent, k.round(), *rest))
    results, right = backend.results(case, dtype), exact(case, dtype)
    assert all(x.isfinite().all() for x in results.values())
    for part in ("out", "value", "lam"):
        assert relative_error(results[part], right[part]) < (1e-5 if dtype == torch.float32 else 2e-2)


@each(PLAIN)
def test_large_logits(backend):
    """Of around a thousand, in both factors."""
    case = Case("large", T=9, S=9, kwargs=CAUSAL)
    case = with_inputs(case, lambda query, key, *rest: (30 * query, 30 * key, *rest))
    results = backend.results(case)
    assert relative_error(results["out"], exact(case)["out"]) < 2e-4
    assert all(x.isfinite().all() for x in results.values())


FAR = [  # every two of a range, a sign and a dtype
    ({}, -60.0, torch.float32), ({}, 60.0, torch.float16),
    (CAUSAL | {"kv_start": ints(3)}, 60.0, torch.float32), (CAUSAL | {"kv_start": ints(3)}, -60.0, torch.float16),
    ({"kv_lengths": ints(17)}, -60.0, torch.float32), ({"kv_lengths": ints(17)}, 60.0, torch.float16),
]  # fmt: skip


@each(FORMS)
@pytest.mark.parametrize(("kwargs", "logit", "dtype"), FAR, ids=str)
def test_logits_far_from_zero_beside_keys_that_are_not_there(backend, kwargs, logit, dtype):
    """Keys beyond the tensor or the range count as zeros, whose logit of 0 is far above all others, or far below."""

    def far(query, key, *rest):
        query[..., ::16], key[..., ::16] = 8.0, logit / 2
        return query, key, *rest

    case = with_inputs(Case("x", H=1, G=1, T=20, S=20, D=16, E=16, kwargs=kwargs), far)
    results = backend.results(case, dtype)
    right = {part: exact(case, dtype)[part] for part in results}
    assert_close(results, right, 1e-4 if dtype == torch.float32 else 2e-2)


@each(PLAIN)
@pytest.mark.parametrize("sign", [1, -1])
def test_one_key_gives_no_gradient_to_scores(backend, sign):
    """Its weight is 1 whatever its score. In bf16 too, where queries of 60 would multiply what rounding leaves."""
    results = backend.results(peaked(BY_NAME["one position"], 60, sign), torch.bfloat16)
    # fp32 sums of products of 8 numbers, times 60.
    assert results["query"].abs().max() < 1e-5
    assert results["key"].abs().max() < 2e-4


SMALL = Case("small", B=2, H=2, G=1, T=9, S=11, D=8, E=6, kwargs=CAUSAL)


@each((*PLAIN, *FORMS), [SMALL, dataclasses.replace(SMALL, name="by query", lam="query")], heavy=("small",))
@pytest.mark.parametrize("lam", [0.0, -0.8, 3.0])
def test_any_lam(backend, case, lam):
    """Zero, negative and large; with zero, the gradient of lam is not."""

    def with_lam(query, key, value, drawn, grad):
        return query, key, value, torch.full_like(drawn, lam), grad

    backend.assert_right(with_inputs(case, with_lam))


@each((*PLAIN, "sdpa"), [SMALL, decoding("decoding", lam="query")], heavy=("small",))
@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_any_scale(backend, case, scale):
    backend.assert_right(dataclasses.replace(case, kwargs=case.kwargs | {"scale": scale}))


def masks_and_then_scales(query, key, value, *, attn_mask, is_causal, scale, enable_gqa):
    """PyTorch's attention as its GPU kernels order the steps."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril() if is_causal else attn_mask
    return ((query @ key.mT).masked_fill(~allowed, -torch.inf) * scale).softmax(-1) @ value


@each(("sdpa",), [SMALL, dataclasses.replace(SMALL, name="torch's own mask", T=11)])
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_a_scale_is_positive_where_masks_come_before_it(backend, case, scale, monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", masks_and_then_scales)
    backend.assert_right(dataclasses.replace(case, kwargs=case.kwargs | {"scale": scale}))


@each(LABELS)
def test_lam_stays_in_fp32(backend):
    """A lam that bf16 cannot hold: with both maps equal the output is (1 - lam) V, and 1 - lam would round to 0."""
    query, value = torch.zeros(1, 1, 4, 32).bfloat16(), torch.ones(1, 1, 4, 16).bfloat16()
    case = Case("equal maps", H=1, G=1, T=4, S=4, D=16, E=16)
    case = with_inputs(case, lambda *_: (query, query, value, torch.tensor(0.9995), value))
    results = backend.results(case, torch.bfloat16)
    torch.testing.assert_close(results["out"].float(), torch.full((1, 1, 4, 16), 0.0005), rtol=1e-2, atol=0)
    if "lam" in results:
        assert results["lam"].dtype == torch.float32
        torch.testing.assert_close(results["lam"], torch.tensor(-64.0))


# Restrictions.

EMPTY = [
    BY_NAME[name]
    for name in ("mask with empty rows", "left padding", "more queries than keys", "cache, window", "both ends, mask")
]


@pytest.mark.parametrize(("dtype", "norm"), [(torch.float32, False), (torch.bfloat16, True)])
@each(cases=EMPTY, heavy=("mask with empty rows",))
def test_a_query_that_sees_nothing_gives_zeros_with_zero_gradients(backend, case, dtype, norm):
    """With the norm too, however large 1 / sqrt(eps) is; without a gradient too."""
    empty = ~oracle.dense_mask(case).any(-1)
    assert empty.any()
    assert not empty.all()
    leaves = [*case.inputs(dtype)[:4], *[torch.ones(case.E, requires_grad=True)] * norm]
    attend = backend.normed(case, 1e-12) if norm else backend.attend(case)
    with torch.no_grad():
        assert (attend(*leaves)[empty] == 0).all()
    if not backend.differentiates(case):
        return
    out = attend(*leaves)
    assert (out[empty] == 0).all()
    assert (out[~empty] != 0).any()
    # A gradient that enters by such queries alone reaches nothing.
    into_empty = 3 * empty.unsqueeze(-1).expand_as(out).to(dtype)
    assert all((grad == 0).all() for grad in torch.autograd.grad(out, leaves, into_empty, retain_graph=True))
    grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert (grads[0][empty] == 0).all()
    assert all(grad.isfinite().all() for grad in grads)


@each(("reference", "chunked", "cpu"))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("groups", "length"), [(2, 65), (1, 1)])
def test_softmax_attention_equals_torchs(backend, groups, length, causal):
    kwargs = {"is_causal": causal}
    case = Case("x", B=2, H=4, G=groups, T=length, S=length, D=8, E=12, lam=None, kwargs=kwargs)

    def by_torch(query, key, value, lam):
        return F.scaled_dot_product_attention(query, key, value, **kwargs, enable_gqa=True)

    right = output_and_gradients(by_torch, case, torch.float64, of=torch.float32)
    assert_close(backend.results(case), right, 2e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case.lam is not None][:12], ids=by_name)
def test_eager_is_the_equations(case):
    """What low precision is held against."""
    assert_close(output_and_gradients(eager(case), case, torch.float64), exact(case, torch.float64), 1e-12)


GRAD_CASES = [
    Case("own keys", B=2, H=2, G=1, T=3, S=5, D=2, E=3, kwargs=CAUSAL),
    Case("shared key", H=2, G=2, T=3, S=4, D=2, E=2, shared_key=True, lam="query", kwargs={"kv_start": ints(1)}),
    Case("empty row", H=2, G=1, T=4, S=3, D=2, E=2, lam="scalar", kwargs=CAUSAL | {"attn_mask": random_mask(4, 3)}),
    Case("softmax", H=2, G=1, T=3, S=4, D=2, E=3, lam=None, kwargs=CAUSAL),
]


@each(FLOAT64, GRAD_CASES)
def test_gradcheck(backend, case):
    *inputs, _ = case.inputs(torch.float64)
    assert torch.autograd.gradcheck(backend.attend(case), inputs)
    if backend.name == "reference":
        assert torch.autograd.gradgradcheck(backend.attend(case), inputs, atol=1e-4)
