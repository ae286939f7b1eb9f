"""Peak memory of attention above its inputs, forward and backward: our kernel, the chunked backend and PyTorch's.

On the CPU it is measured in a fresh process, as the peak of the resident set above what the process held before: its imports
and the inputs. On a GPU PyTorch counts the memory in use.
"""

import multiprocessing
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from script import Steps, run

from difftransformer_lab.bench.attention import KERNELS, AttentionShape, attention_call, draw
from difftransformer_lab.bench.settings import Settings
from difftransformer_lab.results import BenchRow
from difftransformer_lab.studies.costs import RETURN_FREED_BLOCKS, peak_bytes

LENGTHS = {"cpu": (2048, 8192), "cuda": (8192, 32_768, 65_536)}
LONG = {"cpu": (32_768, 65_536), "cuda": (131_072,)}
"""Lengths at which our kernel alone is measured."""
HEADS = {"cpu": 4, "cuda": 16}
SHORT_TOKENS = 64


def steps(settings: Settings) -> Steps:
    """List the implementations of each shape."""
    device, kernel = settings.device, f"diff {KERNELS[settings.device]}"
    found = {}
    for length in LENGTHS[device] + LONG[device]:
        dtype = (settings.dtypes or ["fp32"])[0]
        shape = AttentionShape(dtype, "forward+backward", 1, length, HEADS[device], 64)
        names = [kernel] if length in LONG[device] else [kernel, "diff chunked", "torch sdpa"]
        found |= {f"memory of {name}, {length} tokens": partial(measure, name, shape, settings) for name in names}
    return found


def measure(implementation: str, shape: AttentionShape, settings: Settings) -> list[BenchRow]:
    """Measure the peak memory of an implementation on one shape."""
    if settings.device == "cpu":
        peak = in_a_fresh_process(peak_of_attention, implementation, shape, settings.threads or torch.get_num_threads())
    else:
        call = attention_call(implementation, shape, draw(shape, settings.device))
        call()  # tuning and compiling take memory of their own, once
        peak = device_peak_bytes(call)
    _, mode, batch, length, heads, width = shape
    sizes = {"batch": batch, "length_tokens": length, "heads": heads, "head_dim": width}
    figures = {"peak_bytes": float(peak)}
    return [
        BenchRow(
            part="memory", work=mode, dtype=shape.dtype, shape=sizes, implementation=implementation, figures=figures
        )
    ]


def in_a_fresh_process(function: Callable[..., int], *arguments: Any) -> int:
    """Call a function in a process that has inherited no memory, because allocators keep it."""
    os.environ |= RETURN_FREED_BLOCKS
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def peak_of_attention(implementation: str, shape: AttentionShape, threads: int) -> int:
    """Measure a call, after a short one in which libraries allocate their workspaces."""
    torch.set_num_threads(threads)
    short = shape._replace(length_tokens=SHORT_TOKENS)
    attention_call(implementation, short, draw(short, "cpu"))()
    return peak_bytes(attention_call(implementation, shape, draw(shape, "cpu")))


def device_peak_bytes(work: Callable[[], object]) -> int:
    """Measure the most GPU memory in use during the work, above that in use when it begins."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    run(steps, __doc__)
