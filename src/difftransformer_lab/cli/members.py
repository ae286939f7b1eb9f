"""Commands that several processes run: started by `--processes`, or by torchrun.

A process that fails says why and ends, and torchrun ends the others.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from difftransformer.errors import EXIT_INTERRUPTED, ConfigError, FailedElsewhere
from difftransformer.torchrun import started_by_torchrun, world_size

from .arguments import check_device, check_positive
from .console import console

if TYPE_CHECKING:
    from difftransformer.train.parallel import Processes


def run_together(
    run: "Callable[[Processes], int]", device: str, count: int | None, check: Callable[[], None] = lambda: None
) -> int:
    """Run a command in this process, in those that torchrun has started, or in `count` processes that are started here.

    Args:
        run: The command; it gets this process among the others and returns the exit status. Only the first process prints.
        device: cpu or cuda.
        count: Number of processes of this machine; None takes those that there are.
        check: Raises for bad input, before processes start or go on.
    """
    check_positive(processes=count)
    if not started_by_torchrun():
        check()
        if (count or 1) > 1:
            from .launch import launch

            check_device(device)
            return launch(count or 1, sys.argv[1:])
    with members(device, count) as processes:
        if processes.count > 1:
            with processes.fail_together():
                check()
        before, console.quiet = console.quiet, not processes.is_first
        try:
            return run(processes)
        except KeyboardInterrupt:
            if processes.is_first:
                raise
            return EXIT_INTERRUPTED
        finally:
            console.quiet = before


@contextmanager
def members(device: str, count: int | None) -> "Iterator[Processes]":
    """Join this command's process group. An invalid device or count is reported once."""
    from difftransformer.train.parallel import joined

    if count not in (None, started := world_size()):
        if os.environ.get("LOCAL_RANK", "0") != "0":
            raise FailedElsewhere("the first process says why")
        raise ConfigError(f"--processes {count}: torchrun has started {started}; omit --processes")
    if started == 1:
        check_device(device)
    with joined(device) as processes:
        with processes.fail_together():
            check_device(device)
        yield processes
