"""Differential attention as two calls of cuDNN through `F.scaled_dot_product_attention`, each with the whole value.

cuDNN takes a value that is wider than queries and keys, forward and backward, on Hopper and Blackwell GPUs
(cudnn-frontend, `scaled_dot_product_flash_attention.h`). The two outputs are rounded to the input dtype before they are
subtracted, as in `sdpa.py`. PyTorch differentiates its own calls, so no operator is registered here.

Dimensions: B batch, H differential heads, G key/value groups, T query positions, S key positions, D width of one map's queries
and keys, E value width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .fused import positive_scale
from .problem import LOW_PRECISION, Call, Problem

DESCRIPTION = "two calls of cuDNN through F.scaled_dot_product_attention; subtracts outputs that are already rounded"

DTYPES = LOW_PRECISION
OLDEST = 91000  # 9.10, the first that takes widths up to 256 in the backward pass
MAX_WIDTHS = {9: 256, 10: 128}  # by the major number of the compute capability
MULTIPLE = 8


def supports(problem: Problem) -> str | None:
    """Return why this backend cannot run the problem, or None."""
    if not _is_gpu(problem.device_type):
        return f"runs on CUDA, not on {problem.device_type}"
    if problem.dtype not in DTYPES:
        return f"takes bfloat16 and float16, not {str(problem.dtype).removeprefix('torch.')}"
    if problem.needs_mask:
        return "takes no mask: no attn_mask, window, kv_start, kv_lengths, cu_seqlens, or causal call with T < S"
    if problem.queries <= 1 or problem.keys == 0 or problem.batch == 0:
        return "needs at least two queries, a key and a row"
    version, capability = _device()
    largest = MAX_WIDTHS.get(capability, 0)
    if not largest:
        return f"needs compute capability 9.0 or 10.0 (Hopper, Blackwell), not {capability}.x"
    if version < OLDEST:
        return f"cuDNN {version}; at least {OLDEST} (9.10) is needed"
    for name, width in (("width", problem.width), ("value width", problem.value_width)):
        if width % MULTIPLE or width > largest:
            return f"{name} {width}; cuDNN takes multiples of {MULTIPLE} up to {largest} here"
    return None


def run(call: Call) -> Tensor:
    """Attend as `reference.run` does; the two rounded outputs are subtracted in fp32, and the result is rounded again."""
    query, scale = positive_scale(call.query, call.scale)
    value, lam, restrictions = call.value, call.lam, call.restrictions
    is_causal = restrictions.is_causal and query.shape[2] > 1
    shared = {"enable_gqa": True} if query.shape[1] != value.shape[1] else {}
    outs = [
        _attend(q_BHTD, k_BGSD, value, is_causal=is_causal, scale=scale, **shared)
        for q_BHTD, k_BGSD in call._replace(query=query).maps()
    ]
    if lam is None:
        return outs[0]
    # lam stays fp32: the product and the difference are formed there and rounded once.
    return (outs[0] - lam.unsqueeze(-1) * outs[1]).to(value.dtype)


def _attend(query: Tensor, key: Tensor, value: Tensor, **arguments: object) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, **arguments)  # type: ignore[arg-type]


def _is_gpu(device_type: str) -> bool:
    return device_type == "cuda"


@torch.compiler.assume_constant_result
def _device() -> tuple[int, int]:
    """Return the version of cuDNN and the major number of the current device's compute capability; zeros without them."""
    if not torch.cuda.is_available():
        return 0, 0
    return torch.backends.cudnn.version() or 0, torch.cuda.get_device_capability()[0]
