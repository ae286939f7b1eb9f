"""Calls drawn at random, layouts of memory, and bits: what tests of kernels share beside the table of backends."""

import dataclasses

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.support import oracle
from tests.support.cases import CAUSAL, assert_as_good_as_eager, eager, ints, normed_op, op, random_mask, with_inputs
from tests.support.oracle import Case, output_and_gradients, relative_error

quick = settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def tensors(case, dtype=torch.float32):
    """The leaves of a call and its output's gradient."""
    query, key, value, lam, grad = case.inputs(dtype)
    return [x for x in (query, key, value, lam) if isinstance(x, torch.Tensor)], lam, grad


def bits(backend, case, dtype=torch.float32, norm=False, gradients=True):
    """Output and gradients, with norm also that of its weight; without gradients, the output of a call that wants none."""
    leaves, lam, grad = tensors(case, dtype)
    norm = norm and case.lam is not None
    weight = torch.linspace(0.5, 1.5, case.E, device=grad.device).requires_grad_()
    with torch.set_grad_enabled(gradients):
        out = (normed_op if norm else op)(case, backend)(*leaves[:3], lam, *[weight] * norm)
    if not gradients:
        return [out]
    return [out.detach(), *torch.autograd.grad(out, leaves + [weight] * norm, grad)]


def assert_same_bits(a, b):
    assert len(a) == len(b)
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        assert x.isfinite().all(), i
        assert torch.equal(x, y), i


# Any call.


@st.composite
def calls(draw, *, batch=3, groups=3, heads_per_group=3, positions=30):
    """One call of any shape up to some sizes and with any restrictions that go together."""
    groups, per_group = draw(st.integers(1, groups)), draw(st.integers(1, heads_per_group))
    batch, queries = draw(st.integers(1, batch)), draw(st.integers(1, positions))
    keys = draw(st.just(queries) | st.integers(1, positions))
    lam = draw(st.sampled_from([None, "float", "scalar", "vector", "head", "query"]))
    width = draw(st.integers(1, 80))
    kwargs = {"scale": draw(st.none() | st.sampled_from([0.3, 1.5, -0.7]).map(lambda part: part * width**-0.5))}
    if draw(st.booleans()):
        kwargs["is_causal"] = True
        kwargs["window"] = draw(st.none() | st.integers(1, positions))
    number = st.integers(0, keys)
    what = draw(st.sampled_from(["nothing", "ranges", "documents"]))
    if what == "documents":
        batch, keys = 1, queries
        cuts = draw(st.lists(st.integers(0, queries), max_size=4))
        kwargs["cu_seqlens"] = ints(0, *sorted(cuts), queries)
    elif what == "ranges":
        for name in draw(st.sampled_from([["kv_start"], ["kv_lengths"], ["kv_start", "kv_lengths"]])):
            kwargs[name] = ints(*draw(st.lists(number, min_size=batch, max_size=batch)))
    heads = groups * per_group
    if draw(st.integers(0, 3)) == 0:
        shape = [draw(st.sampled_from([1, size])) for size in (batch, heads, queries, keys)]
        kwargs["attn_mask"] = random_mask(*shape[draw(st.integers(0, 3)) :])
    sizes = {"B": batch, "H": heads, "G": groups, "T": queries, "S": keys, "D": width, "E": draw(st.integers(1, 140))}
    return Case("drawn", **sizes, shared_key=lam is not None and draw(st.booleans()), lam=lam, kwargs=kwargs)


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


def laid_out(x, how):
    """The same numbers in another memory layout."""
    if how == "transposed":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "sliced":  # rows and start that pairs of bf16 do not divide
        wide = F.pad(x, (1, 2))
        return wide[..., 1:-2]
    if how == "columns":
        return x.mT.contiguous().mT
    return x


layouts = st.tuples(*[st.sampled_from(("plain", "transposed", "sliced", "columns"))] * 3)


def in_layouts(backend, case, how):
    """The call with query, key and value laid out as `how` says, and the output's gradient as query."""
    attend = backend.attend(case)

    def function(query, key, value, lam):
        moved = [laid_out(x, one) for x, one in zip((query, key, value), how, strict=True)]
        return laid_out(attend(*moved, lam), how[0])

    return function


def assert_any_call_as_good(backend, case, how, dtype, draws=4):
    """Several draws of the numbers, so that eager PyTorch is not right by luck where there is one number or few."""
    results, eager_results, exact = [], [], []
    for seed in range(draws):
        seeded = dataclasses.replace(case, seed=seed)
        results.append(output_and_gradients(in_layouts(backend, case, how), seeded, dtype))
        eager_results.append(output_and_gradients(eager(case), seeded, dtype))
        exact.append(
            output_and_gradients(lambda *inputs: oracle.attention(case, *inputs), seeded, torch.float64, of=dtype)
        )

    def joined(many):
        return {name: torch.stack([one[name] for one in many]) for name in many[0]}

    assert_as_good_as_eager(joined(results), joined(eager_results), joined(exact), dtype)


# What is read, and what is not.

UNSEEN = {
    "start": Case("x", B=3, H=2, G=1, T=70, S=150, kwargs={"kv_start": ints(4, 129, 150)}),
    "odd start": Case("x", B=3, H=2, G=1, T=70, S=150, kwargs=CAUSAL | {"kv_start": ints(5, 131, 1)}),
    "length": Case("x", B=3, H=2, G=1, T=9, S=150, kwargs=CAUSAL | {"kv_lengths": ints(100, 131, 0)}),
    "both": Case("x", B=3, T=9, S=150, kwargs={"kv_start": ints(3, 2, 9), "kv_lengths": ints(99, 140, 7)}),
    "softmax": Case("x", B=2, T=9, S=150, lam=None, kwargs={"kv_start": ints(3, 2), "kv_lengths": ints(99, 140)}),
    "decoding": Case("x", B=3, T=1, S=300, kwargs={"kv_start": ints(3, 2, 290), "kv_lengths": ints(99, 280, 300)}),
    "odd width": Case("x", B=2, T=9, S=150, D=5, E=7, kwargs={"kv_start": ints(3, 2), "kv_lengths": ints(99, 140)}),
}


def unseen_keys(case):
    """(B, S), those outside kv_start and kv_lengths."""
    start, length = (case.kwargs.get(limit) for limit in ("kv_start", "kv_lengths"))
    position = torch.arange(case.S).expand(case.B, -1)
    return (position < (0 if start is None else start[:, None])) | (
        position >= (case.S if length is None else length[:, None])
    )


def with_unseen(case, fill):
    """The case with `fill` in the keys and values that nobody may see."""
    unseen = unseen_keys(case)

    def fill_in(x):
        x = x.detach().clone()
        x.transpose(1, 2)[unseen] = fill
        return x

    return with_inputs(case, lambda query, key, value, *rest: (query, fill_in(key), fill_in(value), *rest))


def assert_unseen_keys_are_not_read(case, bits_of):
    """NaN or infinity there gives what zeros give, and such keys have no gradient; `bits_of(case)` is as `bits`."""
    zeros = bits_of(with_unseen(case, 0.0))
    for fill in (torch.nan, torch.inf):
        assert_same_bits(bits_of(with_unseen(case, fill)), zeros)
    for grad in zeros[2:4]:  # none of a call without gradients
        assert (grad.transpose(1, 2)[unseen_keys(case)] == 0).all()


def errors_of(attend, leaves, grad, reference, gradients=True):
    """Of the output and the gradients of `attend(*leaves)`, to those of `reference` in float64."""
    results = {}
    for function, dtype in ((attend, torch.float32), (reference, torch.float64)):
        cast = [x.detach().to(dtype).requires_grad_() for x in leaves]
        with torch.set_grad_enabled(gradients):
            out = function(*cast)
        results[dtype] = [out, *(torch.autograd.grad(out, cast, grad.to(dtype)) if gradients else ())]
    return [relative_error(x, exact) for x, exact in zip(*results.values(), strict=True)]


# Operators, tracing.

OPCHECK = [
    Case("own keys", B=2, H=2, G=1, T=3, S=5, lam="query", kwargs=CAUSAL | {"window": 4}),
    Case("shared key", T=6, S=6, shared_key=True, kwargs={"kv_start": ints(2)}),
    Case("lengths", B=2, H=1, G=1, T=3, S=9, lam="scalar", kwargs={"kv_lengths": ints(2, 9), "scale": 0.3}),
    Case("softmax", H=1, G=1, T=3, S=5, lam=None, kwargs={"attn_mask": random_mask(3, 5)}),
    Case("documents", T=9, S=9, kwargs={"cu_seqlens": ints(0, 3, 9)}),
    Case("decoding", H=1, G=1, T=2, S=140, kwargs=CAUSAL),
    *(Case(f"{name} = 0", D=8, E=6, kwargs=CAUSAL, **{name: 0}) for name in "TS"),
]


def operator_inputs(case, dtype, norm):
    """Arguments of `difftransformer::BACKEND_attention`, and a gradient of its output; norm is None, "gain" or "no gain"."""
    query, key, value, lam, grad = case.inputs(dtype)
    names = ("attn_mask", "is_causal", "window", "kv_start", "kv_lengths", "cu_seqlens")
    restrictions = [({"is_causal": False} | case.kwargs).get(name) for name in names]
    if lam is not None and lam.dim() < 3:
        lam = lam.detach().view(1, -1, 1).requires_grad_()
    weight = torch.ones(case.E, dtype=dtype, requires_grad=True) if norm == "gain" else None
    rest = [case.kwargs.get("scale", 0.5), weight, None if norm is None else 1e-5, 0.4]
    return (query, key, value, lam, *restrictions, *rest), grad
