"""difftransformer bench."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from ..bench.settings import Settings
from ..bench.tables import grouped, label, time_tables
from ..results import Bench, BenchRow, write_result
from ..table import Table
from .arguments import check_device, use_threads
from .console import log, show, show_table
from .progress import Bars

Part = Literal["attention", "models"]
QUIET_SHARE = 0.03
"""Share of a machine that other processes may take before times mean little."""


def declare(_: str) -> type:
    return Settings


def run(part: Part, out: str = "reports/bench", *, verb: str, options: Settings) -> int:
    """Time attention or models of DIFF against the same-size Transformer, interleaved in one run.

    Args:
        part: What to time: attention by itself, forward, backward and decoding; or whole models, a training step, prefill and
            decoding of DIFF, DIFF V2, the twin and transformers' Llama.
        out: Folder for PART.json.
        verb: The command.
        options: What to measure and for how long.
    """
    use_threads(options.threads)
    check_device(options.device)
    if part == "attention":
        from ..bench.attention import attention_steps as steps_of
    else:
        from ..bench.models import model_steps as steps_of
    measure_and_write(steps_of(options), Path(out, f"{part}.json"), options.device)
    return 0


def measure_and_write(
    steps: Mapping[str, Callable[[], list[BenchRow]]],
    path: Path,
    device: str,
    command: str | None = None,
    tables: Callable[[Bench], list[Table]] = time_tables,
) -> None:
    """Run steps with a progress bar, print tables and write the rows."""
    from ..environment import command_line, environment, foreign_cpu_share, now

    share, rows = foreign_cpu_share(), list[BenchRow]()
    with Bars() as bars:
        for done, (step, measure) in enumerate(steps.items()):
            bars.show("benchmark", done, len(steps), f"{done + 1} of {len(steps)}: {step}", words=step, at_once=True)
            rows += measure()
    result = Bench(
        command=command or command_line(),
        created=now(),
        environment=environment(device),
        # On a GPU the load of the CPU does not matter, and compilers leave processes there.
        foreign_cpu_share=share() if device == "cpu" else None,
        rows=rows,
    )
    for table in tables(result):
        show_table(table)
    left_out = grouped((row for row in rows if row.left_out), lambda row: (row.implementation, row.left_out))
    for (name, reason), those in left_out.items():
        log(f"Left out: {name} of {', '.join(f'{row.work} {label(row)}' for row in those)}: {reason}")
    if (foreign := result.foreign_cpu_share or 0.0) > QUIET_SHARE:
        show(f"Other processes took {foreign:.0%} of this machine meanwhile; repeat it when it is idle.")
    show(f"Results: {write_result(result, path)}")
