"""Tables in the terminal."""

from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.console import Group, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from .tables import Table

MOST_UNBROKEN = 34
"""Letters of a name that a column may have in a row."""

_BETWEEN = 3
"""Letters between two columns."""

_HEAD_LINES = 4
"""Lines above the rows."""


def terminal_table(table: Table, width: int) -> RichTable | Group:
    """Return a table for a terminal. Where its words have no room in a row, cells stand below each other, or columns do.

    Columns can only if the first cell of a row says which it is. Of both the shorter is taken.
    """
    rows = table.folded()
    widths = [min(one, MOST_UNBROKEN) for one in table.widths()]
    plain = replace(table, groups=tuple(replace(one, parts=("",), fold="plain") for one in table.groups), rows=rows)
    parts = _parts(widths, width)
    if len(parts) == 1:
        return _in_rows(plain, widths, width)
    stacked_lines = sum(sum(map(bool, row)) for row in rows)
    if len({row[0] for row in rows}) < len(rows) or (len(rows) + _HEAD_LINES) * len(parts) > stacked_lines:
        return _stacked(plain)
    made = []
    for place, part in enumerate(parts):
        groups = tuple(plain.groups[column] for column in part)
        cells = [[row[column] for column in part] for row in rows]
        title, notes = plain.title if place == 0 else "", plain.notes if place == len(parts) - 1 else []
        one = replace(plain, title=title, groups=groups, rows=cells, notes=notes)
        made.append(_in_rows(one, [widths[column] for column in part], width))
    return Group(*made)


def _parts(widths: list[int], width: int) -> list[list[int]]:
    """Return the columns that have room beside the first one, in as many parts as that takes."""
    parts = [[0]]
    for column in range(1, len(widths)):
        used = [*parts[-1], column]
        if len(used) > 2 and sum(widths[one] + _BETWEEN for one in used) > width:
            parts.append([0])
        parts[-1].append(column)
    return parts


def _stacked(table: Table) -> Group:
    made = RichTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(overflow="fold", max_width=44)
    made.add_column(overflow="fold")
    for row in table.rows:
        made.add_row(Text(row[0], style="bold"), "")
        for group, cell in zip(table.groups[1:], row[1:], strict=True):
            if cell:
                made.add_row(Text(f"  {group.title}"), Text(cell))
    notes = [Text(" ".join(table.notes), style="table.caption")] if table.notes else []
    title = [Text(f"\n{table.title}", style="table.title")] if table.title else []
    return Group(*title, made, *notes, Text())


def _in_rows(table: Table, widths: list[int], width: int) -> RichTable:
    """Return a table with a line for each row. Brackets in names are no markup."""
    titles = [group.title for group in table.groups]
    wanted = [max(map(len, column)) for column in zip(titles, *table.rows, strict=True)]
    widths, room = list(widths), width - _BETWEEN * len(widths)
    while sum(widths) < min(room, sum(wanted)):
        most = max(range(len(widths)), key=lambda place: wanted[place] - widths[place])
        widths[most] += 1
    title = Text(table.title, style="table.title") if table.title else None
    caption = Text(" ".join(table.notes), style="table.caption") if table.notes else None
    made = RichTable(title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
    made.pad_edge = False
    for group, width in zip(table.groups, widths, strict=True):
        side: JustifyMethod = "right" if group.numeric else "left"
        made.add_column(Text(group.title), justify=side, overflow="fold", width=width)
    for row in table.rows:
        made.add_row(*map(Text, row))
    return made
