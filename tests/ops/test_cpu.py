"""The fused C++ kernels: any shape and restriction, the same bits on any threads, nothing read that is not to be read."""

import dataclasses
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel

from difftransformer.errors import BackendUnavailable, DiffTransformerError
from difftransformer.ops import (
    build,
    differential_attention,
    normed_differential_attention,
    processor,
    softmax_attention,
)
from tests.support import fused_calls, oracle
from tests.support.cases import (
    BY_NAME,
    CAUSAL,
    assert_close,
    by_name,
    ints,
    needs_kernels,
    new_memory_is_nan,
    op,
    random_mask,
    slow_but_for,
    threads,
)
from tests.support.fused_calls import (
    OPCHECK,
    UNSEEN,
    assert_any_call_as_good,
    assert_compiles_to_the_same_bits,
    assert_same_bits,
    assert_unseen_keys_are_not_read,
    by_equations,
    calls,
    errors_of,
    in_float64,
    in_layouts,
    layouts,
    operator_inputs,
    quick,
    tensors,
)
from tests.support.oracle import Case, output_and_gradients, relative_error

pytestmark = needs_kernels

LOW = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *LOW)


run = partial(fused_calls.run, "cpu")
bits = partial(fused_calls.bits, "cpu")
assert_as_good = partial(fused_calls.assert_as_good, "cpu")


# Shapes and restrictions.


@quick
@given(calls(), layouts)
def test_any_call_equals_the_equations(case, how):
    results = output_and_gradients(in_layouts("cpu", case, how), case, torch.float32)
    assert_close(results, by_equations(case), 2e-5)


@settings(quick, max_examples=40)
@given(calls(), layouts, st.sampled_from(LOW))
def test_any_call_in_low_precision(case, how, dtype):
    assert_any_call_as_good("cpu", case, how, dtype)


@st.composite
def windowed_calls(draw):
    """More than one block of rows and of keys, heads in groups, and windows, documents or ranges shorter than a block."""
    per_group = draw(st.integers(2, 8))
    queries = draw(st.integers(65, 300))
    keys = queries + draw(st.sampled_from([0, 0, 1, 70]))
    kwargs = CAUSAL | {"window": draw(st.none() | st.integers(1, 12) | st.integers(13, 200))}
    if keys == queries and draw(st.booleans()):
        kwargs["cu_seqlens"] = ints(0, *sorted(draw(st.lists(st.integers(0, queries), max_size=6))), queries)
    elif draw(st.booleans()):
        kwargs |= {"kv_start": ints(draw(st.integers(0, keys))), "kv_lengths": ints(draw(st.integers(0, keys)))}
    lam = draw(st.sampled_from([None, "head", "query"]))
    return Case("drawn", B=1, H=per_group, G=1, T=queries, S=keys, D=draw(st.sampled_from([4, 16, 33])),
                E=draw(st.sampled_from([4, 33])), lam=lam, kwargs=kwargs)  # fmt: skip


@settings(quick, max_examples=40)
@given(windowed_calls(), st.sampled_from(DTYPES))
def test_several_blocks_and_short_windows(case, dtype):
    assert_as_good(case, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("queries", "window"), [(257, 1), (513, 1), (513, 3), (513, 9)])
def test_windows_of_few_keys_in_grouped_heads(queries, window, dtype):
    """Blocks have rows that see no key of a tile."""
    assert_as_good(Case("x", H=4, G=2, T=queries, S=queries, kwargs=CAUSAL | {"window": window}), dtype)


LENGTHS = (1, 63, 64, 65, 127, 128, 129, 200, 300)
WAYS = ({}, CAUSAL, CAUSAL | {"window": 70})


@pytest.mark.parametrize("keys", LENGTHS)
@pytest.mark.parametrize("queries", LENGTHS)
def test_block_edges(queries, keys):
    """A tile is 128 keys, a block 64 rows, and rows are those of all heads of a group."""
    for heads, kwargs in ((1, WAYS[(queries + keys) % 3]), (3, WAYS[(queries + keys + 1) % 3])):
        case = Case("x", H=heads, G=1, T=queries, S=keys, D=5, E=7, lam="query", kwargs=kwargs)
        assert_close(run(case), in_float64(case), 2e-5)


EDGES = [
    Case("own heads", B=2, T=129, S=129, D=16, E=32, kwargs=CAUSAL),
    Case("window", H=3, G=1, T=65, S=200, D=9, E=17, lam="scalar", kwargs=CAUSAL | {"window": 70}),
    Case("shared key", H=4, G=2, T=127, S=300, shared_key=True, D=33, E=64, kwargs=CAUSAL),
    Case("wide", H=2, G=1, T=70, S=130, D=128, E=256, lam="query"),
    Case("many heads", H=96, G=2, T=3, S=40, D=3, E=5, kwargs=CAUSAL),
    Case("one key", H=3, G=1, T=100, S=1, D=8, E=8),
    Case("softmax", H=6, G=2, T=100, S=150, D=24, E=24, lam=None, kwargs=CAUSAL),
    Case("mask", B=2, T=65, S=131, kwargs={"attn_mask": random_mask(2, 1, 65, 131)}),
    Case("ranges", B=3, T=65, S=200, kwargs=CAUSAL | {"kv_start": ints(0, 65, 131), "kv_lengths": ints(65, 200, 150)}),
    Case("documents", H=3, G=1, T=300, S=300, kwargs=CAUSAL | {"cu_seqlens": ints(0, 1, 66, 130, 131, 300)}),
    Case("documents, window", T=300, S=300, kwargs=CAUSAL | {"cu_seqlens": ints(0, 131, 300), "window": 64}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", EDGES, ids=by_name)
def test_several_tiles_and_blocks(case, dtype):
    assert_as_good(case, dtype)


# Keys, values and gradients of a group of 2 MiB and more: threads share a group, and from 2 D + E = 384 on the backward takes
# blocks of 128 rows and tiles of 64 keys.
LARGE = [
    Case("wide heads", H=2, G=1, T=200, S=920, D=96, E=192, lam="query", kwargs=CAUSAL),
    Case("wide heads, window", H=2, G=1, T=450, S=920, D=96, E=192, kwargs=CAUSAL | {"window": 300}),
    Case("wide heads, softmax", T=130, S=1850, D=97, E=290, lam=None),
    Case("long", B=2, T=150, S=1400, D=64, E=128, kwargs=CAUSAL | {"kv_start": ints(3, 700)}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LARGE, ids=by_name)
def test_groups_larger_than_a_cache(case, dtype):
    assert_as_good(case, dtype)


@pytest.mark.parametrize("case", LARGE, ids=by_name)
def test_groups_larger_than_a_cache_have_the_same_bits(case):
    found = []
    for count in (1, 2, 3):
        with threads(count):
            found.append(bits(case, torch.bfloat16, norm=case.lam is not None))
    for other in found[1:]:
        assert_same_bits(found[0], other)


def decoding(name, **fields):
    """A call of at most 8 rows a group and more than a tile of keys."""
    return Case(name, **({"B": 2, "H": 8, "G": 2, "T": 1, "S": 300, "D": 17, "E": 19, "kwargs": CAUSAL} | fields))


DECODING = [
    decoding("one group", G=1),
    decoding("own heads", G=8),
    decoding("two queries", T=2, lam="query"),
    decoding("eight queries", H=2, T=8, lam="query"),
    decoding("129 keys", S=129),
    decoding("whole chunks", S=512, D=16, E=64),
    decoding("wide values", S=257, E=140, lam="scalar"),
    decoding("5000 keys", B=1, S=5000, D=64, E=128),
    decoding("shared key", shared_key=True, T=2, lam="vector"),
    decoding("float", lam="float", kwargs={"scale": -0.3}),
    decoding("softmax", lam=None),
    decoding("padding", B=3, kwargs=CAUSAL | {"kv_start": ints(3, 280, 300)}),
    decoding("cache", B=3, T=2, kwargs=CAUSAL | {"kv_lengths": ints(1, 300, 257)}),
    decoding("both ends", B=2, T=2, S=600, kwargs=CAUSAL | {"kv_start": ints(257, 5), "kv_lengths": ints(511, 6)}),
    decoding("window", T=2, kwargs=CAUSAL | {"window": 100}),
    decoding("mask", kwargs={"attn_mask": random_mask(2, 8, 1, 300)}),
    decoding("mask of keys", T=2, lam=None, kwargs={"attn_mask": random_mask(300)}),
    decoding("empty chunks", kwargs={"attn_mask": torch.arange(300) > 290}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", DECODING, ids=by_name)
def test_few_queries_and_many_keys(case, dtype):
    assert_as_good(case, dtype)


SMALL = Case("x", B=2, H=4, G=2, T=9, S=11, D=8, E=6, lam="head", kwargs=CAUSAL)


@pytest.mark.parametrize("scale", [0.0, -0.5, -1e-3, 3.0])
@pytest.mark.parametrize("case", [SMALL, decoding("decoding", lam="query")], ids=by_name)
def test_any_scale(case, scale):
    case = dataclasses.replace(case, kwargs=case.kwargs | {"scale": scale})
    assert_close(run(case), by_equations(case), 2e-5)


@pytest.mark.skipif(
    os.environ.get("DIFFTRANSFORMER_SANITIZE_KERNELS") == "1",
    reason="-O1 with sanitizers rounds scores before it subtracts",
)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("case", [SMALL, decoding("decoding", lam="query")], ids=by_name)
def test_logits_around_ten_thousand(case, sign):
    """As exact as the equations in fp32; whole numbers, so that the logits themselves are exact."""
    case = dataclasses.replace(case, D=8, kwargs={"scale": 1.0})
    query, key, value, lam, grad = case.inputs(requires_grad=False)
    query, key = (2 * query).round(), key.round()
    query[..., :: case.D], key[..., :: case.D] = 100.0, 100.0 * sign
    ours, plain = (
        errors_of(op(case, backend), (query, key, value, lam), grad, op(case, "reference"))
        for backend in ("cpu", "reference")
    )
    for error, plain_error in zip(ours, plain, strict=True):
        assert error <= 4 * max(plain_error, 1e-6)


@pytest.mark.parametrize("spread", [10, 30, 100])
@pytest.mark.parametrize("queries", [1, 70])
def test_peaked_maps_are_as_exact_as_torchs(queries, spread):
    """Where one key takes nearly all, gradients are what is left of a difference."""
    case = Case("x", H=4, G=4, T=queries, S=300, D=16, E=16, lam=None)
    query, key, value, _, grad = case.inputs(requires_grad=False)
    leaves = (spread * query, key, value)

    def fused(*inputs):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(*inputs)

    def errors(attend):
        return errors_of(attend, leaves, grad, lambda *inputs: op(case, "reference")(*inputs, None))

    ours, theirs = errors(lambda *inputs: op(case, "cpu")(*inputs, None)), errors(fused)
    for error, their_error in zip(ours, theirs, strict=True):
        assert error <= 2 * max(their_error, 1e-5)


def seconds_of(function, calls=7):
    """The fastest of some calls."""
    taken = []
    for _ in range(calls):
        start = time.perf_counter()
        function()
        taken.append(time.perf_counter() - start)
    return min(taken)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [20, 60])
def test_peaked_scores_take_no_longer(factor, dtype):
    """Most exponentials are below fp32's smallest normal number; not flushed, some processors took 60 times as long."""
    case = Case("x", H=2, G=2, T=512, S=512, D=64, E=64, kwargs=CAUSAL)
    query, key, value, lam, grad = case.inputs(dtype, requires_grad=False)

    def step(query):
        leaves = [x.requires_grad_() for x in (query, key, value)]
        torch.autograd.grad(op(case, "cpu")(*leaves, lam), leaves, grad)

    plain, peaked = (partial(step, query * times) for times in (1, factor))
    plain()
    assert min(seconds_of(peaked) / seconds_of(plain) for _ in range(3)) <= 1.5


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("groups", "length"), [(4, 65), (2, 200), (1, 1)])
def test_softmax_and_its_gradients_equal_torchs(groups, length, causal):
    case = Case("x", B=2, H=4, G=groups, T=length, S=length, D=8, E=12, lam=None, kwargs={"is_causal": causal})
    by_torch = output_and_gradients(
        lambda q, k, v, lam: F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True),
        case,
        torch.float64,
        of=torch.float32,
    )
    assert_close(run(case), by_torch, 2e-5)


# The same bits.

SAME_BITS = {
    "one head": Case("x", H=1, G=1, T=300, S=300, D=16, E=32, lam="scalar"),
    "one head, causal": Case("x", H=1, G=1, T=300, S=300, D=16, E=32, kwargs=CAUSAL),
    "window": Case("x", H=1, G=1, T=500, S=500, D=8, E=8, lam="query", kwargs=CAUSAL | {"window": 90}),
    "one group": Case("x", H=4, G=1, T=130, S=200, D=16, E=20, kwargs=CAUSAL),
    "two groups": Case("x", B=2, H=6, G=2, T=70, S=300, D=9, E=11, lam="scalar", kwargs={"kv_start": ints(0, 140)}),
    "documents": Case("x", H=2, G=1, T=300, S=300, kwargs=CAUSAL | {"cu_seqlens": ints(0, 70, 200, 300)}),
    "softmax": Case("x", H=2, G=1, T=200, S=200, D=16, E=32, lam=None, kwargs=CAUSAL),
    "decoding": Case("x", H=4, G=1, T=2, S=3000, D=16, E=32, kwargs=CAUSAL),
}


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SAME_BITS)
def test_the_same_bits_on_any_threads(name, dtype, norm):
    case = SAME_BITS[name]
    if norm and case.lam is None:
        return
    with threads(1):
        alone = bits(case, dtype, norm)
        assert_same_bits(bits(case, dtype, norm), alone)
    for count in (2, 3, 5):
        with threads(count):
            for _ in range(2):
                assert_same_bits(bits(case, dtype, norm), alone)


def test_the_same_bits_inside_a_parallel_caller():
    """Calls from several Python threads at once."""
    from concurrent.futures import ThreadPoolExecutor

    case = SAME_BITS["one head, causal"]
    alone = bits(case)
    with ThreadPoolExecutor(4) as pool:
        for together in pool.map(lambda _: bits(case), range(8)):
            assert_same_bits(together, alone)


@pytest.mark.parametrize("case", [SAME_BITS["one head, causal"], decoding("decoding")], ids=by_name)
def test_denormal_numbers_count_as_zero(case):
    """In every thread, whatever they cost on this processor."""
    query, key, value, lam, grad = case.inputs(requires_grad=False)
    leaves = [x.requires_grad_() for x in (query, key, torch.full_like(value, 1e-40))]
    out = op(case, "cpu")(*leaves, lam)
    assert (out == 0).all()
    grads = torch.autograd.grad(out, leaves, torch.full_like(grad, 1e-40))
    assert all((x == 0).all() for x in grads)


def test_denormal_numbers_are_flushed_within_a_call_alone():
    """The caller's own threads keep them, as torch does by default."""
    denormal = torch.full((1 << 20,), 1e-40)
    assert (denormal * 0.5 > 0).all()
    bits(SAME_BITS["one head, causal"])
    assert (denormal * 0.5 > 0).all()


# What is read, and what is not.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", UNSEEN)
def test_keys_outside_the_range_are_not_read(name, norm, dtype):
    if norm and UNSEEN[name].lam is None:
        return
    assert_unseen_keys_are_not_read(UNSEEN[name], lambda case: bits(case, dtype, norm))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["mask with empty rows", "left padding", "more queries than keys", "both ends, mask"])
def test_rows_that_see_nothing_are_zero(name, dtype):
    case = BY_NAME[name]
    empty = ~oracle.dense_mask(case).any(-1)
    leaves, lam, _ = tensors(case, dtype)
    out = op(case, "cpu")(*leaves[:3], lam)
    assert (out[empty] == 0).all()
    into_empty = empty.unsqueeze(-1).expand_as(out).to(dtype)
    for grad in torch.autograd.grad(out, leaves, into_empty, retain_graph=True):
        assert (grad == 0).all()
    assert (torch.autograd.grad(out, leaves[0], torch.ones_like(out))[0][empty] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["one position", "257 window", "left padding", "documents", "softmax, mask"])
def test_no_uninitialised_memory(name, dtype):
    case = BY_NAME[name]
    usual = bits(case, dtype)
    with new_memory_is_nan():
        assert_same_bits(bits(case, dtype), usual)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*EDGES[1:4], DECODING[2], DECODING[7]], ids=by_name)
def test_no_uninitialised_memory_in_odd_sizes(case, dtype, norm):
    usual = bits(case, dtype, norm)
    with new_memory_is_nan():
        assert_same_bits(bits(case, dtype, norm), usual)


# Autograd, tracing, checkpoints.


COMPILED = [SMALL, decoding("decoding"), BY_NAME["cache, window"], BY_NAME["softmax"]]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("case", COMPILED, ids=by_name)
def test_compiles_to_the_same_bits(case, norm):
    assert_compiles_to_the_same_bits("cpu", case, norm)


@pytest.mark.parametrize(
    ("dtype", "norm"),
    [
        (torch.float32, None),
        (torch.bfloat16, "gain"),
        pytest.param(torch.float32, "gain", marks=pytest.mark.slow),
        pytest.param(torch.float32, "no gain", marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, None, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, "no gain", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("case", slow_but_for(OPCHECK, "own keys", "softmax"), ids=by_name)
def test_opcheck(case, dtype, norm):
    assert build.load() is None
    inputs, grad = operator_inputs(case, dtype, norm)
    ops = torch.ops.difftransformer
    torch.library.opcheck(ops.cpu_attention.default, inputs)
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
    saved = ops.cpu_attention(*plain)[1:]
    torch.library.opcheck(ops.cpu_attention_backward.default, (grad, *saved, *plain))


# Refusals.


def test_float64_is_refused_with_the_reason():
    query, key, value, lam, _ = SMALL.inputs(torch.float64)
    with pytest.raises(BackendUnavailable, match="cpu: takes float32, bfloat16 and float16, not float64"):
        op(SMALL, "cpu")(query, key, value, lam)


def test_without_the_kernels_auto_takes_another_and_the_name_says_why(monkeypatch):
    query, key, value, lam, _ = SMALL.inputs()
    usual = op(SMALL, "auto")(query, key, value, lam)
    assert torch.equal(usual, op(SMALL, "cpu")(query, key, value, lam))
    monkeypatch.setattr(build, "_outcome", ["no C++ compiler: 'c++' was not found"])
    other = op(SMALL, "auto")(query, key, value, lam)
    assert torch.equal(other, op(SMALL, "reference")(query, key, value, lam))
    torch.testing.assert_close(other, usual, rtol=1e-5, atol=1e-6)
    for attend in (differential_attention, softmax_attention):
        with pytest.raises(BackendUnavailable, match=r"'cpu' cannot .*cpu: no C\+\+ compiler: 'c\+\+' was not found"):
            attend(*([query, key, value] + [lam] * (attend is differential_attention)), backend="cpu")


@pytest.mark.parametrize("changes", [{"key": 3}, {"value": 3}, {"lam": 3}, {"weight": 3}, {"query": 1}], ids=str)
def test_wrong_shapes_never_reach_the_kernels(changes, monkeypatch):
    def reached(*_):
        raise AssertionError

    monkeypatch.setattr(torch.ops.difftransformer, "cpu_attention", reached)
    inputs = dict(zip(("query", "key", "value", "lam"), SMALL.inputs(), strict=False)) | {"weight": torch.ones(SMALL.E)}
    for name, cut in changes.items():
        inputs[name] = inputs[name][..., :cut]
    with pytest.raises(DiffTransformerError):
        normed_differential_attention(*inputs.values(), eps=1e-5, backend="cpu")


# The other instruction sets.

WITH_EMULATOR = """
import ctypes, sys
from difftransformer.ops import build, processor
wanted, emulator, *arguments = sys.argv[1:]
if emulator:
    emulator = ctypes.CDLL(emulator)
    emulator.tile_emulator_count.restype = ctypes.c_uint64
    found = processor.available()
    processor.available = lambda: (*found, wanted)
"""
PROGRAM = (
    WITH_EMULATOR
    + """
import pytest
assert processor.instruction_set() == wanted and build.load() is None
before = emulator and emulator.tile_emulator_count()
status = pytest.main(arguments)
assert not emulator or emulator.tile_emulator_count() > 100 * before  # the tests went by tiles, and not the check alone
sys.exit(status)
"""
)
WRONG = (
    WITH_EMULATOR
    + """
import logging, torch
logging.basicConfig()
ctypes.c_int.in_dll(emulator, "tile_emulator_is_wrong").value = 1
assert build.load() is None
counted = emulator.tile_emulator_count()
assert counted > 0
x = torch.randn(1, 2, 300, 64).bfloat16()
from difftransformer.ops import differential_attention
ours, plain = (differential_attention(x, x, x, 0.5, is_causal=True, backend=name) for name in ("cpu", "reference"))
torch.testing.assert_close(ours, plain, rtol=2e-2, atol=1e-2)
assert emulator.tile_emulator_count() == counted
"""
)
FILES = ("test_cpu.py", "test_attention.py", "test_normed_attention.py")


@pytest.fixture(scope="session")
def tile_emulator(tmp_path_factory):
    """A library that does what AMX instructions do, in place of a processor that has none."""
    library = tmp_path_factory.mktemp("emulator") / "tiles.so"
    source = Path(__file__).with_name("tile_emulator.c")
    subprocess.run(["cc", "-std=c11", "-O3", "-shared", "-fPIC", source, "-o", library], check=True)
    return library


@pytest.mark.slow(minutes=2)
@pytest.mark.parametrize("wanted", sorted({*processor.available(), "amx"} - {*processor.available()[-1:]}))
def test_on_other_instruction_sets(wanted, request):
    """All of this file, and what the other files ask of this backend, in a process with other kernels."""
    available = processor.available()
    if "avx512_bf16" not in available and wanted == "amx":
        pytest.skip("the tiled kernels need AVX512_BF16 beside the tiles")
    emulator = "" if wanted in available else str(request.getfixturevalue("tile_emulator"))
    # Under the emulator times say nothing, and processes of their own would be without it.
    which = "cpu and not compile" + (" and not memory_grows and not no_longer" if emulator else "")
    here = Path(__file__).parent
    options = ["-q", "-x", "-m", "not slow and not gpu", "-k", which, "-p", "no:cacheprovider", "-p", "no:faulthandler"]
    # The program imports the package first, so that pytest cannot rewrite the assertions of its dependencies.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    environment = os.environ | {processor.VARIABLE: wanted, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, wanted, emulator, *(str(here / name) for name in FILES), *options],
        env=environment,
        cwd=here.parents[1],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_tiles_that_disagree_are_not_taken(tile_emulator):
    """On a processor that multiplies wrongly one line says so, and the other form takes over."""
    if processor.available()[-1] != "avx512_bf16":
        pytest.skip("the emulator needs AVX512_BF16, and a processor with tiles multiplies them itself")
    environment = os.environ | {processor.VARIABLE: "amx", "PYTHONPATH": os.pathsep.join(sys.path)}
    words = [sys.executable, "-c", WRONG, "amx", str(tile_emulator)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "the kernels for AMX tiles disagree with the others on this machine" in done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [{"T": 70, "S": 70}, {"T": 1, "S": 300}, {"T": 130, "S": 130, "D": 32, "E": 64}])
@pytest.mark.parametrize("factor", [1e4, 1e10, 1e20])
def test_huge_scores(sizes, dtype, factor):
    """Standard normal keys, and queries times a factor: every map is one-hot, and so are the sums of its gradient."""
    case = Case("huge", H=2, G=2, **sizes, kwargs=CAUSAL)
    query, key, value, lam, grad = case.inputs(dtype)
    query = (query.detach() * factor).requires_grad_()
    inputs = (query, key, value, lam)
    found = {}
    for backend in ("cpu", "reference"):
        out = differential_attention(*inputs, is_causal=True, backend=backend)
        found[backend] = [out.detach(), *torch.autograd.grad(out, (value, lam), grad)]
        assert all(x.isfinite().all() for x in torch.autograd.grad(differential_attention(
            *inputs, is_causal=True, backend=backend), (query, key), grad))  # fmt: skip
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, right in zip(found["cpu"], found["reference"], strict=True):
        assert relative_error(ours, right) < tolerance
