"""The same tables in the terminal."""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from difftransformer.report import tables
from difftransformer.report.verdict import verdicts
from difftransformer.results import Comparison

LONGEST_UNBROKEN_WORD = 14
"""A column stays wide enough for words up to this many characters, also in a narrow terminal."""


def comparison_table(comparison: Comparison) -> RichTable:
    """The table of metrics: mean and standard error for each model, and the paired difference with its interval."""
    return _rich(tables.metrics_table(comparison))


def cost_table(comparison: Comparison) -> RichTable:
    """The table of costs, a row for each quantity: models are fewer than quantities, and a terminal is narrow."""
    table = tables.cost_table(comparison)
    rows = table.folded()
    titles = [group.title for group in table.groups]
    turned = [[title, *cells] for title, *cells in zip(titles, *rows, strict=True)]
    groups = tuple(tables.Group(title, numeric=index > 0) for index, title in enumerate(turned[0]))
    return _rich(tables.Table(table.name, table.title, groups, turned[1:], table.notes))


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Print the verdicts, the table of metrics and the table of costs."""
    console = console or Console()
    for verdict in verdicts(comparison):
        console.print(escape(verdict.text), highlight=False)
    for table in (comparison_table(comparison), cost_table(comparison)):
        console.print(table)


def _rich(table: tables.Table) -> RichTable:
    rich_table = RichTable(
        title=escape(table.title),
        caption=escape(" ".join(table.notes)),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        show_lines=False,
        pad_edge=False,
    )
    rows = table.folded()
    for group, cells in zip(table.groups, zip(*rows, strict=True) if rows else [()] * len(table.groups), strict=True):
        longest_word = max(len(word) for text in (group.title, *cells) for word in text.split() or [""])
        rich_table.add_column(
            escape(group.title),
            justify="right" if group.numeric else "left",
            overflow="fold",
            min_width=min(longest_word, LONGEST_UNBROKEN_WORD),
        )
    for row in rows:
        rich_table.add_row(*map(escape, row))
    return rich_table
