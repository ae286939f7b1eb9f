"""Runs as processes of their own, some at a time, watched through their metrics files."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

from difftransformer.errors import EXIT_DIVERGED, EXIT_INTERRUPTED, DiffTransformerError
from difftransformer.train import Interrupted, checkpoints
from difftransformer.train.metrics import METRICS_FILE

from ..child import start_child

LOG_FILE = "log.txt"
WATCH_SECONDS = 0.5


@dataclass(kw_only=True)
class Job:
    """One run: what it is called, where it and its shards are, and how far it has come.

    `prepare` is called before its process, which locks the folder. `flops` of its training are its share of the
    work. `seconds` is the time that the process took. A run that `may_diverge` is done as well where its loss stops being
    finite after its first step.
    """

    label: str
    folder: Path
    shards: Sequence[Path]
    steps: int
    flops: float
    threads: int
    device: str = "cpu"
    prepare: Callable[[], None] = lambda: None
    done: bool = False
    may_diverge: bool = False
    has_diverged: bool = False
    step: int = 0
    loss_nats: float | None = None
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    seconds: float = 0.0
    began: float = 0.0

    def start(self) -> None:
        """Start the process; what it prints goes to log.txt."""
        self.prepare()
        self.began = time.monotonic()
        words = (str(self.folder), str(self.threads), self.device, *map(str, self.shards))
        environment = os.environ | {"OMP_NUM_THREADS": str(self.threads), "TOKENIZERS_PARALLELISM": "false"}
        with (self.folder / LOG_FILE).open("wb") as log:
            streams = {"stdout": log, "stderr": subprocess.STDOUT}
            # In a session of its own: a Ctrl-C at the terminal reaches the parent alone, which passes it on once.
            how = {"env": environment, "start_new_session": True}
            self.process = start_child("difftransformer_lab.studies.run", *words, **streams, **how)

    def look(self) -> None:
        path = self.folder / METRICS_FILE
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 8192))
                lines = file.read().splitlines()
        except OSError:
            return
        for line in lines:
            try:
                metrics = json.loads(line)
            except json.JSONDecodeError:
                continue
            self.step, self.loss_nats = metrics["step"], metrics.get("loss_nats", self.loss_nats)

    def failure(self) -> str:
        """How the process ended: the signal that killed it, or else the last line that it printed."""
        code = (0 if self.process is None else self.process.returncode) or 0
        if code < 0:
            hint = "; if memory ran out, give fewer --jobs" if -code == signal.SIGKILL else ""
            return f"its process was ended by {signal.Signals(-code).name} at step {self.step}{hint}"
        lines = (self.folder / LOG_FILE).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        free = shutil.disk_usage(self.folder).free
        return lines[-1] if lines else f"it ended without a message, with {free / 2**20:.0f} MiB of disk free"


Watcher = Callable[[Sequence[Job]], None]
_watcher: ContextVar[Watcher | None] = ContextVar("jobs", default=None)


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` again and again with the jobs that run in the block."""
    before = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(before)


def tell(jobs: Sequence[Job]) -> None:
    if (watcher := _watcher.get()) is not None:
        watcher(jobs)


def run_jobs(jobs: Sequence[Job], *, at_once: int, on_done: Callable[[Job], None] = lambda job: None) -> None:
    """Run jobs, `at_once` at a time, until all are done; `on_done` is called with each that has just ended.

    Raises:
        DiffTransformerError: a job failed; the rest are stopped, each with a checkpoint.
        Interrupted: SIGINT or SIGTERM; each running job has saved a checkpoint.
    """
    waiting = [job for job in jobs if not job.done]
    for job in jobs:
        if job.done:
            job.step = job.steps
    running: list[Job] = []
    is_asked = False

    def ask(*_: object) -> None:
        nonlocal is_asked
        is_asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while (waiting or running) and not is_asked:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                job.start()
                running.append(job)
            time.sleep(WATCH_SECONDS)
            for job in list(running):
                job.look()
                assert job.process is not None
                code = job.process.poll()
                if code is None:
                    continue
                running.remove(job)
                job.process.communicate()  # closes its standard input
                if code == EXIT_INTERRUPTED:
                    is_asked = True
                    continue
                job.has_diverged = code == EXIT_DIVERGED and job.may_diverge and job.step > 0
                if code != 0 and not job.has_diverged:
                    raise DiffTransformerError(f"{job.label}: {job.failure()} (see {job.folder / LOG_FILE})")
                job.done, job.step, job.seconds = True, job.steps, time.monotonic() - job.began
                on_done(job)
            tell(jobs)
        if is_asked:
            _end(running)
            saved = [path for job in jobs for path in checkpoints(job.folder)[-1:]]
            raise Interrupted(saved[-1] if saved else jobs[0].folder, max(job.step for job in jobs))
    finally:
        _end(running)
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(running: Sequence[Job]) -> None:
    for job in running:
        if job.process is not None and job.process.poll() is None:
            job.process.send_signal(signal.SIGINT)
    for job in running:
        if job.process is not None:
            job.process.wait()  # with its standard input open, so that it takes its time
            job.process.communicate()
