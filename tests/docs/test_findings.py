"""docs/findings.md: every section with figures names a results file, and its table shows what the file holds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from difftransformer.results import Bench, Comparison, TaskResult, Upcycling, read_document, read_result

DOCS = Path(__file__).parents[2] / "docs"
SECTIONS = dict(
    re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", (DOCS / "findings.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
)
FIGURE = re.compile(r"^\|.*\d.*\|$|\d (?:%|bits)|\d\.\d+", re.MULTILINE)
KINDS = {"bench": Bench, "comparison": Comparison, "task": TaskResult, "upcycling": Upcycling}


def test_sections_with_figures_name_a_results_file():
    found = {title: re.findall(r"\]\((results/[^)]+\.json)\)", text) for title, text in SECTIONS.items()}
    elsewhere = {"What others found", "Claims of the paper"}  # others' figures, as published
    with_figures = [title for title, text in SECTIONS.items() if FIGURE.search(text) and title not in elsewhere]
    assert len(with_figures) >= 2
    assert [title for title in with_figures if not found[title]] == []
    for name in {name for names in found.values() for name in names}:
        assert (DOCS / name).is_file(), name


def test_generated_text_is_that_of_the_records():
    done = subprocess.run(
        [sys.executable, DOCS / "evidence.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.stdout == done.stderr == ""
    assert done.returncode == 0


RESULTS = [path for path in sorted((DOCS / "results").glob("*.json")) if path.name != "intervals.json"]  # a simulation


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_committed_results_open(path):
    result = read_result(path, KINDS[read_document(path)[0]])
    assert result.environment.processor
    assert result.environment.threads >= 1


def test_the_table_of_retrieval_is_that_of_its_file():
    result = read_result(DOCS / "results" / "retrieval.json", Comparison)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in SECTIONS["Retrieval, DIFF against its twin"].splitlines()
        if line.startswith("| ")
    ]
    counts = [int(cell) for cell in rows[0][1:]]
    for label, *cells in rows[2:]:
        (run,) = [run for run in result.runs if run.model == {"DIFF": "diff", "Transformer": "softmax"}[label]]
        for count, cell in zip(counts, cells, strict=True):
            found = [
                row
                for row in run.evaluations["needle"].measurements
                if row.at.get("cities") == "seen" and row.at.get("needles") == count and "depth" in row.at
            ]
            right, asked = sum(round(row.value * row.n) for row in found), sum(row.n for row in found)
            assert cell == f"{100 * right / asked:.1f} %"


def test_the_range_of_training_steps_is_that_of_its_file():
    result = read_result(DOCS / "results" / "models-epyc-avx512-bf16.json", Bench)
    ratios = [
        row.ratio_to_twin for row in result.models if row.work == "training step" and row.implementation == "DIFF"
    ]
    assert len(ratios) == 6
    assert f"{min(ratios):.2f} to {max(ratios):.2f} of its twin's time" in SECTIONS["Speed on CPU"]


def test_the_figures_of_the_demo_are_those_of_its_file():
    result = read_result(DOCS / "results" / "demo.json", Comparison)
    text = " ".join(SECTIONS["Retrieval, DIFF against its twin"].split())
    shares = {}
    for model in ("diff", "softmax"):
        runs = [run for run in result.runs if run.model == model]
        for segments in (("answer",), ("before", "after")):
            found = [
                row.value
                for run in runs
                for row in run.evaluations["allocation"].measurements
                if row.at.get("form") == "signed" and row.at.get("depth") == 0.5 and row.at["segment"] in segments
            ]
            shares[model, len(segments)] = f"{sum(found) / len(runs):.0%}".replace("%", " %")
    assert f"gives {shares['diff', 1]} (DIFF) and {shares['softmax', 1]} (twin) of its signed weight" in text
    assert f"{shares['diff', 2]} of DIFF's signed weight and {shares['softmax', 2]} of the twin's" in text
    (first, second), (other_first, other_second) = (run.lambda_values[-1] for run in result.runs if run.lambda_values)
    assert f"lambda ends at {first:.2f}" in text
    assert f"ends at {other_first:+.2f}; the second layer's ends at {second:.2f} and {other_second:.2f}" in text
