"""A backend is compared with the equations: by `doctor`, and Triton's kernels by a process before it uses them on a GPU."""

import dataclasses
import itertools
import json
import re

import pytest
import torch

from difftransformer.errors import BackendUnavailable
from difftransformer.ops import BACKENDS, Problem, chunked, differential_attention, select_backend, selfcheck
from difftransformer.ops.selfcheck import TOLERANCES, check
from difftransformer_lab import doctor
from difftransformer_lab.cli.main import main
from tests.support.cases import needs_kernels

CPU = torch.device("cpu")


def wrong(call):
    return chunked.run(call) * 1.001


def wrong_gradient(call):
    return chunked.run(call._replace(value=call.value.detach())) + 0 * call.value.sum()


def one_nan(call):
    out = chunked.run(call)
    return out + torch.where(torch.arange(out.shape[-1]) == 3, torch.nan, 0.0)


def raises(call):
    raise RuntimeError("illegal memory access\nwas encountered")


def out_of_memory(call):
    raise torch.OutOfMemoryError("CUDA out of memory")


def stand_in(run, name="chunked"):
    return dataclasses.replace(BACKENDS[name], run=run, supports=lambda problem: None, norms=False)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        pytest.param(wrong, r"its error is \d\.\de-0\d, at most 1e-04 is allowed \(T=67, S=67,", id="wrong"),
        pytest.param(wrong_gradient, "its error is 1.0e", id="wrong gradient"),
        pytest.param(one_nan, "its error is nan", id="NaN"),
        pytest.param(raises, "it raised RuntimeError: illegal memory access was encountered", id="raises"),
    ],
)
def test_a_wrong_backend_is_found(run, words):
    found = check(stand_in(run), CPU, torch.float32)
    assert re.match(words, found.problem)


@needs_kernels
@pytest.mark.parametrize("name", ["cpu", "chunked", "sdpa"])
@pytest.mark.parametrize("dtype", doctor.DTYPES)
def test_sound_backends_pass(name, dtype):
    """With room to spare: a fifth of the tolerance, as the comment there says."""
    found = check(BACKENDS[name], CPU, dtype)
    assert found.problem is None
    assert 0 < found.error < TOLERANCES[dtype] / 5


def test_the_check_leaves_everything_as_it_was():
    """Random numbers, modes and hooks of the caller; and none of them reaches the check."""
    packed, before = [], torch.get_rng_state()
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x),
    ):
        assert check(BACKENDS["chunked"], CPU, torch.float32).error < 1e-5
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert not packed
    assert torch.equal(torch.get_rng_state(), before)


def test_the_outcome_is_remembered_but_not_that_memory_ran_out(monkeypatch):
    monkeypatch.setattr(selfcheck, "_outcomes", {})
    assert selfcheck.why_not(stand_in(out_of_memory), CPU, torch.float32) is None
    monkeypatch.setenv(selfcheck.VARIABLE, "0")
    assert selfcheck.why_not(stand_in(wrong), CPU, torch.float32) is None
    monkeypatch.delenv(selfcheck.VARIABLE)
    torch.func.vmap(lambda x: (selfcheck.why_not(stand_in(wrong), CPU, torch.float32), x)[1])(torch.ones(2))
    assert not selfcheck._outcomes
    reason = selfcheck.why_not(stand_in(wrong), CPU, torch.float32)
    assert "at most 1e-04 is allowed" in reason
    assert selfcheck.why_not(stand_in(chunked.run), CPU, torch.float32) == reason
    assert selfcheck.why_not(stand_in(chunked.run), CPU, torch.bfloat16) is None


def test_only_triton_on_a_gpu_is_checked(monkeypatch):
    seen = []
    monkeypatch.setattr(
        selfcheck, "why_not", lambda backend, *place: seen.append((backend.name, *place)) or "it is wrong"
    )
    query = torch.randn(1, 2, 4, 16)
    differential_attention(query, query, query, 0.5, is_causal=True)
    assert not seen
    for name in ("triton", "sdpa"):
        monkeypatch.setitem(BACKENDS, name, dataclasses.replace(BACKENDS[name], supports=lambda problem: None))
    sizes = {"batch": 1, "heads": 2, "groups": 2, "queries": 4, "keys": 4, "width": 8, "value_width": 16}
    problem, gpu = Problem("differential", "cuda", torch.bfloat16, **sizes), torch.device("cuda", 0)
    assert select_backend(problem, device=gpu).name == "sdpa"
    assert seen == [("triton", gpu, torch.bfloat16)]
    with pytest.raises(BackendUnavailable, match="triton: not used on cuda:0: it is wrong; `difftransformer doctor`"):
        select_backend(problem, "triton", gpu)


@needs_kernels
def test_doctor(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "TRIALS", selfcheck.FIRST)
    monkeypatch.setattr(doctor, "TIMED_LENGTHS", {"cpu": 16})
    left_out = dataclasses.replace(BACKENDS["triton"], supports=lambda problem: "left out")
    monkeypatch.setitem(BACKENDS, "triton", left_out)  # on the CPU it takes minutes
    assert main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    for word in ("torch", "processor", "instruction sets", "compiler", "threads", "CPU kernels", torch.__version__):
        assert word in text
    monkeypatch.setitem(
        BACKENDS, "chunked", stand_in(lambda call: chunked.run(call) + 0 * torch.empty(call.value.shape[-1]))
    )
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)  # NaN is not JSON
    rows = {(row["backend"], row["dtype"]): row for row in found["backends"]}
    assert len(rows) == 3 * len(BACKENDS)
    assert rows["cpu", "bfloat16"]["outcome"] == "ok"
    assert rows["cpu", "float32"]["error"] < 2e-5
    assert rows["cpu", "float32"]["milliseconds"] > 0
    assert rows["chunked", "float32"]["outcome"] == "wrong"  # it reads new memory
    assert "its error is nan" in rows["chunked", "float32"]["reason"]
    assert rows["cudnn", "float32"] == {
        "backend": "cudnn", "dtype": "float32", "outcome": "cannot run", "reason": "runs on CUDA, not on cpu",
        "error": None, "milliseconds": None,
    }  # fmt: skip
    assert not torch.are_deterministic_algorithms_enabled()


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    # In the interpreter a dtype takes half a minute; test_conformance.py has low precision there.
    [*itertools.product(("cpu", "chunked", "sdpa"), doctor.DTYPES), ("triton", torch.float32)],
)
def test_every_trial_of_the_doctor_passes(name, dtype):
    if name == "triton":
        pytest.importorskip("triton")
    found = check(BACKENDS[name], CPU, dtype, doctor.TRIALS)
    assert found.problem is None
    assert found.error < TOLERANCES[dtype] / 2
