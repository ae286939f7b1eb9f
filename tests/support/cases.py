"""Calls that the tests of every backend share, and how their results are held against the equations."""

import contextlib
import ctypes
import dataclasses
import shutil
from functools import cache, partial

import pytest
import torch

from difftransformer.ops import (
    Problem,
    differential_attention,
    normed_differential_attention,
    processor,
    softmax_attention,
)
from tests.support import interpreter, oracle
from tests.support.oracle import Case, output_and_gradients, relative_error

needs_kernels = pytest.mark.skipif(
    not processor.available() or shutil.which("c++") is None, reason="needs AVX2 or NEON and a compiler"
)
# tests/conftest.py asks for it.
needs_interpreter = pytest.mark.skipif(
    not interpreter.IS_USED, reason="needs Triton's interpreter, for which there must be no GPU"
)
if interpreter.IS_USED:
    interpreter.patch_once()
    interpreter.round_to_nearest()
# What a mask then takes away may overflow, and numpy warns of it.
overflow_is_fine = pytest.mark.filterwarnings("ignore:overflow|invalid value|All-NaN:RuntimeWarning")
TRITON = pytest.param("triton", marks=(needs_interpreter, overflow_is_fine))


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def random_mask(*shape, seed=3):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.5


def mask_with_empty_rows():
    mask = random_mask(2, 1, 9, 11)
    mask[0, 0, 3] = mask[1, 0, 0] = mask[1, 0, 8] = False
    return mask


CAUSAL = {"is_causal": True}
CASES = [
    Case("one position", T=1, S=1),
    Case("63 own heads causal", T=63, S=63, kwargs=CAUSAL),
    Case("257 causal", H=1, G=1, T=257, S=257, D=8, E=16, kwargs=CAUSAL),
    Case("257 window", H=2, G=1, T=257, S=257, lam="query", kwargs=CAUSAL | {"window": 70}),
    Case("257 free", H=1, G=1, T=257, S=257, D=4, E=4),
    Case("grouped, cross, narrow value", B=2, H=4, G=2, T=5, S=9, D=8, E=3, lam="query"),
    Case("one group, decoding", B=2, H=4, G=1, T=3, S=12, lam="scalar", kwargs=CAUSAL),
    Case("one query", B=2, H=4, G=2, T=1, S=12, lam="vector", kwargs=CAUSAL),
    Case("more queries than keys", T=9, S=5, lam="query", kwargs=CAUSAL),
    Case("shared key", B=2, H=4, G=2, T=6, S=6, shared_key=True, E=4, kwargs=CAUSAL),
    Case("float lam, scale", T=6, S=6, lam="float", kwargs={"scale": 0.9}),
    Case("window 1", T=6, S=8, kwargs=CAUSAL | {"window": 1}),
    Case("wide window", T=6, S=8, kwargs=CAUSAL | {"window": 100}),
    Case("mask with empty rows", B=2, H=4, G=2, T=9, S=11, lam="query", kwargs={"attn_mask": mask_with_empty_rows()}),
    Case("mask by head", B=2, H=4, G=2, T=9, S=9, kwargs=CAUSAL | {"attn_mask": random_mask(4, 1, 9)}),
    Case("mask of keys", B=2, T=5, S=7, kwargs={"attn_mask": random_mask(7)}),
    Case("left padding", B=3, T=9, S=9, kwargs=CAUSAL | {"kv_start": ints(0, 4, 9)}),
    Case("cache", B=3, H=4, G=2, T=2, S=12, kwargs=CAUSAL | {"kv_lengths": ints(2, 12, 7, dtype=torch.int64)}),
    Case("cache, window", B=3, T=4, S=12, kwargs=CAUSAL | {"kv_lengths": ints(3, 12, 7), "window": 3}),
    Case("both ends, mask", B=3, H=4, T=6, S=10, lam="query",
         kwargs={"kv_start": ints(0, 2, 5), "kv_lengths": ints(10, 8, 5), "attn_mask": random_mask(3, 4, 1, 10)}),
    Case("both ends, causal mask", B=3, T=6, S=10,
         kwargs=CAUSAL | {"kv_start": ints(1, 2, 2), "kv_lengths": ints(10, 4, 4), "attn_mask": random_mask(3, 1, 6, 10)}),
    Case("documents", H=4, G=2, T=21, S=21, kwargs=CAUSAL | {"cu_seqlens": ints(0, 1, 8, 8, 21)}),
    Case("documents, free", T=21, S=21, kwargs={"cu_seqlens": ints(0, 13, 21, dtype=torch.int64)}),
    Case("documents, window, mask", T=15, S=15, kwargs=CAUSAL | {"cu_seqlens": ints(0, 5, 15), "window": 4}),
    Case("long documents", H=1, G=1, T=200, S=200, kwargs=CAUSAL | {"cu_seqlens": ints(0, 140, 200)}),
    Case("softmax", B=2, H=4, G=2, T=9, S=9, E=4, lam=None, kwargs=CAUSAL),
    Case("softmax 130, wide value", H=1, G=1, T=130, S=150, E=9, lam=None, kwargs=CAUSAL | {"window": 90}),
    Case("softmax, mask", B=2, T=9, S=11, lam=None, kwargs={"attn_mask": mask_with_empty_rows()}),
    Case("softmax, cache", B=3, T=2, S=12, lam=None, kwargs=CAUSAL | {"kv_lengths": ints(1, 12, 7)}),
    Case("softmax, documents", T=21, S=21, lam=None, kwargs=CAUSAL | {"cu_seqlens": ints(0, 5, 21)}),
]  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
READS_LENGTHS = [case for case in CASES if {"kv_start", "kv_lengths", "cu_seqlens"} & case.kwargs.keys()]


def by_name(case):
    return case.name


SLOW_TRITON = pytest.param("triton", marks=(*TRITON.marks, pytest.mark.slow))


def with_inputs(case, change):
    """The case with `change(query, key, value, lam, grad)` in place of what is drawn."""
    changed = dataclasses.replace(case)

    def inputs(dtype=torch.float32, seed=None, requires_grad=True):
        found = change(*case.inputs(dtype, seed, requires_grad=False))
        leaves = [x.detach().requires_grad_(requires_grad) if isinstance(x, torch.Tensor) else x for x in found[:4]]
        return *leaves, found[4]

    changed.inputs = inputs
    return changed


def peaked(case, factor, sign):
    """The case with queries `factor` times as large, and lambda of one sign."""
    return with_inputs(case, lambda query, key, value, lam, grad: (query * factor, key, value, lam * sign, grad))


def op(case, backend):
    if case.lam is None:
        return lambda q, k, v, lam: softmax_attention(q, k, v, backend=backend, **case.kwargs)
    return lambda q, k, v, lam: differential_attention(q, k, v, lam, backend=backend, **case.kwargs)


LONG = 150_000  # products of a query and a key, above which the oracle's loop takes too long


@cache
def exact(case, of=torch.float32, norm=False):
    """Output and gradients in float64 of inputs in a dtype: by the oracle, or for long calls by `eager`, without its loop."""
    attend = eager(case) if case.B * case.H * case.T * case.S > LONG else partial(oracle.attention, case)
    if norm:
        return normed_results(norm_by_hand(attend), case, torch.float64, of=of)
    return output_and_gradients(attend, case, torch.float64, of=of)


@cache
def by_eager(case, dtype, norm=False):
    """Output and gradients by eager PyTorch in a dtype."""
    if norm:
        return normed_results(norm_by_hand(eager(case)), case, dtype)
    return output_and_gradients(eager(case), case, dtype)


def assert_close(results, reference, tolerance):
    assert results.keys() == reference.keys()
    errors = {name: relative_error(x, reference[name]) for name, x in results.items()}
    assert all(error < tolerance for error in errors.values()), errors


def eager(case, allowed=None):
    """The equations with every step, maps included, in the dtype of the inputs; `allowed` where the mask is at hand."""
    if allowed is None:
        allowed = oracle.dense_mask(case)

    def one_map(q, k):
        repeated = k.repeat_interleave(case.H // case.G, 1)
        scores = (q @ repeated.mT) * oracle.scale_of(case)
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return scores.softmax(-1).masked_fill(~allowed, 0)

    def function(q, k, v, lam):
        v = v.repeat_interleave(case.H // case.G, 1)
        if case.lam is None:
            return one_map(q, k) @ v
        k1, k2 = (k, k) if case.shared_key else k.chunk(2, -1)
        q1, q2 = q.chunk(2, -1)
        lam = torch.as_tensor(lam, dtype=q.dtype)
        lam = lam.unsqueeze(-1) if lam.dim() == 3 else lam.view(1, -1, 1, 1)
        return (one_map(q1, k1) - lam * one_map(q2, k2)) @ v

    return function


def half_unit_in_last_place(largest, dtype):
    """Of a number of that size."""
    limits = torch.finfo(dtype)
    return limits.eps * max(2.0 ** torch.tensor(largest).log2().floor().item(), limits.smallest_normal) / 2


def assert_as_good_as_eager(results, eager_results, reference, dtype, times=2):
    """At most twice the error of eager PyTorch in the same dtype, or twice half a unit in the last place.

    A gradient that is zero everywhere, as with one key, may keep what is left of terms around 1 that cancel.
    """
    assert results.keys() == reference.keys()
    for part, exact in reference.items():
        error, eager_error = ((x[part].double() - exact).abs().max().item() for x in (results, eager_results))
        largest = exact.abs().max().item()
        allowed = times * max(eager_error, half_unit_in_last_place(largest, dtype)) if largest > 1e-12 else 1e-5
        assert error <= allowed, (part, error, allowed)


# With the headwise norm.

EPS, FACTOR = 1e-5, 0.37


def normed_op(case, backend, eps=EPS):
    """A function of query, key, value, lam and weight."""
    return lambda *inputs: normed_differential_attention(
        *inputs, eps=eps, factor=FACTOR, backend=backend, **case.kwargs
    )


def norm_by_hand(attend, eps=EPS):
    return lambda *inputs: oracle.rms_norm(attend(*inputs[:4]), inputs[4], eps, FACTOR)


def normed_results(function, case, dtype, *, of=None, gain=True, gradients=True):
    """Output and gradients of `function(query, key, value, lam, weight)`, that of the weight included."""
    weight = None
    if gain:
        drawn = 0.5 + torch.rand(case.E, generator=torch.Generator().manual_seed(7))
        weight = drawn.to(of or dtype).to(dtype).requires_grad_()
    results = output_and_gradients(lambda *inputs: function(*inputs, weight), case, dtype, of=of, gradients=gradients)
    return results | ({"weight": weight.grad} if gain and gradients else {})


M_PERTURB = -6  # of glibc's malloc.h


@contextlib.contextmanager
def new_memory_is_nan():
    """New memory is NaN: of tensors, which torch fills in this mode, and of the C++ kernels, which malloc does on glibc.

    torch's stable interface gives the kernels tensors that its mode does not fill, unless by calls that take microseconds.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        # The lowest byte of 0x100 ^ 0xff; zero turns it off.
        mallopt(M_PERTURB, 0x100)
        assert torch.empty(1000).isnan().all()
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
        if mallopt is not None:
            mallopt(M_PERTURB, 0)


@contextlib.contextmanager
def threads(count):
    """Some number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# What backends choose by.

SIZES = {"batch": 1, "heads": 2, "groups": 2, "queries": 256, "keys": 256, "width": 32, "value_width": 64}
PROBLEM = Problem(op="differential", device_type="cpu", dtype=torch.float32, is_causal=True, **SIZES)


def problem(length=256, **changes):
    """Return `PROBLEM` with as many queries and keys, and other changes."""
    return dataclasses.replace(PROBLEM, queries=length, keys=length, **changes)
