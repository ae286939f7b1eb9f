"""Print to the terminal, and stop a command so that it can be continued. All that commands print goes through this file."""

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from difftransformer.errors import EXIT_ERROR, EXIT_INTERRUPTED
from difftransformer.sources import shipped_models

from ..printable import printable, printable_line

if TYPE_CHECKING:
    from ..table import Table

CELL_PADDING = 3  # a space on both sides, and one between columns
WIDTH_WITHOUT_TERMINAL = 10_000  # a file or a pipe has no width: no table is broken there


class _PlainConsole(Console):
    """Prints text as it is: brackets are not markup, and control characters in names and texts are made visible."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)


console = _PlainConsole(
    width=None if sys.stdout is not None and sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL, markup=False, emoji=False
)


def show(text: str) -> None:
    """Print a result exactly as it is, without wrapping lines."""
    console.print(text, highlight=False, soft_wrap=True)


def command(*words: object) -> str:
    """Write a command of this package so that the reader's shell finds it."""
    python = min(sys.executable, os.path.relpath(sys.executable), key=len)
    program = ["difftransformer"] if shutil.which("difftransformer") else [python, "-m", "difftransformer_lab"]
    return shlex.join([*program, *map(str, words)])


def show_next(*words: object) -> None:
    show(f"Next: {command(*words)}")


def show_needle_next(*models: str) -> None:
    digits = ["--digits", "2"] if shipped_models().keys() & {*models} else []  # those learned no longer numbers
    show_next("eval", "needle", *models, *digits)


def show_table(table: "Table") -> None:
    """Print a table. Columns that do not fit follow below it, beside a copy of the first column."""
    rows = table.folded()
    widths = _widths(table, rows)
    for number, columns in enumerate(_parts(widths)):
        # Brackets in names are no markup.
        made = RichTable(title=None if number else Text(table.title), title_justify="left", box=SIMPLE_HEAD)
        for column in columns:
            group = table.groups[column]
            side: JustifyMethod = "right" if group.numeric else "left"
            made.add_column(Text(group.title), justify=side, overflow="fold", width=widths[column])
        for row in rows:
            made.add_row(*(Text(row[column]) for column in columns))
        console.print(made)
    if table.notes:
        console.print(Text(" ".join(table.notes), style="dim italic"))


def _widths(table: "Table", rows: list[list[str]]) -> list[int]:
    """Return widths of columns with whole titles if these fit, else with titles broken between words, and no number broken."""
    titles = [group.title for group in table.groups]
    cells = [max((len(row[place]) for row in rows), default=0) for place in range(len(titles))]
    whole = [max(width, len(title)) for width, title in zip(cells, titles, strict=True)]
    if _together(whole) <= console.width:
        return whole
    first, *others = (max([width, *map(len, title.split())]) for width, title in zip(cells, titles, strict=True))
    first = min(first, console.width // 2)
    left = console.width - _together([first, 0])
    return [first, *(min(width, left) for width in others)]


def _together(widths: list[int]) -> int:
    return 1 + sum(width + CELL_PADDING for width in widths)


def _parts(widths: list[int]) -> list[list[int]]:
    """Divide columns of these widths into as many parts as the width of the terminal asks for."""
    parts: list[list[int]] = [[0]]
    for column in range(1, len(widths)):
        if len(parts[-1]) > 1 and _together([widths[one] for one in (*parts[-1], column)]) > console.width:
            parts.append([0])
        parts[-1].append(column)
    return parts


def log(text: str) -> None:
    console.print(text, style="dim", highlight=False, soft_wrap=True)


class _LogLines(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        log(record.getMessage())


@contextmanager
def log_shown() -> Iterator[None]:
    """Print what the laboratory logs, and the library while it prepares data: a dimmed line for each."""
    loggers, lines = [logging.getLogger(name) for name in ("difftransformer_lab", "difftransformer.data")], _LogLines()
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(lines)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(lines)
            logger.setLevel(level)


def complain(text: str) -> None:
    print(printable_line(text), file=sys.stderr)


def told_gaps(verb: str, gaps: Sequence[str]) -> int:
    """Print what is missing from a page or a result, and return the exit status."""
    for gap in gaps:
        complain(f"difftransformer {verb}: missing: {' '.join(gap.split())}")
    return EXIT_ERROR if gaps else 0


@contextmanager
def resumable(saved: str = "") -> Iterator[None]:
    """If the block is interrupted, raise KeyboardInterrupt with the command that continues the work.

    Args:
        saved: Says what is saved; by default the message of `train.Interrupted`.
    """
    from difftransformer.train import Interrupted

    try:
        yield
    except (Interrupted, KeyboardInterrupt) as stop:
        interruption = KeyboardInterrupt(f"{saved or stop}. Continue with: {command(*sys.argv[1:])}")
        interruption.status = getattr(stop, "status", EXIT_INTERRUPTED)  # type: ignore[attr-defined]
        raise interruption from None
