"""Ports for tests that start servers and processes."""

import contextlib
import random
import socket


def free_port():
    """Return a port that stays free until it is used: Linux, macOS and Windows give none of these to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
