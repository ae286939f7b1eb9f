"""Train the arms of the demo side by side, each in a process of its own, and say how far they are."""

import multiprocessing
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from difftransformer.errors import DiffTransformerError

PRELOADED = ["difftransformer_lab.demo.recall"]
WAIT_SECONDS = 0.2


@dataclass
class Run:
    """What is known of one arm and seed.

    Attributes:
        curve: Share of right held-out answers by step.
        row: How the trained model reads a held-out row, `recall.Row`; None while it trains.
    """

    arm: str
    seed: int
    curve: dict[int, float] = field(default_factory=dict)
    row: Any = None

    @property
    def accuracy(self) -> float:
        """The latest share of right answers, 0 before the first."""
        return next(reversed(self.curve.values()), 0.0)


class Runs:
    """Runs that train at the same time. Leaving the block ends those that still train.

    with Runs(["diff", "twin"], seeds=[0], steps=300, jobs=2) as runs:
        runs.wait(draw)
    """

    def __init__(self, arms: Sequence[str], seeds: Sequence[int], steps: int, jobs: int) -> None:
        self.runs = [Run(arm, seed) for seed in seeds for arm in arms]
        self._steps, self._jobs = steps, jobs

    def __enter__(self) -> "Runs":
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            context.set_forkserver_preload(PRELOADED)  # imports PyTorch and transformers once for all processes
        self._tasks, self._heard = context.SimpleQueue(), context.Queue()
        for index, run in enumerate(self.runs):
            self._tasks.put((index, run.arm, run.seed, self._steps))
        jobs = min(self._jobs, len(self.runs))
        for _ in range(jobs):
            self._tasks.put(None)
        self._processes = [
            context.Process(target=_work, args=(self._tasks, self._heard), daemon=True) for _ in range(jobs)
        ]
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def wait(self, show: Callable[[list[Run]], None]) -> list[Run]:
        """Return the finished runs; meanwhile call `show` with all runs whenever one has come further."""
        while any(run.row is None for run in self.runs):
            try:
                index, step, value = self._heard.get(timeout=WAIT_SECONDS)
            except queue.Empty:
                if any(process.exitcode for process in self._processes):
                    raise DiffTransformerError(
                        "a process that trains a model of the demo ended early; is there memory for it?"
                    ) from None
                continue
            if step:
                self.runs[index].curve[step] = value
            else:
                self.runs[index].row = value
            show(self.runs)
        return self.runs


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _work(tasks: Any, heard: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    from . import recall

    torch.set_num_threads(1)
    for index, arm, seed, steps in iter(tasks.get, None):
        model = recall.build(recall.ARMS[arm], seed)
        for step, accuracy in recall.learn(model, recall.ARMS[arm].rate, seed, steps):
            heard.put((index, step, accuracy))
        heard.put((index, 0, recall.read(model, seed)))
