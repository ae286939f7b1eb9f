"""Peak memory of one call or training run.

On the CPU it is measured in a fresh process, which is given a JSON spec: the peak of the resident set (VmHWM on Linux) above
what the process held before the work, which is its imports and the inputs. The process must be fresh because allocators keep
memory, and because a child's peak from getrusage starts at its parent's. On a GPU PyTorch counts the memory in use, in any
process.
"""

import contextlib
import dataclasses
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from difftransformer.errors import DiffTransformerError
from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM

from ..child import start_child
from .attention_work import AttentionShape, attention_work
from .model_work import training_work

SHORT_TOKENS = 64
# Variables of glibc that return freed blocks to the system at once, so that the peak counts only memory in use.
RETURN_FREED_BLOCKS = {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}


def peak_attention_bytes(implementation: str, shape: AttentionShape, *, threads: int, device: str = "cpu") -> int:
    """Measure the peak above the inputs of one call of `attention_work`."""
    if device != "cpu":
        work = attention_work(implementation, shape, device)
        work()  # tuning and compiling take memory of their own, once
        return device_peak_bytes(work)
    return _measure({"implementation": implementation, "shape": vars(shape), "threads": threads})


def peak_training_bytes(config: DiffTransformerConfig, *, rows: int, context_tokens: int, threads: int) -> int:
    """Measure the peak of two training steps: weights, gradients, both moments and activations."""
    return _measure({"config": config.to_dict(), "rows": rows, "context": context_tokens, "threads": threads})


def device_peak_bytes(work: Callable[[], object], before: int | None = None) -> int:
    """Return the most GPU memory in use during the work above `before`, by default the memory in use when it begins."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if before is None else before
    work()
    return torch.cuda.max_memory_allocated() - before


def _measure(spec: dict[str, Any]) -> int:
    environment = os.environ | RETURN_FREED_BLOCKS
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with start_child("difftransformer_lab.bench.memory", json.dumps(spec), env=environment, **pipes) as process:
        lines = process.stdout.read().decode(errors="replace").splitlines()  # type: ignore[union-attr]
    if process.returncode:
        reason = lines[-1] if lines else f"status {process.returncode}"
        raise DiffTransformerError(f"the memory measurement failed: {reason}")
    return int(next(line for line in reversed(lines) if line.isdecimal()))


def _resident_bytes(field: str) -> int:
    """Return VmRSS (now) or VmHWM (peak) of this process."""
    status = Path("/proc/self/status")
    if not status.exists():  # other systems tell only the peak
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main(arguments: list[str]) -> int:
    """Do the work of a spec, which is one of attention or of training, and print its peak in bytes."""
    spec = json.loads(arguments[0])
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)

    def train() -> None:
        model = DiffTransformerForCausalLM(DiffTransformerConfig.from_dict(spec["config"]))
        step = training_work(model, spec["rows"], spec["context"])
        step()
        step()

    work: Callable[[], object] = train
    if "shape" in spec:
        shape = AttentionShape(**spec["shape"])
        # Make a short call first: libraries allocate their workspaces once.
        attention_work(spec["implementation"], dataclasses.replace(shape, length_tokens=SHORT_TOKENS))()
        work = attention_work(spec["implementation"], shape)
    sys.stdout.write(f"{peak_bytes(work)}\n")
    return 0


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the peak of the resident set during the work, above its size before."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak, which the imports have set
    before = _resident_bytes("VmRSS")
    work()
    return _resident_bytes("VmHWM") - before
