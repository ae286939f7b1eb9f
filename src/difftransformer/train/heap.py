"""The C library's memory in processes that train."""

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of mallopt(3)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for later tensors; other C libraries are left as they are.

    By default it returns large blocks to the system, which fills the next ones with zeros page by page: every step frees and
    takes the same activations again. The peak of a process's memory stays about the same, but memory does not shrink after it.
    """
    with suppress(OSError, AttributeError):  # no such function
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
