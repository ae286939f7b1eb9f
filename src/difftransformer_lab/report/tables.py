"""A table as text: the page and the terminal print its rows folded, the CSV files cell by cell; and how numbers are written."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..printable import printable
from ..results import PairedDifference

NOT_MEASURED = "not measured"

State = Literal["good", "bad", "open"]
"""Colour of a verdict."""

_FOLDS = {
    "plain": ("{}",),
    "mean": ("{}", " \u00b1 {}"),
    "interval": ("{}", " [{}", ", {}]"),
    "ratio": ("{}", " ({}x)"),
    "remark": ("{}", " ({})"),
    "of": ("{}", " of {}"),
    "judged": ("{}", " \u00b1 {}", ", {}"),
    "censored": ("{}", " \u00b1 {}", "; {} never got there", ", {}"),
    "verdict": ("{}",),
    "valued": ("{}", ", {}"),
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
    """A table as text. `rows` has one cell for each part of each group; `states` colours verdicts that are its own."""

    name: str
    title: str
    groups: tuple[Group, ...]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)
    states: Mapping[str, State] = field(default_factory=dict)

    def header(self) -> list[str]:
        return [f"{group.title}: {part}" if part else group.title for group in self.groups for part in group.parts]

    def folded(self) -> list[list[str]]:
        """Return the rows with one cell for each group, as the page and the terminal print them."""
        return [["".join(cell).removeprefix(", ").removeprefix("; ") for cell in row] for row in self.parted()]

    def parted(self) -> list[list[tuple[str, str]]]:
        """Return the rows with one cell for each group: its text, and its verdict, which is empty in most."""
        rows = []
        for row in self.rows:
            cells, start = [], 0
            for group in self.groups:
                parts = row[start : start + len(group.parts)]
                start += len(group.parts)
                folds = zip(_FOLDS[group.fold], parts, strict=True)
                texts = [text.format(part) if part else "" for text, part in folds]
                has_verdict = group.fold in ("judged", "censored", "valued", "verdict")
                cells.append(("".join(texts[:-1]), texts[-1]) if has_verdict else ("".join(texts), ""))
            rows.append(cells)
        return rows

    def widths(self) -> list[int]:
        """Return the letters that each column needs so that no word and no number with its interval is broken."""
        columns = zip(*self.parted(), strict=True) if self.rows else [()] * len(self.groups)
        return [
            max(map(len, [*group.title.split(" "), *(piece for cell in column for piece in _unbroken(group, *cell))]))
            for group, column in zip(self.groups, columns, strict=True)
        ]

    def csv(self) -> str:
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.header())
        writer.writerows(self.rows)
        return printable(buffer.getvalue())

    def markdown(self, links: Mapping[str, str] | None = None) -> str:
        """Return the table as Markdown, with its cells folded, and its notes.

        Args:
            links: Addresses by the text of a cell.
        """
        links = links or {}
        titles = [group.title.replace("|", "\\|") for group in self.groups]
        marks = ["---:" if group.numeric else "---" for group in self.groups]
        rows = [
            [f"[{cell}]({links[cell]})" if cell in links else cell.replace("|", "\\|") for cell in row]
            for row in self.folded()
        ]
        lines = [f"| {' | '.join(row)} |" for row in (titles, marks, *rows)]
        return printable("\n".join([*lines, *([""] if self.notes else []), " ".join(self.notes)]).rstrip() + "\n")

    def latex(self) -> str:
        """Return the table as LaTeX for the package booktabs, with its cells folded and its notes as comments."""
        columns = "".join("r" if group.numeric else "l" for group in self.groups)
        cells = ([group.title for group in self.groups], *self.folded())
        header, *rows = [" & ".join(cell.translate(_LATEX) for cell in row) + r" \\" for row in cells]
        notes = [f"% {note}" for note in self.notes]
        top, bottom = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"], [r"\bottomrule", r"\end{tabular}"]
        return printable("\n".join([*notes, *top, header, r"\midrule", *rows, *bottom]) + "\n")


def columns(*titles: str) -> tuple[Group, ...]:
    """Return a column of names and, after it, columns of numbers."""
    return tuple(Group(title, numeric=index > 0) for index, title in enumerate(titles))


def names(*titles: str) -> tuple[Group, ...]:
    """Return columns of words."""
    return tuple(Group(title, numeric=False) for title in titles)


def _unbroken(group: Group, text: str, verdict: str) -> list[str]:
    is_number = group.numeric or group.fold in ("judged", "censored", "valued")
    return [*([f"{text}," if verdict else text] if is_number else text.split(" ")), *verdict.split(" ")]


_LATEX = {ord(letter): f"\\{letter}" for letter in "{}_&%$#"} | {
    ord("\\"): r"\textbackslash{}", ord("~"): r"\textasciitilde{}", ord("^"): r"\textasciicircum{}",
    ord("<"): r"\textless{}", ord(">"): r"\textgreater{}", ord("\u00b1"): r"$\pm$",
}  # fmt: skip


Outcome = Literal["first", "second", "undecided", "unknown"]


def favoured(difference: PairedDifference) -> Outcome:
    """Return which side of a difference is higher, if its interval and its p-value after Holm's correction tell them apart."""
    low, high, p = difference.low, difference.high, difference.p_holm
    if low is None or high is None:
        return "unknown"
    if low <= 0 <= high or (p is not None and p > 1 - difference.confidence):
        return "undecided"
    return "first" if low > 0 else "second"


def p_text(p: float | None) -> str:
    """Format a p-value; empty for None."""
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def holm_note(differences: Iterable[PairedDifference]) -> str:
    """Return the note of a table whose p-values are corrected for the number of comparisons on the page."""
    comparisons = max((one.comparisons or 0 for one in differences), default=0)
    if not comparisons:
        return "Undecided: the interval holds zero."
    number = "1 comparison" if comparisons == 1 else f"{comparisons} comparisons"
    return (
        f"p (Holm): p-value corrected for the {number} of this page; a loss in two units is one. "
        "Undecided: it is above 0.05, or the interval holds zero."
    )


def decimals_for(values: Sequence[float]) -> int:
    """Return the decimals to print: five digits of the largest value, at most 4 decimals."""
    largest = max((abs(value) for value in values), default=0.0)
    return 4 if largest == 0 else min(4, max(0, 4 - math.floor(math.log10(largest))))


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
