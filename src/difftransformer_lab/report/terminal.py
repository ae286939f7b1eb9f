"""The same words and tables in the terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, JustifyMethod
from rich.table import Table as RichTable
from rich.text import Text

from . import study_tables
from .lead import lead
from .studied import Studied
from .tables import Table

MOST_UNBROKEN = 34
"""Letters of a name that a column may have in a row."""

_BETWEEN = 3
"""Letters between two columns."""


def print_study(study: Studied, console: Console | None = None) -> None:
    """Print what a study asked and found, its verdicts, the costs of a comparison, and what would decide what is open."""
    console = console or Console()
    evidence, said = study.evidence, lead(study)
    console.print(Text(evidence.index.question, style="bold"), highlight=False)
    tables = [said.table] if said.table else []
    if evidence.index.upcycling:
        tables.append(study_tables.upcycling_table(evidence, study.rows))
    if evidence.index.costs:
        tables.append(study_tables.measured_costs_table(evidence))
    for table in tables:
        console.print(terminal_table(table, console.width))
    console.print(Text(said.answer), highlight=False)
    if said.deciding:
        console.print(Text(f"What would decide it: {said.deciding}"), highlight=False)
    if said.command:
        console.print(Text(f"  {said.command}"), highlight=False, soft_wrap=True)


def terminal_table(table: Table, width: int) -> RichTable | Group:
    """Return a table for a terminal; where its words have no room in a row, cells stand below each other."""
    widths = [min(one, MOST_UNBROKEN) for one in table.widths()]
    room = width - _BETWEEN * len(widths)
    return _stacked(table) if sum(widths) > room else _in_rows(table, widths, room)


def _stacked(table: Table) -> Group:
    made = RichTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    made.add_column(overflow="fold", max_width=44)
    made.add_column(overflow="fold")
    for row in table.folded():
        made.add_row(Text(row[0], style="bold"), "")
        for group, cell in zip(table.groups[1:], row[1:], strict=True):
            if cell:
                made.add_row(Text(f"  {group.title}"), Text(cell))
    notes = [Text(" ".join(table.notes), style="table.caption")] if table.notes else []
    return Group(Text(f"\n{table.title}", style="table.title"), made, *notes, Text())


def _in_rows(table: Table, widths: list[int], room: int) -> RichTable:
    """Return a table with a line for each row. Brackets in names are no markup."""
    rows = table.folded()
    titles = [group.title for group in table.groups]
    wanted = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    while sum(widths) < min(room, sum(wanted)):
        most = max(range(len(widths)), key=lambda place: wanted[place] - widths[place])
        widths[most] += 1
    made = RichTable(
        title=Text(table.title, style="table.title"),
        caption=Text(" ".join(table.notes), style="table.caption"),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_lines=False,
        pad_edge=False,
    )
    for group, width in zip(table.groups, widths, strict=True):
        side: JustifyMethod = "right" if group.numeric else "left"
        made.add_column(Text(group.title), justify=side, overflow="fold", width=width)
    for row in rows:
        made.add_row(*map(Text, row))
    return made
