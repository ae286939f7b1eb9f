"""Speed and memory of training: the share of the device's peak that model FLOPs reach, and peak memory."""

import resource
import sys
import time
from typing import Any

import torch

from ..model import DiffTransformerConfig, count
from .config import LogsConfig, TrainingConfig

_WIDTH = {"cpu": 512, "cuda": 8192}  # of the matrices whose product is timed
_ROUNDS = 5


class Speed:
    """Says of each step the figures of `StepMetrics` that depend on the machine.

    Args:
        model_config: Model configuration. Model FLOPs are known for models of this package.
        config: Training configuration.
        logs: States the peak speed of one device, or None to measure it by a matrix product.
        device: "cpu" or "cuda".
        processes: Number of processes, each with a device.
    """

    def __init__(
        self, model_config: Any, config: TrainingConfig, logs: LogsConfig, *, device: str, processes: int
    ) -> None:
        self.device = device
        self.step_flops = self.peak_flops = 0.0
        if isinstance(model_config, DiffTransformerConfig):
            token = count(model_config, context_tokens=config.context_tokens).train_flops_per_token
            self.step_flops = token * config.batch_tokens
            stated = logs.peak_tflops and 1e12 * logs.peak_tflops
            self.peak_flops = processes * (stated or matmul_flops(device, config.precision))

    def of_step(self, seconds: float) -> dict[str, Any]:
        """Return `mfu` and `peak_bytes` of a step that took this time."""
        mfu = self.step_flops / seconds / self.peak_flops if self.peak_flops else None
        return {"mfu": mfu, "peak_bytes": _peak_bytes(self.device)}


def matmul_flops(device: str, precision: str) -> float:
    """Return the FLOP/s of a product of two square matrices, the best of some; it draws no random number."""
    width = _WIDTH[device]
    matrix = torch.ones(width, width, device=device, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    best = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        matrix @ matrix
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return 2 * width**3 / best


def _peak_bytes(device: str) -> int:
    """Return the most memory that this process has had: that of tensors on a GPU, and all of it on a CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
