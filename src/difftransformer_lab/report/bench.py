"""The tables of a benchmark: times as ratios to one implementation, and what else was measured."""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import TypeVar

from rich.console import Console

from difftransformer_lab.report.tables import Table, columns
from difftransformer_lab.report.terminal import terminal_table
from difftransformer_lab.report.words import QUIET_SHARE, busy_words
from difftransformer_lab.results import Bench, BenchRow

MEAN = "geometric mean"
DIFFLLAMAS = ("DiffLlama sdpa", "DiffLlama eager")

# The implementation that times of a part are divided by; elsewhere, or if that is missing, the first that was measured.
BASES = {"models": "Llama sdpa", "generation": "Transformer"}
# Further ratios of a part: of an implementation to the fastest of others.
RATIOS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "attention": (
        ("diff cpu", ("softmax cpu",)),
        ("normed cpu", DIFFLLAMAS),
        ("diff triton", ("softmax triton",)),
        ("normed triton", DIFFLLAMAS),
    ),
    "models": (("DIFF", ("twin",)), ("DIFF", ("twin sdpa",)), ("DIFF V2", ("twin sdpa",)), ("DIFF", DIFFLLAMAS)),
    "generation": (("DIFF", DIFFLLAMAS),),
}
# Title, factor and format of figures; others are shown as they are. None is left out of tables.
FIGURES: dict[str, tuple[str, float, str] | None] = {
    "peak_bytes": ("peak memory, MiB", 2**-20, ",.1f"),
    "first_step_seconds": ("first step with compilation, s", 1, ".1f"),
    "model_flops": ("model TFLOPs of a step", 1e-12, ".1f"),
    "cpu_seconds": ("CPU time of all threads, ms", 1e3, ",.2f"),
    "parameters": None,
}

Cell = Mapping[str, BenchRow]  # what was measured in turns, by implementation
KeyT = TypeVar("KeyT", bound=Hashable)
RowT = TypeVar("RowT")


def bench_tables(bench: Bench) -> list[Table]:
    """Make the tables of each kind of work of each part: times if there are any, then the other figures."""
    tables = []
    for (part, work), rows in grouped(bench.rows, lambda row: (row.part, row.work)).items():
        if any(row.timing for row in rows):
            tables.append(_times_table(f"{part}-{work}", f"{part.capitalize()}, {work}", part, rows))
        names = list(dict.fromkeys(name for row in rows for name in row.figures if FIGURES.get(name, True)))
        if names:
            tables.append(_figures_table(f"{part}-{work}-figures", f"{part.capitalize()}, {work}", rows, names))
    return tables


def print_bench(bench: Bench, console: Console) -> None:
    for table in bench_tables(bench):
        console.print(terminal_table(table, console.width))
    left_out = grouped((row for row in bench.rows if row.left_out), lambda row: (row.implementation, row.left_out))
    for (name, reason), rows in left_out.items():
        what = ", ".join(dict.fromkeys(f"{row.work} {label(row)}" for row in rows))
        line = f"Left out: {name} of {what}: {reason}"
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    if (share := bench.foreign_cpu_share or 0.0) > QUIET_SHARE:
        console.print(busy_words(share), style="bold", highlight=False, soft_wrap=True)


def cells(rows: Iterable[BenchRow]) -> dict[str, Cell]:
    by_label = grouped((row for row in rows if not row.left_out), label)
    return {title: {row.implementation: row for row in cell} for title, cell in by_label.items()}


def label(row: BenchRow) -> str:
    """Return dtype and shape in a few words; attention as n/h/d, or BxN/h/d for more than one row."""
    shape = dict(row.shape)
    words: list[str] = [row.dtype]
    if "head_dim" in shape:
        batch, length, heads, width = (shape.pop(name, 1) for name in ("batch", "length_tokens", "heads", "head_dim"))
        words[0] += f" {f'{batch}x' if batch != 1 else ''}{length}/{heads}/{width}"
    for name, value in shape.items():
        name = name.replace("_", " ")
        if isinstance(value, str):
            words.append(value)
        else:
            amount = f"{value:,}" if isinstance(value, int) else f"{value:g}"
            words.append(f"{amount} tokens" if name.endswith("tokens") else f"{name} {amount}")
    return ", ".join(words)


def median_of(cell: Cell, name: str) -> float | None:
    """Return the median time of an implementation; None where it was not timed."""
    timing = cell[name].timing if name in cell else None
    return timing.median_seconds if timing else None


def ratio(cell: Cell, name: str, bases: Sequence[str]) -> float | None:
    """Return the median time of an implementation over that of the fastest of others; None where one was not timed."""
    mine, others = median_of(cell, name), [known for base in bases if (known := median_of(cell, base))]
    return mine / min(others) if mine and others else None


def base_of(part: str, rows: Sequence[BenchRow]) -> str:
    known = BASES.get(part)
    return known if known in {row.implementation for row in rows} else rows[0].implementation


def mean_ratio(measured: Iterable[Cell], name: str, bases: Sequence[str]) -> tuple[float, bool] | None:
    """Return the geometric mean of an implementation's ratios over cells, and whether all cells have one."""
    ratios = [ratio(cell, name, bases) for cell in measured]
    known = [one for one in ratios if one]
    return (geometric_mean(known), len(known) == len(ratios)) if known else None


def _times_table(name: str, title: str, part: str, rows: Sequence[BenchRow]) -> Table:
    """Make a row for each shape and, in attention, for the means of each dtype; a column for each ratio."""
    base, measured = base_of(part, rows), cells(rows)
    names = [one for one in dict.fromkeys(row.implementation for row in rows if row.timing) if one != base]
    further = [(one, bases) for one, bases in RATIOS.get(part, ()) if one in names and {*bases} & {*names}]
    pairs: list[tuple[str, tuple[str, ...]]] = [*((one, (base,)) for one in names), *further]
    table = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        mine = {key: cell for key, cell in measured.items() if next(iter(cell.values())).dtype == dtype}
        for key, cell in mine.items():
            ratios = [ratio(cell, *pair) for pair in pairs]
            milliseconds = f"{1e3 * time:,.2f}" if (time := median_of(cell, base)) else "-"
            table.append([key, milliseconds, *(f"{one:.2f}" if one else "-" for one in ratios)])
        if part == "attention" and len(mine) > 1:
            means = (mean_ratio(mine.values(), *pair) for pair in pairs)
            cells_of = (f"{mean[0]:.2f}{'' if mean[1] else '*'}" if mean else "-" for mean in means)
            table.append([f"{dtype} {MEAN}", "", *cells_of])
    has_gap = any(cell.endswith("*") for row in table for cell in row)
    titles = [f"{base}, ms", *names]
    titles += [f"{one} over {bases[0] if len(bases) == 1 else 'the faster DiffLlama'}" for one, bases in further]
    notes = [f"Ratios of median times to {base}; below 1 is faster.", *(["*: not timed on every shape."] * has_gap)]
    return Table(name, title, columns("", *titles), table, notes)


def _figures_table(name: str, title: str, rows: Sequence[BenchRow], names: Sequence[str]) -> Table:
    """Make a column for each implementation where there is one figure, else a column for each figure."""
    if len(names) == 1:
        measured = cells(rows)
        people = list(dict.fromkeys(row.implementation for row in rows if names[0] in row.figures))
        table = [[key, *(_figure(cell.get(one), names[0]) for one in people)] for key, cell in measured.items()]
        return Table(name, f"{title}: {_title(names[0])}", columns("", *people), table)
    table = [[f"{label(row)}, {row.implementation}", *(_figure(row, one) for one in names)] for row in rows]
    return Table(name, title, columns("", *map(_title, names)), table)


def grouped(rows: Iterable[RowT], key: Callable[[RowT], KeyT]) -> dict[KeyT, list[RowT]]:
    """Return the rows by key, in the order in which the keys come."""
    groups: dict[KeyT, list[RowT]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _title(figure: str) -> str:
    known = FIGURES.get(figure)
    return known[0] if known else figure.replace("_", " ")


def _figure(row: BenchRow | None, figure: str) -> str:
    value = row.figures.get(figure, math.nan) if row else math.nan
    _, factor, form = FIGURES.get(figure) or ("", 1, ".3g")
    return "-" if math.isnan(value) else f"{factor * value:{form}}"
