"""Rendezvous, collectives and joint failure of the processes that torchrun started; no-ops for a single process."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ...errors import ConfigError, DiffTransformerError, FailedElsewhere
from ...files import locked
from ...torchrun import end_with_launcher, world_size

T = TypeVar("T")

# The first process may tokenise for hours while the others wait for it.
LONGEST_WAIT = timedelta(days=2)


@dataclass(frozen=True)
class Processes:
    """One process of a run.

    Attributes:
        rank: Index of this process.
        count: Number of processes.
        device: "cpu" or "cuda".
        group: Group of all processes for numbers on the CPU; None for one process.
    """

    rank: int = 0
    count: int = 1
    device: str = "cpu"
    group: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this process prints, logs and writes."""
        return self.rank == 0

    def largest(self, value: int) -> int:
        """Return the largest of every process's value."""
        if self.count == 1:
            return value
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.group)
        return int(tensor)

    @contextmanager
    def fail_together(self) -> Iterator[None]:
        """Fail in every process if the block fails in one; the first such process raises its own error.

        Raises:
            FailedElsewhere: The block failed, and another process says why.
        """
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        first = -self.largest(-self.count if failure is None else -self.rank)
        if first == self.rank and failure is not None:
            raise failure
        if first < self.count:
            raise FailedElsewhere(f"process {first} of {self.count} has failed") from failure

    def broadcast(self, make: Callable[[], T]) -> T:
        """Return in every process what the first one makes."""
        with self.fail_together():
            made = [make() if self.is_first else None]
        if self.count > 1:
            dist.broadcast_object_list(made, src=0, group=self.group)
        return made[0]  # type: ignore[return-value]

    def gathered(self, value: T) -> list[T]:
        """Return every process's value, by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value, group=self.group)
        return values

    def rank0_first(self, make: Callable[[], T]) -> T:
        """Call `make` in this process; the others wait until the first has done so, and find its files."""
        with self.fail_together():
            made = [make()] if self.is_first else []
        with self.fail_together():
            return made[0] if self.is_first else make()

    @contextmanager
    def locked(self, folder: Path, *, wait: bool = False) -> Iterator[None]:
        """Hold the lock of a folder, which the first process takes for all; see `files.locked`."""
        with ExitStack() as stack:
            with self.fail_together():
                if self.is_first:
                    stack.enter_context(locked(folder, wait=wait))
            yield

    def fail(self, error: Exception) -> None:
        """Raise an error that every process has met: as it is in the first one, and FailedElsewhere in the others."""
        raise error if self.is_first else FailedElsewhere("process 0 has failed") from error


ALONE = Processes()


@contextmanager
def joined(device: str) -> Iterator[Processes]:
    """Meet the other processes that torchrun has started, if there are any; if torchrun is killed, this one gets SIGTERM.

    Args:
        device: "cpu" for gloo, or "cuda" for NCCL and one GPU for each process of a machine.

    Raises:
        ConfigError: There are fewer GPUs than processes, or the port for meeting is in use.
        FailedElsewhere: Another process has ended.
    """
    count = world_size()
    if count == 1:
        yield Processes(device=device)
        return
    end_with_launcher()
    rank, place = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    lacks_gpu = device == "cuda" and place >= torch.cuda.device_count()
    if device == "cuda" and not lacks_gpu:
        torch.cuda.set_device(place)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" and not lacks_gpu else "gloo"
    try:
        store, _, _ = next(rendezvous("env://", rank, count))
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            # After a restart, torchrun's store still has the addresses of processes that are gone.
            store = dist.PrefixStore(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=count)
    except (dist.DistError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        advice = "the port is in use; choose another with MASTER_PORT" if "EADDRINUSE" in reason else reason
        raise ConfigError(f"process {rank} of {count} cannot meet the others at {where}: {advice}") from None
    try:
        processes = Processes(rank, count, device, dist.new_group(backend="gloo", timeout=LONGEST_WAIT))
        with processes.fail_together():
            if lacks_gpu:
                raise ConfigError(
                    f"--device cuda: this machine has {torch.cuda.device_count()} GPUs for "
                    f"{os.environ.get('LOCAL_WORLD_SIZE', place + 1)} processes; start as many processes as there are GPUs, "
                    "or use --device cpu"
                )
        yield processes
    except (DiffTransformerError, KeyboardInterrupt, SystemExit):  # in every process, so that none waits for another
        dist.destroy_process_group()
        raise
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise  # not of a process that is gone
        raise DiffTransformerError(
            f"process {rank} of {count}: another process of the run has ended; if it did not say why, it was killed"
        ) from error
    dist.destroy_process_group()
