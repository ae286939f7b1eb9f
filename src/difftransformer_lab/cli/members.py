"""Commands that several processes run: started by `--processes`, or by torchrun.

A process that fails says why and ends; torchrun then ends the rest.
"""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from difftransformer.errors import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_REQUEUE,
    ConfigError,
    DiffTransformerError,
    FailedElsewhere,
)
from difftransformer.torchrun import end_with_launcher, started_by_torchrun, world_size

from .arguments import check_device, check_positive
from .console import console

if TYPE_CHECKING:
    from difftransformer.train.parallel import Processes

SHUTDOWN_SECONDS = "1800"  # in which processes finish a step and save after a signal; torch kills them after 30


def run_together(
    run: "Callable[[Processes], int]", device: str, count: int | None, check: Callable[[], None] = lambda: None
) -> int:
    """Run a command in this process, in the processes of torchrun, or in `count` processes that are started here.

    Args:
        run: The command, which returns the exit status. Only the first process prints.
        device: cpu or cuda.
        count: Number of processes of this machine; None takes the processes that torchrun has started, or this one.
        check: Raises an error for bad input. It runs before processes start, so that the error is printed once.
    """
    check_positive(processes=count)
    if not started_by_torchrun():
        check()
        if (count or 1) > 1:
            check_device(device)
            return launch(count or 1, sys.argv[1:])
    elif world_size() > 1:
        end_with_launcher()  # before `joined`, whose imports take seconds
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
            if processes.count > 1:
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


def launch(count: int, words: list[str]) -> int:
    """Run `python -m difftransformer_lab WORDS` in `count` processes that find each other, and return the exit status.

    If one fails, the rest are ended and the status of the first failure is returned.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable()  # the launcher's own; processes say themselves what failed
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    here: dict[str, Any] = {"min_nodes": 1, "max_nodes": 1, "rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0"}
    run_id = uuid.uuid4().hex
    here |= {"signals_to_handle": "SIGTERM,SIGINT"}  # not SIGHUP, which `nohup` has made ignored
    config = LaunchConfig(**here, nproc_per_node=count, run_id=run_id, max_restarts=0, monitor_interval=0.1)
    try:
        elastic_launch(config, sys.executable)("-m", "difftransformer_lab", *words)
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        if failure.exitcode >= 0:
            return failure.exitcode or EXIT_ERROR
        raise DiffTransformerError(
            f"process {rank} of {count} was killed ({signal.Signals(-failure.exitcode).name}), and the others were ended; "
            "run the command again to continue from the newest checkpoint"
        ) from None
    except SignalException as stopped:
        return EXIT_INTERRUPTED if stopped.sigval == signal.SIGINT else EXIT_REQUEUE
    finally:
        logging.disable(logging.NOTSET)
    return 0
