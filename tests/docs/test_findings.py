"""The pages of results: every section with figures names a results file, and its table shows what the file holds."""

import dataclasses
import importlib
import os
import re
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from difftransformer_lab.report import read_evidence, studied, study_figures
from difftransformer_lab.report.answers import answers, brief_explored
from difftransformer_lab.report.lead import plain_answer
from difftransformer_lab.results import (
    Bench,
    Change,
    ChosenRate,
    Contrast,
    Question,
    StudyAxis,
    StudyFigure,
    StudyIndex,
    TaskResult,
    Term,
    read_document,
    read_result,
)
from tests.support.simulated_study import LOSS, planned, record, study

DOCS = Path(__file__).parents[2] / "docs"
STUDIES = sorted((DOCS / "results" / "studies").glob("*/README.md"))
FIGURE = re.compile(r"^\|.*\d.*\|$|\d (?:%|bits)|\d\.\d+", re.MULTILINE)
KINDS = {"bench": Bench, "study": StudyIndex, "task": TaskResult}


def test_sections_with_figures_name_a_results_file():
    figures = 0
    for page in (DOCS / "retrieval.md", *STUDIES):
        for text in re.split(r"^## ", page.read_text("utf-8"), flags=re.MULTILINE)[1:]:
            files = re.findall(r"\]\(([\w./-]+\.json)\)", text)
            figures += bool(FIGURE.search(text))
            assert files or not FIGURE.search(text), text[:40]
            assert all((page.parent / name).is_file() for name in files), files
    assert figures >= 8


def test_generated_text_is_that_of_the_records():
    words = [sys.executable, DOCS / "evidence.py", "--check"]
    without_torch = os.environ | {"DIFFTRANSFORMER_LAZY": "1"}
    done = subprocess.run(words, env=without_torch, capture_output=True, text=True, check=False)
    assert done.stdout == done.stderr == ""
    assert done.returncode == 0


PLAIN = ("intervals.json", "start-rms.json")  # a simulation, and sizes of models that no run trained
RESULTS = [path for path in sorted((DOCS / "results").glob("*.json")) if path.name not in PLAIN]


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_committed_results_open(path):
    kind, _, _ = read_document(path)
    is_study = kind == "study"
    opened = [run for *_, run in read_evidence(path).every_run()] if is_study else [read_result(path, KINDS[kind])]
    assert opened
    for result in opened:
        assert result.environment.processor
        assert result.environment.threads >= 1


def cells_of(text):
    """The cells of the table that a text begins with, without the line below the titles."""
    lines = takewhile(lambda line: line.startswith("|"), text.lstrip().splitlines())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def split_tables(text):
    return re.findall(r"^\| `attention_type`.*?(?=^\| `attention_type`|\Z)", text, re.MULTILINE | re.DOTALL)


def table_after(marker, page):
    return cells_of(page.read_text("utf-8").partition(marker)[2])


def test_the_readme_has_a_short_line_for_each_study():
    rows = table_after("<!-- studies -->", DOCS.parent / "README.md")[1:]
    told = [path for path in (DOCS / "results" / "studies").glob("*/*.json") if path.stem != "normal-start"]
    assert len(rows) == len(told)
    for row in rows:
        assert len(" ".join(row).split()) <= 26, row  # the name of the study and 25 words


def test_every_study_says_what_was_changed_and_whether_it_confirms():
    sections = [text for page in STUDIES for text in re.split(r"^## ", page.read_text("utf-8"), flags=re.MULTILINE)[1:]]
    assert len(sections) >= 7
    for section in sections:
        assert "Disclosed:" in section
        explores = "This study explores: nothing in it is confirmed." in section
        assert explores != ("This study confirms a plan." in section)
        if explores:
            assert not re.search(r"is (better|worse) than|Holm", section)


def test_the_section_of_a_plan_has_its_questions_its_contrasts_and_all_rates(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    losses = {"diff": 2.0, "softmax": 2.1}
    terms = [Term(arms=["diff"], weight=1.0), Term(arms=["softmax"], weight=-1.0)]
    words = {"name": "DIFF minus Transformer", "above": "It is higher.", "below": "It is lower."}
    contrast = Contrast(figure=LOSS.label, terms=terms, seeds=6, **words)
    rate = ChosenRate(arm="diff", point={}, learning_rate=2e-3, tried=[(1e-3, 2.2), (2e-3, 2.1)])
    plan = planned([Question(question="Is the loss lower?", contrasts=[contrast])])
    changes = [Change(when="2026-02-01", what="One."), Change(when="abc", what="Two.")]

    def make(arm, point, seed):
        return record([LOSS], {LOSS.label: losses[arm] + 0.01 * (seed % 3) * (arm == "diff")}, arm=arm)

    evidence = study(list(losses), [LOSS], 6, make, first_seed=2000, plan=plan, rates=[rate], changes=changes)
    evidence = dataclasses.replace(evidence, path=DOCS / "results" / "studies" / "simulated" / "laptop.json")
    text = importlib.import_module("evidence").section(studied(evidence), False)
    bullet = next(line for line in text.splitlines() if line.startswith("- Is the loss lower?"))
    assert bullet.startswith("- Is the loss lower? DIFF minus Transformer: -0.0900 nats/token [-0.")
    assert ", below zero in 6 of 6 seeds: It is lower (registered; Student's t test, p < 0.001)." in bullet
    assert text.startswith("## laptop\n")
    assert "This study confirms a plan." in text
    assert "2.200 | 2.100 * | at the edge |" in text
    assert "Disclosed:\n\n- 1 February 2026: One.\n- abc: Two.\n" in text
    assert "SHA-256 " + "5" * 64 in text


RATES = ["0.004", "0.016", "0.064"]
LOSSES = {  # of two seeds at each rate; the lowest single loss is not at the rate with the lowest mean
    ("diff", "64"): [(1.9, 2.9), (2.0, 2.2), (2.2, 2.4)],
    ("diff", "256"): [(1.9, 2.1), (2.1, 2.3), (1.8, 4.2)],
    ("softmax", "64"): [(2.6, 2.6), (2.3, 2.5), (2.1, 2.3)],
    ("softmax", "256"): [(2.2, 2.4), (2.0, 2.2), (2.4, 2.4)],
}


def test_a_run_that_diverged_is_in_no_mean_of_the_pages(monkeypatch):
    """The first run of every arm has no figures."""
    monkeypatch.syspath_prepend(str(DOCS))
    figures = [StudyFigure(label=label, task="needle", name=label) for label in ("retrieval, seen cities", LOSS.label)]

    def make(arm, point, seed):
        values = {one.label: seed * (2.0 if arm == "twin" else 1.0) for one in figures}
        run = record(figures, values, arm=arm, seed=seed)
        return run if seed else dataclasses.replace(run, diverged_after=9, figures=[])

    page = importlib.import_module("evidence")
    rates = [ChosenRate(arm=arm, point={}, learning_rate=0.1, tried=[(0.1, 1.0)]) for arm in ("diff", "twin")]
    controls = study(["diff", "twin"], figures, 4, make, name="controls", rates=rates)
    assert "| diff | 3 | 0.1 | 2.00 | 2.000 |" in page.retrieving_arms([studied(controls)])
    axes = [StudyAxis(name="start", values=["fan-in-0.002", "normal-0.002"])]
    rows = page.one_rate_table(study(["diff", "twin"], figures, 4, make, axes=axes)).rows
    assert rows[0] == ["fan-in", "2.000", "4.000", "-2.000 [-4.484, +0.484]", "3 of 3"]


MEANS = {
    ("diff", "64"): [2.4, 2.1, 2.3],
    ("diff", "256"): [2.0, 2.2, 3.0],
    ("softmax", "64"): [2.6, 2.4, 2.2],
    ("softmax", "256"): [2.3, 2.1, 2.4],
}
BEST = {"diff": [(0.016, 2.1), (0.004, 2.0)], "softmax": [(0.064, 2.2), (0.016, 2.1)]}  # rate and loss at each width


def test_the_best_rates_over_width_are_the_answer(monkeypatch):
    def make(arm, point, seed):
        loss = LOSSES[arm, point[0]][RATES.index(point[1])][seed]
        return record([LOSS], {LOSS.label: loss}, arm=arm, seed=seed)

    canvases = []
    axes = [
        StudyAxis(name="width", values=["64", "256"]),
        StudyAxis(name="rate", values=RATES, numbers=[float(rate) for rate in RATES]),
    ]
    evidence = study(["diff", "softmax"], [LOSS], 2, make, axes=axes)
    found = studied(evidence)
    [said] = answers(found)
    assert said.text.startswith(
        "diff: 0.016 at width 64, 0.004 at width 256 (at the edge); softmax: 0.064 at width 64 (at the edge), 0.016 at width "
        "256. Tried: 0.004, 0.016, 0.064; explored"
    )
    brief = "Best rate, width 64 to 256: 0.016 to 0.004 (diff); 0.064 to 0.016 (softmax); explored."
    assert brief_explored(found) == brief
    assert said.text in plain_answer(found)
    monkeypatch.setattr(study_figures, "finish", lambda *given: canvases.append(given[3]))
    study_figures.draw_transfer(evidence, found.rows)
    panels = canvases[0].axes
    assert [ax.get_title(loc="left") for ax in panels] == ["diff", "softmax"]
    for ax, arm in zip(panels, ("diff", "softmax"), strict=True):
        lines = [line for line in ax.lines if len(line.get_xdata()) == 3]
        rings = [line.get_xydata()[0].tolist() for line in ax.lines if len(line.get_xdata()) == 1]
        for line, ring, width, best in zip(lines, rings, ("64", "256"), BEST[arm], strict=True):
            assert line.get_xdata().tolist() == [0.004, 0.016, 0.064]
            assert line.get_ydata().tolist() == pytest.approx(MEANS[arm, width])
            assert ring == pytest.approx(best)
    assert [text.get_text() for text in canvases[0].legends[0].texts] == ["width 64", "width 256"]
    without = [row for row in found.rows if row.point[:1] != ("256",)]  # whose runs are still to come
    study_figures.draw_transfer(evidence, without)
    assert [len(ax.lines) for ax in canvases[1].axes] == [2, 2]
    text = answers(dataclasses.replace(found, rows=without))[0].text
    assert text.startswith("diff: 0.016 at width 64; softmax: 0.064 at width 64 (at the edge). Tried")


def test_the_table_of_retrieval_is_that_of_its_file():
    evidence = read_evidence(DOCS / "results" / "retrieval.json")
    rows = table_after("<!-- retrieval -->", DOCS / "retrieval.md")
    counts = [int(cell) for cell in rows[0][1:]]
    assert len(rows) == 5
    for label, *cells in rows[1:]:
        name, cities = re.fullmatch(r"(.+), (\w+) cities", label).groups()
        (run,) = evidence.at({"DIFF Transformer": "diff", "Transformer": "softmax"}[name], ()).values()
        for count, cell in zip(counts, cells, strict=True):
            found = [
                row
                for row in run.evaluations["needle"].measurements
                if row.at.get("cities") == cities and row.at.get("needles") == count and "depth" in row.at
            ]
            right, asked = sum(round(row.value * row.n) for row in found), sum(row.n for row in found)
            assert cell == f"{100 * right / asked:.1f} %"


def test_the_ranges_of_times_are_those_of_their_file():
    result = read_result(DOCS / "results" / "variants.json", Bench)
    rows = {row[0]: row for row in table_after("<!-- measured -->", DOCS / "choose.md")}
    for kind in ("diff", "diff_v2", "grouped_diff", "grouped_diff_v2", "dex"):
        steps = [row for row in result.rows if row.work == "training step"]
        seconds = {(row.shape["model"], row.dtype, row.implementation): row.timing.median_seconds for row in steps}
        own = {(size, dtype): taken for (size, dtype, who), taken in seconds.items() if who == kind}
        ratios = [taken / seconds[*place, "softmax"] for place, taken in own.items()]
        assert len(ratios) >= 4
        assert rows[f"`{kind}`"][1] == f"{min(ratios):.2f} to {max(ratios):.2f}"


def test_the_figures_of_the_demo_are_those_of_its_file():
    evidence = read_evidence(DOCS / "results" / "demo.json")
    rows = table_after("<!-- demo -->", DOCS / "retrieval.md")[1:]
    for arm, (label, *cells, lambdas) in zip(evidence.index.arms, rows, strict=True):
        assert label == arm.label
        runs = list(evidence.at(arm.name, ()).values())
        for cell, segments in zip(cells, (("answer",), ("before", "after")), strict=True):
            found = [
                row.value
                for run in runs
                for row in run.evaluations["allocation"].measurements
                if row.at.get("form") == "signed" and row.at.get("depth") == 0.5 and row.at["segment"] in segments
            ]
            assert cell == f"{sum(found) / len(runs):.0%}".replace("%", " %")
        learned = [curve.values[-1] for run in runs for name, curve in run.curves.items() if name.startswith("lambda")]
        shown = [float(number) for number in re.findall(r"[+-][\d.]+", lambdas)]
        assert shown == [round(value, 2) for value in learned]


def test_choose_a_variant_shows_what_a_study_measured(monkeypatch):
    """A type has the figures of its first arm, with a mark where the interval excludes zero; a type without a run has none."""
    monkeypatch.syspath_prepend(str(DOCS))
    choice = importlib.import_module("measured").choice_tables
    seen = StudyFigure(label="retrieval, seen cities", task="needle", name="accuracy", better="higher", unit="share")
    means = {"diff": 0.9, "diff_v2": 0.5, "softmax": 0.5}
    noise = {0: 0.01, 1: -0.01, 2: 0.02, 3: 0.0, 4: -0.02}

    def make(arm, point, seed):
        spread = noise[seed] * {"diff": 0.5, "diff_v2": -1, "softmax": 1}[arm]
        seconds = 150 if arm == "diff" else 100
        return record([seen], {seen.label: means[arm] + spread}, arm=arm, seed=seed, seconds=seconds)

    evidence = study(list(means), [seen], 5, make, name="variants")
    timed = read_result(DOCS / "results" / "variants.json", Bench)
    upcycled = studied(read_evidence(DOCS / "results" / "upcycle.json"))
    times, quality = map(cells_of, split_tables(choice(timed, upcycled, [studied(evidence)])))
    missing = "not measured yet"
    assert [row[1:] for row in times if row[0] == "`softmax`"] == [["1"] * 3]
    rows = {row[0]: row[1:3] for row in quality}
    assert rows["`diff`"] == ["0.900 \u00b1 0.004 *", missing]
    assert rows["`diff_v2`"][0].startswith("0.500 \u00b1 ")
    assert not rows["`diff_v2`"][0].endswith("*")
    assert rows["`softmax`"] == ["0.500 \u00b1 0.007", missing]
    assert rows["`dex`"] == rows["`grouped_diff`"] == [missing] * 2
    _, nothing = map(cells_of, split_tables(choice(timed, upcycled, [])))
    assert {cell for row in nothing[1:] for cell in row[1:3]} == {missing}
