"""A full disk."""

import resource
from contextlib import contextmanager


@contextmanager
def room(bytes_):
    """Let no file of this process grow beyond a size, which is what a full disk does to one process.

    Nothing of pytest may run inside: its report may be a file, too.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
