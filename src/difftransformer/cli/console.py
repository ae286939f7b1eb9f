"""What commands print to."""

from rich.console import Console

console = Console()


def say(text: str) -> None:
    """One quiet line."""
    console.print(text, style="dim", highlight=False)
