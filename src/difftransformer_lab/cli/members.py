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
    run: "Callable[[Processes], int]", device: str, processes: int | None, check: Callable[[], None] = lambda: None
) -> int:
    """Run a command in this process, in those that torchrun has started, or in `processes` that are started here.

    Args:
        run: The command; it gets this process among the others and returns the exit status. Only the first process prints.
        device: cpu or cuda.
        processes: Number of processes of this machine; None takes those that there are.
        check: Raises for bad input, before processes start or go on.
    """
    check_positive(processes=processes)
    if not started_by_torchrun():
        check()
        if (processes or 1) > 1:
            from .launch import launch

            check_device(device)
            return launch(processes or 1, sys.argv[1:])
    with members(device, processes) as crew:
        if crew.count > 1:
            with crew.together():
                check()
        before, console.quiet = console.quiet, not crew.is_first
        try:
            return run(crew)
        except KeyboardInterrupt:
            if crew.is_first:
                raise
            return EXIT_INTERRUPTED
        finally:
            console.quiet = before


@contextmanager
def members(device: str, processes: int | None) -> "Iterator[Processes]":
    """Meet the processes of this command. A wrong device or number is said once."""
    from difftransformer.train.parallel import joined

    if processes not in (None, count := world_size()):
        if os.environ.get("LOCAL_RANK", "0") != "0":
            raise FailedElsewhere("the first process says why")
        raise ConfigError(f"--processes {processes}: torchrun has started {count}; omit --processes")
    if count == 1:
        check_device(device)
    with joined(device) as crew:
        with crew.together():
            check_device(device)
        yield crew
