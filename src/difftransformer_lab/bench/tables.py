"""Tables of benchmarks: median times as ratios to one implementation."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import TypeVar

from ..results import Bench, BenchRow
from ..table import Table, columns

# The implementation that times of a part are divided by; elsewhere the first of the part.
BASES = {"models": "Llama sdpa", "generation": "Transformer"}

Cell = Mapping[str, BenchRow]  # what was timed in turns, by implementation
Pair = tuple[str, str, Sequence[str]]
T = TypeVar("T")


def time_tables(bench: Bench, pairs: Sequence[Pair] = ()) -> list[Table]:
    """Make a table for each kind of work that was timed, with a row for each shape and a column for each ratio.

    Args:
        pairs: Further ratios: a title, an implementation, and the implementations of which the fastest is the base.
    """
    works = grouped((row for row in bench.rows if row.timing), lambda row: (row.part, row.work))
    return [_table(part, work, rows, pairs) for (part, work), rows in works.items()]


def _table(part: str, work: str, rows: list[BenchRow], further: Sequence[Pair]) -> Table:
    names = list(dict.fromkeys(row.implementation for row in rows))
    base = BASES[part] if BASES.get(part) in names else names[0]
    pairs: list[Pair] = [(name, name, [base]) for name in names if name != base]
    pairs += [pair for pair in further if pair[1] in names and {*pair[2]} & {*names}]
    lines = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        measured = cells(row for row in rows if row.dtype == dtype)
        ratios = [[ratio(cell, *pair[1:]) for pair in pairs] for cell in measured.values()]
        for (key, cell), mine in zip(measured.items(), ratios, strict=True):
            time = cell[base].timing if base in cell else None
            numbers = (f"{one:.2f}" if one else "-" for one in mine)
            lines.append([key, f"{1e3 * time.median_seconds:,.2f}" if time else "-", *numbers])
        if part == "attention" and len(measured) > 1:
            means = (f"{geometric_mean(known):.2f}" if all(known) else "-" for known in zip(*ratios, strict=True))
            lines.append([f"{dtype} geometric mean", "", *means])
    titles = ("", f"{base}, ms", *(pair[0] for pair in pairs))
    note = f"Ratios of median times to {base}; below 1 is faster."
    return Table(f"{part}-{work}", f"{part.capitalize()}, {work}", columns(*titles), lines, [note])


def cells(rows: Iterable[BenchRow]) -> dict[str, Cell]:
    """Arrange rows by what was timed in turns."""
    measured = grouped((row for row in rows if row.timing), label)
    return {key: {row.implementation: row for row in cell} for key, cell in measured.items()}


def ratio(cell: Cell, name: str, bases: Sequence[str]) -> float | None:
    """Divide the median time of an implementation by the fastest of others; None where one was not timed."""
    seconds = {key: row.timing.median_seconds for key, row in cell.items() if row.timing}
    known = [seconds[base] for base in bases if base in seconds]
    return seconds[name] / min(known) if name in seconds and known else None


def label(row: BenchRow) -> str:
    """Name dtype and shape; attention as n/h/d, or BxN/h/d for more than one row."""
    shape, words = dict(row.shape), [str(row.dtype)]
    if "head_dim" in shape:
        batch, length, heads, width = (shape.pop(name, 1) for name in ("batch", "length_tokens", "heads", "head_dim"))
        words = [f"{row.dtype} {f'{batch}x' if batch != 1 else ''}{length}/{heads}/{width}"]
    for name, value in shape.items():
        amount = value if isinstance(value, str) else f"{value:,}" if isinstance(value, int) else f"{value:g}"
        if name.endswith("tokens"):
            amount += " tokens"
        elif not isinstance(value, str):
            amount = f"{name.replace('_', ' ')} {amount}"
        words.append(amount)
    return ", ".join(words)


def grouped(rows: Iterable[BenchRow], key: Callable[[BenchRow], T]) -> dict[T, list[BenchRow]]:
    groups: dict[T, list[BenchRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups
