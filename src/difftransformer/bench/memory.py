"""Peak memory of one piece of work in a fresh process. `python -m difftransformer.bench.memory SPEC`, SPEC in JSON.

The peak is that of the resident set (VmHWM on Linux) above what the process held before the work: what it imported and
its inputs. A fresh process is needed because allocators keep memory, and a child's peak from getrusage starts at its
parent's.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ..errors import DiffTransformerError
from ..model import DiffTransformerConfig, DiffTransformerForCausalLM
from .work import attention_work, training_work


def peak_attention_bytes(
    *, op: str, backend: str, heads: int, length_tokens: int, head_dim: int, dtype: str, threads: int
) -> int:
    """Peak above the inputs of one causal forward and backward of attention (`attention_work`)."""
    return _measure(
        {
            "work": "attention",
            "op": op,
            "backend": backend,
            "heads": heads,
            "length": length_tokens,
            "head_dim": head_dim,
            "dtype": dtype,
            "threads": threads,
        }
    )


def peak_training_bytes(config: DiffTransformerConfig, *, rows: int, context_tokens: int, threads: int) -> int:
    """Peak of two training steps: weights, gradients, both moments and activations."""
    return _measure(
        {"work": "training", "config": config.to_dict(), "rows": rows, "context": context_tokens, "threads": threads}
    )


def _measure(spec: dict[str, Any]) -> int:
    command = [sys.executable, "-m", "difftransformer.bench.memory", json.dumps(spec)]
    # Freed blocks go back to the system at once, so that the peak is of memory in use.
    environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise DiffTransformerError(f"the memory measurement failed: {done.stderr.strip().splitlines()[-1:]}")
    return int(done.stdout.split()[-1])


def _resident_bytes(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process."""
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux: only the peak is known
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def main(spec: dict[str, Any]) -> int:
    """Do the work of a spec and return the bytes above the start."""
    torch.set_num_threads(spec["threads"])
    torch.manual_seed(0)
    if spec["work"] == "attention":
        # A tiny call first: libraries allocate their own workspaces once.
        attention_work(spec["op"], spec["backend"], spec["heads"], 64, spec["head_dim"], spec["dtype"])()
        call = attention_work(
            spec["op"], spec["backend"], spec["heads"], spec["length"], spec["head_dim"], spec["dtype"]
        )
        before = _resident_bytes("VmRSS")
        call()
        return _resident_bytes("VmHWM") - before
    before = _resident_bytes("VmRSS")
    fields = {
        key: value for key, value in spec["config"].items() if key not in ("architectures", "transformers_version")
    }
    step = training_work(DiffTransformerForCausalLM(DiffTransformerConfig(**fields)), spec["rows"], spec["context"])
    step()
    step()
    return _resident_bytes("VmHWM") - before


if __name__ == "__main__":
    sys.stdout.write(f"{main(json.loads(sys.argv[1]))}\n")
