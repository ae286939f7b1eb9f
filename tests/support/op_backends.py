"""The backends of the op as its tests meet them: a row of `TABLE` each, with how it is made available on this machine."""

import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as torch_flex

from difftransformer.ops import (
    cudnn,
    differential_attention,
    flash,
    flex,
    normed_differential_attention,
    softmax_attention,
)
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


def flex_as_on_a_gpu(patch):
    """The path of CUDA, gradients included, by PyTorch's own unfused form of FlexAttention in place of a kernel."""
    if not hasattr(torch_flex, "_validate_device"):
        pytest.skip("this torch refuses gradients on the CPU elsewhere")
    patch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    patch.setattr(flex, "_has_kernel", lambda device_type: True)
    compiled = torch.compile(flex.flex_attention, fullgraph=True, backend="eager")
    patch.setattr(flex, "_compiled", lambda: compiled)


class FlashPackage(types.ModuleType):
    """A stand-in for flash_attn, or for flex_head_fa with the pairs of widths that this compiles; it knows their rules.

    Written from what the package's README says of its three functions, in float64 and a loop over head and query.
    """

    __version__ = "2.8.3"

    def __init__(self, name="flash_attn", pairs=()):
        super().__init__(name)
        self.pairs, self.calls = pairs, []

    def _check(self, name, q, k, v, scale):
        self.calls.append(name)
        assert k.shape[-1] == q.shape[-1] <= 256
        assert (q.shape[-1], v.shape[-1]) in self.pairs or v.shape[-1] == q.shape[-1]
        assert q.shape[-2] % k.shape[-2] == 0
        assert scale > 0

    def _row(self, q, k, v, scale, causal, window):
        """(T, H, D), (S, G, D), (S, G, C) -> (T, H, C). Keys from i + S - T - left to i + S - T + right; causal: right = 0."""
        T, H, S, G = *q.shape[:2], *k.shape[:2]
        left, right = window
        right = 0 if causal else right
        dtype, (q, k, v) = q.dtype, (x.double() for x in (q, k, v))
        heads = []
        for h in range(H):
            rows = []
            for i in range(T):
                first = 0 if left < 0 else max(0, i + S - T - left)
                last = S if right < 0 else min(S, i + S - T + right + 1)
                if first >= last:
                    rows.append(0 * q[i, h].sum() + torch.zeros(v.shape[-1], dtype=torch.float64))
                    continue
                g = h // (H // G)
                weights = torch.softmax(scale * (k[first:last, g] @ q[i, h]), 0)
                rows.append(weights @ v[first:last, g])
            heads.append(torch.stack(rows))
        return torch.stack(heads, 1).to(dtype)

    def flash_attn_func(self, q, k, v, *, softmax_scale, causal, window_size, deterministic):
        self._check("flash_attn_func", q, k, v, softmax_scale)
        return torch.stack([self._row(*row, softmax_scale, causal, window_size) for row in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(
        self, q, k, v, bounds_q, bounds_k, longest_q, longest_k, *, softmax_scale, causal, window_size, deterministic
    ):
        self._check("flash_attn_varlen_func", q, k, v, softmax_scale)
        assert bounds_q.dtype == bounds_k.dtype == torch.int32
        pieces = []
        for (a, b), (c, d) in zip(*(bounds.unfold(0, 2, 1).tolist() for bounds in (bounds_q, bounds_k)), strict=True):
            assert b - a <= longest_q > 1
            assert d - c <= longest_k > 1
            if b > a:
                pieces.append(self._row(q[a:b], k[c:d], v[c:d], softmax_scale, causal, window_size))
        return torch.cat(pieces)

    def flash_attn_with_kvcache(self, q, k_cache, v_cache, *, cache_seqlens, softmax_scale, causal, window_size):
        self._check("flash_attn_with_kvcache", q, k_cache, v_cache, softmax_scale)
        assert cache_seqlens.dtype == torch.int32
        assert k_cache.stride(-1) == v_cache.stride(-1) == 1
        rows = zip(q, k_cache, v_cache, cache_seqlens.tolist(), strict=True)
        return torch.stack(
            [self._row(q, k[:n], v[:n], softmax_scale, causal, window_size) for q, k, v, n in rows]
        ).detach()


def install_flash(patch, *packages):
    """Install stand-ins, by default flash_attn; the CPU passes for a GPU, and fp32 for a dtype that the package takes."""
    patch.setattr(flash, "_is_gpu", lambda device_type: device_type in ("cpu", "cuda"))
    patch.setattr(flash, "DTYPES", (torch.float32, torch.bfloat16, torch.float16))
    patch.setattr(flash, "_outcome", functools.cache(flash._outcome.__wrapped__))
    for name in ("flash_attn", "flex_head_fa"):
        patch.setitem(sys.modules, name, None)
    for package in packages or (FlashPackage(),):
        patch.setitem(sys.modules, package.__name__, package)


def has_cuda(patch):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def has_flash_attn(patch):
    has_cuda(patch)
    pytest.importorskip("flash_attn")


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


def flash_takes(case):
    return not {"attn_mask", "kv_start"} & case.kwargs.keys()


# torch.compile hides this warning of its own, unless warnings are errors.
hidden_by_compile = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
INTERPRETED = {
    "name": "triton", "marks": (needs_interpreter, overflow_is_fine), "low": (torch.float16,), "is_heavy": True
}  # fmt: skip
FURTHER_FORM = INTERPRETED | {"is_further_form": True}
ON_CUDA = {"device": "cuda", "marks": (pytest.mark.gpu,), "provide": has_cuda}
FLASH = {
    "name": "flash", "times": 3, "takes": flash_takes, "differentiates": lambda case: "kv_lengths" not in case.kwargs
}  # fmt: skip

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
    OpBackend(name="flex", provide=flex_as_on_a_gpu, marks=(hidden_by_compile,), low=(torch.bfloat16,), times=3,
              is_heavy=True),
    OpBackend(name="cudnn", times=3, takes=cudnn_takes, provide=install_cudnn),
    OpBackend(**FLASH, provide=install_flash),
    OpBackend(**ON_CUDA, name="triton", label="triton on CUDA",
              width_factor=lambda dtype: 1 if dtype == torch.float32 else 8),
    OpBackend(**ON_CUDA | {"provide": has_hopper}, name="cudnn", label="cudnn on CUDA", times=3, takes=cudnn_takes,
              width_factor=lambda dtype: 8),
    # Its products may be in TF32.
    OpBackend(**ON_CUDA, name="flex", label="flex on CUDA", times=3, tolerance=1e-3, width_factor=lambda dtype: 16),
    OpBackend(**FLASH | ON_CUDA | {"provide": has_flash_attn}, label="flash on CUDA"),
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
        heavy: As `quick`, for backends that are heavy.
        few: By label, names of the only cases that a row takes; a further form takes those that are quick tests.
        more: Further marks by label.
    """
    names = ["backend", *["case"] * (cases is not None), *["dtype"] * (dtypes is not None)]
    found = []
    for row in (row for row in TABLE if str(row) in labels):
        both = (torch.float32,) if row.is_heavy else (torch.float32, row.low[0])
        chosen = {"low": row.low, "both": both}[dtypes] if isinstance(dtypes, str) else dtypes or [None]
        named = heavy if row.is_heavy and heavy is not None else quick
        for case in [None] if cases is None else filter(row.takes, cases):
            only = (few or {}).get(str(row), heavy if row.is_further_form else None)
            if case is not None and only is not None and case.name not in only:
                continue
            slow = [pytest.mark.slow] * (case is not None and named is not None and case.name not in named)
            for dtype in chosen:
                fitting = case and rounded_up(case, row.width_factor(dtype))
                values = [x for x in (row, fitting, dtype) if x is not None]
                words = [str(x).removeprefix("torch.") if x is not fitting else case.name for x in values]
                marks = [*row.marks, *slow, *more.get(str(row), ())]
                found.append(pytest.param(*values, marks=marks, id="-".join(words)))
    return pytest.mark.parametrize(names, found, indirect=["backend"])
