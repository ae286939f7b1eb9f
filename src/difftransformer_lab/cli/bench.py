"""difftransformer bench."""

from dataclasses import replace
from pathlib import Path

import torch

from difftransformer.files import write_text_atomically

from ..bench import Settings, steps_of
from ..bench.settings import Step
from ..bench.steps import Part
from ..environment import command_line, environment, foreign_cpu_share, now
from ..report.bench import print_bench
from ..report.bench_figures import bench_drawings
from ..results import Bench, BenchRow, write_result
from .arguments import check_device, use_threads
from .console import console, show
from .progress import Bars, study_progress


def declare(_: str) -> type:
    """Return the dataclass whose fields the command takes beside the arguments of `run`."""
    return Settings


def run(part: Part, out: str = "reports/bench", *, verb: str, options: Settings) -> int:
    """Time attention and models of DIFF against the same-size Transformer, interleaved in one run.

    Args:
        part: What to measure: "attention" forward, backward and decoding; its peak "memory"; "models", a training step,
            prefill and decoding of DIFF, its twin, transformers' Llama and DiffLlama, all of one shape; "generation",
            decoding behind a long cache by DIFF, DiffLlama with the same weights and the Transformer; or "all" of these.
        out: Folder for results.json, and for a figure of each part that was timed.
        verb: The command.
        options: What to measure and for how long.
    """
    use_threads(options.threads)
    check_device(options.device)
    settings = replace(options, threads=torch.get_num_threads())
    measure_and_write(steps_of(part, settings), Path(out), settings.device)
    return 0


def measure_and_write(steps: list[Step], out: Path, device: str, command: str | None = None) -> None:
    share = foreign_cpu_share()
    rows = _measure(steps)
    result = Bench(
        command=command or command_line(),
        created=now(),
        environment=environment(device),
        # On a GPU the load of the CPU does not matter, and compilers leave processes there.
        foreign_cpu_share=share() if device == "cpu" else None,
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
    with study_progress() as progress:
        bars = Bars(progress)
        for done, step in enumerate(steps):
            line = f"{done + 1} of {len(steps)}: {step.label}"
            bars.update("benchmark", done, len(steps), line, at_once=True, loss=step.label)
            rows += step.measure()
        bars.hide("benchmark")
    return rows
