"""A backend is checked against the equations before its first use, and one that fails is switched off."""

import dataclasses
import json
import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from difftransformer.errors import BackendUnavailable
from difftransformer.ops import BACKENDS, backends, chunked, differential_attention, examination, trust, use_backend
from difftransformer_lab.cli.main import main
from tests.support import oracle
from tests.support.cases import CAUSAL, PROBLEM, needs_kernels
from tests.support.oracle import Case, relative_error

CASE = Case("x", T=5, S=5, kwargs=CAUSAL)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """As if nothing had been checked in this process or before."""
    monkeypatch.setattr(trust, "_verdicts", {})
    monkeypatch.setattr(trust, "_folder", lambda: tmp_path / "verdicts")
    monkeypatch.delenv(trust.VARIABLE, raising=False)
    return tmp_path


def attend(backend="auto", dtype=torch.float32):
    query, key, value, lam, _ = CASE.inputs(dtype)
    return differential_attention(query, key, value, lam, is_causal=True, backend=backend)


def expected():
    return oracle.attention(CASE, *(x.double() for x in CASE.inputs()[:4]))


def wrong(call):
    return chunked.run(call) * 1.001


def wrong_gradient(call):
    return chunked.run(call._replace(value=call.value.detach())) + 0 * call.value.sum()


def one_nan(call):
    out = chunked.run(call)
    return out + torch.where(torch.arange(out.shape[-1]) == 3, torch.nan, 0.0)


def raises(call):
    raise RuntimeError("illegal memory access\nwas encountered")


def reads_new_memory(call):
    return chunked.run(call) + 0 * torch.empty(call.value.shape[-1])


class Differs:
    """One unit in the last place more with each call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, call):
        self.calls += 1
        return chunked.run(call) * (1 + self.calls * torch.finfo(torch.float32).eps)


BROKEN = [
    pytest.param(wrong, r"its error is \d\.\de-0\d, at most 1e-04 is allowed \(T=67, S=67,", id="wrong"),
    pytest.param(wrong_gradient, "its error is 1.0e", id="wrong gradient"),
    pytest.param(one_nan, "its error is nan", id="NaN"),
    pytest.param(raises, "it raised RuntimeError: illegal memory access was encountered", id="raises"),
    pytest.param(reads_new_memory, "its error is nan", id="reads new memory"),
    pytest.param(Differs(), "equal calls give different bits", id="differs"),
]


@pytest.fixture
def calls(monkeypatch):
    """Replaces the way that the `cpu` backend runs; returns the calls that it got."""

    def replace(run, name="cpu"):
        seen = []

        def counted(call):
            seen.append(call)
            return run(call)

        changed = dataclasses.replace(BACKENDS[name], run=counted, supports=lambda problem: None, norms=False)
        monkeypatch.setitem(BACKENDS, name, changed)
        return seen

    return replace


@pytest.mark.parametrize(("run", "words"), BROKEN)
def test_a_broken_backend_is_switched_off(run, words, calls, caplog):
    """`auto` goes on with the next one, and a call that names it raises an error; the log has one line."""
    seen = calls(run)
    for _ in range(2):
        assert relative_error(attend(), expected()) < 2e-5
    checked = len(seen)
    with pytest.raises(BackendUnavailable, match=rf"cpu: switched off on cpu: {words}") as caught:
        attend("cpu")
    assert "\n" not in str(caught.value)
    with use_backend("cpu"), pytest.raises(BackendUnavailable, match="switched off"):
        attend()
    assert len(seen) == checked
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("backend cpu is switched off on cpu in float32: ")
    assert "difftransformer doctor" in line
    assert "\n" not in line


def test_only_what_was_checked_is_switched_off(calls):
    calls(lambda call: one_nan(call) if call.query.dtype == torch.bfloat16 else chunked.run(call))
    attend("cpu")
    attend("cpu", torch.float16)
    with pytest.raises(BackendUnavailable, match="switched off"):
        attend("cpu", torch.bfloat16)


def test_where_every_backend_is_broken_the_equations_are_left(calls, monkeypatch):
    for name in ("cpu", "chunked", "sdpa"):
        calls(lambda call: torch.zeros_like(call.value[:, :, : call.query.shape[2]]), name)
    assert relative_error(attend(), expected()) < 2e-5


@needs_kernels
@pytest.mark.parametrize("name", ["cpu", "chunked", "sdpa"])
@pytest.mark.parametrize("dtype", trust.DTYPES)
def test_sound_backends_pass(name, dtype, caplog):
    """With room to spare: a fifth of the tolerance, as the comment there says."""
    attend(name, dtype)
    verdict = trust._verdicts[name, CPU, dtype]
    assert verdict.reason is None
    assert 0 < verdict.error < trust.TOLERANCES[dtype] / 5
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


def test_a_verdict_is_kept_for_later_processes(calls, fresh, monkeypatch, caplog):
    seen = calls(wrong)
    attend()
    (path,) = (fresh / "verdicts").iterdir()
    assert path.name.startswith("cpu-cpu-float32-")
    seen.clear()
    for _ in range(2):
        trust._verdicts.clear()
        with pytest.raises(BackendUnavailable, match="switched off"):
            attend("cpu")
    assert not seen
    assert len([record for record in caplog.records if "switched off" in record.getMessage()]) == 3
    for change in (
        lambda patch: patch.setattr(torch, "__version__", "9.9"),
        lambda patch: patch.setattr(trust, "_source_hash", lambda: "other"),
        lambda patch: patch.setattr(trust.processor, "name", lambda: "another processor"),
        lambda patch: path.write_text('{"reason": nul'),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            trust._verdicts.clear()
            seen.clear()
            with pytest.raises(BackendUnavailable, match="switched off"):
                attend("cpu")
            assert seen


def test_a_cache_that_cannot_be_written(calls, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(trust, "_folder", lambda: tmp_path / "file")
    seen = calls(chunked.run)
    attend("cpu")
    checked = len(seen)
    attend("cpu")
    assert len(seen) == checked + 1


def test_no_check_if_the_variable_says_so(calls, monkeypatch):
    monkeypatch.setenv(trust.VARIABLE, "0")
    seen = calls(wrong)
    attend("cpu")
    assert len(seen) == 1


@pytest.mark.usefixtures("fresh")
def test_the_check_leaves_everything_as_it_was(calls):
    """Random numbers, modes and hooks of the caller; and none of them reaches the check."""
    seen = calls(lambda call: chunked.run(call) + torch.rand(()) * 0)
    packed = []
    before = torch.get_rng_state()
    calls(chunked.run)
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x),
    ):
        attend("cpu")
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert not packed
    assert not seen
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.are_deterministic_algorithms_enabled()
    assert trust._verdicts["cpu", CPU, torch.float32].error < 1e-5
    trust._verdicts.clear()
    with torch.inference_mode():
        attend("chunked")
    assert trust._verdicts["chunked", CPU, torch.float32].error < 1e-5


def test_the_check_waits_while_a_graph_is_traced_or_transformed(calls):
    seen = calls(chunked.run)
    torch.compiler.reset()
    inputs = CASE.inputs()[:4]

    def by_name(*inputs):
        return differential_attention(*inputs, is_causal=True, backend="cpu")

    torch.compile(by_name, fullgraph=True, backend="aot_eager")(*inputs)
    assert not trust._verdicts
    with FakeTensorMode() as mode:
        by_name(*map(mode.from_tensor, inputs))
    torch.func.vmap(lambda x: (backends.select_backend(PROBLEM, "cpu", x.device), x)[1])(inputs[0])
    assert not trust._verdicts
    seen.clear()
    attend("cpu")
    assert len(seen) > 1
    seen.clear()
    attend("cpu")
    assert len(seen) == 1


def test_memory_that_runs_out_is_no_verdict(calls):
    def run(call):
        raise torch.OutOfMemoryError("CUDA out of memory")

    calls(run)
    with pytest.raises(torch.OutOfMemoryError):
        attend("cpu")
    assert not trust._verdicts


@needs_kernels
def test_doctor(capsys, monkeypatch, calls):
    monkeypatch.setattr(trust, "FULL", trust.FIRST)
    monkeypatch.setattr(examination, "TIMED_LENGTHS", {"cpu": 16})
    for name in ("flex", "triton"):  # on the CPU both take minutes
        monkeypatch.setitem(BACKENDS, name, dataclasses.replace(BACKENDS[name], supports=lambda problem: "left out"))
    assert main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    for word in ("torch", "processor", "instruction sets", "compiler", "threads", "CPU kernels", torch.__version__):
        assert word in text
    calls(wrong, "chunked")
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    rows = {(row["backend"], row["dtype"]): row for row in found["backends"]}
    assert len(rows) == 3 * len(BACKENDS)
    assert rows["cpu", "bfloat16"]["verdict"] == "ok"
    assert rows["cpu", "float32"]["error"] < 2e-5
    assert rows["cpu", "float32"]["milliseconds"] > 0
    assert rows["chunked", "float32"]["verdict"] == "off"
    assert "at most 1e-04 is allowed" in rows["chunked", "float32"]["reason"]
    assert rows["flash", "float32"] == {
        "backend": "flash", "dtype": "float32", "verdict": "cannot run", "reason": "runs on CUDA, not on cpu",
        "error": None, "milliseconds": None,
    }  # fmt: skip
    # A backend that is sound again is switched on again.
    calls(chunked.run, "chunked")
    assert main(["doctor", "--device", "cpu"]) == 0


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (name, dtype)
        for name in ("cpu", "chunked", "sdpa", "triton")
        for dtype in trust.DTYPES
        if (name, dtype) != ("triton", torch.float16)  # minutes in the interpreter; test_triton.py has fp16
    ],
)
def test_every_trial_of_the_doctor_passes(name, dtype):
    if name == "triton":
        pytest.importorskip("triton")
    verdict = trust.check(BACKENDS[name], CPU, dtype, trust.FULL)
    assert verdict.reason is None
    assert verdict.error < trust.TOLERANCES[dtype] / 2
