"""The fused C++ kernels' own: the same bits on any threads, peaked scores, denormal numbers, other instruction sets.

`test_conformance.py` has their numbers.
"""

import dataclasses
import os
import subprocess
import sys
import time
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from difftransformer.errors import BackendUnavailable, DiffTransformerError
from difftransformer.ops import (
    build,
    differential_attention,
    normed_differential_attention,
    processor,
    softmax_attention,
)
from tests.support import calls, oracle
from tests.support.calls import assert_same_bits, errors_of
from tests.support.cases import CAUSAL, EPS, FACTOR, by_name, ints, needs_kernels, normed_op, op, threads
from tests.support.oracle import Case

pytestmark = needs_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
bits = partial(calls.bits, "cpu")
SMALL = Case("x", B=2, H=4, G=2, T=9, S=11, D=8, E=6, lam="head", kwargs=CAUSAL)
DECODING = Case("decoding", B=2, H=8, G=2, T=1, S=300, D=17, E=19, lam="query", kwargs=CAUSAL)


# Scores.


@pytest.mark.skipif(
    os.environ.get("DIFFTRANSFORMER_SANITIZE_KERNELS") == "1",
    reason="-O1 with sanitizers rounds scores before it subtracts",
)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("case", [SMALL, DECODING], ids=by_name)
def test_logits_around_ten_thousand(case, sign):
    """As exact as the equations in fp32; whole numbers, so that the logits themselves are exact.

    The first number of a query's gradient is 100 times a sum that is zero, where every order of addition rounds otherwise. Its
    bound is the error of PyTorch's fused kernel.
    """
    case = dataclasses.replace(case, D=8, E=8, kwargs={"scale": 1.0})
    query, key, value, lam, grad = case.inputs(requires_grad=False)
    query, key = (2 * query).round(), key.round()
    query[..., :: case.D], key[..., :: case.D] = 100.0, 100.0 * sign

    def fused(query, key, value, lam):
        maps = zip(query.chunk(2, -1), key.chunk(2, -1), strict=True)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            first, second = (F.scaled_dot_product_attention(q, k, value, scale=1.0, enable_gqa=True) for q, k in maps)
        return first - (lam if lam.dim() == 3 else lam.unsqueeze(-1)).unsqueeze(-1) * second

    ours, plain, torchs = (
        errors_of(attend, (query, key, value, lam), grad, op(case, "reference"))
        for attend in (op(case, "cpu"), op(case, "reference"), fused)
    )
    bounds = [4 * max(error, 1e-6) for error in plain]
    bounds[1] = max(bounds[1], torchs[1])
    for error, bound in zip(ours, bounds, strict=True):
        assert error <= bound


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


@pytest.mark.parametrize("queries", [1, 4, 16])
def test_sums_over_many_keys_are_as_exact_as_torchs(queries):
    """By the rule of low precision, in fp32: at most twice the error of eager PyTorch, or 16 units of the largest number.

    Scores and their powers cost these units. Added one after the other, 16,384 keys cost 10 times as much, where PyTorch
    adds sums of parts.
    """
    case = Case("long", H=2, G=2, T=queries, S=16_384, D=64, E=64, lam="scalar", kwargs=CAUSAL)
    inputs = case.inputs()

    def results(attend, dtype):
        *operands, grad = (one.detach().to(dtype).requires_grad_() for one in inputs)
        out = attend(*operands)
        return [out, *torch.autograd.grad(out, operands[:3], grad)]

    def eager(query, key, value, lam):
        seen = torch.ones(queries, case.S, dtype=torch.bool).tril(case.S - queries)
        maps = [
            (q @ k.mT * case.D**-0.5).masked_fill(~seen, -torch.inf).softmax(-1)
            for q, k in zip(query.chunk(2, -1), key.chunk(2, -1), strict=True)
        ]
        return (maps[0] - lam * maps[1]) @ value

    right = results(eager, torch.float64)
    found, torchs = results(op(case, "cpu"), torch.float32), results(eager, torch.float32)
    for own, theirs, exact in zip(found, torchs, right, strict=True):
        error, allowed = ((one - exact).abs().max() / exact.abs().max() for one in (own, theirs))
        assert error <= max(2 * allowed, 16 * torch.finfo(torch.float32).eps)


def test_the_kernels_round_once():
    """The head is normalised before it is rounded: the fused pass differs from the fp32 result by that rounding alone."""
    case = Case("x", B=2, H=4, T=65, S=65, D=16, E=32, kwargs={"is_causal": True})
    query, key, value, lam, _ = case.inputs(torch.float16, requires_grad=False)
    wide = normed_op(case, "cpu")(query.float(), key.float(), value.float(), lam, None)
    fused = normed_op(case, "cpu")(query, key, value, lam, None)
    assert torch.equal(fused, wide.half())
    apart = oracle.rms_norm(differential_attention(query, key, value, lam, **case.kwargs).float(), None, EPS, FACTOR)
    assert not torch.equal(apart.half(), wide.half())


def seconds_of(function, calls=7):
    """Processor time of the fastest of some calls; waiting for other processes does not count."""
    taken = []
    for _ in range(calls):
        start = time.process_time()
        function()
        taken.append(time.process_time() - start)
    return min(taken)


@pytest.mark.parametrize("dtype", DTYPES)
def test_peaked_scores_take_no_longer(dtype):
    """Most exponentials are below fp32's smallest normal number; not flushed, some processors took 60 times as long."""
    case = Case("x", H=2, G=2, T=512, S=512, D=64, E=64, kwargs=CAUSAL)
    query, key, value, lam, grad = case.inputs(dtype, requires_grad=False)

    def step(query):
        leaves = [x.requires_grad_() for x in (query, key, value)]
        torch.autograd.grad(op(case, "cpu")(*leaves, lam), leaves, grad)

    plain, peaked = (partial(step, query * times) for times in (1, 60))
    plain()
    assert min(seconds_of(peaked) / seconds_of(plain) for _ in range(3)) <= 1.5


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
    "larger than a cache": Case("x", H=2, G=1, T=200, S=920, D=96, E=192, lam="query", kwargs=CAUSAL),
    "larger, window": Case("x", H=2, G=1, T=450, S=920, D=96, E=192, kwargs=CAUSAL | {"window": 300}),
    "larger, softmax": Case("x", T=130, S=1850, D=97, E=290, lam=None),
}


@pytest.mark.parametrize(
    ("name", "dtype", "norm"),
    [
        *((name, torch.float32, False) for name in SAME_BITS),
        *((name, torch.bfloat16, True) for name in ("window", "two groups", "decoding", "larger than a cache")),
        *((name, torch.float16, False) for name in ("one group", "softmax", "documents")),
    ],
)
def test_the_same_bits_on_any_threads(name, dtype, norm):
    case = SAME_BITS[name]
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


@pytest.mark.parametrize("case", [SAME_BITS["one head, causal"], DECODING], ids=by_name)
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


# Refusals.


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
wanted, emulator, wheel, *arguments = sys.argv[1:]
assert str(build.PREBUILT).startswith(wheel)
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
assert build.open_library().path == build.PREBUILT / f"{wanted}.so"
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
FILES = ("test_cpu.py", "test_conformance.py", "test_contract.py")


@pytest.fixture(scope="session")
def tile_emulator(tmp_path_factory):
    """A library that does what AMX instructions do, in place of a processor that has none."""
    library = tmp_path_factory.mktemp("emulator") / "tiles.so"
    source = Path(__file__).with_name("tile_emulator.c")
    subprocess.run(["cc", "-std=c11", "-O3", "-shared", "-fPIC", source, "-o", library], check=True)
    return library


@pytest.fixture(scope="session")
def wheel(distribution, tmp_path_factory):
    """A folder with the packages of the wheel and its kernels."""
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(next(distribution.glob("*.whl"))) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.slow(minutes=2)
@pytest.mark.parametrize("wanted", sorted({*processor.available(), "amx"} - {*processor.available()[-1:]}))
def test_on_other_instruction_sets(wanted, wheel, request):
    """All of this file, and what the other files ask of this backend, in processes with other kernels of the wheel."""
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
    environment = os.environ | {processor.VARIABLE: wanted, "PYTHONPATH": os.pathsep.join([str(wheel), *sys.path])}
    words = [wanted, emulator, str(wheel), *(str(here / name) for name in FILES), *options]
    how = {"env": environment, "cwd": here.parents[1], "capture_output": True, "text": True, "timeout": 900}
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], **how)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_tiles_that_disagree_are_not_taken(tile_emulator, wheel):
    """On a processor that multiplies wrongly one line says so, and the other form takes over."""
    if processor.available()[-1] != "avx512_bf16":
        pytest.skip("the emulator needs AVX512_BF16, and a processor with tiles multiplies them itself")
    environment = os.environ | {processor.VARIABLE: "amx", "PYTHONPATH": os.pathsep.join([str(wheel), *sys.path])}
    words = [sys.executable, "-c", WRONG, "amx", str(tile_emulator), str(wheel)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "the kernels for AMX tiles disagree with the others on this machine" in done.stderr
