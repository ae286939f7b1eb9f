"""Start a command in several processes of this machine, by the launcher of torchrun."""

import logging
import os
import signal
import sys
import uuid

from difftransformer.errors import EXIT_ERROR, EXIT_INTERRUPTED, EXIT_REQUEUE, DiffTransformerError


def launch(count: int, words: list[str]) -> int:
    """Run `python -m difftransformer_lab WORDS` in `count` processes that find each other, and return the exit status of all.

    If one fails, the others are ended, and the status is that of the first that failed.

    Raises:
        DiffTransformerError: A process was killed, so it could not say why it ended.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.disable()  # the launcher's own; processes say themselves what failed
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
    )
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
