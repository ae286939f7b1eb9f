"""Faults of one process of two, as each process meets them: one pair of processes runs all of them."""

import errno
import json
import math
import os
import sys
import threading
import time
import warnings
from pathlib import Path

import torch

from tests.support import parallel_steps

SAVED = {"steps": 8, "context_stages": [(0, 32)], "checkpoint_every": 2, "validate_every": 8, "keep_checkpoints": 9}


def main():
    """Be the process of a rank, and print what the warnings of each scenario said."""
    from difftransformer.train.parallel import joined

    torch.set_num_threads(1)
    folder, shards = sys.argv[1:]
    said = {}
    with joined("cpu") as processes:
        for scenario in (plain, asynchronous, skip, rollback, slow, full, hanging):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    scenario(Path(folder) / scenario.__name__, shards, processes)
                except Exception as error:
                    said[f"{scenario.__name__} raised"] = f"{type(error).__name__}: {error}"
            said[scenario.__name__] = [str(warning.message) for warning in caught]
    print(json.dumps(said), flush=True)
    os._exit(0)


def train(folder, shards, processes, **fields):
    parallel_steps.run(folder, shards, layout={}, processes=processes, variants=["diff"], **SAVED | fields)


def plain(folder, shards, processes):
    train(folder, shards, processes)


def asynchronous(folder, shards, processes):
    from difftransformer.train.config import CheckpointConfig

    train(folder, shards, processes, checkpoint=CheckpointConfig(asynchronous=True))


def skip(folder, shards, processes):
    poisoned(folder, shards, processes, rank=1, nonfinite="skip")


def rollback(folder, shards, processes):
    poisoned(folder, shards, processes, rank=1, nonfinite="rollback")


def poisoned(folder, shards, processes, *, rank, **fields):
    """The loss of the fifth step is not a number in one process."""
    from difftransformer.train import trainer

    compute, calls = trainer.summed_next_token_nll, []

    def nll(model, *arguments, **options):
        calls.extend([1] * model.training)
        found = compute(model, *arguments, **options)
        return found * math.nan if model.training and len(calls) == 5 and processes.rank == rank else found

    trainer.summed_next_token_nll = nll
    try:
        train(folder, shards, processes, **fields)
    finally:
        trainer.summed_next_token_nll = compute


def slow(folder, shards, processes):
    """The second process still writes its weights, under a temporary name, when the first has written all of its own."""
    from difftransformer.train import saving

    write = saving.save_file

    def save_file(tensors, path, **options):
        if processes.rank == 1:
            unfinished = path.with_name(".tmp123456")
            unfinished.write_bytes(b"half")
            time.sleep(0.5)
            unfinished.unlink()
        write(tensors, path, **options)

    saving.save_file = save_file
    try:
        train(folder, shards, processes)
    finally:
        saving.save_file = write


def full(folder, shards, processes):
    """The disk of the second process is full at step 4 for weights, and at step 6 for moments."""
    from torch.distributed.checkpoint import filesystem

    from difftransformer.train import saving

    write, create = saving.save_file, filesystem.FileSystem.create_stream

    def save_file(tensors, path, **options):
        if processes.rank == 1 and path.parent.name == ".step-000004.tmp":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(tensors, path, **options)

    def create_stream(self, path, mode):
        if processes.rank == 1 and Path(path).parent.name == ".step-000006.tmp":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(self, path, mode)

    saving.save_file, filesystem.FileSystem.create_stream = save_file, create_stream
    try:
        train(folder, shards, processes)
    finally:
        saving.save_file, filesystem.FileSystem.create_stream = write, create


def hanging(folder, shards, processes):
    """The second process does not end writing its weights of step 4."""
    from difftransformer.train import saving
    from difftransformer.train.config import CheckpointConfig

    write, released = saving.save_file, threading.Event()

    def save_file(tensors, path, **options):
        if processes.rank == 1 and path.parent.name == ".step-000004.tmp":
            released.wait(120)
        write(tensors, path, **options)

    saving.save_file = save_file
    try:
        train(folder, shards, processes, checkpoint=CheckpointConfig(timeout_seconds=4.0))
    finally:
        found = [path.name for path in (folder / "diff" / "checkpoints").glob("step-*")]
        assert found == ["step-000002"], found
        released.set()
        saving.save_file = write
