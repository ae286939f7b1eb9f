"""The Triton kernels on a GPU, against float64 on the same device; one of each test in Triton's interpreter, so that it works.

FSDP2 is not here: it gathers the weights of modules, and the operators get plain tensors (`tests/model/test_fsdp.py`).
"""

import dataclasses
import itertools
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from difftransformer.ops.problem import Restrictions, allowed_keys
from tests.support import calls
from tests.support.calls import assert_same_bits, errors_of, tensors
from tests.support.cases import (
    CAUSAL,
    assert_as_good_as_eager,
    assert_close,
    eager,
    ints,
    needs_interpreter,
    new_memory_is_nan,
    norm_by_hand,
    normed_op,
    op,
    overflow_is_fine,
    random_mask,
)
from tests.support.oracle import Case, output_and_gradients, relative_error
from tests.support.tiny_models import tiny, tokens

configs = pytest.importorskip("difftransformer.ops.triton_kernels.configs")

pytestmark = overflow_is_fine

LOW = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *LOW)
FORMS = ("both_maps", "split", "atomic")  # a forward without gradients, two backwards
NORM = (False, True)
MARKS = {"cuda": [pytest.mark.gpu], "cpu": [needs_interpreter, pytest.mark.slow]}


def on_both(names, interpreted, dtypes=DTYPES, **more):
    """Cases by name and dtype, and with values of more arguments: all on a GPU, and the last of one in the interpreter.

    In fp16 there, since it rounds to bf16 towards zero.
    """
    rows = [("cuda", *row) for row in itertools.product(names, dtypes, *more.values())]
    dtype = torch.float16 if torch.float16 in dtypes else torch.float32
    rows.append(("cpu", interpreted, dtype, *(values[-1] for values in more.values())))
    params = [pytest.param(*row, marks=MARKS[row[0]]) for row in rows]
    return pytest.mark.parametrize(("device", "name", "dtype", *more), params, indirect=["device"])


@pytest.fixture(params=[pytest.param(name, marks=marks) for name, marks in MARKS.items()])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return "cuda"


@pytest.fixture
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def moved(case, device):
    """The case with its tensors on a device."""

    def there(x):
        return x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x

    inputs = case.inputs
    changed = dataclasses.replace(case, kwargs={name: there(x) for name, x in case.kwargs.items()})
    changed.inputs = lambda *arguments, **how: tuple(there(x) for x in inputs(*arguments, **how))
    return changed


def eager_there(case):
    """Eager PyTorch on the device of a moved case, with a mask that is not made in a loop."""
    tensor = case.inputs(requires_grad=False)[0]
    allowed = allowed_keys(Restrictions(**case.kwargs), case.T, case.S, tensor.device)
    if allowed is None:
        allowed = torch.ones(1, 1, case.T, case.S, dtype=torch.bool, device=tensor.device)
    return eager(case, allowed)


def on_cpu(results):
    return {name: x.cpu() for name, x in results.items()}


def assert_as_good_there(case, device, dtype, norm=False, gradients=True):
    """Against float64 on the device: fp32 to 5e-5 of the largest number, below to twice the error of eager PyTorch."""
    case = moved(case, device)
    if norm:

        def compute(backend, dtype):
            function = norm_by_hand(eager_there(case)) if backend == "eager" else normed_op(case, backend)
            weight = torch.linspace(0.5, 1.5, case.E, device=device)
            return output_and_gradients(
                lambda *inputs: function(*inputs, weight.to(inputs[0].dtype)), case, dtype, of=low, gradients=gradients
            )
    else:

        def compute(backend, dtype):
            function = eager_there(case) if backend == "eager" else op(case, backend)
            return output_and_gradients(function, case, dtype, of=low, gradients=gradients)

    low = dtype
    results, exact = compute("triton", dtype), compute("reference", torch.float64)
    if dtype == torch.float32:
        assert_close(results, exact, 1e-4 if norm else 5e-5)
    else:
        assert_as_good_as_eager(results, compute("eager", dtype), exact, dtype)


bits = partial(calls.bits, "triton")


# Calls.


LARGE = {  # from n positions and the width of one map
    "causal": lambda n, width: {},
    "free, cross, odd": lambda n, width: {"T": n - 5, "S": n + 9, "kwargs": {}, "lam": "query"},
    "window": lambda n, width: {"kwargs": CAUSAL | {"window": n // 3}},
    "left padding": lambda n, width: {"kwargs": CAUSAL | {"kv_start": ints(0, n // 2 + 3)}},
    "partly filled": lambda n, width: {"S": 2 * n, "kwargs": CAUSAL | {"kv_lengths": ints(n + 3, 2 * n)}},
    "documents": lambda n, width: {"B": 1, "kwargs": CAUSAL | {"cu_seqlens": ints(0, 5, n // 2 + 1, n)}},
    "mask": lambda n, width: {"B": 1, "kwargs": {"attn_mask": random_mask(n, n)}},
    "shared key": lambda n, width: {"shared_key": True, "H": 8},
    "one group": lambda n, width: {"H": 8, "G": 1, "T": n // 2},
    "softmax": lambda n, width: {"lam": None},
    "padded widths": lambda n, width: {"D": width - width // 8, "E": 2 * width + width // 8},
    "D = 128": lambda n, width: {"D": 2 * width, "E": 4 * width, "B": 1},
    "D = 96": lambda n, width: {"D": 3 * width // 2, "E": 3 * width, "B": 1},
    "D = 32": lambda n, width: {"D": width // 2, "E": width},
    "E = D": lambda n, width: {"E": width},
}


def large(name, device):
    """Shapes that take many tiles of a GPU, or of the interpreter."""
    n, width = (2048, 64) if device == "cuda" else (70, 16)
    base = Case(name, B=2, H=4, G=2, T=n, S=n, D=width, E=2 * width, kwargs=CAUSAL)
    return dataclasses.replace(base, **LARGE[name](n, width))


@on_both(LARGE, "documents", form=FORMS)
def test_large_calls(name, dtype, form, device, take):
    take(form)
    assert_as_good_there(large(name, device), device, dtype, gradients=form != "both_maps")


@on_both(("odd",), "odd", [torch.float32], form=FORMS)
def test_odd_widths(name, dtype, form, device, take):
    take(form)
    case = large("causal", device)
    assert_as_good_there(
        dataclasses.replace(case, D=case.D - 3, E=case.E + 5), device, dtype, gradients=form != "both_maps"
    )


@on_both(("causal", "shared key"), "causal", LOW, form=FORMS)
def test_rows_at_odd_addresses(name, dtype, form, device, take):
    """Views that start at any number and whose rows lie at any distance, the gradient of the output among them."""
    take(form)
    case = moved(large(name, device), device)
    leaves, lam, grad = tensors(case, dtype)

    def odd(x):
        room = x.new_zeros(*x.shape[:3], x.shape[3] + 3)
        room[..., 1:-2] = x.detach()
        return room[..., 1:-2].requires_grad_(x.requires_grad)

    found = []
    for place in (lambda x: x, odd):
        inputs = [place(x) for x in leaves[:3]]
        with torch.set_grad_enabled(form != "both_maps"):
            out = op(case, "triton")(*inputs, lam)
        found.append((out, *(() if form == "both_maps" else torch.autograd.grad(out, inputs, place(grad)))))
    for x, y in zip(*found, strict=True):
        assert relative_error(x, y) <= (2 * torch.finfo(dtype).eps if form == "atomic" else 0)


@on_both(("causal", "left padding", "D = 128"), "left padding", form=FORMS)
def test_large_calls_with_the_norm(name, dtype, form, device, take):
    take(form)
    assert_as_good_there(large(name, device), device, dtype, norm=True, gradients=form != "both_maps")


@on_both((4096, 16384), 128, norm=NORM)
def test_decoding(name, dtype, norm, device):
    """Partly filled caches of so many keys, and left padding; one and two positions."""
    keys = name
    for queries in (1, 2):
        ranges = {"kv_start": ints(0, 3, 5, 7), "kv_lengths": ints(keys, keys // 2 + 1, 9, 7)}
        case = Case("x", B=4, H=8, G=2, T=queries, S=keys, D=64, E=128, kwargs=CAUSAL | ranges)
        case = moved(case, device)
        inputs = case.inputs(dtype, requires_grad=False)[:4]
        weight = torch.linspace(0.5, 1.5, case.E, device=device).to(dtype)
        by_hand = eager_there(case)

        def attend(backend, *inputs, case=case, weight=weight):
            return normed_op(case, backend)(*inputs, weight.to(inputs[0].dtype)) if norm else op(case, backend)(*inputs)

        out, exact = attend("triton", *inputs), attend("reference", *(x.double() for x in inputs))
        if dtype == torch.float32:
            assert relative_error(out, exact) < (1e-4 if norm else 2e-5)
            continue
        by_eager = norm_by_hand(by_hand)(*inputs, weight) if norm else by_hand(*inputs)
        assert_as_good_as_eager({"out": out}, {"out": by_eager}, {"out": exact}, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sign", [1, -1])
def test_logits_around_ten_thousand(sign, form, gpu, take):
    """As exact as the equations in fp32: a score is multiplied and its maximum subtracted in one rounding."""
    take(form)
    case = Case("x", B=2, H=4, G=2, T=70, S=130, D=16, E=32, kwargs={"scale": 1.0})
    query, key, value, lam, grad = (x.to(gpu) for x in case.inputs(requires_grad=False))
    query, key = (2 * query).round(), key.round()
    query[..., :: case.D], key[..., :: case.D] = 100.0, 100.0 * sign
    ours, plain = (
        errors_of(op(case, backend), (query, key, value, lam), grad, op(case, "reference"), form != "both_maps")
        for backend in ("triton", "reference")
    )
    for error, plain_error in zip(ours, plain, strict=True):
        assert error <= 4 * max(plain_error, 1e-6)


# The same bits, and nothing read that was not written.


@on_both(("causal", "one group", "partly filled"), "causal", [torch.float32, torch.bfloat16], norm=NORM)
@pytest.mark.usefixtures("deterministic")
def test_the_same_bits_twice(name, dtype, norm, device):
    """In torch's deterministic mode."""
    case = moved(large(name, device), device)
    first = bits(case, dtype, norm)
    for _ in range(3 if device == "cuda" else 1):
        assert_same_bits(bits(case, dtype, norm), first)


@on_both(("causal", "D = 128"), "causal", [torch.float16])
def test_the_forward_has_no_race(name, dtype, device):
    case = moved(large(name, device), device)
    query, key, value, lam, _ = case.inputs(dtype, requires_grad=False)
    attend = op(case, "triton")
    for some in (query, query[:, :, :1]):
        first = attend(some, key, value, lam)
        for _ in range(20 if device == "cuda" else 1):
            assert torch.equal(attend(some, key, value, lam), first)


@on_both(("one group",), "one group")
def test_a_backward_that_adds_is_close_to_one_that_does_not(name, dtype, device, take):
    case = moved(large(name, device), device)
    take("split")
    one = bits(case, dtype)
    take("atomic")
    for x, y in zip(bits(case, dtype), one, strict=True):
        assert relative_error(x, y) < (1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps)


@on_both(("left padding", "documents", "padded widths"), "left padding", [torch.float16], norm=NORM, form=FORMS)
def test_no_uninitialised_memory(name, dtype, norm, form, device, take):
    take(form)
    case = moved(large(name, device), device)
    with new_memory_is_nan():
        found = bits(case, dtype, norm, gradients=form != "both_maps")
        with torch.no_grad():
            one = op(dataclasses.replace(case, kwargs={}), "triton")(
                *(x[:, :, :1] if i == 0 else x for i, x in enumerate(case.inputs(dtype)[:4]))
            )
    assert all(x.isfinite().all() for x in (*found, one))


# Compiled, captured, checkpointed.


@pytest.mark.filterwarnings("default")
@on_both(("causal",), "causal", [torch.float16], norm=NORM)
def test_compiles_without_a_graph_break(name, dtype, norm, device):
    torch.compiler.reset()
    case = moved(large(name, device), device)
    leaves, lam, grad = tensors(case, dtype)
    weight = torch.ones(case.E, device=device) if norm else None

    def attend(query, key, value, lam):
        inputs = (2 * query, key, value, lam)
        return (normed_op(case, "triton")(*inputs, weight) if norm else op(case, "triton")(*inputs)) + 1

    compiled = torch.compile(attend, fullgraph=True, backend="inductor" if device == "cuda" else "aot_eager")
    outs = [function(*leaves[:3], lam) for function in (compiled, attend)]
    grads = [torch.autograd.grad(out, leaves, grad) for out in outs]
    for x, y in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        assert relative_error(x, y) < 4 * torch.finfo(dtype).eps


def test_activation_checkpointing(device, take):
    take("split")
    case = moved(large("causal", device), device)
    leaves, lam, grad = tensors(case, torch.float16)
    out = checkpoint(op(case, "triton"), *leaves[:3], lam, use_reentrant=False)
    assert_same_bits([out.detach(), *torch.autograd.grad(out, leaves, grad)], bits(case, torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", LOW)
def test_a_decoding_step_in_a_cuda_graph(dtype, gpu):
    """Replayed as the cache fills."""
    kwargs = CAUSAL | {"kv_lengths": ints(100, 7)}
    case = moved(Case("x", B=2, H=8, G=2, T=1, S=4096, D=64, E=128, kwargs=kwargs), gpu)
    inputs = case.inputs(dtype, requires_grad=False)[:4]
    attend = op(case, "triton")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        attend(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(*inputs)
    for lengths in (ints(100, 7), ints(101, 4096), ints(0, 2049)):
        case.kwargs["kv_lengths"].copy_(lengths)
        graph.replay()
        assert torch.equal(out, attend(*inputs))


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_generation(cache, gpu):
    """transformers compiles the steps of a static cache. `tests/model/test_triton_model.py` generates in the interpreter."""
    torch.compiler.reset()
    ids = tokens(2, 9).to(gpu)
    how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 12}
    how["attention_mask"][1, :4] = 0
    if cache == "static":
        how["cache_implementation"] = "static"
    fields = {"hidden_size": 64, "num_hidden_layers": 1, "tie_word_embeddings": False}
    models = (tiny(attn_backend=backend, **fields).to(gpu) for backend in ("triton", "reference"))
    assert torch.equal(*(model.generate(ids, **how) for model in models))


# The choice of a form, several devices.


@pytest.mark.gpu
def test_the_fastest_form_is_found_once(gpu, monkeypatch):
    monkeypatch.setattr(configs, "_fastest", {})
    monkeypatch.delenv("DIFFTRANSFORMER_AUTOTUNE", raising=False)
    case = moved(large("causal", gpu), gpu)
    assert not torch.are_deterministic_algorithms_enabled()
    bits(case, torch.bfloat16)
    chosen = dict(configs._fastest)
    assert {form.name for form in chosen.values()} & {"split", "atomic"}
    monkeypatch.setattr(configs, "do_bench", None)  # not timed again
    bits(case, torch.bfloat16)
    assert configs._fastest == chosen


@pytest.mark.gpu
def test_another_device_than_the_current(gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    case = large("causal", gpu)
    first, second = (bits(moved(case, f"cuda:{index}"), torch.float16) for index in (0, 1))
    assert torch.cuda.current_device() == 0
    for x, y in zip(first, second, strict=True):
        assert y.device.index == 1
        assert relative_error(y.cpu(), x.cpu()) < 2e-3
