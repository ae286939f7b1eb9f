"""difftransformer bench."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..bench import Settings, plan, sort_rows
from ..bench.steps import Part, Row, Step
from ..bench.timing import foreign_cpu_seconds
from ..report.bench import print_bench
from ..report.bench_figures import bench_drawings
from ..results import Bench, Dtype, write_result, write_text_atomically
from ..studies.environment import command_line, environment, now
from .arguments import check_device, use_threads
from .console import console, log, show

TRUSTED_SECONDS = 30.0  # so much of the guessed time outweighs what has been seen, at the start


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
        part: "attention" forward and backward, the same with "peaked" scores, "decode" of one token, peak "memory", a
            "training" (or "train") step, or "all" of these; "diffllama" is transformers' DiffLlama, accelerated and as it
            is; "generation" is decoding by whole models, DIFF against DiffLlama with the same weights and against the
            Transformer; "models" is a training step, prefill and decoding of DIFF, its twin, transformers' Llama and its
            DiffLlama, all of one shape.
        out: Folder for results.json, and attention.svg, peaked.svg and models.svg where these were measured.
        device: cpu or cuda.
        dtypes: Of attention and of the training step, as [fp32,bf16], the default on the CPU; fp16 too; on cuda [bf16].
        lengths: Tokens, as [512,2048]; by default 512 to 8,192, on cuda 2,048 to 65,536.
        head_dims: Widths of one map, as [64]; by default 32, 64, 128, on cuda 64, 128.
        backends: Of differential attention, as [chunked]; by default all, those with n x n maps up to 1,024 tokens.
        peers: Whether transformers' DiffLlama is timed too.
        repeats: Timed rounds of a shape at most, at least 3.
        seconds: Time for a shape, after which no round begins but the first 3.
        threads: CPU threads; all by default.
        long_memory: Whether memory is measured up to 65,536 tokens too, on cuda up to 131,072.
        sizes: Of "models", as [135M], which needs 12 GB; by default 0.5M, 5M and 20M.
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
        **attention,  # None means the device's
    )
    # Work on a GPU does not wait for the CPU, where its compilers leave processes of their own.
    begun, foreign = time.monotonic(), foreign_cpu_seconds() if device == "cpu" else None
    rows = _measure(plan(part, settings))
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


def _measure(steps: list[Step]) -> list[Row]:
    """Make the steps under a bar with the time left; without a terminal, print a line for each."""
    rows: list[Row] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[left]}"))
    whole, begun = sum(step.expected_seconds for step in steps), time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=whole, left="")
        for index, step in enumerate(steps):
            done = progress.tasks[bar].completed
            # The guesses are of another machine: what the steps so far have taken corrects them.
            pace = (time.monotonic() - begun + TRUSTED_SECONDS) / (done + TRUSTED_SECONDS)
            left = f"about {1 + int(pace * (whole - done) / 60)} min left"
            progress.update(bar, description=escape(step.label), left=left)
            if not console.is_terminal:
                log(f"{index + 1} of {len(steps)}, {left}: {step.label}")
            rows += step.measure()
            progress.advance(bar, step.expected_seconds)
    return rows
