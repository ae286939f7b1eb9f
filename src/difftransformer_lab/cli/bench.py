"""difftransformer bench."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from difftransformer.files import write_text_atomically

from ..bench import Settings, sort_rows, steps_of
from ..bench.steps import Part, Step
from ..bench.timing import foreign_cpu_seconds
from ..report.bench import print_bench
from ..report.bench_figures import bench_drawings
from ..results import Bench, Dtype, write_result
from ..studies.environment import command_line, environment, now
from .arguments import check_device, use_threads
from .console import console, log, show

TRUSTED_SECONDS = 30.0  # weight of the estimate against the time measured so far


def run(
    part: Part,
    out: str = "reports/bench",
    device: str = "cpu",
    dtypes: tuple[Dtype, ...] | None = None,
    lengths: tuple[int, ...] | None = None,
    head_dims: tuple[int, ...] | None = None,
    backends: list[str] | None = None,
    peers: bool = True,
    repeats: int = Settings.rounds,
    seconds: float = Settings.budget_seconds,
    threads: int | None = None,
    long_memory: bool = False,
    sizes: list[str] | None = None,
) -> int:
    """Time attention and a training step of DIFF against the same-size Transformer, interleaved in one run.

    Args:
        part: What to measure: "attention" forward and backward, the same with "peaked" scores, "decode" of one token, peak
            "memory", a "training" (or "train") step, or "all" of these; "diffllama" times transformers' DiffLlama,
            accelerated and as it is; "generation" times decoding by whole models, DIFF against DiffLlama with the same
            weights and against the Transformer; "models" times a training step, prefill and decoding of DIFF, its twin,
            transformers' Llama and DiffLlama, all of one shape; "variants" the same of every attention type, with equally
            many parameters; "loss" times the loss over 20,000 logits of 4,096 tokens; "overhead" times the training loop
            against a bare PyTorch loop.
        out: Folder for results.json, and for attention.svg, peaked.svg and models.svg if these parts were measured.
        device: cpu or cuda.
        dtypes: Data types of attention and of the training step, such as [fp32,bf16], the default on the CPU; fp16 is
            possible too; the default on cuda is [bf16].
        lengths: Sequence lengths in tokens, such as [512,2048]; by default 512 to 8,192, on cuda 2,048 to 65,536.
        head_dims: Widths of one map, such as [64]; by default 32, 64, 128, on cuda 64, 128.
        backends: Backends of differential attention, such as [chunked]; by default all, but those with n x n maps only up
            to 1,024 tokens.
        peers: Whether to time transformers' DiffLlama too.
        repeats: Largest number of timed rounds of a shape, at least 3.
        seconds: Time for a shape; after it no round begins, but at least 3 are timed.
        threads: CPU threads; all by default.
        long_memory: Whether to measure memory up to 65,536 tokens too, on cuda up to 131,072.
        sizes: Sizes of "models" and "variants", such as [135M], which needs 12 GB; by default 0.5M, 5M and 20M; of
            "overhead", 5M.
    """
    use_threads(threads)
    check_device(device)
    attention: dict[str, Any] = {"dtypes": dtypes, "lengths_tokens": lengths, "head_dims": head_dims}
    settings = Settings(
        device=device,
        backends=backends,
        peers=peers,
        rounds=repeats,
        budget_seconds=seconds,
        threads=torch.get_num_threads(),
        long_memory=long_memory,
        sizes=sizes,
        **attention,  # None means the device's defaults
    )
    # On a GPU the load of the CPU does not matter, and compilers leave processes there.
    begun, foreign = time.monotonic(), foreign_cpu_seconds() if device == "cpu" else None
    rows = _measure(steps_of(part, settings))
    share = None
    if foreign is not None:
        cpu_seconds = (time.monotonic() - begun) * (os.cpu_count() or 1)
        share = max(0.0, (foreign_cpu_seconds() or 0.0) - foreign) / cpu_seconds
    result = Bench(
        command=command_line(),
        created=now(),
        environment=environment(device),
        foreign_cpu_share=share,
        **sort_rows(rows, by_width=settings.defaults.means_by_width),
    )
    path = write_result(result, Path(out) / "results.json")
    print_bench(result, console)
    for drawing in bench_drawings(result):
        figure = path.with_name(f"{drawing.name}.svg")
        write_text_atomically(figure, drawing.svg)
        show(f"Figure: {figure}")
    show(f"Results: {path}")
    return 0


def _measure(steps: list[Step]) -> list[object]:
    """Run the steps with a progress bar and the time left; without a terminal, print a line for each step."""
    rows: list[object] = []
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    whole, begun = sum(step.expected_seconds for step in steps), time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=whole, left="")
        for index, step in enumerate(steps):
            done = progress.tasks[bar].completed
            # The estimates come from another machine; the time of the steps so far corrects them.
            pace = (time.monotonic() - begun + TRUSTED_SECONDS) / (done + TRUSTED_SECONDS)
            left = f"about {1 + int(pace * (whole - done) / 60)} min left"
            progress.update(bar, description=step.label, left=left)
            if not console.is_terminal:
                log(f"{index + 1} of {len(steps)}, {left}: {step.label}")
            rows += step.measure()
            progress.advance(bar, step.expected_seconds)
    return rows
