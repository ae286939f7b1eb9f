"""The Triton backend under autograd, tracing and checkpoints; what it refuses; which form of a pass it chooses."""

import dataclasses
import itertools
import os
import subprocess
import sys
from functools import partial

import pytest
import torch

from difftransformer.errors import BackendUnavailable
from difftransformer.ops import triton as triton_backend
from tests.support import fused_calls
from tests.support.cases import (
    BY_NAME,
    CAUSAL,
    assert_close,
    by_name,
    ints,
    needs_interpreter,
    op,
    overflow_is_fine,
    random_mask,
    slow_but_for,
)
from tests.support.fused_calls import (
    OPCHECK,
    assert_compiles_to_the_same_bits,
    operator_inputs,
)
from tests.support.oracle import Case, relative_error

configs = pytest.importorskip("difftransformer.ops.triton_kernels.configs")
launch = pytest.importorskip("difftransformer.ops.triton_kernels.launch")

pytestmark = [needs_interpreter, overflow_is_fine]

bits = partial(fused_calls.bits, "triton")
SMALL = Case("x", B=2, H=2, G=1, T=9, S=11, D=8, E=6, lam="head", kwargs=CAUSAL)


def decoding(name, **fields):
    """More keys than a tile for each of the interpreter's three shares."""
    return Case(name, **({"B": 2, "H": 4, "G": 2, "T": 1, "S": 150, "D": 17, "E": 19, "kwargs": CAUSAL} | fields))


# Autograd, tracing, checkpoints.


@pytest.mark.parametrize("norm", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("case", slow_but_for([SMALL, BY_NAME["cache, window"], BY_NAME["softmax"]], "x"), ids=by_name)
def test_compiles_to_the_same_bits(case, norm):
    if norm and case.lam is None:
        return
    assert_compiles_to_the_same_bits("triton", case, norm)


def test_decoding_compiles_to_the_same_bits():
    torch.compiler.reset()
    case = decoding("cache", H=2, kwargs=CAUSAL | {"kv_lengths": ints(40, 150)})
    inputs = case.inputs(requires_grad=False)[:4]
    attend = op(case, "triton")
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), attend(*inputs))
    case.kwargs["kv_lengths"].copy_(ints(97, 3))
    assert torch.equal(compiled(*inputs), attend(*inputs))


OP_CASES = [
    Case("own keys", H=2, G=1, T=3, S=5, lam="query", kwargs=CAUSAL | {"window": 4}),
    Case("no lam", H=1, G=1, T=3, S=5, lam=None, kwargs={"attn_mask": random_mask(3, 5)}),
    *OPCHECK,
]


@pytest.mark.parametrize("norm", ["gain", *(pytest.param(norm, marks=pytest.mark.slow) for norm in (None, "no gain"))])
@pytest.mark.parametrize("case", [*OP_CASES[:2], *slow_but_for(OPCHECK)], ids=by_name)
def test_opcheck(case, norm):
    dtype = torch.float16 if norm == "gain" else torch.float32
    inputs, grad = operator_inputs(case, dtype, norm)
    ops = torch.ops.difftransformer
    torch.library.opcheck(ops.triton_attention.default, (*inputs, True))
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
    torch.library.opcheck(ops.triton_attention.default, (*plain, False))
    saved = ops.triton_attention(*plain, True)
    torch.library.opcheck(ops.triton_attention_backward.default, (grad, *saved, *plain, True))


@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("sizes", [{"T": 0}, {"S": 0}], ids=str)
def test_opcheck_of_sizes_of_zero(sizes, save):
    inputs, grad = operator_inputs(dataclasses.replace(SMALL, B=1, H=2, **sizes), torch.float32, "gain")
    plain = [x.detach() if isinstance(x, torch.Tensor) else x for x in inputs]
    ops = torch.ops.difftransformer
    torch.library.opcheck(ops.triton_attention.default, (*plain, save))
    saved = ops.triton_attention(*plain, save)
    torch.library.opcheck(ops.triton_attention_backward.default, (grad, *saved, *plain, save))


# Refusals.


@pytest.mark.parametrize(
    ("case", "dtype", "words"),
    [
        (SMALL, torch.float64, "triton: takes bfloat16, float16 and float32, not float64"),
        (dataclasses.replace(SMALL, D=129), torch.float32, "triton: takes D up to 128 and E up to 256, not D = 129"),
        (dataclasses.replace(SMALL, E=257), torch.float32, "triton: takes D up to 128 and E up to 256, .* and E = 257"),
    ],
)
def test_refusals_say_why(case, dtype, words):
    with pytest.raises(BackendUnavailable, match=words):
        op(case, "triton")(*case.inputs(dtype)[:4])


WITHOUT = """
import sys, torch
sys.modules.update({name: None for name in sys.argv[1:]})
from difftransformer.errors import BackendUnavailable
from difftransformer.ops import explain, softmax_attention
x = torch.zeros(1, 1, 4, 8)
try:
    softmax_attention(x, x, x, backend="triton")
except BackendUnavailable as error:
    print(error)
print(softmax_attention(x, x, x).shape)
"""


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ([], "triton: runs on CUDA devices, not on cpu (with TRITON_INTERPRET=1 set before Python starts, on the CPU)"),
        pytest.param(
            ["triton"],
            "triton: needs the triton package: pip install 'difftransformer[gpu]'",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["no interpreter", "no package"],
)
def test_where_it_cannot_run(missing, words):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *missing],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert words in done.stdout
    assert "torch.Size([1, 1, 4, 8])" in done.stdout


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    reason = triton_backend._reason.__wrapped__("cuda")
    assert reason == "needs a GPU of compute capability 8.0 or newer, this is 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert triton_backend._reason.__wrapped__("cuda") is None
    assert "not on xpu" in triton_backend._reason.__wrapped__("xpu")


# The choice of a form.

SLOW, FAST = (configs.Form(name, (configs.Tiling(16, 16, 4, 1),)) for name in ("slow", "fast"))


@pytest.fixture
def timed(monkeypatch):
    """As on a GPU, with a clock that says how long each form takes; returns what it timed."""
    timed = []

    def do_bench(run, **_):
        timed.append(run())
        return {"slow": 2.0, "fast": 1.0}[timed[-1].name]

    monkeypatch.setattr(configs, "INTERPRETED", False)
    monkeypatch.setattr(configs, "do_bench", do_bench)
    monkeypatch.setattr(configs, "_fastest", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delenv("DIFFTRANSFORMER_AUTOTUNE", raising=False)
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield timed
    torch.use_deterministic_algorithms(deterministic)


def choose(key="key", forms=(SLOW, FAST)):
    return configs.choose(forms, key, lambda form: form)


def test_the_fastest_form_is_timed_once_for_each_key(timed):
    assert [choose("a"), choose("a"), choose("b")] == [FAST] * 3
    assert timed == [SLOW, FAST] * 2
    assert choose("c", (SLOW,)) is SLOW
    assert len(timed) == 4


@pytest.mark.parametrize("why", ["deterministic", "environment", "interpreted", "capturing"])
def test_the_first_form_is_taken_where_no_clock_may_decide(why, timed, monkeypatch):
    if why == "deterministic":
        torch.use_deterministic_algorithms(True)
    elif why == "environment":
        monkeypatch.setenv("DIFFTRANSFORMER_AUTOTUNE", "0")
    elif why == "interpreted":
        monkeypatch.setattr(configs, "INTERPRETED", True)
    else:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose() is SLOW
    assert timed == []
    monkeypatch.undo()


def test_a_form_that_was_timed_is_taken_while_a_graph_is_captured(timed, monkeypatch):
    choose()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose() is FAST


def test_what_is_timed_is_run(monkeypatch):
    """`choose` is given a way to run each form, which gives the same as the form that is taken."""
    outs = []

    def run_all(forms, key, run):
        hash(key)
        outs.append([run(form) for form in forms])
        return forms[0]

    monkeypatch.setattr(launch, "choose", run_all)
    monkeypatch.setattr(launch, "DECODE_ROWS", 0)
    trained = bits(SMALL, norm=True)
    prefilled = bits(SMALL, norm=True, gradients=False)
    (training,), (split, atomic), (both_maps, by_map) = outs
    assert torch.equal(training.out, trained[0])
    assert torch.equal(both_maps.out, prefilled[0])
    assert_close({"out": by_map.out}, {"out": both_maps.out}, 1e-6)
    for x, y in zip(split, atomic, strict=True):
        assert relative_error(x, y) < 1e-5


def is_power_of_two(number):
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("width", [1, 5, 16, 32, 64, 96, 128])
@pytest.mark.parametrize("value_width", [1, 7, 32, 64, 128, 192, 256])
def test_tilings_are_what_the_compiler_takes(width, value_width, low, monkeypatch):
    """Powers of two; 16 and more for its matrix instructions."""
    monkeypatch.setattr(configs, "INTERPRETED", False)
    widths = {"width": width, "value_width": value_width, "low": low}
    passes = [configs.backward_forms(**widths, key_maps=maps) for maps in (2, 1)]
    for is_differential, starts_late, has_mask, save in itertools.product((False, True), repeat=4):
        forms = configs.forward_forms(
            **widths, is_differential=is_differential, starts_late=starts_late, has_mask=has_mask, save=save
        )
        assert (is_differential and not save) or [form.name for form in forms] == ["by_map"]
        passes.append(forms)
    assert [forms[0].name for forms in passes[:2]] == ["split"] * 2  # the same bits every time, where that is asked for
    rows = [1, 3, 16, 17, configs.DECODE_ROWS]
    tilings = [configs.decode_tiling(**widths, rows=count) for count in rows]
    assert all(tiling.queries >= count for tiling, count in zip(tilings, rows, strict=True))
    for forms in passes:
        assert len({form.name for form in forms}) == len(forms)
        for form in forms:
            assert len(form.tilings) in ((2, 3) if form.name == "split" else (1, 2))
            tilings.extend(form.tilings)
    for tiling in tilings:
        assert is_power_of_two(tiling.queries) and tiling.queries >= 16  # noqa: PT018
        assert is_power_of_two(tiling.keys) and tiling.keys >= 16  # noqa: PT018
        assert tiling.warps in (1, 2, 4, 8, 16)
        assert 1 <= tiling.stages <= 5
    for block in (configs.padded(width), configs.padded(value_width, 32)):
        assert is_power_of_two(block)


def test_shares_of_a_cache(monkeypatch):
    """Two programs for each processor, but no share of fewer keys than are worth one."""
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(configs, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)

    def shares(programs, keys):
        return configs.decode_splits(programs, keys, torch.device("cuda"))

    assert shares(1, 100) == 1
    assert shares(1, 4096) == 16
    assert shares(1, 10**6) == configs.DECODE_SPLITS
    assert shares(16, 10**6) == 17
    assert shares(10_000, 10**6) == 1
