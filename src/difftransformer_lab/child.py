"""Processes that end within seconds of the one that started them, also if that one was killed.

The standard input of a child is a pipe from its parent, which the operating system closes when the parent ends. The child
watches it from the start, before the imports that take seconds.
"""

import importlib
import os
import signal
import subprocess
import sys
import threading
from typing import Any

from difftransformer.errors import EXIT_INTERRUPTED

GRACE_SECONDS = 2  # for the step and the checkpoint of a child whose parent is gone


def start_child(module: str, *words: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start `main(words)` of a module in a process that ends with this one."""
    command = [sys.executable, "-m", "difftransformer_lab.child", module, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, **options)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    if hasattr(signal, "alarm"):  # ends the process in the kernel, whatever Python is doing
        signal.alarm(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)


def main(module: str, *words: str) -> int:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Libraries swallow a KeyboardInterrupt during their imports, and nothing can be lost so early.
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    run = importlib.import_module(module).main
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return int(run(list(words)))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
