"""Progress bars that show the remaining time."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ..evals.task import Watch
from ..studies import Job
from ..train.metrics import Metrics, StepMetrics
from .console import console

# Without a terminal, print this many lines in place of a bar.
QUIET_PARTS = 10


def training_progress() -> Progress:
    """Return a display with one bar per run: steps, loss, elapsed and remaining time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
    )


def watch_jobs(progress: Progress) -> Callable[[Sequence[Job]], None]:
    """Return a callback that draws jobs as bars, or prints a line at every tenth of the steps without a terminal."""
    bars: dict[str, int] = {}
    printed: dict[str, int] = {}

    def watch(jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.label not in bars:
                bars[job.label] = progress.add_task(job.label, total=job.steps, loss="", start=False)
            bar = progress.tasks[bars[job.label]]
            if job.process is not None and not bar.started:
                progress.start_task(bar.id)
            loss = "" if job.loss_nats is None else f"loss {job.loss_nats:.3f}"
            progress.update(bar.id, completed=job.step, loss=loss)
            part = QUIET_PARTS * job.step // job.steps
            if not console.is_terminal and part > printed.get(job.label, 0):
                printed[job.label] = part
                console.print(f"{job.label}: step {job.step} of {job.steps} {loss}")

    return watch


def watch_steps(progress: Progress, label: str, steps: int) -> Callable[[Metrics], None]:
    """Return a callback that draws one run as a bar."""
    bar = progress.add_task(label, total=steps, loss="")
    printed = [0]

    def on_metrics(metrics: Metrics) -> None:
        if not isinstance(metrics, StepMetrics):
            return
        loss = f"loss {metrics.loss_nats:.3f}, {metrics.tokens_per_second:,.0f} tokens/s"
        progress.update(bar, completed=metrics.step, loss=loss)
        part = QUIET_PARTS * metrics.step // steps
        if not console.is_terminal and part > printed[0]:
            printed[0] = part
            console.print(f"{label}: step {metrics.step} of {steps} {loss}")

    return on_metrics


@contextmanager
def evaluation_progress(label: str) -> Iterator[Watch]:
    """Draw a bar over the tokens of an evaluation and one for each later stage, or print lines without a terminal."""
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
    ) as progress:
        bars: dict[str, TaskID] = {}
        printed: dict[str, int] = {}
        began = time.monotonic()

        def watch(done: int, total: int, stage: str = "") -> None:
            title = f"{label}, {stage}" if stage else label
            if stage not in bars:
                bars[stage] = progress.add_task(title, total=total)
            progress.update(bars[stage], completed=done, total=total)
            part = QUIET_PARTS * done // max(1, total)
            if not console.is_terminal and part > printed.get(stage, 0):
                printed[stage] = part
                console.print(f"{title}: {100 * done // total} % after {time.monotonic() - began:.0f} s")

        yield watch
