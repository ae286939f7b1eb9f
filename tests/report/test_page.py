"""The page, its files and the terminal: whole, offline, the same each time, and with the same numbers everywhere."""

import csv
import dataclasses
import io
import math
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from difftransformer.errors import ResultsError
from difftransformer_lab.report import cost_table, print_study, write_report
from difftransformer_lab.report.page import all_tables, study_page
from difftransformer_lab.report.tables import Table, metrics_table
from difftransformer_lab.report.terminal import rich_table
from difftransformer_lab.results import Comparison, read_result, write_result
from tests.support.missing import without


class Page(HTMLParser):
    """What a browser would see: visible text, ids, links, and tags left open."""

    VOID = frozenset({"meta", "br", "img", "link", "path", "use", "image", "rect", "circle"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.stack: list[str] = []
        self.cells: list[str] = []
        self.words = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        self.links += [value or "" for name, value in attrs if name in {"href", "src", "xlink:href", "data", "action"}]
        if tag not in self.VOID:
            self.stack.append(tag)
        if tag in {"td", "th"}:
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.stack.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data
        if self.stack and {"td", "th"} & set(self.stack):
            self.cells[-1] += data


FIGURES = {"loss", "lambda", "perplexity", "needle", "allocation"}
TABLES = {
    "metrics", "cost", "models", "runs", "environment", "perplexity", "perplexity_brief", "needle", "needle_brief",
    "allocation", "allocation_brief",
}  # fmt: skip


def build_tables(comparison: Comparison) -> dict[str, Table]:
    return {table.name: table for table in all_tables(study_page(comparison))}


def terminal_text(*tables: object) -> str:
    console = Console(width=400, record=True, file=io.StringIO())
    for table in tables:
        console.print(table)
    return console.export_text()


@pytest.fixture(scope="module")
def written(comparison: Comparison, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(comparison, tmp_path_factory.mktemp("report"))


def test_every_table_stands_on_the_page_and_in_its_csv(comparison: Comparison, written: Path) -> None:
    page = Page(written.read_text())
    tables = build_tables(comparison)
    assert set(tables) == TABLES
    shown = set(page.cells)
    for name, table in tables.items():
        for row in table.folded():
            assert set(row) <= shown
        with open(written.parent / "tables" / f"{name}.csv", newline="") as file:
            header, *rows = list(csv.reader(file))
        assert header == table.header()
        assert rows == table.rows
        assert rows
        for row, folded in zip(rows, table.folded(), strict=True):
            assert all(cell in "|".join(folded) for cell in row)
    assert not page.stack


def test_the_page_holds_what_was_measured(comparison: Comparison, written: Path) -> None:
    page = Page(written.read_text())
    cells, words = "|".join(page.cells), page.words
    for metric in comparison.metrics:
        for statistic in metric.models.values():
            assert f"{statistic.mean:.4f} \u00b1 {statistic.standard_error:.4f}" in cells
        difference = metric.differences["diff"]
        assert f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]" in cells
    for run in comparison.runs:
        assert f"{run.evaluations['perplexity'].measurements[0].value:.4f}" in cells
        assert run.run in cells
    # The interval is Student's t over the seeds' shares, not Wilson's over the answers of all seeds.
    unseen = [row for run in comparison.runs if run.model == "diff" for row in run.evaluations["needle"].measurements
              if row.at == {"cities": "unseen"}]  # fmt: skip
    shares = [row.value for row in unseen]
    assert len(set(shares)) > 1
    half = 4.302653 * statistics.stdev(shares) / math.sqrt(3)
    low, high = max(0, statistics.mean(shares) - half), min(1, statistics.mean(shares) + half)
    assert f"{statistics.mean(shares):.2f} [{low:.2f}, {high:.2f}]" in cells
    assert f"{sum(row.n for row in unseen):,}" in page.cells
    for known in ("3.4521", "462.0 (1.12x)", "not measured", "870.1", "131.7 (0.67x)", "3157224", "DIFF at 62 %"):
        assert known in cells
    for known in (comparison.command, "learning_rate: 0.001", "Example CPU, 2 cores", comparison.created, "0, 1, 2"):
        assert known in words


def test_the_page_needs_nothing_from_outside(written: Path) -> None:
    text = written.read_text()
    page = Page(text)
    for link in page.links:
        assert link.startswith(("#", "tables/")), link
        if link.startswith("#"):
            assert link[1:] in page.ids
        else:
            assert (written.parent / link).is_file()
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    assert "@import" not in text
    assert not re.search(r"url\(\s*['\"]?(?!#)", text)
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert len(page.ids) == len(set(page.ids))


def test_the_same_results_give_the_same_bytes(comparison: Comparison, written: Path, tmp_path: Path) -> None:
    path = write_result(comparison, tmp_path / "results.json")
    again = write_report(read_result(path, Comparison), tmp_path / "again")
    files = sorted(path.relative_to(written.parent) for path in written.parent.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(again.parent) for path in again.parent.rglob("*") if path.is_file())
    assert len(files) == 1 + len(FIGURES) + 3 * len(TABLES)  # CSV, Markdown, LaTeX
    for file in files:
        assert (written.parent / file).read_bytes() == (again.parent / file).read_bytes(), file


def test_figures_are_pictures_of_their_own(written: Path) -> None:
    for name in sorted(FIGURES):
        root = ElementTree.parse(written.parent / "figures" / f"{name}.svg").getroot()
        assert root.tag.endswith("}svg")
        assert len(list(root.iter())) > 50


def test_a_later_report_leaves_nothing_of_an_earlier_one(
    comparison: Comparison, make: Callable[..., Comparison], tmp_path: Path
) -> None:
    write_report(comparison, tmp_path, png=True)
    images = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert images == FIGURES
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "figures").glob("*.png"))
    write_report(make(seeds=1, needle=False, allocation=False), tmp_path)
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"loss.svg", "perplexity.svg", "lambda.svg"}
    assert not (tmp_path / "tables" / "needle.csv").exists()


def test_the_terminal_prints_the_same_numbers(comparison: Comparison, written: Path) -> None:
    tables = build_tables(comparison)
    text = terminal_text(rich_table(metrics_table(comparison)), cost_table(comparison))
    for name in ("metrics", "cost"):
        for row in tables[name].folded():
            for cell in row:
                assert cell in text
        for note in tables[name].notes:
            assert note in " ".join(text.split())


def test_the_terminal_says_who_won_and_loses_no_digit_when_narrow(comparison: Comparison) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    print_study(comparison, console)
    text = console.export_text()
    assert "DIFF reaches a lower validation loss than Transformer" in " ".join(text.split())
    assert "\u2026" not in text
    for metric in comparison.metrics:
        assert f"{metric.differences['diff'].mean:+.4f}" in text


@pytest.mark.parametrize(
    "options",
    [
        {"seeds": 1},
        {"seeds": 1, "needle": False},
        {"seeds": 2, "allocation": False, "needle_counts": 1},
        {"seeds": 2, "advantage": -0.03, "layers": 2},
        {"models": ("softmax",), "needle": False, "allocation": False},
        {"models": ("diff", "softmax", "diff_v2"), "layers": 40, "lengths": (512, 4096), "seeds": 2},
    ],
)
def test_every_shape_of_comparison_has_a_page(options: dict, make: Callable[..., Comparison], tmp_path: Path) -> None:
    comparison = make(**options)
    page = Page(write_report(comparison, tmp_path).read_text())
    assert not page.stack
    assert ("needle" in page.ids) == options.get("needle", True)
    assert ("allocation" in page.ids) == options.get("allocation", True)
    assert ("lambda" in page.ids) == ("diff" in options.get("models", ("diff",)))
    assert ("One seed: there is no standard error" in page.words) == (options.get("seeds") == 1)


def test_runs_without_curves_have_a_page(comparison: Comparison, tmp_path: Path) -> None:
    empty = dataclasses.replace(comparison.runs[0].train_loss_nats, steps=[], values=[])
    bare = [
        dataclasses.replace(
            run,
            train_loss_nats=empty,
            validation_loss_nats=empty,
            lambda_steps=[],
            lambda_values=[],
            evaluations={},
        )
        for run in comparison.runs
    ]
    write_report(dataclasses.replace(comparison, runs=bare, metrics=[]), tmp_path)
    assert not (tmp_path / "figures").exists()


def test_names_from_outside_are_text_not_markup(comparison: Comparison, tmp_path: Path) -> None:
    sly = "<script>alert(1)</script> & $x$ [bold]"
    models = [dataclasses.replace(comparison.models[0], label=sly), *comparison.models[1:]]
    changed = dataclasses.replace(comparison, name=sly, models=models, recipe={"note": sly})
    page = Page(write_report(changed, tmp_path).read_text())
    assert "script" not in page.tags
    assert sly in page.words
    assert sly in terminal_text(rich_table(metrics_table(changed)))


def test_curves_that_contradict_themselves_are_refused(comparison: Comparison, tmp_path: Path) -> None:
    run = comparison.runs[0]
    for broken in (
        dataclasses.replace(run, lambda_values=run.lambda_values[:-1]),
        dataclasses.replace(run, train_loss_nats=dataclasses.replace(run.train_loss_nats, values=[1.0])),
    ):
        with pytest.raises(ResultsError, match="run the command again"):
            write_report(dataclasses.replace(comparison, runs=[broken, *comparison.runs[1:]]), tmp_path)
    assert not (tmp_path / "index.html").exists()


def test_the_baseline_stands_beside_bits_per_byte_alone(comparison: Comparison) -> None:
    table = metrics_table(comparison)
    column = table.header().index("byte bigram (baseline)")
    assert [(row[1], row[column]) for row in table.rows if row[column]] == [("bits/byte", "3.4521")]


def test_a_report_is_made_without_torch_and_without_a_display(comparison: Comparison, tmp_path: Path) -> None:
    path = write_result(comparison, tmp_path / "results.json")
    program = without("torch", "transformers") + (
        "from difftransformer_lab.report import write_report; from difftransformer_lab.results import *;"
        f"write_report(read_result({str(path)!r}, Comparison), {str(tmp_path / 'report')!r});"
        "loaded = {'matplotlib.pyplot', 'tkinter'} & sys.modules.keys();"
        "assert not loaded, loaded"
    )
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report" / "index.html").is_file()


def test_a_report_leaves_other_files_of_its_folder(comparison: Comparison, tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "mine.svg").write_text("mine")
    for _ in range(2):
        write_report(comparison, tmp_path)
    assert (tmp_path / "figures" / "mine.svg").read_text() == "mine"
