"""torchrun as its processes see it, without torch: what it has set in the environment, and whether it lives."""

import functools
import os
import signal
import threading
import time

WATCH_SECONDS = 1.0


def started_by_torchrun() -> bool:
    """Whether torchrun, or a scheduler that sets the same variables, has started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def world_size() -> int:
    """Return the number of processes that torchrun has started, this one included; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1


@functools.cache
def end_with_launcher() -> None:
    """Send this process SIGTERM once its launcher is gone: without it, processes may wait half an hour to meet the others."""
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(WATCH_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
