"""What commands print to."""

import sys

from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 120  # of a log, where nothing tells the width

console = Console(width=None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL)


def say(text: str) -> None:
    """One quiet line."""
    console.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)
