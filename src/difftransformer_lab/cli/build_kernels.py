"""difftransformer build-kernels."""

import time

from difftransformer.ops import build

from .console import show, show_next


def run(force: bool = False) -> int:
    """Build the CPU attention kernels now instead of on first use.

    Args:
        force: Build the kernels again even if they exist.
    """
    start = time.perf_counter()
    library = build.open_library(force=force)
    seconds = time.perf_counter() - start
    how = f"built in {seconds:.1f} s" if library.is_new else "built before"
    show(f"CPU attention kernels for {library.instruction_set}: {how}; {library.path}")
    show_next("demo")
    return 0
