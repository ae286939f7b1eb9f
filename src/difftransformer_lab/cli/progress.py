"""Progress bars of rich and, where there is no terminal, lines with the time that is left."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from difftransformer.progress import shown_by, titled

from .console import console, resumable

if TYPE_CHECKING:
    from difftransformer.train import Callback

    from ..studies import Job

PRINTED_PARTS = 10  # number of lines that are printed in place of a bar
PRINTED_SECONDS = 30.0  # after this time an evaluation prints a line in any case


def in_words(seconds: float) -> str:
    """Format a time, such as 95 s, 12 min, 3.5 h or 12 days."""
    for name, size, decimals in (("s", 1, 0), ("min", 60, 0), ("h", 3600, 1)):
        if seconds < 100 * size:
            return f"{seconds / size:.{decimals}f} {name}"
    return f"{seconds / 86_400:,.0f} days"


class Bars(Progress):
    """Bars by title. Without a terminal, a line is printed for each tenth of the work."""

    def __init__(self) -> None:
        texts = ("{task.description}", "{task.percentage:>3.0f} %", "{task.fields[words]}")
        title, share, words = (TextColumn(text, markup=False) for text in texts)
        times = TimeElapsedColumn(), TimeRemainingColumn()
        super().__init__(title, BarColumn(), share, words, *times, console=console, get_time=time.monotonic)
        self._shown: dict[str, TaskID] = {}

    def show(self, title: str, done: float, total: float, line: str, *, words: str = "", at_once: bool = False) -> bool:
        """Move a bar.

        Args:
            line: What is printed without a terminal, at each tenth of the work, or now if `at_once`.
            words: What stands beside the bar.

        Returns:
            Whether the line was printed.
        """
        if title not in self._shown:
            self._shown[title] = self.add_task(title, total=total, words=words, before=done, part=0)
        self.update(self._shown[title], completed=done, total=total, words=words)
        task = self.tasks[self._shown[title]]
        part = int(PRINTED_PARTS * done / total) if total else 0
        if console.is_terminal or not (at_once or part > task.fields["part"]):
            return False
        task.fields["part"] = part
        console.print(line + _left(task))
        return True

    def forget(self, title: str) -> None:
        """Take a bar away, if there is one."""
        if title in self._shown:
            self.update(self._shown.pop(title), visible=False)


def _left(task: Task) -> str:
    done = task.completed - task.fields["before"]
    if done <= 0 or not task.remaining or task.elapsed is None:
        return ""
    return f", about {in_words(task.elapsed * task.remaining / done)} left"


def watch_study(bars: Bars, title: str) -> "Callable[[Sequence[Job]], None]":
    """Draw one bar over all jobs, and one for each that is running.

    A job weighs as much as its FLOPs. The bar begins anew with other jobs, as when learning rates have been chosen.
    """
    printed = 0
    watched: Sequence[Job] | None = None

    def watch(jobs: "Sequence[Job]") -> None:
        nonlocal printed, watched
        if jobs is not watched:
            bars.forget(title)
            printed, watched = 0, jobs
        ended = sum(job.done for job in jobs)
        done = sum(job.flops * job.step / job.steps for job in jobs) / sum(job.flops for job in jobs)
        runs = f"{ended} of {len(jobs)} runs"
        if bars.show(title, done, 1.0, f"{title}: {runs}", words=runs, at_once=ended > printed):
            printed = ended
        for job in jobs if console.is_terminal else ():
            if job.process is None or job.done:
                bars.forget(job.label)
            else:
                loss = "" if job.loss_nats is None else f"loss {job.loss_nats:.3f}"
                bars.show(job.label, job.step, job.steps, "", words=loss)

    return watch


def step_bar(bars: Bars, label: str, steps: int) -> "Callback":
    from difftransformer.train import Callback, Trainer
    from difftransformer.train.metrics import Metrics, StepMetrics

    class StepBar(Callback):
        def on_metrics(self, trainer: Trainer, metrics: Metrics) -> None:
            if isinstance(metrics, StepMetrics):
                rates = f"loss {metrics.loss_nats:.3f}, {metrics.tokens_per_second:,.0f} tokens/s"
                words = f"step {metrics.step} of {steps}, {rates}"
                bars.show(label, metrics.step, steps, f"{label}: {words}", words=words)

    return StepBar()


@contextmanager
def training_shown(title: str) -> Iterator[None]:
    """Draw the progress of the block's jobs, and say how to continue after an interruption."""
    from ..studies import watched_by

    with resumable("stopped; every run is saved"), Bars() as bars, watched_by(watch_study(bars, title)):
        yield


@contextmanager
def evaluation_progress(label: str = "") -> Iterator[None]:
    """Draw a bar for the progress that the block reports, with `label` before its title. A new title replaces the bar."""
    with Bars() as bars:
        began, printed = dict[str, float](), time.monotonic()

        def update(done: int, total: int, title: str) -> None:
            nonlocal printed
            now = time.monotonic()
            if title not in began:
                for ended in began:
                    bars.forget(ended)
                began[title] = now
            line = f"{title}: {100 * done // max(1, total)} % after {in_words(now - began[title])}"
            if bars.show(title, done, total, line, at_once=now - printed > PRINTED_SECONDS):
                printed = now

        with shown_by(update), titled(label) if label else nullcontext():
            yield
