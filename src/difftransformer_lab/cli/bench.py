"""difftransformer bench."""

import time
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from difftransformer.files import write_text_atomically

from ..bench import Settings, steps_of
from ..bench.settings import Step
from ..bench.steps import Part
from ..bench.timing import foreign_cpu_share
from ..report.bench import print_bench
from ..report.bench_figures import bench_drawings
from ..results import Bench, BenchRow, Dtype, Mode, write_result
from ..studies.environment import command_line, environment, now
from .arguments import check_device, use_threads
from .console import console, log, show


def run(
    part: Part,
    out: str = "reports/bench",
    device: str = "cpu",
    dtypes: tuple[Dtype, ...] | None = None,
    modes: tuple[Mode, ...] | None = None,
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
    """Time attention and models of DIFF against the same-size Transformer, interleaved in one run.

    Args:
        part: What to measure: "attention" forward, backward and decoding; its peak "memory"; "models", a training step,
            prefill and decoding of DIFF, its twin, transformers' Llama and DiffLlama, all of one shape; "generation",
            decoding behind a long cache by DIFF, DiffLlama with the same weights and the Transformer; or "all" of these.
        out: Folder for results.json, and for a figure of each part that was timed.
        device: cpu or cuda.
        dtypes: Data types, such as [fp32,bf16], the default on the CPU; fp16 is possible too; the default on cuda is [bf16].
        modes: Passes of attention, such as [forward,decode].
        lengths: Sequence lengths of attention in tokens, such as [512,2048]; by default 512 to 8,192, on cuda 2,048 to
            65,536, and longer in decoding.
        head_dims: Widths of one map, such as [64]; by default 32, 64, 128, on cuda 64, 128.
        backends: Backends of differential attention, such as [chunked]; by default all, but those with n x n maps only up
            to 1,024 tokens.
        peers: Whether to time transformers' DiffLlama beside attention too.
        repeats: Largest number of timed rounds of a shape, at least 3.
        seconds: Time for a shape; after it no round begins, but at least 3 are timed.
        threads: CPU threads; all by default.
        long_memory: Whether to measure memory up to 65,536 tokens too, on cuda up to 131,072.
        sizes: Sizes of "models", such as [135M], which needs 12 GB; by default 0.5M, 5M and 20M, on cuda 125M and 350M.
    """
    use_threads(threads)
    check_device(device)
    settings = Settings(
        device=device,
        dtypes=dtypes,
        modes=modes,
        lengths_tokens=lengths,
        head_dims=head_dims,
        backends=backends,
        peers=peers,
        rounds=repeats,
        budget_seconds=seconds,
        threads=torch.get_num_threads(),
        long_memory=long_memory,
        sizes=sizes,
    )
    measure_and_write(steps_of(part, settings), Path(out), device)
    return 0


def measure_and_write(steps: list[Step], out: Path, device: str, command: str | None = None) -> None:
    """Run the steps, write results.json and the figures, and print the tables."""
    # On a GPU the load of the CPU does not matter, and compilers leave processes there.
    share = foreign_cpu_share() if device == "cpu" else None
    rows = _measure(steps)
    result = Bench(
        command=command or command_line(),
        created=now(),
        environment=environment(device),
        foreign_cpu_share=share() if share else None,
        rows=rows,
    )
    path = write_result(result, out / "results.json")
    print_bench(result, console)
    for drawing in bench_drawings(result):
        write_text_atomically(path.with_name(f"{drawing.name}.svg"), drawing.svg)
        show(f"Figure: {path.with_name(f'{drawing.name}.svg')}")
    show(f"Results: {path}")


def _measure(steps: list[Step]) -> list[BenchRow]:
    """Run the steps with a progress bar and the time left; without a terminal, print a line for each step."""
    rows: list[BenchRow] = []
    begun, left = time.monotonic(), ""
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(steps))
        for done, step in enumerate(steps):
            if done:
                left = f", about {1 + int((time.monotonic() - begun) / done * (len(steps) - done) / 60)} min left"
            progress.update(bar, description=f"{step.label}{left}")
            if not console.is_terminal:
                log(f"{done + 1} of {len(steps)}{left}: {step.label}")
            rows += step.measure()
            progress.advance(bar)
    return rows
