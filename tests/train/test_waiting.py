"""A training step asks the device for no value: its figures are read when the next step computes."""

from collections import Counter

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from difftransformer.errors import Diverged
from difftransformer.model import nll
from difftransformer.ops import isolation, problem
from difftransformer.train import Interrupted, OptimizerConfig, checkpoints, late
from difftransformer.train.config import CheckpointConfig
from difftransformer.train.parallel import mesh
from difftransformer.train.trainer import Trainer
from tests.train.test_faults import poison  # noqa: F401
from tests.train.test_resume import stop_after

OPERATORS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")
FUNCTIONS = ("tolist", "numpy", "__array__")  # which no operator shows on a CPU


class Operators(TorchDispatchMode):
    """Counts the operators for whose values, or number of values, the host would wait for a GPU."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        name = operator.overloadpacket.__name__
        by_mask = name == "index" and any(one is not None and one.dtype == torch.bool for one in arguments[1])
        if name in OPERATORS or by_mask:
            self.waits[name] += 1
        return operator(*arguments, **(options or {}))


class Functions(TorchFunctionMode):
    """The same of functions."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, function, types, arguments=(), options=None):
        if getattr(function, "__name__", "") in FUNCTIONS:
            self.waits[function.__name__] += 1
        return function(*arguments, **(options or {}))


def uncounted(function):
    """Let a function that is for the host's tensors, or for figures that have arrived, read them."""

    def reading(*arguments):
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            return function(*arguments)

    return reading


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Let training on the CPU go the ways of a GPU; return the Counter of what its steps wait for."""
    waits, step, begin = Counter(), Trainer.train_step, Trainer.__init__

    def begin_late(self, *arguments, **options):
        begin(self, *arguments, **options)
        self.reads_late = True

    def counted(self):
        with Operators(waits), Functions(waits):
            return step(self)

    for module in (nll, isolation, problem):
        monkeypatch.setattr(module, "is_readable", lambda tensor: False)
    monkeypatch.setattr(mesh, "row_lengths", uncounted(mesh.row_lengths))
    monkeypatch.setattr(late.OnTheWay, "read", uncounted(late.OnTheWay.read))
    monkeypatch.setattr(Trainer, "__init__", begin_late)
    monkeypatch.setattr(Trainer, "train_step", counted)
    return waits


@pytest.mark.parametrize(
    ("attention_type", "fields"),
    [
        ("diff", {"optimizer": OptimizerConfig(method="muon"), "pack_documents": True, "accumulation": 2, "ema": 0.5}),
        ("diff_v2", {"loss_chunk_tokens": 16, "z_loss": 1e-4, "gradient_checkpointing": True}),
        ("softmax", {}),
    ],
)
def test_steps_wait_for_nothing_and_report_the_same(train_toy, tmp_path, read_run, request, attention_type, fields):
    train_toy(tmp_path / "at once", attention_type=attention_type, **fields)
    waits = request.getfixturevalue("as_on_a_gpu")
    train_toy(tmp_path / "late", attention_type=attention_type, **fields)
    assert waits == {}
    assert read_run(tmp_path / "late") == read_run(tmp_path / "at once")


def test_a_run_that_reads_late_goes_on_bitwise(train_toy, tmp_path, read_run, as_on_a_gpu):
    """A signal that follows a figure comes a step later; the checkpoint then has the figures of all steps before it."""
    fields = {"checkpoint": CheckpointConfig(asynchronous=True)}
    train_toy(tmp_path / "whole", **fields)
    with pytest.raises(Interrupted) as stopped:
        train_toy(tmp_path / "cut", on_metrics=stop_after(4), **fields)
    assert stopped.value.step == 5
    assert [line["step"] for line in read_run(tmp_path / "cut")[0]] == [1, 2, 3, 4, 5]
    train_toy(tmp_path / "cut", **fields)
    assert read_run(tmp_path / "cut") == read_run(tmp_path / "whole")


@pytest.mark.parametrize(("at", "saved"), [(4, 3), (6, 3), (8, 6)])
def test_a_step_that_is_not_finite_is_saved_nowhere(train_toy, tmp_path, read_run, as_on_a_gpu, poison, at, saved):  # noqa: F811
    """Neither where the next step finds it, nor where a checkpoint is due or training ends."""
    poison(at)
    with pytest.raises(Diverged, match=f"step {at} has loss nan and gradient norm nan; lower"):
        train_toy(tmp_path)
    assert checkpoints(tmp_path)[-1].name == f"step-{saved:06d}"
    assert [line["step"] for line in read_run(tmp_path)[0]] == list(range(1, at))


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_steps_wait_for_nothing_on_a_gpu(train_toy, tmp_path, monkeypatch, optimizer):
    step = Trainer.train_step

    def checked(self):
        torch.cuda.set_sync_debug_mode("error" if self.step > 1 else "default")  # the first ones choose kernels
        try:
            return step(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Trainer, "train_step", checked)
    fields = {"optimizer": OptimizerConfig(method=optimizer), "pack_documents": True, "precision": "bf16"}
    train_toy(tmp_path, device="cuda", **fields)
