"""Progress bars that show the remaining time, and their replacement by lines where there is no terminal."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from difftransformer.progress import shown_by, titled

from .console import console, resumable

if TYPE_CHECKING:
    from difftransformer.train.metrics import Metrics

    from ..studies import Job

PRINTED_PARTS = 10  # number of lines that are printed in place of a bar
LAST_LOSSES, CURVE_LETTERS, BLOCKS = 240, 12, "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
PRINTED_SECONDS = 30.0  # after this time an evaluation prints a line in any case


def in_words(seconds: float) -> str:
    """Return a time such as 95 s, 12 min, 3.5 h or 12 days."""
    for name, size, decimals in (("s", 1, 0), ("min", 60, 0), ("h", 3600, 1)):
        if seconds < 100 * size:
            return f"{seconds / size:.{decimals}f} {name}"
    return f"{seconds / 86_400:,.0f} days"


def small_curve(losses: Sequence[float]) -> str:
    """Return the curve of some losses in a few letters, from the first to the last."""
    count = min(CURVE_LETTERS, len(losses))
    parts = [losses[len(losses) * i // count : len(losses) * (i + 1) // count] for i in range(count)]
    means = [sum(part) / len(part) for part in parts]
    low, room = min(means), (max(means) - min(means)) or 1.0
    return "".join(BLOCKS[round((len(BLOCKS) - 1) * (mean - low) / room)] for mean in means)


class Bars:
    """Bars by title. Without a terminal, print a line with the time left for each tenth of the work."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.ids: dict[str, TaskID] = {}
        self.parts: dict[str, int] = {}
        self.starts: dict[str, tuple[float, float]] = {}  # the time, and what was done before
        self.losses: dict[str, dict[int, float]] = {}

    def loss_words(self, title: str, step: int, loss: float | None) -> str:
        """Return the loss after a step with the curve of the last ones."""
        if loss is None:
            return ""
        losses = self.losses.setdefault(title, {})
        losses[step] = loss
        if len(losses) > LAST_LOSSES:
            del losses[next(iter(losses))]
        return f"loss {loss:.3f} {small_curve([*losses.values()])}"

    def update(
        self,
        title: str,
        done: float,
        total: float,
        line: str,
        *,
        started: bool = True,
        at_once: bool = False,
        **fields: Any,
    ) -> bool:
        """Move a bar and return whether its line was printed instead, as at each tenth of the work, or now if `at_once`."""
        if title not in self.ids:
            self.ids[title] = self.progress.add_task(title, total=total, start=False, **fields)
        bar = self.progress.tasks[self.ids[title]]
        if started and not bar.started:
            self.progress.start_task(bar.id)
            self.starts[title] = time.monotonic(), done
        self.progress.update(bar.id, completed=done, total=total, **fields)
        part = int(PRINTED_PARTS * done / total) if total else 0
        printed = not console.is_terminal and (at_once or part > self.parts.get(title, 0))
        if printed:
            self.parts[title] = part
            console.print(line + self._left(title, done, total))
        return printed

    def _left(self, title: str, done: float, total: float) -> str:
        began, before = self.starts.get(title, (0.0, done))
        if not before < done < total:
            return ""
        return f", about {in_words((time.monotonic() - began) * (total - done) / (done - before))} left"

    def hide(self, title: str) -> None:
        self.progress.update(self.ids[title], visible=False)

    def forget(self, title: str) -> None:
        """Take a bar away, if there is one, so that the title gets a new one."""
        if title in self.ids:
            self.hide(title)
            del self.ids[title]
            self.parts.pop(title, None)
            self.starts.pop(title, None)


def training_progress() -> Progress:
    return _display(MofNCompleteColumn(), TextColumn("{task.fields[loss]}", markup=False))


def study_progress() -> Progress:
    """Return a display of a study: the share of the work that is done, elapsed and remaining time."""
    words = ("{task.percentage:>3.0f} %", "{task.fields[loss]}")
    return _display(*(TextColumn(text, markup=False) for text in words))


def watch_study(progress: Progress, title: str) -> "Callable[[Sequence[Job]], None]":
    """Return a callback that draws one bar over all jobs, and one for each that is running.

    A job weighs as much as its kind took before. Those of a new kind weigh as much by step as the others. The bar begins anew
    with other jobs, as when learning rates have been chosen.
    """
    bars, printed = Bars(progress), 0
    watched: Sequence[Job] | None = None

    def watch(jobs: "Sequence[Job]") -> None:
        nonlocal printed, watched
        if jobs is not watched:
            bars.forget(title)
            printed, watched = 0, jobs
        ended = sum(job.done for job in jobs)
        known = [(job.expected_seconds, job.steps) for job in jobs if job.expected_seconds]
        by_step = sum(seconds for seconds, _ in known) / sum(steps for _, steps in known) if known else 1.0
        weights = [job.expected_seconds or by_step * job.steps for job in jobs]
        done = sum(weight * job.step / job.steps for weight, job in zip(weights, jobs, strict=True)) / sum(weights)
        runs = f"{ended} of {len(jobs)} runs"
        if bars.update(title, done, 1.0, f"{title}: {runs}", at_once=ended > printed, loss=runs):
            printed = ended
        for job in jobs if console.is_terminal else ():
            if job.process is not None and not job.done:
                words = bars.loss_words(job.label, job.step, job.loss_nats)
                bars.update(job.label, job.step, job.steps, "", loss=words)
            elif job.label in bars.ids:
                bars.hide(job.label)

    return watch


def watch_steps(progress: Progress, label: str, steps: int) -> "Callable[[Metrics], None]":
    """Return a callback that draws one run as a bar."""
    from difftransformer.train.metrics import StepMetrics

    bars = Bars(progress)
    bars.update(label, 0, steps, "", started=False, loss="")  # a run that goes on does not begin at step 0

    def on_metrics(metrics: "Metrics") -> None:
        if isinstance(metrics, StepMetrics):
            loss, speed = f"loss {metrics.loss_nats:.3f}", f"{metrics.tokens_per_second:,.0f} tokens/s"
            line = f"{label}: step {metrics.step} of {steps}, {loss}, {speed}"
            words = f"{bars.loss_words(label, metrics.step, metrics.loss_nats)} {speed}"
            bars.update(label, metrics.step, steps, line, loss=words)

    return on_metrics


@contextmanager
def training_shown(title: str) -> Iterator[None]:
    """Draw the progress of the jobs that the block runs; it can be interrupted."""
    from ..studies import watched_by

    with resumable("stopped; every run is saved"), study_progress() as bars, watched_by(watch_study(bars, title)):
        yield


@contextmanager
def evaluation_progress(label: str = "") -> Iterator[None]:
    """Draw a bar for the progress that the block reports, with `label` before its title; each new title takes its place."""
    with _display(TextColumn("{task.percentage:>3.0f} %", markup=False)) as progress:
        bars, began, printed = Bars(progress), dict[str, float](), time.monotonic()

        def update(done: int, total: int, title: str) -> None:
            nonlocal printed
            now = time.monotonic()
            if title not in began:
                for ended in began:
                    bars.hide(ended)
                began[title] = now
            line = f"{title}: {100 * done // max(1, total)} % after {in_words(now - began[title])}"
            if bars.update(title, done, total, line, at_once=now - printed > PRINTED_SECONDS):
                printed = now

        with shown_by(update), titled(label) if label else nullcontext():
            yield


def _display(*own: ProgressColumn) -> Progress:
    title = TextColumn("{task.description}", markup=False)
    return Progress(title, BarColumn(), *own, TimeElapsedColumn(), _TimeLeft(), console=console)


class _TimeLeft(TimeRemainingColumn):
    """The remaining time with the word "left", and nothing when all is done."""

    def render(self, task: Task) -> Text:
        return Text() if task.finished else Text.assemble("left ", super().render(task))
