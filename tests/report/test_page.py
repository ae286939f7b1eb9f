"""The page, its files and the terminal: whole, offline, the same each time, and with the same numbers everywhere."""

import csv
import dataclasses
import io
import math
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import scipy.stats
from rich.console import Console

from difftransformer.errors import ResultsError
from difftransformer_lab.report import Evidence, print_study, read_studies, studied, write_study
from difftransformer_lab.report.comparisons import row_of
from difftransformer_lab.report.lead import lead, plain_answer, what_would_decide
from difftransformer_lab.report.page import Page as ReportPage
from difftransformer_lab.report.page import all_tables, write_page
from difftransformer_lab.report.study_page import found_words, study_page
from difftransformer_lab.report.tables import Table, decimals_for, fixed, significant
from difftransformer_lab.results import Curve
from tests.support.missing import without
from tests.support.simulated_study import save


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


FIGURES = {"lead", "arms", "losses", "lambda", "perplexity", "needle", "allocation", "positions"}
TABLES = {
    "verdicts", "figures", "costs", "measured_costs", "arms", "runs", "machines", "perplexity", "perplexity_brief",
    "needle", "needle_brief", "allocation", "allocation_brief",
}  # fmt: skip


def terminal(comparison: Evidence, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    print_study(studied(comparison), console)
    return console.export_text()


def written_to(folder: Path, comparison: Evidence) -> Path:
    return write_study(studied(comparison), folder)


@pytest.fixture(scope="module")
def built(comparison: Evidence) -> ReportPage:
    return study_page(studied(comparison))


@pytest.fixture(scope="module")
def tables(built: ReportPage) -> dict[str, Table]:
    return {table.name: table for table in all_tables(built)}


@pytest.fixture(scope="module")
def written(built: ReportPage, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(built, tmp_path_factory.mktemp("report"))


def check_page(path: Path, tables: Sequence[Table]) -> Page:
    """Check that a page is whole, needs nothing but the files of its tables, and shows every table, and return it."""
    text = path.read_text()
    page = Page(text)
    assert not page.stack
    assert len(page.ids) == len(set(page.ids))
    assert not {"script", "link", "iframe", "img", "object"} & set(page.tags)
    for link in page.links:
        assert link[1:] in page.ids if link.startswith("#") else (path.parent / link).is_file(), link
    assert "@import" not in text
    assert not re.search(r"url\(\s*['\"]?(?!#)", text)
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    shown = set(page.cells)
    assert len({table.name for table in tables}) == len(tables)
    for table in tables:
        for row in table.parted():
            assert {
                text + (" " if text and verdict else "") + verdict.removeprefix(", ") for text, verdict in row
            } <= shown
        with open(path.parent / "tables" / f"{table.name}.csv", newline="") as file:
            assert list(csv.reader(file)) == [table.header(), *table.rows]
        assert (path.parent / "tables" / f"{table.name}.md").read_text() == table.markdown()
        assert (path.parent / "tables" / f"{table.name}.tex").read_text() == table.latex()
        assert table.rows
    return page


def test_a_page_is_whole_and_shows_every_table(tables: dict[str, Table], written: Path) -> None:
    assert set(tables) == TABLES
    check_page(written, [*tables.values()])


def test_the_page_holds_what_was_measured(comparison: Evidence, written: Path) -> None:
    page = Page(written.read_text())
    cells, words = "|".join(page.cells), page.words
    values = {
        arm: [run.evaluations["perplexity"].measurements[1].value for run in comparison.at(arm, ()).values()]
        for arm in ("diff", "softmax")
    }
    differences = [a - b for a, b in zip(*values.values(), strict=True)]
    half = 4.302653 * statistics.stdev(differences) / math.sqrt(3)  # Student's t with two degrees of freedom, any table
    for arm in values.values():
        assert f"{statistics.mean(arm):.3f} \u00b1 {statistics.stdev(arm) / math.sqrt(3):.3f}" in cells
    mean = statistics.mean(differences)
    assert f"{mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}] *" in cells
    # The interval is Student's t over the seeds' shares, not Wilson's over the answers of all seeds.
    unseen = [row for run in comparison.at("diff", ()).values() for row in run.evaluations["needle"].measurements
              if row.at == {"cities": "unseen"}]  # fmt: skip
    shares = [row.value for row in unseen]
    assert len(set(shares)) > 1
    half = 4.302653 * statistics.stdev(shares) / math.sqrt(3)
    low, high = max(0, statistics.mean(shares) - half), min(1, statistics.mean(shares) + half)
    assert f"{statistics.mean(shares):.2f} [{low:.2f}, {high:.2f}]" in cells
    assert f"{sum(row.n for row in unseen):,}" in page.cells
    for known in ("462.0 (1.12x)", "not measured", "870.1", "3,157,224", "DIFF at 62 %", "runs/diff-seed2.json"):
        assert known in cells
    for known in (
        comparison.index.command, "learning_rate: 0.001", "Example CPU, 2 cores", "3.4521 bits/byte", "2 January 2026",
        "a sentence such as", "formula what such a DIFF costs", "loss per token, nats/token",
    ):  # fmt: skip
        assert known in words
    for internal in ("nll", "N1R1", "2026-01-02", "needle:"):
        assert internal not in words.replace(comparison.index.command, "")


def test_the_same_results_give_the_same_bytes(comparison: Evidence, written: Path, tmp_path: Path) -> None:
    (read,) = read_studies(save(comparison, tmp_path))
    assert read.evidence.runs == comparison.runs
    path = comparison.path
    again = written_to(tmp_path / "again", dataclasses.replace(read.evidence, path=path))
    files = sorted(path.relative_to(written.parent) for path in written.parent.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(again.parent) for path in again.parent.rglob("*") if path.is_file())
    assert len(files) == 1 + len(FIGURES) + 3 * len(TABLES)  # CSV, Markdown, LaTeX
    for file in files:
        assert (written.parent / file).read_bytes() == (again.parent / file).read_bytes(), file
    for name in sorted(FIGURES):
        root = ElementTree.parse(written.parent / "figures" / f"{name}.svg").getroot()
        assert root.tag.endswith("}svg")
        assert len(list(root.iter())) > 50


@pytest.mark.usefixtures("undrawn")
def test_a_later_report_leaves_nothing_of_an_earlier_one_but_what_is_not_its_own(
    written: Path, make: Callable[..., Evidence], tmp_path: Path
) -> None:
    shutil.copytree(written.parent, tmp_path, dirs_exist_ok=True)
    (tmp_path / "figures" / "mine.svg").write_text("mine")
    written_to(tmp_path, make(seeds=1, needle=False, allocation=False))
    left = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert left == {"lead", "arms", "losses", "perplexity", "lambda", "positions", "mine"}
    assert not (tmp_path / "tables" / "needle.csv").exists()


@pytest.mark.parametrize("width", [80, 400])
def test_the_terminal_prints_the_same_and_breaks_no_number(
    width: int, comparison: Evidence, built: ReportPage, tables: dict[str, Table]
) -> None:
    text = terminal(comparison, width)
    assert max(map(len, text.splitlines())) <= width
    assert "\u2026" not in text
    for name in ("verdicts", "measured_costs"):
        for row in tables[name].parted():
            assert all(number in text for number, _ in row[1:])
        for note in tables[name].notes:
            assert note in " ".join(text.split())
    assert built.lead.answer in " ".join(text.split())


@pytest.mark.usefixtures("wide_alone")
@pytest.mark.parametrize("options", [
    {"seeds": 1}, {"seeds": 2, "allocation": False, "needle_counts": 1, "advantage": -0.03, "layers": 2},
    {"needle": False, "allocation": False},
    {"models": ("diff", "diff_v2", "softmax"), "layers": 40, "lengths": (512, 4096), "seeds": 2},
])  # fmt: skip
def test_every_shape_of_comparison_has_a_page(options: dict, make: Callable[..., Evidence], tmp_path: Path) -> None:
    page = Page(written_to(tmp_path, make(**options)).read_text())
    assert not page.stack
    assert ("needle" in page.ids) == options.get("needle", True)
    assert ("allocation" in page.ids) == options.get("allocation", True)
    assert ("lambda" in page.ids) == ("diff" in options.get("models", ("diff",)))
    assert ("One seed: no interval is over training" in page.words) == (options.get("seeds") == 1)


def test_one_seed_has_an_interval_over_items_for_losses_and_none_for_retrieval(make: Callable[..., Evidence]) -> None:
    evidence = make(seeds=1)
    study = studied(evidence)
    rows = {row.figure.label: row for row in study.rows if row.difference}
    diff, twin = (evidence.at(arm, ())[0].evaluations["perplexity"] for arm in ("diff", "softmax"))
    loss = rows["validation loss per token"].difference
    assert loss.interval_method == "studentised over items"
    assert loss.low < loss.mean < loss.high
    assert loss.mean == pytest.approx(diff.measurements[0].value - twin.measurements[0].value)
    assert rows["validation loss"].statistic.standard_error is None
    seen = rows["needle accuracy (seen cities)"].difference
    assert (seen.interval_method, seen.low, seen.high) == ("none", None, None)
    first = lead(study)
    words = [row[1] for row in first.table.parted()]
    assert [verdict for _, verdict in words][1] == ", reference"
    assert words[0][1] == (", better on these items" if loss.high < 0 else ", no clear difference")
    assert [row[2][1] for row in first.table.parted()] == [", one seed", ", reference"]
    assert first.answer.startswith("With one training run of each model, by these items, ")
    said = found_words(study)
    assert re.search(r"bits/byte \[-0\.\d+, [+-]0\.\d+\] over items, below zero in 1 of 1 seeds", said[0].text)
    assert ", without an interval; explored" in said[1].text


def test_sentences_are_about_the_leading_figure_of_each_task(make: Callable[..., Evidence]) -> None:
    assert [one.subject for one in found_words(studied(make()))] == [
        "Validation loss", "Needle accuracy (seen cities)", "Needle accuracy (unseen cities)", "Signed attention on the answer"
    ]  # fmt: skip
    assert len(found_words(studied(make(needle=False, allocation=False)))) == 1


def test_the_first_screen_answers_and_says_what_would_decide(make: Callable[..., Evidence]) -> None:
    """Verdicts follow scipy's paired t test; the seeds asked for have the power of a t test."""
    evidence = make(seeds=3, advantage=0.004)
    study = studied(evidence)
    first = lead(study)
    row, other = (row_of(study.rows, "validation loss", arm, ()) for arm in ("diff", "softmax"))
    p = scipy.stats.ttest_rel([*row.values.values()], [*other.values.values()]).pvalue
    verdict = first.table.parted()[0][1][1]
    assert verdict == (", no clear difference" if p > 0.05 else ", better" if row.difference.mean < 0 else ", worse")
    more = re.match(
        r"(\d+) more seeds? of every model, about \d+ minutes where these ran, one run at a time, ", first.deciding
    )
    assert more
    assert first.command == f"difftransformer compare recipes/bytes-small.yaml --seeds {3 + int(more[1])}"
    demo = dataclasses.replace(evidence.index, command="difftransformer demo --out reports/demo")  # has no --seeds
    shown = studied(dataclasses.replace(evidence, index=demo))
    assert what_would_decide(shown)[1] == "difftransformer compare demo --seeds 5 --out reports/demo-full"
    clear = studied(make(seeds=5, advantage=0.3, needle=False, allocation=False))
    assert "DIFF is better than Transformer on validation loss (" in plain_answer(clear)
    assert plain_answer(clear).endswith("not confirmed.")
    deciding, nothing = what_would_decide(clear)
    assert (nothing, "confirm" in deciding) == ("", True)


@pytest.mark.usefixtures("wide_alone")
def test_runs_without_curves_and_evaluations_have_a_page(comparison: Evidence, tmp_path: Path) -> None:
    runs = {
        key: {seed: dataclasses.replace(run, curves={}, evaluations={}, figures=[]) for seed, run in found.items()}
        for key, found in comparison.runs.items()
    }
    written_to(tmp_path, dataclasses.replace(comparison, runs=runs))
    assert not (tmp_path / "figures").exists()


@pytest.mark.usefixtures("wide_alone")
def test_names_from_outside_are_text_not_markup(comparison: Evidence, tmp_path: Path) -> None:
    sly = "<script>alert(1)</script> & $x$ [bold]"
    arms = [dataclasses.replace(comparison.index.arms[0], label=sly), *comparison.index.arms[1:]]
    index = dataclasses.replace(comparison.index, question=sly, arms=arms)
    changed = dataclasses.replace(comparison, index=index)
    page = Page(written_to(tmp_path, changed).read_text())
    assert "script" not in page.tags
    assert sly in page.words
    assert sly in terminal(changed, 400)


@pytest.mark.usefixtures("undrawn")
def test_curves_that_contradict_themselves_are_refused(comparison: Evidence, tmp_path: Path) -> None:
    run = comparison.at("diff", ())[0]
    broken = dataclasses.replace(run, curves=run.curves | {"lambda 0": Curve(steps=[1, 2], values=[1.0])})
    runs = comparison.runs | {("diff", ()): comparison.at("diff", ()) | {0: broken}}
    with pytest.raises(ResultsError, match="run the command again"):
        written_to(tmp_path, dataclasses.replace(comparison, runs=runs))
    assert not (tmp_path / "index.html").exists()


def test_a_report_is_made_without_torch_and_without_a_display(make: Callable[..., Evidence], tmp_path: Path) -> None:
    path = save(make(needle=False, allocation=False), tmp_path)
    program = without("torch", "transformers") + (
        "from difftransformer_lab.cli.main import main;"
        f"assert main(['report', {str(path)!r}, '--out', {str(tmp_path / 'report')!r}]) == 0;"
        "loaded = {'matplotlib.pyplot', 'tkinter'} & sys.modules.keys();"
        "assert not loaded, loaded"
    )
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path)), "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "DIFF is better than Transformer on" in done.stdout
    assert (tmp_path / "report" / "index.html").is_file()


def test_small_numbers_keep_their_digits() -> None:
    assert [decimals_for(values) for values in ([1.25, 1.26], [12345.6], [0.0])] == [4, 0, 4]
    assert fixed(-0.00001, 4, "+") == "+0.0000"
    assert [significant(value) for value in (12345.6, 462.0, 0.00012345, None)] == ["12346", "462.0", "0.0001234", ""]
