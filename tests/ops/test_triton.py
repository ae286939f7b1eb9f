"""The Triton kernels' own: shares of a cache, forms of a pass and the choice among them, and what the backend refuses.

In Triton's interpreter; `test_conformance.py` has the numbers of every form.
"""

import dataclasses
import itertools

import pytest
import torch

from difftransformer.errors import BackendUnavailable
from difftransformer.ops import softmax_attention
from difftransformer.ops import triton as triton_backend
from tests.support import fresh, oracle
from tests.support.calls import bits, tensors
from tests.support.cases import CAUSAL, by_name, ints, needs_interpreter, normed_op, op, overflow_is_fine
from tests.support.oracle import Case, relative_error

configs = pytest.importorskip("difftransformer.ops.triton_kernels.configs")
OutOfResources = pytest.importorskip("triton.runtime.errors").OutOfResources
launch = pytest.importorskip("difftransformer.ops.triton_kernels.launch")

pytestmark = [needs_interpreter, overflow_is_fine]

SMALL = Case("x", B=2, H=2, G=1, T=9, S=11, D=8, E=6, lam="head", kwargs=CAUSAL)
WIDE = Case("wide", H=2, G=1, T=35, S=70, D=8, E=140, lam="scalar")


@pytest.mark.parametrize("splits", [1, 7])
def test_any_number_of_shares(splits, monkeypatch):
    monkeypatch.setattr(launch, "decode_splits", lambda *_: splits)
    cache = CAUSAL | {"kv_lengths": ints(150, 40)}
    case = Case("cache", B=2, H=4, G=2, T=2, S=150, D=17, E=19, kwargs=cache)
    inputs = case.inputs(requires_grad=False)[:4]
    assert relative_error(op(case, "triton")(*inputs), op(case, "reference")(*(x.double() for x in inputs))) < 2e-5


@pytest.mark.parametrize("case", [SMALL, WIDE], ids=by_name)
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


def test_rows_up_to_which_a_call_is_split(take):
    """Into shares of the keys, by kernels that have one form, where no gradient is wanted; with two heads a group."""
    taken, chosen = take(), []
    for queries in (1, 32, 33):
        query = torch.zeros(1, 4, queries, 8)
        with torch.no_grad():
            softmax_attention(query, query[:, :2], query[:, :2], backend="triton")
        chosen.append(len(taken))
    assert chosen == [0, 0, 1]
    query = query[:, :, :1].requires_grad_()
    softmax_attention(query, query[:, :2], query[:, :2], backend="triton")
    assert len(taken) == 2


def test_the_norm_rounds_once():
    """Heads are normalised before they are rounded."""
    case = Case("x", B=2, H=4, T=33, S=33, D=16, E=32, kwargs=CAUSAL)
    query, key, value, lam, _ = case.inputs(torch.float16)
    wide = normed_op(case, "triton")(query.float(), key.float(), value.float(), lam, None)
    # The products' weights are rounded on the way, so the two differ by that, but seldom by more than a step.
    fused = normed_op(case, "triton")(query, key, value, lam, None)
    apart = oracle.rms_norm(op(case, "triton")(query, key, value, lam).float(), None, 1e-5, 0.37).half()
    assert (fused.float() - wide).abs().mean() < (apart.float() - wide).abs().mean()


GUARDED = """
import ctypes, mmap, torch
from tests.support.cases import CAUSAL, ints, normed_op, op, random_mask
from tests.support.oracle import Case

def guarded(x):
    "The same numbers, followed by a page that may not be read."
    if not isinstance(x, torch.Tensor):
        return x
    page, size = mmap.PAGESIZE, x.numel() * x.element_size()
    used = -(-size // page) * page
    memory = mmap.mmap(-1, used + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + used), ctypes.c_size_t(page), 0) == 0
    moved = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=used - size).view(x.shape)
    return moved.copy_(x.detach()).requires_grad_(x.requires_grad)

odd = {"B": 2, "H": 4, "G": 2, "T": 3, "S": 37, "D": 5, "E": 7, "lam": "query"}
for case in (
    Case("mask by head", **odd, kwargs={"attn_mask": random_mask(2, 4, 3, 37)}),
    Case("ranges", **odd, kwargs=CAUSAL | {"kv_start": ints(3, 0), "kv_lengths": ints(30, 37)}),
    Case("documents", **odd | {"B": 1, "T": 37}, kwargs={"cu_seqlens": ints(0, 20, 37)}),
):
    case.kwargs.update({name: guarded(x) for name, x in case.kwargs.items()})
    *inputs, grad = map(guarded, case.inputs())
    inputs.append(guarded(torch.linspace(0.5, 1.5, case.E)))
    with torch.no_grad():
        normed_op(case, "triton")(*inputs)
    normed_op(case, "triton")(*inputs).backward(grad)
    print(case.name)
"""


@pytest.mark.slow
def test_nothing_is_read_past_the_end_of_a_tensor():
    """In decoding, forward and backward, with sizes that no tile divides; such a read would end the process."""
    assert fresh.run(GUARDED).splitlines() == ["mask by head", "ranges", "documents"]


@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize("width", [16, 24, 12])
def test_rows_in_low_precision_start_at_multiples_of_16_numbers(width, offset):
    """Copied only where they do not; in fp32 never."""
    launch = pytest.importorskip("difftransformer.ops.triton_kernels.launch")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        memory = torch.arange(2 * 5 * 3 * width + offset, dtype=torch.float32).to(dtype)
        x = memory[offset:].view(2, 5, 3, width).transpose(1, 2)
        found = launch.aligned(x)
        assert torch.equal(found, x)
        assert found.stride(-1) == 1
        is_fine = dtype == torch.float32 or (width == 16 and offset != 1)
        assert (found.data_ptr() == x.data_ptr()) == is_fine
        if dtype != torch.float32:
            assert found.data_ptr() % 16 == 0
            assert all(stride % 16 == 0 for stride in found.stride()[:3])


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
loaded = {name: module for name, module in sys.modules.items() if name == "triton"}
sys.modules["triton"] = None
from difftransformer.errors import BackendUnavailable
from difftransformer.ops import softmax_attention, triton
x = torch.zeros(1, 1, 4, 8)
for has_package in (False, True):
    if has_package:
        del sys.modules["triton"]
        sys.modules.update(loaded)
        triton._reason.cache_clear()
    try:
        softmax_attention(x, x, x, backend="triton")
    except BackendUnavailable as error:
        print(error)
    print(softmax_attention(x, x, x).shape)
"""


def test_where_it_cannot_run():
    """Without the package, and then with it but without its interpreter."""
    no_package, first, no_interpreter, second = fresh.run(WITHOUT, TRITON_INTERPRET="0").splitlines()
    assert "triton: needs the triton package: pip install 'difftransformer[gpu]'" in no_package
    needed = "(with TRITON_INTERPRET=1 set before Python starts, on the CPU)"
    assert f"triton: runs on CUDA devices, not on cpu {needed}" in no_interpreter
    assert first == second == "torch.Size([1, 1, 4, 8])"


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    reason = triton_backend._reason.__wrapped__("cuda")
    assert reason == "needs a GPU of compute capability 8.0 or newer, this is 7.5"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert triton_backend._reason.__wrapped__("cuda") is None
    assert "not on xpu" in triton_backend._reason.__wrapped__("xpu")


# The choice of a form.


@pytest.mark.parametrize("form", ["both_maps", "split", "atomic"])
def test_a_pass_is_made_by_the_form_that_is_chosen(form, take):
    taken = take(form)
    for norm in (False, True):
        bits("triton", SMALL, norm=norm, gradients=form != "both_maps")
    assert taken == (["both_maps"] if form == "both_maps" else ["by_map", form]) * 2


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


def test_the_fastest_form_is_timed_once_for_each_key(timed, monkeypatch):
    """It is then taken also while a graph is captured."""
    assert [choose("a"), choose("a"), choose("b")] == [FAST] * 3
    assert timed == [SLOW, FAST] * 2
    assert choose("c", (SLOW,)) is SLOW
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose("a") is FAST
    assert len(timed) == 4


@pytest.mark.parametrize("large", [SLOW, FAST], ids=["slow", "fast"])
def test_a_form_that_the_device_cannot_hold_is_not_taken(large, timed):
    def run(form):
        if form is large:
            raise OutOfResources(131072, 101376, "shared memory")
        return form

    assert configs.choose((SLOW, FAST), "key", run) is ({SLOW, FAST} - {large}).pop()


@pytest.mark.parametrize(
    ("kib", "small", "small_with_mask"), [(100, True, True), (164, False, True), (228, False, False)]
)
def test_which_devices_take_small_tiles(kib, small, small_with_mask, monkeypatch):
    """Shared memory of a processor, by NVIDIA's table: 8.6, 8.9 and 12.0 have 100 KiB, 8.0 has 164 and 9.0 has 228."""
    properties = type("Properties", (), {"shared_memory_per_multiprocessor": kib * 1024})
    monkeypatch.setattr(configs, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = [configs.is_small.__wrapped__(torch.device("cuda"), has_mask) for has_mask in (False, True)]
    assert found == [small, small_with_mask]


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


def test_what_is_timed_is_run(monkeypatch):
    """`choose` is given a way to run each form, which gives the same as the form that is taken."""
    outs = []

    def run_all(forms, key, run):
        hash(key)
        outs.append([run(form) for form in forms])
        return forms[0]

    monkeypatch.setattr(launch, "choose", run_all)
    monkeypatch.setattr(launch, "DECODE_ROWS", 0)
    trained = bits("triton", SMALL, norm=True)
    prefilled = bits("triton", SMALL, norm=True, gradients=False)
    (training,), (split, atomic), (both_maps, by_map) = outs
    assert torch.equal(training.out, trained[0])
    assert torch.equal(both_maps.out, prefilled[0])
    assert relative_error(by_map.out, both_maps.out) < 1e-6
    for x, y in zip(split, atomic, strict=True):
        assert relative_error(x, y) < 1e-5


def is_power_of_two(number):
    return number > 0 and number & (number - 1) == 0


@pytest.mark.parametrize(("low", "small"), [(False, False), (True, False), (True, True)])
def test_tilings_are_what_the_compiler_takes(low, small, monkeypatch):
    """Powers of two; 16 and more for its matrix instructions."""
    monkeypatch.setattr(configs, "INTERPRETED", False)
    for width, value_width in itertools.product((1, 5, 16, 64, 96, 128), (1, 7, 64, 128, 192, 256)):
        widths = {"width": width, "value_width": value_width, "low": low, "small": small}
        passes = [configs.backward_forms(**widths, key_maps=maps) for maps in (2, 1)]
        for is_differential, starts_late, has_mask, save in itertools.product((False, True), repeat=4):
            forms = configs.forward_forms(
                **widths, is_differential=is_differential, starts_late=starts_late, has_mask=has_mask, save=save
            )
            assert (is_differential and not save) or [form.name for form in forms] == ["by_map"]
            passes.append(forms)
        # The same bits every time, where that is asked for.
        assert [forms[0].name for forms in passes[:2]] == ["split"] * 2
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


def test_the_form_for_hopper_is_tried_only_where_it_is_asked_for(monkeypatch):
    from difftransformer.ops.triton_kernels import configs

    device, refusal = torch.device("cuda"), configs.hopper_refusal.__wrapped__
    monkeypatch.setattr(configs, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(configs.triton, "__version__", "3.6.0")
    monkeypatch.delenv("DIFFTRANSFORMER_HOPPER", raising=False)
    assert "is off" in refusal(device)
    monkeypatch.setenv("DIFFTRANSFORMER_HOPPER", "1")
    assert refusal(device) is None
    monkeypatch.setattr(configs.triton, "__version__", "3.5.1")
    assert refusal(device) == "needs Triton 3.6 to 3.9, this is 3.5.1"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert refusal(device) == "needs a GPU of compute capability 9.0, this is 10.0"


def test_what_suits_the_form_for_hopper():
    from difftransformer.ops.problem import Call, Restrictions
    from difftransformer.ops.triton_kernels import launch

    def suits(length=256, groups=2, width=64, dtype=torch.bfloat16, lam=(1, 2, 1), **restrictions):
        q, k = (torch.empty(1, heads, length, 2 * width, dtype=dtype, device="meta") for heads in (2, groups))
        given = Restrictions(**({"is_causal": True} | restrictions))
        inputs = launch.Inputs(Call(q, k, k, torch.empty(lam, device="meta"), given, 0.125))
        return launch._suits_hopper(inputs, q)

    assert suits()
    assert not any(
        (suits(length=192), suits(groups=1), suits(width=128), suits(dtype=torch.float16), suits(lam=(1, 2, 256)))
    )
    assert not any((suits(is_causal=False), suits(window=64), suits(cu_seqlens=torch.tensor([0, 256]))))
