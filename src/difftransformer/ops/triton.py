"""Attention in Triton (`triton_kernels/`): fused forward and backward for GPUs, O(n) memory, decoding split over the cache.

Work in units of 2 n n D, for one differential head and for the Transformer's two: the forward takes 6 and 4 units, since each
map needs its own product with V (`triton_kernels/forward.py`). The backward takes 10 and 10 in one kernel, which adds dQ in no
fixed order, or 14 in two, which give the same bits every time (`torch.use_deterministic_algorithms`). Decoding reads each
cached number once, as the Transformer does.

With TRITON_INTERPRET=1, set before Python starts, the kernels run on the CPU in Triton's interpreter: slowly, for tests.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from . import fused
from .problem import LOW_PRECISION, Call, Problem

DESCRIPTION = "fused Triton kernels for GPUs, forward, backward and decoding; subtracts in fp32, once"
MAX_WIDTH, MAX_VALUE_WIDTH = 128, 256
WIDTH_FACTOR = 8  # in bf16 and fp16: rows are loaded 16 bytes at a time
MIN_CAPABILITY = (8, 0)  # matrix instructions for bf16

_library, _attend = fused.define(
    "triton", ("lse", "second", "plain", "inverse_rms"), keeps_out=True, more=("bool save",)
)


def supports(problem: Problem) -> str | None:
    """Return why this backend cannot run the problem, or None."""
    if problem.dtype == torch.float64:
        return "takes bfloat16, float16 and float32, not float64"
    if problem.width > MAX_WIDTH or problem.value_width > MAX_VALUE_WIDTH:
        return f"takes D up to {MAX_WIDTH} and E up to {MAX_VALUE_WIDTH}, not D = {problem.width} and E = {problem.value_width}"
    is_multiple = problem.width % WIDTH_FACTOR == problem.value_width % WIDTH_FACTOR == 0
    if not is_multiple and problem.device_type == "cuda" and problem.dtype in LOW_PRECISION:
        dtype, sizes = str(problem.dtype).removeprefix("torch."), f"D = {problem.width} and E = {problem.value_width}"
        return f"takes multiples of {WIDTH_FACTOR} as D and E in {dtype}, not {sizes}"
    return fused.untraceable() or _unavailable(problem.device_type)


def run(call: Call) -> Tensor:
    """Attend as `reference.run` does, and normalise heads in the same pass."""
    # Tensors of vmap do not say whether they need a gradient.
    save = Problem.of(call).needs_grad or (torch.is_grad_enabled() and fused.is_transformed())
    out: Tensor = _attend(*fused.arguments_of(call), save)[0]
    return out


@torch.compiler.assume_constant_result
def _unavailable(device_type: str) -> str | None:
    return _reason(device_type)


@functools.cache
def _reason(device_type: str) -> str | None:
    try:
        from triton import knobs
    except ImportError:
        return "needs the triton package: pip install 'difftransformer[gpu]'"
    if device_type == "cpu" and knobs.runtime.interpret:
        return None
    if device_type != "cuda":
        return (
            f"runs on CUDA devices, not on {device_type} (with TRITON_INTERPRET=1 set before Python starts, on the CPU)"
        )
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < MIN_CAPABILITY:
        major, minor = torch.cuda.get_device_capability()
        return f"needs a GPU of compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or newer, this is {major}.{minor}"
    return None


def refusal_of_hopper(device: torch.device) -> str | None:
    """Return why the backward does not try its warp-specialised form for Hopper on a device, or None."""
    if (reason := _reason(device.type)) is not None:
        return reason
    from .triton_kernels import configs

    return configs.hopper_refusal(device)


def _attention(*arguments: Any) -> tuple[Tensor, ...]:
    from .triton_kernels import launch

    *flat, save = arguments
    call = fused.call_of(*flat)
    with _device_of(call.query):
        return tuple(launch.forward(launch.Inputs(call), call.norm, save=save))


def _backward(
    grad: Tensor, out: Tensor, lse: Tensor, second: Tensor, plain: Tensor, inverse_rms: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    from .triton_kernels import launch

    call = fused.call_of(*arguments[:-1])
    with _device_of(call.query):
        saved = launch.Forward(out, lse, second, plain, inverse_rms)
        *others, dlam, dweight = launch.backward(launch.Inputs(call), call.norm, saved, grad)
    return *others, dlam if call.lam is None else dlam.sum_to_size(call.lam.shape), dweight


def _device_of(tensor: Tensor) -> Any:
    """Make the tensor's device the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device if tensor.is_cuda else -1)


for _key in ("CUDA", "CPU"):
    _library.impl("triton_attention", _attention, _key)
    _library.impl("triton_attention_backward", _backward, _key)


@torch.library.register_fake("difftransformer::triton_attention")
def _(query: Tensor, key: Tensor, value: Tensor, lam: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    batch, heads, queries = query.shape[:3]
    eps, save = rest[-3], rest[-1] and query.numel() * key.numel() > 0
    width, maps = value.shape[3], 1 if lam is None else 2

    def heads_if(wanted: bool, dtype: torch.dtype = torch.float32) -> Tensor:
        if not wanted:
            return query.new_empty(0)
        return query.new_empty(batch, queries, heads, width, dtype=dtype).transpose(1, 2)

    def rows_if(wanted: bool, *last: int) -> Tensor:
        shape = (batch, heads, queries, *last) if wanted else (0,)
        return query.new_empty(shape, dtype=torch.float32 if wanted else None)

    return (
        heads_if(True, query.dtype),
        rows_if(save, maps),
        heads_if(save and lam is not None),
        heads_if(save and (lam is not None or eps is not None)),
        rows_if(save and eps is not None),
    )


@torch.library.register_fake("difftransformer::triton_attention_backward")
def _(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    query, key, value, lam = arguments[5:9]
    weight = arguments[-4]

    def like(x: Tensor) -> Tensor:
        batch, heads, positions, width = x.shape
        return x.new_empty(batch, positions, heads, width).transpose(1, 2)

    return (
        like(query),
        like(key),
        like(value),
        query.new_empty((0,) if lam is None else lam.shape, dtype=torch.float32),
        query.new_empty(0 if weight is None else value.shape[3], dtype=torch.float32),
    )
