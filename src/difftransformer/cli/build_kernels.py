"""difftransformer build-kernels."""

import time

from ..ops import build
from .console import console


def run(force: bool = False) -> int:
    """Build the CPU attention kernels now, not on first use.

    Args:
        force: Build them again where they are there.
    """
    start = time.perf_counter()
    library = build.open_library(force=force)
    seconds = time.perf_counter() - start
    how = f"built in {seconds:.1f} s" if library.is_new else "were there already"
    text = f"CPU attention kernels for {library.instruction_set}: {how}; {library.path}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0
