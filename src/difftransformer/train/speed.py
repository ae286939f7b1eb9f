"""Speed and memory of training: the share of the device's peak that model FLOPs reach, peak memory, the C library's heap."""

import ctypes
import resource
import sys
import time
from contextlib import suppress
from typing import Any

import torch

from ..model import DiffTransformerConfig, DiffTransformerForCausalLM, count
from ..model.counts import BACKWARD_AND_FORWARD
from .checkpoint import CheckpointState
from .config import LogsConfig
from .lora import ADAPTER_PART
from .trainer import Callback, Trainer

_WIDTH = {"cpu": 512, "cuda": 8192}  # of the matrices whose product is timed
_ROUNDS = 5
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of mallopt(3)


class Speed(Callback):
    """Adds the figures of `StepMetrics` that depend on the machine.

    Args:
        logs: States the peak speed of one device, or None to measure it by a matrix product.
    """

    def __init__(self, logs: LogsConfig) -> None:
        self._stated_tflops = logs.peak_tflops
        self._token_flops: dict[int, float] = {}  # by length of rows
        self._peak_flops = 0.0

    def on_restore(self, trainer: Trainer, state: CheckpointState | None) -> None:
        """Measure the peak, once. Model FLOPs are known for models of this package."""
        config, processes = trainer.config, trainer.processes
        if not self._peak_flops and isinstance(trainer.model_config, DiffTransformerConfig):
            self._token_flops = {
                context: train_flops_per_token(trainer.model, trainer.model_config, context)
                for _, context in config.context_stages
            }
            stated = self._stated_tflops and 1e12 * self._stated_tflops
            self._peak_flops = processes.count * (stated or matmul_flops(processes.device, config.precision))

    def on_step(self, trainer: Trainer, figures: dict[str, Any]) -> None:
        """Add the MFU and the peak of memory."""
        if self._peak_flops:
            flops = self._token_flops[trainer.loader.context_tokens] * figures["tokens_per_second"]
            figures["mfu"] = flops / self._peak_flops
        figures["peak_bytes"] = _peak_bytes(trainer.processes.device)


def train_flops_per_token(
    model: DiffTransformerForCausalLM, config: DiffTransformerConfig, context_tokens: int
) -> float:
    """Return the FLOPs of a token's forward and backward pass, in which frozen matrices get no gradient.

    Args:
        model: The model, with adapters if it has them.
        config: Its configuration.
        context_tokens: Length of rows.
    """
    flops = float(count(config, context_tokens=context_tokens).train_flops_per_token)
    looked_up = None if config.tie_word_embeddings else model.get_input_embeddings().weight
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and parameter is not looked_up:
            if ADAPTER_PART in name:
                flops += 2 * BACKWARD_AND_FORWARD * parameter.numel()
            elif not parameter.requires_grad:
                flops -= 2 * parameter.numel()
    return flops


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


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for later tensors; other C libraries are left as they are.

    By default it returns large blocks to the system, which fills the next ones with zeros page by page: every step frees and
    takes the same activations again. The peak of a process's memory stays about the same, but memory does not shrink after it.
    """
    with suppress(OSError, AttributeError):  # no such function
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
