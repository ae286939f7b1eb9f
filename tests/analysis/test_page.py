"""The page of a study: whole, offline, the same each time, with the numbers of its records and the states of its findings."""

import csv
import dataclasses
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

from difftransformer.errors import ResultsError
from difftransformer_lab.analysis import Records, analyse, read_studies
from difftransformer_lab.analysis import page as pages
from difftransformer_lab.analysis.page import study_page, write_page
from difftransformer_lab.cli import report as command
from difftransformer_lab.plots import COLOURS, MORE_COLOURS, REFERENCE_COLOUR, arm_styles
from difftransformer_lab.results import (
    Change,
    ChosenRate,
    Contrast,
    Correction,
    Curve,
    Question,
    RunRecord,
    StudyAxis,
    StudyFigure,
    Term,
    write_result,
)
from difftransformer_lab.table import Group, Table, decimals_for, fixed, significant
from tests.support.missing import without
from tests.support.simulated_study import LOSS, planned, record, save, study


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


FIGURES = {"arms", "losses", "lambda", "perplexity", "needle", "allocation", "positions"}
TABLES = {
    "figures", "costs", "measured_costs", "arms", "runs", "machines", "baselines", "perplexity", "perplexity_brief",
    "needle", "needle_brief", "allocation", "allocation_brief",
}  # fmt: skip


def written_to(folder: Path, comparison: Records) -> Path:
    return write_page(study_page(analyse(comparison)), folder)


def all_tables(page: pages.Page) -> list[Table]:
    return [table for section in page.sections for table, _ in section.every_table]


@pytest.fixture(scope="module")
def built(comparison: Records) -> pages.Page:
    return study_page(analyse(comparison))


@pytest.fixture(scope="module")
def written(built: pages.Page, tmp_path_factory: pytest.TempPathFactory) -> Path:
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
        for row in table.folded():
            assert set(row) <= shown
        with open(path.parent / "tables" / f"{table.name}.csv", newline="") as file:
            assert list(csv.reader(file)) == [table.header(), *table.rows]
        assert (path.parent / "tables" / f"{table.name}.md").read_text() == table.markdown()
        assert table.rows
    return page


def test_a_page_is_whole_and_shows_every_table(built: pages.Page, written: Path) -> None:
    assert {table.name for table in all_tables(built)} == TABLES
    check_page(written, all_tables(built))


def test_the_page_holds_what_was_measured(comparison: Records, written: Path) -> None:
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
    for known in (
        "462.0 (1.12x)",
        "not measured",
        "870.1",
        "3.4521",
        "3,157,224",
        "DIFF at 62 %",
        "runs/diff-seed2.json",
    ):
        assert known in cells
    for known in (
        comparison.index.command, "learning_rate: 0.001", "Example CPU, 2 cores", "2 January 2026",
        "loss per token, nats/token",
    ):  # fmt: skip
        assert known in words
    for internal in ("nll", "N1R1", "2026-01-02", "needle:"):
        assert internal not in words.replace(comparison.index.command, "")


@pytest.mark.slow
def test_the_same_results_give_the_same_bytes(comparison: Records, written: Path, tmp_path: Path) -> None:
    (read,) = read_studies(save(comparison, tmp_path))
    assert read.records.runs == comparison.runs
    path = comparison.path
    again = written_to(tmp_path / "again", dataclasses.replace(read.records, path=path))
    files = sorted(path.relative_to(written.parent) for path in written.parent.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(again.parent) for path in again.parent.rglob("*") if path.is_file())
    assert len(files) == 1 + len(FIGURES) + 2 * len(TABLES)  # CSV and Markdown
    for file in files:
        assert (written.parent / file).read_bytes() == (again.parent / file).read_bytes(), file
    for name in sorted(FIGURES):
        root = ElementTree.parse(written.parent / "figures" / f"{name}.svg").getroot()
        assert root.tag.endswith("}svg")
        assert len(list(root.iter())) > 50


@pytest.mark.usefixtures("undrawn")
def test_a_later_report_leaves_nothing_of_an_earlier_one_but_what_is_not_its_own(
    written: Path, make: Callable[..., Records], tmp_path: Path
) -> None:
    shutil.copytree(written.parent, tmp_path, dirs_exist_ok=True)
    (tmp_path / "figures" / "mine.svg").write_text("mine")
    written_to(tmp_path, make(seeds=1, needle=False, allocation=False))
    left = {path.stem for path in (tmp_path / "figures").iterdir()}
    assert left == {"arms", "losses", "perplexity", "lambda", "positions", "mine"}
    assert not (tmp_path / "tables" / "needle.csv").exists()


@pytest.mark.usefixtures("wide_alone")
@pytest.mark.parametrize("options", [
    pytest.param({"seeds": 1}, marks=pytest.mark.slow),
    {"seeds": 2, "allocation": False, "needle_counts": 1, "advantage": -0.03, "layers": 2},
    {"needle": False, "allocation": False},
    pytest.param(
        {"models": ("diff", "diff_v2", "softmax"), "layers": 40, "lengths": (512, 4096), "seeds": 2}, marks=pytest.mark.slow
    ),
])  # fmt: skip
def test_every_shape_of_comparison_has_a_page(options: dict, make: Callable[..., Records], tmp_path: Path) -> None:
    page = Page(written_to(tmp_path, make(**options)).read_text())
    assert not page.stack
    assert ("needle" in page.ids) == options.get("needle", True)
    assert ("allocation" in page.ids) == options.get("allocation", True)
    assert ("lambda" in page.ids) == ("diff" in options.get("models", ("diff",)))
    assert ("One training run each" in page.words) == (options.get("seeds") == 1)


def test_one_seed_has_an_interval_over_items_for_losses_and_none_for_retrieval(make: Callable[..., Records]) -> None:
    evidence = make(seeds=1)
    study = analyse(evidence)
    rows = {row.figure.label: row for row in study.rows if row.difference}
    diff, twin = (evidence.at(arm, ())[0].evaluations["perplexity"] for arm in ("diff", "softmax"))
    loss = rows["validation loss per token"].difference
    assert loss.interval_method == "studentised over items"
    assert loss.low < loss.mean < loss.high
    assert loss.mean == pytest.approx(diff.measurements[0].value - twin.measurements[0].value)
    assert rows["validation loss"].statistic.standard_error is None
    seen = rows["needle accuracy (seen cities)"].difference
    assert (seen.interval_method, seen.low, seen.high) == ("none", None, None)


@pytest.mark.usefixtures("wide_alone")
def test_runs_without_curves_and_evaluations_have_a_page(comparison: Records, tmp_path: Path) -> None:
    runs = {
        key: {seed: dataclasses.replace(run, curves={}, evaluations={}, figures=[]) for seed, run in found.items()}
        for key, found in comparison.runs.items()
    }
    written_to(tmp_path, dataclasses.replace(comparison, runs=runs))
    assert not (tmp_path / "figures").exists()


@pytest.mark.usefixtures("wide_alone")
def test_names_from_outside_are_text_not_markup(comparison: Records, tmp_path: Path) -> None:
    sly = "<script>alert(1)</script> & $x$ [bold]"
    arms = [dataclasses.replace(comparison.index.arms[0], label=sly), *comparison.index.arms[1:]]
    index = dataclasses.replace(comparison.index, question=sly, arms=arms)
    changed = dataclasses.replace(comparison, index=index)
    page = Page(written_to(tmp_path, changed).read_text())
    assert "script" not in page.tags
    assert sly in page.words


@pytest.mark.usefixtures("undrawn")
def test_curves_that_contradict_themselves_are_refused(comparison: Records, tmp_path: Path) -> None:
    run = comparison.at("diff", ())[0]
    broken = dataclasses.replace(run, curves=run.curves | {"lambda 0": Curve(steps=[1, 2], values=[1.0])})
    runs = comparison.runs | {("diff", ()): comparison.at("diff", ()) | {0: broken}}
    with pytest.raises(ResultsError, match="run the command again"):
        written_to(tmp_path, dataclasses.replace(comparison, runs=runs))
    assert not (tmp_path / "index.html").exists()


def test_a_report_is_made_without_torch_and_without_a_display(make: Callable[..., Records], tmp_path: Path) -> None:
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
    assert "validation loss" in done.stdout
    assert (tmp_path / "report" / "index.html").is_file()


def test_small_numbers_keep_their_digits() -> None:
    assert [decimals_for(values) for values in ([1.25, 1.26], [12345.6], [0.0])] == [4, 0, 4]
    assert fixed(-0.00001, 4, "+") == "+0.0000"
    assert [significant(value) for value in (12345.6, 462.0, 0.00012345, None)] == ["12346", "462.0", "0.0001234", ""]


def test_markdown_escapes_its_own_characters() -> None:
    table = Table("t", "T", (Group("a_b|c", numeric=False), Group("50 %")), [["x|y & {z}", "1 \u00b1 2"]], ["Note."])
    assert table.markdown() == "| a_b\\|c | 50 % |\n| --- | ---: |\n| x\\|y & {z} | 1 \u00b1 2 |\n\nNote.\n"


ARMS = ["diff", "wide", "twin"]
SHARE = StudyFigure(
    label="right answers", task="recall", name="accuracy", better="higher", unit="share", paper={"diff": 0.85, "twin": 0.55}
)  # fmt: skip
DIFF, TWIN, WIDE = (Term(arms=[arm], weight=weight) for arm, weight in (("diff", 1.0), ("twin", -1.0), ("wide", -1.0)))
PRIMARY = Contrast(
    name="DIFF minus TWIN", figure=SHARE.label, terms=[DIFF, TWIN], first_seed=0, seeds=12, smallest=0.1,
    above="Subtraction answers more.", below="Subtraction answers less.", within="There is no difference as large as 0.1.",
)  # fmt: skip
SECOND = dataclasses.replace(PRIMARY, name="DIFF minus WIDE", terms=[DIFF, WIDE])


def answering(seeds: int = 12, **parts: object) -> Records:
    """DIFF and wide heads answer nine questions of ten, the twin one."""

    def make(arm: str, point: tuple[str, ...], seed: int) -> RunRecord:
        value = (0.1 if arm == "twin" else 0.9) + 0.01 * math.sin(7 * seed + ARMS.index(arm))
        return record([SHARE, LOSS], {SHARE.label: value, LOSS.label: 1.5}, arm=arm, seed=seed)

    return study(ARMS, [SHARE, LOSS], seeds, make, **({"question": "Does subtraction answer?"} | parts))


def test_the_page_of_a_plan_shows_the_state_of_every_finding(tmp_path: Path) -> None:
    """The words of the page are those of people: the plan's sentences, the disclosure and the correction."""
    rates = [ChosenRate(arm="diff", point={}, learning_rate=1e-3, tried=[(1e-3, 0.8), (2e-3, 0.5)])]
    disclosed = {"changes": [Change(when="2026-02-01", what="Two seeds were added.")], "rates": rates}
    disclosed |= {"correction": Correction(stands="Open: it copies.", why="Any number is right in 1/N.")}
    plan = planned(
        [
            Question(
                question="Does it?",
                contrasts=[PRIMARY, SECOND, dataclasses.replace(SECOND, name="later", first_seed=50)],
            )
        ]
    )
    found = analyse(answering(plan=plan, **disclosed))
    built = study_page(found)
    page = check_page(write_page(built, tmp_path), all_tables(built))
    assert [one.state for one in found.findings] == ["above", "within", "incomplete"]
    (table,) = built.sections[0].tables
    rows = [dict(zip(table.header(), row, strict=True)) for row in table.rows]
    assert [row["state"] for row in rows] == [one.state for one in found.findings]
    assert [row["meaning"] for row in rows] == [one.meaning for one in found.findings]
    assert rows[0]["meaning"] == "Subtraction answers more, by more than 0.1"
    assert rows[2]["seeds: there"] == "0"
    for words in (
        "Open: it copies. Any number is right in 1/N.", "1 February 2026: Two seeds were added.", "plans/simulated.yaml",
        "5" * 64, "Registered: committed before every run.",
    ):  # fmt: skip
        assert words in page.words
    assert {"0.8000 *", "0.001 (at the edge)", "0.85 (+0.30)", "12 of 12"} <= set(page.cells)
    younger = planned([Question(question="Does it?", contrasts=[PRIMARY])], at="2026-01-03T00:00:00Z")
    notes = study_page(analyse(answering(plan=younger))).sections[-1].notes
    assert notes[-1].startswith("Planned, not registered: runs/diff-seed0.json began on 2 January 2026, 03:0")


def test_the_command_writes_pages_of_one_or_all_studies_the_same_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder, alone = (
        save(answering(seeds=2, name="one"), tmp_path / "records"),
        tmp_path / "pages",
        tmp_path / "alone",
    )
    save(answering(seeds=2, name="two", question="Another?"), tmp_path / "records")
    assert command.run(str(tmp_path / "records"), out=str(folder)) == 0
    assert command.run(str(path), out=str(alone)) == 0
    index = Page((folder / "index.html").read_text())
    assert {"one-laptop/index.html", "two-laptop/index.html"} <= set(index.links)
    assert {"Does subtraction answer?", "Another?"} <= set(index.cells)
    files = [file for file in alone.rglob("*") if file.is_file()]
    assert len(files) > 10
    for file in files:
        assert (folder / "one-laptop" / file.relative_to(alone)).read_bytes() == file.read_bytes()
    assert command.run(str(path.parent), out=str(tmp_path / "again")) == 0  # a folder of one study shows that study
    assert "Does subtraction answer?" in (tmp_path / "again" / "index.html").read_text()
    assert capsys.readouterr().out.count("Report: ") == 3


def test_a_page_that_lacks_a_figure_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two settings are too few for a law."""
    axes = [StudyAxis(name=name, values=["1", "2"], numbers=[1e6, 2e6]) for name in ("size", "tokens")]
    for name in ("one", "two"):
        save(answering(seeds=1, axes=axes, analysis="scaling", name=name), tmp_path)
    assert command.run(str(tmp_path), out=str(tmp_path / "pages")) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "two-laptop: scaling: diff over tokens: 2 settings have paired runs" in said


def test_no_measure_takes_the_name_of_another_table() -> None:
    figures = [StudyFigure(label=label, task="needle", name=label) for label in ("costs", "runs", "arms", "findings")]
    axes = [StudyAxis(name="size", values=["small", "large"])]
    made = study(
        ["diff", "twin"],
        figures,
        2,
        lambda arm, point, seed: record(figures, {"costs": 1.0, "runs": 2.0}, arm=arm),
        axes=axes,
    )
    names = [table.name for table in all_tables(study_page(analyse(made)))]
    assert len(set(names)) == len(names)


@pytest.mark.usefixtures("undrawn")
def test_a_study_of_which_only_tuning_runs_or_none_are_there_has_a_page(tmp_path: Path) -> None:
    whole = answering(seeds=2, plan=planned([Question(question="Does it?", contrasts=[PRIMARY])]))
    tuning = [dataclasses.replace(member, is_tuning=True) for member in whole.index.members]
    for members in (tuning, []):
        path = save(dataclasses.replace(whole, index=dataclasses.replace(whole.index, members=members)), tmp_path)
        (found,) = read_studies(path)
        assert len(found.records.tuning) == len(members)
        assert found.findings[0].state == "incomplete"
        page = Page(write_page(study_page(found), tmp_path / "page").read_text())
        assert f"Runs: {len(members)} of 6." in page.words


def test_every_arm_has_a_colour_of_its_own_in_all_studies() -> None:
    controls = ["diff", "wide", "norm", "no-norm", "zero", "init", "one", "added", "mean", "normal", "other", "twin"]
    styles = arm_styles(controls, "twin")
    looks = [tuple(map(str, style.values())) for style in styles.values()]
    assert len(set(looks)) == len({style["color"] for style in styles.values()}) == len(controls)
    assert len({(style["marker"], str(style["linestyle"])) for style in styles.values()}) == len(controls)
    others = arm_styles(["diff_v2", "wide", "diff", "softmax"], "softmax")
    assert styles["twin"]["color"] == others["softmax"]["color"] == REFERENCE_COLOUR
    assert all(styles[arm] == others[arm] for arm in ("diff", "wide"))
    assert len({*COLOURS, *MORE_COLOURS, REFERENCE_COLOUR}) == len(COLOURS) + len(MORE_COLOURS) + 1


def test_studies_say_which_runs_they_share(tmp_path: Path) -> None:
    first = answering(seeds=3, name="first")
    again = [dataclasses.replace(member, file=f"../first/{member.file}") for member in first.index.members[:2]]
    save(first, tmp_path)
    write_result(dataclasses.replace(first.index, name="other", members=again), tmp_path / "other" / "laptop.json")
    found = {one.records.slug: one for one in read_studies(tmp_path)}
    assert found["first-laptop"].shared == {"other-laptop": 2}
    (table,) = (table for table in all_tables(study_page(found["other-laptop"])) if table.name == "shared")
    assert table.rows == [["first-laptop", "2"]]


def test_the_frame_has_a_row_for_every_number_of_every_run(comparison: Records) -> None:
    frame, run = comparison.frame, comparison.at("diff", ())[1]
    mine = frame[(frame["arm"] == "diff") & (frame["seed"] == 1)]
    curve = mine[mine["figure"] == "validation_loss_nats"]
    assert (curve["step"].tolist(), curve["value"].tolist()) == (
        run.curves["validation_loss_nats"].steps, run.curves["validation_loss_nats"].values
    )  # fmt: skip
    (parameters,) = mine[(mine["kind"] == "run") & (mine["figure"] == "parameters")]["value"]
    assert parameters == run.parameters
    measured = len(comparison.index.figures) + len(run.figures) + 5 + sum(len(one.steps) for one in run.curves.values())
    assert len(mine) == measured
    assert set(mine["file"]) == {"runs/diff-seed1.json"}
