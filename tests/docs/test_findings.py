"""Pages with numbers of records: what they insert is there, verdicts are states of findings, tables show what files hold."""

import re
from itertools import takewhile
from pathlib import Path

import pytest

from difftransformer_lab.analysis import read_records
from difftransformer_lab.recipe_files import shipped_recipes
from difftransformer_lab.results import Bench, TaskResult, read_document, read_result
from tests.support.pages import filled, pages

DOCS = Path(__file__).parents[2] / "docs"
STUDIES = sorted(path.stem for path in (DOCS / "studies").glob("*.md") if "-" not in path.stem)
KINDS = {"bench": Bench, "task": TaskResult}
PLAIN = ("intervals.json", "start-rms.json")  # a simulation, and sizes of models that no run trained
RESULTS = [path for path in sorted((DOCS / "results").glob("*.json")) if path.name not in PLAIN]
ASKED = re.compile(r"\{\{ verdict\(\"([\w-]+)\", \"([^\"]+)\", \"(\w+)\"\) \}\}")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_committed_results_open(path):
    kind, _, _ = read_document(path)
    opened = (
        [run for *_, run in read_records(path).every_run()] if kind == "study" else [read_result(path, KINDS[kind])]
    )
    assert opened
    for result in opened:
        assert result.environment.processor
        assert result.environment.threads >= 1


def cells_of(text):
    """The cells of the table that a text begins with, without the line below the titles."""
    lines = takewhile(lambda line: line.startswith("|"), text.lstrip().splitlines())
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


def tables_of(text):
    return [cells_of(table) for table in re.split(r"\n(?=\n\|)", f"\n{text}") if table.lstrip().startswith("|")]


def pages_of(study):
    """The pages of a study: one of its name, and more of names that begin with it."""
    return [DOCS / "studies" / f"{study}.md", *sorted((DOCS / "studies").glob(f"{study}-*.md"))]


def text_of_study(study):
    return "\n\n".join(filled(str(path.relative_to(DOCS))) for path in pages_of(study))


@pytest.mark.slow
def test_every_page_has_what_it_inserts():
    written = [str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md") if "{{ " in path.read_text("utf-8")]
    assert {"worth.md", "initialization.md", "findings.md", "performance.md", "studies/start.md"} <= set(written)
    for page in written:
        text = filled(page)
        assert "{{ " not in text, page
        for name in re.findall(r"\]\(\.\./figures/(study-[\w-]+\.svg)\)", text):
            assert (pages().folder / "figures" / name).read_text("utf-8").rstrip().endswith("</svg>")


@pytest.mark.parametrize("name", STUDIES)
def test_the_verdicts_of_a_page_are_the_states_of_its_findings(name):
    """In its tables, and in its sentences, which name every contrast that is decided."""
    source, text = "".join(path.read_text("utf-8") for path in pages_of(name)), text_of_study(name)
    studies = [one for one in pages()._studies.values() if one.records.index.name == name]
    states = {one.contrast.name: one.state for study in studies for one in study.findings}
    tables = [table for table in tables_of(text) if "state" in table[0]]
    assert {row[0]: row[table[0].index("state")] for table in tables for row in table[1:]} == states
    said = {contrast: word for _, contrast, word in ASKED.findall(source)}
    assert said.items() <= states.items()
    assert {contrast for contrast, state in states.items() if state in ("above", "below", "within")} == said.keys()


def test_a_verdict_that_is_not_the_state_of_its_finding_is_refused():
    asked = '{{ verdict("start-laptop", "V2 minus Transformer, each at its best", "above") }}'
    with pytest.raises(ValueError, match=r"start-laptop: 'V2 minus Transformer, each at its best' is 'below'"):
        pages().fill(asked)


def test_every_study_with_records_has_a_page_with_all_of_them():
    found = {path.relative_to(DOCS) for path in (DOCS / "results" / "studies").glob("*/*.json")}
    texts = {name: text_of_study(name) for name in STUDIES}
    assert {path.parent.name for path in found} == set(STUDIES) <= set(shipped_recipes("studies"))
    for path in found:
        text = texts[path.parent.name]
        assert f"[{path}](../{path})" in text
        index = pages()._study(f"{path.parent.name}-{path.stem}").records.index
        assert index.command in text
        assert all(change.what in text for change in index.changes)
        assert index.correction is None or index.correction.why in text
        assert ("tests a" if index.plan else "explore") in text


def test_the_ranges_of_times_are_those_of_their_file():
    result = read_result(DOCS / "results" / "variants.json", Bench)
    rows = {row[0]: row for row in cells_of(pages().times_of_types())}
    for kind in ("diff", "diff_v2", "grouped_diff", "grouped_diff_v2", "dex"):
        steps = [row for row in result.rows if row.work == "training step"]
        seconds = {(row.shape["model"], row.dtype, row.implementation): row.timing.median_seconds for row in steps}
        own = {(size, dtype): taken for (size, dtype, who), taken in seconds.items() if who == kind}
        ratios = [taken / seconds[*place, "softmax"] for place, taken in own.items()]
        assert len(ratios) >= 4
        assert rows[f"`{kind}`"][1] == f"{min(ratios):.2f} to {max(ratios):.2f}"


def test_the_attention_of_the_demo_is_that_of_its_file():
    records, rows = read_records(DOCS / "results" / "demo.json"), cells_of(pages().demo_attention())[1:]
    for arm, (label, *cells, lambdas) in zip(records.index.arms, rows, strict=True):
        assert label == arm.label
        runs = list(records.at(arm.name, ()).values())
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


def test_the_table_of_parts_says_what_the_studies_say():
    """Lookup's factors are those of its page; the norm's worth in tokens is the planned contrast turned round."""
    cells = {row[1]: row[2:] for row in cells_of(pages().parts_table())}
    page = (DOCS / "studies" / "lookup.md").read_text("utf-8")
    for models, factor in (
        ("DIFF / DIFF without norm", "1.33 [1.12, 1.59]"),
        ("DIFF / Transformer, wide heads + norm", "1.23 [1.06, 1.42]"),
        ("DIFF without norm / Transformer", "0.76 [0.65, 0.90]"),
        ("DIFF / Transformer + norm", "0.79 [0.66, 0.95]"),
    ):
        assert factor in " ".join(page.split())
        assert factor in cells[models][1]
    worth = cells["DIFF / Transformer + norm"][0].removesuffix(", explored")
    assert f"DIFF needs {worth} of the tokens (explored)" in " ".join(
        (DOCS / "studies" / "parts.md").read_text("utf-8").split()
    )
    more = pages().in_tokens("parts-laptop", "DIFF without norm minus DIFF")
    mean, low, high = (1 / (1 + float(one) / 100) for one in re.findall(r"[+-][\d.]+", more))
    assert cells["DIFF / DIFF without norm"][0] == f"**{mean:.2f} [{high:.2f}, {low:.2f}]**"


def test_how_tables_are_read_is_said_at_the_first():
    page = '{{ rates("start-laptop") }}\n\n{{ rates("start-clean-tuned") }}\n\n{{ rates("start-clean-tuned") }}'
    text = pages().fill(page)
    assert text.count("Mean of the study's first figure over seeds of their own") == 1
    assert len(tables_of(text)) == 3


@pytest.mark.parametrize(("page", "words"), [
    ('{{ runs("start-laptpo") }}', "results: 'start-laptpo': unknown key; did you mean start-laptop"),
    ('{{effect("start-laptop", "DIFF") }}', "start-laptop: 'DIFF': unknown key"),
    ('{{ mean("noise-laptop", "right answers at the end", "dif", "0.6") }}', "noise-laptop has no .*'dif'.*choose one of"),
])  # fmt: skip
def test_what_a_page_names_wrong_is_said(page, words):
    with pytest.raises(ValueError, match=words):
        pages().fill(page)
