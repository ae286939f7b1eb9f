"""The backends of the op as its tests meet them: a row of `TABLE` each, with how it is made available on this machine."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from difftransformer.ops import cudnn, differential_attention, normed_differential_attention, softmax_attention
from tests.support.cases import (
    EPS,
    FACTOR,
    assert_as_good_as_eager,
    assert_close,
    by_eager,
    exact,
    needs_interpreter,
    needs_kernels,
    normed_results,
    overflow_is_fine,
)
from tests.support.oracle import Case, output_and_gradients


def as_it_is(patch: pytest.MonkeyPatch) -> None:
    """Nothing has to be made available."""


@dataclass(frozen=True, kw_only=True)
class OpBackend:
    """A backend on a device, or one form of it.

    Attributes:
        name: Its name for `backend=`.
        label: Its name in the names of tests.
        provide: Makes it available.
        device: Where it computes; inputs are moved there and results back.
        takes: Whether it takes a case.
        differentiates: Whether it gives gradients of a case.
        low: Dtypes below fp32.
        times: In low precision, how many times the error of eager PyTorch it may have; three times where it subtracts
            rounded terms, which may be larger than their difference, as its documentation says.
        tolerance: Of fp32, relative to the largest number.
        width_factor: Of a dtype, what D and E must be multiples of; those of cases are rounded up. None stands for any dtype.
        is_heavy: Whether it takes a second for a call here, so that most calls are slow tests.
        is_further_form: Whether it shares most of its code with another row, so that few calls show what is its own.
    """

    name: str
    label: str = ""
    provide: Callable[[pytest.MonkeyPatch], Any] = as_it_is
    marks: tuple[pytest.MarkDecorator, ...] = ()
    device: str = "cpu"
    takes: Callable[[Case], bool] = lambda case: True
    differentiates: Callable[[Case], bool] = lambda case: True
    low: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16)
    times: int = 2
    tolerance: float = 2e-5
    width_factor: Callable[[torch.dtype | None], int] = lambda dtype: 1
    is_heavy: bool = False
    is_further_form: bool = False

    def __str__(self) -> str:
        return self.label or self.name

    def attend(self, case):
        """A function of query, key, value and lam."""

        def function(query, key, value, lam):
            how = self._there(case.kwargs)
            if case.lam is None:
                out = softmax_attention(*self._there((query, key, value)), backend=self.name, **how)
            else:
                out = differential_attention(*self._there((query, key, value, lam)), backend=self.name, **how)
            return out.to(query.device)

        return function

    def normed(self, case, eps=EPS):
        """A function of query, key, value, lam and weight."""

        def function(*inputs):
            how = {"eps": eps, "factor": FACTOR, "backend": self.name} | self._there(case.kwargs)
            return normed_differential_attention(*self._there(inputs), **how).to(inputs[0].device)

        return function

    def results(self, case, dtype=torch.float32, norm=False, gradients=True, **how):
        """Output and the gradients that it gives."""
        gradients = gradients and self.differentiates(case)
        if norm:
            return normed_results(self.normed(case), case, dtype, gradients=gradients, **how)
        return output_and_gradients(self.attend(case), case, dtype, gradients=gradients)

    def assert_right(self, case, dtype=torch.float32, norm=False, **how):
        """fp32 within the tolerance of the equations, lower dtypes by the rule of flash-attention."""
        results, right = self.results(case, dtype, norm, **how), exact(case, dtype, norm)
        right = {part: right[part] for part in results}
        assert results["out"].dtype == dtype
        if dtype == torch.float32:
            # eps keeps a head whose output is near zero from being divided by it; such heads amplify what went before.
            assert_close(results, right, 5 * self.tolerance if norm else self.tolerance)
        else:
            by_hand = {part: by_eager(case, dtype, norm)[part] for part in results}
            assert_as_good_as_eager(results, by_hand, right, dtype, self.times)

    def _there(self, given):
        if self.device == "cpu":
            return given
        if isinstance(given, dict):
            return {name: x.to(self.device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        return tuple(x.to(self.device) if isinstance(x, torch.Tensor) else x for x in given)


@functools.cache  # a case is itself
def rounded_up(case, factor):
    """The case with widths that are multiples."""
    D, E = (-(-width // factor) * factor for width in (case.D, case.E))
    return case if (D, E) == (case.D, case.E) else dataclasses.replace(case, D=D, E=E)


# How backends are made available.


def force_forms(patch, *names):
    """Let Triton's passes be made by the forms of some names, where they have one; returns the names of those taken.

    "both_maps" is for calls without gradients, whose few queries are then not decoded either.
    """
    from difftransformer.ops.triton_kernels import launch

    taken = []
    if "both_maps" in names:
        patch.setattr(launch, "DECODE_ROWS", 0)

    def choose(forms, key, run):
        form = next((form for form in forms if form.name in names), forms[0])
        taken.append(form.name)
        return form

    patch.setattr(launch, "choose", choose)
    return taken


def has_cuda(patch):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def install_cudnn(patch):
    """PyTorch's attention on the CPU in place of cuDNN, which takes fp32 and widths of one here."""
    patch.setattr(cudnn, "_is_gpu", lambda device_type: device_type in ("cpu", "cuda"))
    patch.setattr(cudnn, "_device", lambda: (cudnn.OLDEST, 9))
    patch.setattr(cudnn, "_attend", F.scaled_dot_product_attention)
    patch.setattr(cudnn, "DTYPES", (torch.float32, torch.bfloat16, torch.float16))
    patch.setattr(cudnn, "MULTIPLE", 1)


def has_hopper(patch):
    has_cuda(patch)
    if torch.cuda.get_device_capability()[0] not in cudnn.MAX_WIDTHS:
        pytest.skip("needs Hopper or Blackwell")


def cudnn_takes(case):
    masks = {"attn_mask", "kv_start", "kv_lengths", "cu_seqlens", "window"} & case.kwargs.keys()
    return (
        not masks and case.T > 1 and case.S > 0 and case.B > 0 and (case.T == case.S or "is_causal" not in case.kwargs)
    )


INTERPRETED = {
    "name": "triton", "marks": (needs_interpreter, overflow_is_fine), "low": (torch.float16,), "is_heavy": True
}  # fmt: skip
FURTHER_FORM = INTERPRETED | {"is_further_form": True}
ON_CUDA = {"device": "cuda", "marks": (pytest.mark.gpu,), "provide": has_cuda}

# A new backend is one more row.
TABLE = (
    OpBackend(name="reference"),
    OpBackend(name="chunked"),
    OpBackend(name="sdpa", times=3),
    OpBackend(name="cpu", marks=(needs_kernels,)),
    OpBackend(**INTERPRETED),
    OpBackend(**FURTHER_FORM, label="atomic triton", provide=lambda patch: force_forms(patch, "atomic")),
    OpBackend(**FURTHER_FORM, label="both_maps triton", provide=lambda patch: force_forms(patch, "both_maps"),
              takes=lambda case: case.lam is not None, differentiates=lambda case: False),
    OpBackend(name="cudnn", times=3, takes=cudnn_takes, provide=install_cudnn),
    OpBackend(**ON_CUDA, name="triton", label="triton on CUDA",
              width_factor=lambda dtype: 1 if dtype == torch.float32 else 8),
    OpBackend(**ON_CUDA | {"provide": has_hopper}, name="cudnn", label="cudnn on CUDA", times=3, takes=cudnn_takes,
              width_factor=lambda dtype: 8),
)  # fmt: skip
LABELS = tuple(map(str, TABLE))
FLOAT64 = ("reference", "chunked", "sdpa")
PLAIN = (*FLOAT64, "cpu", "triton")
FUSED = ("cpu", "triton")
FORMS = ("triton", "atomic triton", "both_maps triton")


def each(labels=LABELS, cases=None, dtypes=None, *, quick=None, heavy=None, few=None, **more):
    """Run a test with each of some backends; the fixture `backend` makes it available.

    Args:
        labels: Of the rows of `TABLE`.
        cases: Cases, those that the backend does not take left out.
        dtypes: Dtypes; "low" for those that the backend has below fp32; "both" for fp32 and, unless it is heavy, one of these.
        quick: Names of the cases that are quick tests; all if None.
        heavy: Names of the cases that are quick tests of heavy backends too. All others of these are slow, and all of
            further forms.
        few: By label, names of the only cases that a row takes; a further form takes those that are quick tests.
        more: Further marks by label.
    """
    names = ["backend", *["case"] * (cases is not None), *["dtype"] * (dtypes is not None)]
    found = []
    for row in (row for row in TABLE if str(row) in labels):
        both = (torch.float32,) if row.is_heavy else (torch.float32, row.low[0])
        chosen = {"low": row.low, "both": both}[dtypes] if isinstance(dtypes, str) else dtypes or [None]
        named = heavy or () if row.is_heavy else quick
        for case in [None] if cases is None else filter(row.takes, cases):
            only = (few or {}).get(str(row), heavy if row.is_further_form else None)
            if case is not None and only is not None and case.name not in only:
                continue
            is_quick = named is None or (case is not None and case.name in named and not row.is_further_form)
            for dtype in chosen:
                fitting = case and rounded_up(case, row.width_factor(dtype))
                values = [x for x in (row, fitting, dtype) if x is not None]
                words = [str(x).removeprefix("torch.") if x is not fitting else case.name for x in values]
                marks = [*row.marks, *[pytest.mark.slow] * (not is_quick), *more.get(str(row), ())]
                found.append(pytest.param(*values, marks=marks, id="-".join(words)))
    return pytest.mark.parametrize(names, found, indirect=["backend"])
