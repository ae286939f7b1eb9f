"""The same tables in the terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from difftransformer_lab.report import tables
from difftransformer_lab.report.verdict import verdicts
from difftransformer_lab.results import Comparison, Study, Upcycling

LONGEST_UNBROKEN_WORD = 14
"""A column stays wide enough for words up to this many characters, also in a narrow terminal."""


def print_study(study: Study, console: Console | None = None) -> None:
    """Print the verdicts, the table of metrics, and the costs of a comparison or the drift of upcycled models."""
    console = console or Console()
    for verdict in verdicts(study):
        console.print(Text(verdict.text), highlight=False)
    if isinstance(study, Upcycling):  # with its many models the table of metrics is too wide for a terminal
        console.print(rich_table(tables.upcycling_table(study)))
    else:
        console.print(rich_table(tables.metrics_table(study)))
    if isinstance(study, Comparison):
        console.print(cost_table(study))


def cost_table(comparison: Comparison) -> RichTable:
    """Return the table of costs with a row for each quantity: there are fewer models than quantities."""
    table = tables.cost_table(comparison)
    rows = table.folded()
    titles = [group.title for group in table.groups]
    turned = [[title, *cells] for title, *cells in zip(titles, *rows, strict=True)]
    groups = tuple(tables.Group(title, numeric=index > 0) for index, title in enumerate(turned[0]))
    return rich_table(tables.Table(table.name, table.title, groups, turned[1:], table.notes))


def rich_table(table: tables.Table) -> RichTable:
    """Return a table as rich prints it. Brackets in names are no markup."""
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
