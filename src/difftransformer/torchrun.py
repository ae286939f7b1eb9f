"""What torchrun has set in the environment, read without torch."""

import os


def started_by_torchrun() -> bool:
    """Whether torchrun, or a scheduler that sets the same variables, has started this process."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def world_size() -> int:
    """Return the number of processes that torchrun has started, this one included; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if started_by_torchrun() else 1
