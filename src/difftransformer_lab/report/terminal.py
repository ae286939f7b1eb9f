"""The same words and tables in the terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from . import study_tables
from .answers import interval_words
from .studied import Studied
from .study_page import found_words
from .tables import Group, Table

LONGEST_UNBROKEN_WORD = 14
"""A column stays wide enough for words up to this many characters, also in a narrow terminal."""


def print_study(study: Studied, console: Console | None = None) -> None:
    """Print what a study found, its figures, and the costs of a comparison."""
    console = console or Console()
    evidence, rows = study.evidence, study.rows
    for said in found_words(study):
        console.print(Text(f"{said.subject}{' ' if said.subject.endswith('?') else ': '}{said.text}"), highlight=False)
    console.print(Text(interval_words(evidence), style="dim"), highlight=False)
    if evidence.index.upcycling:
        console.print(rich_table(study_tables.upcycling_table(evidence, rows)))
    else:
        console.print(rich_table(study_tables.result_tables(evidence, rows)[0]))
    if evidence.index.costs:
        console.print(rich_table(turned(study_tables.measured_costs_table(evidence))))


def turned(table: Table) -> Table:
    """Return a table with a row for each of its columns, for a terminal that is narrow."""
    titles = [group.title for group in table.groups]
    lines = [[title, *cells] for title, *cells in zip(titles, *table.folded(), strict=True)]
    groups = tuple(Group(title, numeric=index > 0) for index, title in enumerate(lines[0]))
    return Table(table.name, table.title, groups, lines[1:], table.notes)


def rich_table(table: Table) -> RichTable:
    """Return a table as rich prints it. Brackets in names are not markup."""
    made = RichTable(
        title=Text(table.title, style="table.title"),
        caption=Text(" ".join(table.notes), style="table.caption"),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_lines=False,
        pad_edge=False,
    )
    rows = table.folded()
    for group, cells in zip(table.groups, zip(*rows, strict=True) if rows else [()] * len(table.groups), strict=True):
        longest_word = max(len(word) for text in (group.title, *cells) for word in text.split() or [""])
        made.add_column(
            Text(group.title),
            justify="right" if group.numeric else "left",
            overflow="fold",
            min_width=min(longest_word, LONGEST_UNBROKEN_WORD),
        )
    for row in rows:
        made.add_row(*map(Text, row))
    return made
