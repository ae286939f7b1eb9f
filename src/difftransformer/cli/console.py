"""Print to the terminal, and stop a command so that it can be continued."""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from ..errors import EXIT_ERROR

WIDTH_WITHOUT_TERMINAL = 120  # for logs, which have no width of their own

console = Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)


def show(text: str) -> None:
    """Print a result exactly as it is, without wrapping lines."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def log(text: str) -> None:
    """Print a dimmed line about progress."""
    console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


class Gaps:
    """What a page or a result lacks: said on standard error, and in the exit status."""

    def __init__(self, verb: str) -> None:
        self.verb, self.count = verb, 0

    def __call__(self, gap: str) -> None:
        """Say one gap."""
        self.count += 1
        print(f"difftransformer {self.verb}: missing: {' '.join(gap.split())}", file=sys.stderr)

    @property
    def status(self) -> int:
        """The exit status."""
        return EXIT_ERROR if self.count else 0


@contextmanager
def resumable(saved: str = "") -> Iterator[None]:
    """Raise KeyboardInterrupt with the command that continues the work, if the block is interrupted.

    Args:
        saved: Sentence that says what is saved. Defaults to that of `train.Interrupted`.
    """
    from ..train import Interrupted

    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        command = shlex.join(["difftransformer", *sys.argv[1:]])
        raise KeyboardInterrupt(f"{saved or stop}. Continue with: {command}") from None
