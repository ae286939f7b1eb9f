"""A table as text, for pages, the terminal and files, and how numbers and dates are written in it."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from .printable import printable

NOT_MEASURED = "not measured"

_FOLDS = {
    "plain": ("{}",),
    "mean": ("{}", " \u00b1 {}"),
    "interval": ("{}", " [{}", ", {}]"),
    "ratio": ("{}", " ({}x)"),
    "remark": ("{}", " ({})"),
    "of": ("{}", " of {}"),
    "marked": ("{}", " [{}", ", {}]", " {}"),
    "marked_value": ("{}", " {}"),
    "ranged": ("{}", " [{}", ", {}]", " ({})"),
}
"""Texts around the cells of a group that become one; an empty cell is left out with its text."""


@dataclass(frozen=True)
class Group:
    """Columns that belong together: one column for a reader, one for each part in the CSV; `fold` is a key of `_FOLDS`."""

    title: str
    parts: tuple[str, ...] = ("",)
    fold: str = "plain"
    numeric: bool = True


@dataclass(frozen=True)
class Table:
    """A table as text. `rows` has one cell for each part of each group."""

    name: str
    title: str
    groups: tuple[Group, ...]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def header(self) -> list[str]:
        return [f"{group.title}: {part}" if part else group.title for group in self.groups for part in group.parts]

    def folded(self) -> list[list[str]]:
        """Return the rows with one cell for each group, as pages and the terminal print them."""
        rows = []
        for row in self.rows:
            cells = iter(row)
            parts = [[(text, next(cells)) for text in _FOLDS[group.fold]] for group in self.groups]
            rows.append(["".join(text.format(cell) for text, cell in part if cell) for part in parts])
        return rows

    def csv(self) -> str:
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.header())
        writer.writerows(self.rows)
        return printable(buffer.getvalue())

    def markdown(self) -> str:
        """Return the table as Markdown, with its cells folded, and its notes."""
        titles = [group.title.replace("|", "\\|") for group in self.groups]
        marks = ["---:" if group.numeric else "---" for group in self.groups]
        rows = [[cell.replace("|", "\\|") for cell in row] for row in self.folded()]
        lines = [f"| {' | '.join(row)} |" for row in (titles, marks, *rows)]
        return printable("\n".join([*lines, *([""] if self.notes else []), " ".join(self.notes)]).rstrip() + "\n")


def columns(*titles: str) -> tuple[Group, ...]:
    """Return a column of names and, after it, columns of numbers."""
    return tuple(Group(title, numeric=index > 0) for index, title in enumerate(titles))


def names(*titles: str) -> tuple[Group, ...]:
    """Return columns of words."""
    return tuple(Group(title, numeric=False) for title in titles)


def p_text(p: float | None) -> str:
    """Format a p-value; empty for None."""
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def decimals_for(values: Sequence[float]) -> int:
    """Return the decimals to print: five digits of the largest value, at most 4 decimals."""
    largest = max((abs(value) for value in values), default=0.0)
    return 4 if largest == 0 else min(4, max(0, 4 - math.floor(math.log10(largest))))


def two_digits(half_width: float) -> int:
    """Return the decimals at which an interval's half width has two digits, from 0 to 6."""
    return min(6, max(0, 1 - math.floor(math.log10(half_width))))


def significant(value: float | None, digits: int = 4) -> str:
    """Format a number with that many significant digits, never in exponent form; empty for None."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def fixed(value: float | None, decimals: int, sign: str = "") -> str:
    """Format a number with that many decimals, zero without a minus sign; empty for None."""
    if value is None or math.isnan(value):
        return ""
    return f"{0.0 if round(value, decimals) == 0 else value:{sign}.{decimals}f}"


def quantity(n: float) -> str:
    """Format a count, such as 1.2M."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= scale:
            return f"{n / scale:.3g}{unit}"
    return f"{n:g}"


def counted(number: int, name: str, names: str = "") -> str:
    return f"{number} {name if number == 1 else names or f'{name}s'}"


def date_words(when: str | datetime) -> str:
    """Write a date such as 2026-01-02T03:04:05+00:00 in words; other texts stay as they are."""
    try:
        date = datetime.fromisoformat(when) if isinstance(when, str) else when
    except ValueError:
        return str(when)
    return f"{date.day} {date:%B %Y}" + (f", {date:%H:%M}" if len(str(when)) > len("2026-01-02") else "")
