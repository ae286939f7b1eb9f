"""Tables in a terminal: none is wider than it, and no cell is lost."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from difftransformer_lab.report import print_study, read_evidence, read_studies, studied
from difftransformer_lab.report.bench import bench_tables, print_bench
from difftransformer_lab.report.tables import Group, Table, columns
from difftransformer_lab.report.terminal import terminal_table
from difftransformer_lab.results import Bench, read_result

RESULTS = Path(__file__).parents[2] / "docs" / "results"
COMPARED = ("demo", "retrieval", "upcycle")
BENCHES = ("bench-xeon-amx", "models-xeon-amx", "generation", "diffllama")
WIDTHS = [60, 80]


def printed(draw, width):
    console = Console(width=width, record=True, file=io.StringIO(), markup=False)
    draw(console)
    return console.export_text()


def of_table(table, width):
    return printed(lambda console: console.print(terminal_table(table, width)), width)


def too_wide(text, width):
    return [
        line for line in text.split("\n") if len(line.rstrip()) > width and not line.startswith("  difftransformer")
    ]


def letters(text):
    return re.sub(r"\s", "", text)


@pytest.fixture(scope="module", params=COMPARED)
def comparison(request):
    return studied(read_evidence(RESULTS / f"{request.param}.json"))


@pytest.mark.parametrize("width", WIDTHS)
def test_comparisons_fit(comparison, width):
    assert too_wide(printed(lambda console: print_study(comparison, console), width), width) == []


@pytest.mark.slow
def test_studies_fit():
    for one in read_studies(RESULTS / "studies"):
        assert too_wide(printed(lambda console, one=one: print_study(one, console), 80), 80) == []


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", BENCHES)
def test_benchmarks_fit_and_lose_no_number(name, width):
    result = read_result(RESULTS / f"{name}.json", Bench)
    tables = bench_tables(result)
    for table in tables:
        text = of_table(table, width)
        assert too_wide(text, width) == []
        for number in re.findall(r"\d[\d,.]*", " ".join(cell for row in table.rows for cell in row[1:])):
            assert number in text
    assert tables
    assert letters(tables[0].title) in letters(printed(lambda console: print_bench(result, console), width))


def wide(rows):
    return Table("wide", "Wide", columns("measure", *(f"model-{place}" for place in range(8))), rows, ["A note."])


def test_columns_of_numbers_stand_below_each_other():
    """Where the first cells say which row it is: a part of the columns a block, each with the names."""
    rows = [[f"row {place}", *(f"{place}{column}.0123456" for column in range(8))] for place in range(9)]
    lines = of_table(wide(rows), 80).split("\n")
    assert [len(re.findall(r"model-\d", line)) for line in lines if "model-" in line] == [5, 3]
    assert sum(line.strip().startswith("row 3 ") for line in lines) == 2
    assert sum("Wide" in line for line in lines) == sum("A note." in line for line in lines) == 1


def test_cells_stand_below_each_other_where_rows_share_a_name():
    rows = [["accuracy", *(f"{place}{column}.0123456" for column in range(8))] for place in range(9)]
    lines = [line.split() for line in of_table(wide(rows), 80).split("\n")]
    assert lines.count(["accuracy"]) == 9
    assert ["model-7", "87.0123456"] in lines


def test_a_table_with_room_is_one():
    groups = (Group("name", numeric=False), Group("mean", ("mean", "low", "high"), "interval"))
    table = Table("t", "T", groups, [["a [b]", "1", "0", "2"]])
    assert "a [b]   1 [0, 2]" in of_table(table, 80)
