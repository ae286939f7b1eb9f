"""difftransformer bench."""

from pathlib import Path

import torch
from rich.table import Table

from ..bench import bench_attention, bench_memory, bench_training_step
from ..bench.timing import MIN_REPEATS
from ..errors import ConfigError
from ..results import Bench, write_result
from ..studies.environment import command_line, environment, now
from .console import console, say
from .hardware import use_threads


def run(out: str = "reports/bench", repeats: int = 7, threads: int | None = None) -> int:
    """Time attention forward and backward and a training step of DIFF over its Transformer twin, interleaved in one run.

    Args:
        out: Folder for results.json.
        repeats: Timed rounds.
        threads: CPU threads; all by default.
    """
    use_threads(threads)
    if repeats < MIN_REPEATS:
        raise ConfigError(f"--repeats {repeats}: quartiles need at least {MIN_REPEATS}")
    timings = bench_attention(repeats=repeats, say=say) + bench_training_step(repeats=repeats, say=say)
    memory = bench_memory(threads=torch.get_num_threads(), say=say)
    result = Bench(command=command_line(), created=now(), environment=environment(), timings=timings, memory=memory)
    path = write_result(result, Path(out) / "results.json")
    table = Table(
        title="Wall time, median of interleaved rounds", caption="ratio: to the Transformer's row of the same group"
    )
    for column in ("", "ms", "quartiles", "ratio"):
        table.add_column(column, justify="left" if column == "" else "right")
    for timing in timings:
        quartiles = f"{timing.low_seconds * 1e3:.2f}-{timing.high_seconds * 1e3:.2f}"
        table.add_row(timing.name, f"{timing.median_seconds * 1e3:.2f}", quartiles, f"{timing.ratio:.2f}")
    console.print(table)
    weights = Table(title="Peak memory above the inputs, fresh process")
    for column in ("", "tokens", "MiB"):
        weights.add_column(column, justify="left" if column == "" else "right")
    for point in memory:
        weights.add_row(point.name, f"{point.length_tokens:,}", f"{point.peak_bytes / 2**20:.1f}")
    console.print(weights)
    console.print(f"Results: {path}", markup=False, highlight=False, soft_wrap=True)
    return 0
