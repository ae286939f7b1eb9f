"""The kernels of a compiled training step on a GPU, and how long the GPU waits for the host.

    python benchmarks/step_kernels.py 125M diff diff_v2 softmax cudnn

"softmax" is the twin on our kernels, "cudnn" the twin on PyTorch's attention, which takes cuDNN.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from difftransformer.model import DiffTransformerConfig, DiffTransformerForCausalLM
from difftransformer.train.speed import train_flops_per_token
from difftransformer_lab.bench.models import SIZES, compiled_work

WARM_UP, TIMED, ROWS = 4, 15, 20


def step_of(size: str, kind: str) -> tuple[Callable[[], None], float]:
    """Build a compiled training step in bf16, and count its FLOPs."""
    fields, rows, context = SIZES[size]
    config = DiffTransformerConfig(**fields, attention_type="diff_v2" if kind == "diff_v2" else "diff")
    if kind in ("softmax", "cudnn"):
        config = config.twin()
    if kind == "cudnn":
        config.attn_backend = "sdpa"
    model = DiffTransformerForCausalLM(config).cuda()
    flops = rows * context * train_flops_per_token(model, config, context)
    return compiled_work(model, rows, context, "bf16"), flops


def seconds_of(step: Callable[[], None]) -> float:
    times = []
    for _ in range(WARM_UP + TIMED):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("kinds", nargs="+", choices=("diff", "diff_v2", "softmax", "cudnn"))
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for kind in args.kinds:
        step, flops = step_of(args.size, kind)
        seconds = seconds_of(step)
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as traced:
            step()
            torch.cuda.synchronize()
        events = sorted(traced.key_averages(), key=lambda event: -event.self_device_time_total)
        busy = sum(event.self_device_time_total for event in events) / 1e6
        print(
            f"{kind} {args.size}: {1e3 * seconds:.1f} ms, {flops / seconds / 1e12:.0f} TFLOP/s; kernels {1e3 * busy:.1f} ms"
        )
        for event in events[:ROWS]:
            print(f"  {event.self_device_time_total / 1e3:7.2f} ms  {event.count:4} x  {event.key[:100]}")


if __name__ == "__main__":
    main()
