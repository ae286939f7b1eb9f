"""The table of backends: what `auto` takes, what a name gives, what `torch.library` says of the custom ops."""

import dataclasses
import itertools
import logging

import pytest
import torch

from difftransformer.errors import BackendUnavailable
from difftransformer.ops import (
    backend_names,
    backends,
    build,
    differential_attention,
    explain,
    reference,
    select_backend,
    softmax_attention,
    triton,
    use_backend,
)
from tests.support.cases import PROBLEM, problem
from tests.support.oracle import Case

OPS = ("differential", "softmax")
RESTRICTED = [{}, {"window": 64}, {"attn_mask": True}, {"kv_range": True, "kv_start": True}, {"cu_seqlens": True}]


@pytest.fixture
def kernels(monkeypatch):
    """As if the C++ kernels were built."""
    monkeypatch.setattr(build, "_outcome", [None])


@pytest.fixture
def no_kernels(monkeypatch):
    """As if they could not be."""
    monkeypatch.setattr(build, "_outcome", ["no compiler today"])


@pytest.fixture
def no_triton(monkeypatch):
    """As if Triton were not installed."""
    monkeypatch.setattr(triton, "_unavailable", lambda device_type: "not here")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("changes", [{"is_causal": False}, *RESTRICTED], ids=str)
@pytest.mark.usefixtures("kernels")
def test_auto_takes_the_kernels_on_the_cpu(op, dtype, changes):
    for length in (0, 1, 64, 65, 512, 100_000):
        assert select_backend(problem(length, op=op, dtype=dtype, **changes)).name == "cpu"
    assert select_backend(dataclasses.replace(PROBLEM, op=op, queries=1, keys=4096)).name == "cpu"


@pytest.mark.parametrize(
    ("asked", "built", "taken"),
    [
        (problem(64, dtype=torch.float64), "kernels", "reference"),
        (problem(65, dtype=torch.float64), "kernels", "chunked"),
        (problem(op="softmax", dtype=torch.float64), "kernels", "sdpa"),
        (problem(device_type="cuda"), "kernels", "sdpa"),
        (problem(8192, device_type="cuda", attn_mask=True), "kernels", "chunked"),
        (problem(64), "no_kernels", "reference"),
        (problem(65), "no_kernels", "chunked"),
        (problem(8192), "no_kernels", "chunked"),
        (problem(64, dtype=torch.bfloat16), "no_kernels", "reference"),
        (problem(512, dtype=torch.bfloat16), "no_kernels", "chunked"),
        (problem(2048, dtype=torch.bfloat16), "no_kernels", "chunked"),
        (dataclasses.replace(PROBLEM, queries=1, keys=4096), "no_kernels", "chunked"),
        (problem(op="softmax"), "no_kernels", "sdpa"),
        (problem(8192, op="softmax"), "no_kernels", "sdpa"),
        (problem(op="softmax", is_causal=False), "no_kernels", "sdpa"),
        *((problem(8192, op="softmax", **how), "no_kernels", "chunked") for how in RESTRICTED[1:]),
        (dataclasses.replace(PROBLEM, op="softmax", queries=1, keys=4096), "no_kernels", "chunked"),
        (problem(8192, device_type="cuda"), "no_kernels", "sdpa"),
        (problem(8192, device_type="cuda", attn_mask=True), "no_kernels", "chunked"),
        (problem(0), "no_kernels", "reference"),
        (problem(0, op="softmax"), "no_kernels", "chunked"),
    ],
)
@pytest.mark.usefixtures("no_triton")
def test_auto_where_other_kernels_do_not_serve(asked, built, taken, request):
    request.getfixturevalue(built)
    assert select_backend(asked).name == taken


def on_cuda(length, **changes):
    return problem(length, device_type="cuda", **({"dtype": torch.bfloat16} | changes))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("restriction", RESTRICTED, ids=str)
def test_auto_takes_our_kernels_on_cuda(restriction, dtype, monkeypatch):
    """For differential attention always; for ordinary attention where it takes a mask."""
    monkeypatch.setattr(triton, "_unavailable", lambda device_type: None if device_type == "cuda" else "not here")
    for length in (0, 1, 64, 8192, 100_000):
        for needs_grad in (False, True):
            asked = on_cuda(length, dtype=dtype, needs_grad=needs_grad, **restriction)
            assert select_backend(asked).name == "triton"
    asked = on_cuda(8192, dtype=dtype, op="softmax", **restriction)
    assert select_backend(asked).name == ("triton" if restriction else "sdpa")
    assert select_backend(on_cuda(8192, dtype=dtype, width=256, **restriction)).name != "triton"
    assert select_backend(on_cuda(8192, dtype=torch.float32, **restriction)).name != "triton"


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        (on_cuda(64), "sdpa"),
        (on_cuda(8192), "sdpa"),
        (on_cuda(8192, dtype=torch.float32), "sdpa"),
        (on_cuda(8192, window=64), "chunked"),
        (on_cuda(8192, cu_seqlens=True, needs_grad=True), "chunked"),
        (on_cuda(8192, attn_mask=True), "chunked"),
        (on_cuda(512, attn_mask=True), "sdpa"),
        (on_cuda(8192, kv_range=True), "chunked"),
        (on_cuda(8192, kv_range=True, needs_grad=True), "chunked"),
        (on_cuda(8192, kv_range=True, kv_start=True), "chunked"),
        (on_cuda(8192, op="softmax"), "sdpa"),
        (on_cuda(8192, op="softmax", window=64), "chunked"),
        (on_cuda(512, op="softmax", cu_seqlens=True), "sdpa"),
        (on_cuda(8192, op="softmax", attn_mask=True), "chunked"),
        (on_cuda(8192, width=8, attn_mask=True), "chunked"),
        (on_cuda(0), "chunked"),
    ],
)
@pytest.mark.usefixtures("no_triton")
def test_auto_on_cuda_without_our_kernels(asked, taken):
    assert select_backend(asked).name == taken


@pytest.mark.parametrize("device_type", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize("built", ["kernels", "no_kernels"])
def test_auto_never_takes_quadratic_memory_above_1024(device_type, built, request):
    request.getfixturevalue(built)
    for op, dtype, restriction in itertools.product(OPS, (torch.float32, torch.bfloat16), RESTRICTED):
        asked = problem(1025, device_type=device_type, op=op, dtype=dtype, **restriction)
        assert not select_backend(asked).has_quadratic_memory(asked), asked
        assert backends.BACKENDS["reference"].has_quadratic_memory(asked)


def test_needs_mask():
    assert not problem().needs_mask
    assert not problem(is_causal=False).needs_mask
    assert not problem(window=256).needs_mask
    assert problem(window=255).needs_mask
    assert dataclasses.replace(PROBLEM, queries=5).needs_mask
    assert not dataclasses.replace(PROBLEM, queries=1).needs_mask
    for name in ("attn_mask", "kv_range", "cu_seqlens"):
        assert problem(**{name: True}).needs_mask


@pytest.mark.parametrize(
    ("case", "needs_mask"),
    [
        (Case("x", T=9, S=9, kwargs={"is_causal": True}), False),
        (Case("x", T=9, S=12), False),
        (Case("x", T=1, S=12, kwargs={"is_causal": True}), False),
        (Case("x", T=9, S=9, kwargs={"is_causal": True, "window": 9}), False),
        (Case("x", T=9, S=9, kwargs={"is_causal": True, "window": 8}), True),
        (Case("x", T=9, S=12, kwargs={"is_causal": True}), True),
    ],
)
def test_sdpa_makes_a_mask_only_where_it_says_so(case, needs_mask, monkeypatch):
    seen = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, **kwargs):
        seen.append(kwargs["attn_mask"])
        return attend(*args, **kwargs)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", spy)
    query, key, value, lam, _ = case.inputs()
    differential_attention(query, key, value, lam, backend="sdpa", **case.kwargs)
    assert len(seen) == 1
    assert (seen[0] is not None) == needs_mask


@pytest.mark.usefixtures("kernels")
def test_a_named_backend_is_used(monkeypatch):
    used = []
    for name, backend in list(backends.BACKENDS.items()):

        def run(*args, name=name):
            used.append(name)
            return reference.run(*args)

        monkeypatch.setitem(backends.BACKENDS, name, dataclasses.replace(backend, run=run, supports=lambda asked: None))
    query, key, value, lam, _ = Case("x", lam="float").inputs()
    for name in backend_names():
        differential_attention(query, key, value, lam, backend=name)
        softmax_attention(query, key, value, backend=name)
        with use_backend(name):
            differential_attention(query, key, value, lam)
    assert used == [name for name in backend_names() for _ in range(3)]
    used.clear()
    with use_backend("sdpa"):
        differential_attention(query, key, value, lam, backend="chunked")
        with use_backend("auto"):
            differential_attention(query, key, value, lam)
        differential_attention(query, key, value, lam)
    differential_attention(query, key, value, lam)
    assert used == ["chunked", "cpu", "sdpa", "cpu"]


def test_use_backend_ends_with_an_error():
    before = select_backend(problem())
    with pytest.raises(KeyError), use_backend("sdpa"):
        raise KeyError
    assert select_backend(problem()) is before
    assert before.name != "sdpa"


def test_compiled_calls_follow_use_backend():
    """Read when compiling: no graph break, and the kernel of the chosen backend is in the graph."""
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    query, key, value, lam, _ = Case("x", T=9, S=9, lam="float").inputs()
    for name, word in (("chunked", "difftransformer.chunked_attention"), ("sdpa", "scaled_dot_product_attention")):
        torch.compiler.reset()
        graphs.clear()
        with use_backend(name):
            torch.compile(lambda: differential_attention(query, key, value, lam), fullgraph=True, backend=keep)()
        assert word in graphs[0]


def test_unknown_names_list_the_known():
    query, key, value, lam, _ = Case("x").inputs()
    with pytest.raises(
        BackendUnavailable, match=r"no backend is named 'flash9'.*'auto'.*reference, cpu, .*chunked, sdpa, cudnn"
    ):
        differential_attention(query, key, value, lam, backend="flash9")
    with pytest.raises(BackendUnavailable, match="flash9"), use_backend("flash9"):
        pass


@pytest.mark.usefixtures("no_kernels")
def test_a_named_backend_that_cannot_says_why_for_each():
    query, key, value, lam, _ = Case("x", T=0).inputs()
    words = r"'sdpa' cannot .*reference: can; cpu: no compiler today; .*chunked: can; sdpa: no queries"
    with pytest.raises(BackendUnavailable, match=words):
        differential_attention(query, key, value, lam, backend="sdpa")
    with pytest.raises(BackendUnavailable, match="sdpa"), use_backend("sdpa"):
        differential_attention(query, key, value, lam)


@pytest.mark.usefixtures("kernels")
def test_explain():
    reasons = explain(problem())
    assert tuple(reasons) == backend_names()
    assert all(reasons[name] is None for name in ("reference", "cpu", "chunked", "sdpa"))
    assert explain(problem(width=256))["triton"] == "takes D up to 128 and E up to 256, not D = 256 and E = 64"
    odd = problem(device_type="cuda", dtype=torch.bfloat16, width=20)
    assert explain(odd)["triton"] == "takes multiples of 8 as D and E in bfloat16, not D = 20 and E = 64"
    assert reasons["cudnn"] == "runs on CUDA, not on cpu"
    assert explain(problem(device_type="cuda"))["cpu"] == "runs on the CPU, not on cuda"
    assert explain(problem(dtype=torch.float64))["cpu"] == "takes float32, bfloat16 and float16, not float64"
    assert "no queries" in explain(problem(0))["sdpa"]
    assert all(backend.description for backend in backends.BACKENDS.values())


def test_every_row_of_the_table_names_a_backend():
    assert {row.backend for row in backends.TABLE} <= set(backend_names())
    assert backends.TABLE[-1].fits(problem(100_000, device_type="xpu", op="softmax"))


@pytest.mark.usefixtures("no_kernels")
def test_auto_says_its_choice_once(caplog, monkeypatch):
    monkeypatch.setattr(backends, "_announced", set())
    with caplog.at_level(logging.INFO, logger="difftransformer"):
        for _ in range(2):
            select_backend(problem(), "auto")
        select_backend(problem(), "sdpa")
        select_backend(problem(dtype=torch.bfloat16), "auto")
    assert [record.getMessage() for record in caplog.records] == [
        "differential attention on cpu in torch.float32: backend chunked (chosen by 'auto')",
        "differential attention on cpu in torch.bfloat16: backend chunked (chosen by 'auto')",
    ]


@pytest.mark.usefixtures("no_kernels")
def test_a_backend_is_one_record_and_one_row(monkeypatch):
    """What adding one takes: `auto`, the name and the errors follow."""
    mine = dataclasses.replace(
        backends.BACKENDS["reference"],
        name="mine",
        supports=lambda asked: None if asked.width == 32 else f"width {asked.width}, only 32",
        has_quadratic_memory=lambda asked: False,
    )
    monkeypatch.setitem(backends.BACKENDS, "mine", mine)
    monkeypatch.setattr(backends, "TABLE", (backends.Row("mine"), *backends.TABLE))
    assert select_backend(problem(9000)) is mine
    assert select_backend(problem(9000, width=64)).name == "chunked"
    with pytest.raises(BackendUnavailable, match="mine: width 64, only 32"):
        select_backend(problem(width=64), "mine")


def test_a_compiled_call_takes_the_backend():
    """In torch 2.11, torch.compile takes torch.compiler.is_exporting() for true."""
    targets = []

    def collect(graph, inputs):
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    query, key, value = torch.randn(3, 1, 2, 70, 16).unbind()
    torch.compile(lambda *x: differential_attention(*x, 0.5, is_causal=True), backend=collect)(query, key, value)
    assert any("difftransformer." in target for target in targets)
