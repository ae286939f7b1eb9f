"""Pages of studies: whole, offline, the same numbers everywhere, one colour for each arm, and states that are computed."""

import csv
import dataclasses
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import yaml

from difftransformer.cli import report as command
from difftransformer.plots.style import COLOURS, MORE_COLOURS, REFERENCE_COLOUR, arm_styles
from difftransformer.report.evidence import (
    Studied,
    judge,
    read_claims,
    read_studies,
    studied,
    study_page,
    write_evidence,
)
from difftransformer.report.evidence.claims import Claim, ClaimTest
from difftransformer.report.evidence.pages import studies_page
from difftransformer.report.page import Page as ReportPage
from difftransformer.report.page import all_tables, write_page
from difftransformer.report.tables import Group, Table
from difftransformer.results import ChosenRate, RunFigure, StudyArm, StudyAxis, StudyFigure
from tests.report.test_narrow_screens import Ancestors, width_in_a_browser
from tests.report.test_page import Page
from tests.support.simulated_study import LOSS, falling, record, save, study

RECIPES = Path(__file__).parents[2] / "recipes" / "studies"
CONTROLS = ["diff", "wide", "norm", "no-norm", "zero", "init", "one", "added", "mean", "normal", "other", "twin"]
SEEN = StudyFigure(
    label="retrieval, seen cities",
    task="needle",
    name="accuracy",
    at={"cities": "seen"},
    better="higher",
    unit="share",
    paper={"diff": 0.85, "twin": 0.55},
    source="Table 2",
)
STEPS = StudyFigure(label="steps to 50 %", curve="validation_accuracy", reaches=0.5, unit="steps")


def controls(seen, noise=0.02, seeds=5):
    """A study of controls: the share of right answers of each arm, and a loss that is the same for all."""
    rng = np.random.default_rng(0)

    def make(arm, point, seed):
        loss = 1.5 + rng.normal(0, 0.01)
        values = {SEEN.label: float(np.clip(seen[arm] + rng.normal(0, noise), 0, 1)), LOSS.label: loss}
        curves = {
            "validation_accuracy": falling(0, values[SEEN.label], 3000, rng),
            "train_loss_nats": falling(6, loss - 0.1, 3000, rng, 0.02),
            "validation_loss_nats": falling(6, loss, 3000, rng, 0.002),
        }
        more = [
            RunFigure(
                task="perplexity",
                name="nll by position",
                unit="nats/token",
                better="lower",
                at={"start": start, "end": start + 16},
                value=loss + 1 / (start + 1),
                n=1,
            )
            for start in range(0, 64, 16)
        ]
        seconds = 110.0 if arm == "diff" else 100.0
        return record([SEEN, LOSS], values, arm=arm, seed=seed, curves=curves, more=more, seconds=seconds)

    arms = [StudyArm(name=arm, label=arm.upper(), about=f"About {arm}.") for arm in CONTROLS if arm in seen]
    return study(arms, [SEEN, LOSS, STEPS], seeds, make, name="controls", question="Is it the subtraction?", planned=99)


class Built(NamedTuple):
    studies: list[Studied]
    pages: dict[str, ReportPage]
    folder: Path


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of a study with many arms, of one with two axes, and of one of scaling."""
    records, folder = tmp_path_factory.mktemp("records"), tmp_path_factory.mktemp("pages")
    rng = np.random.default_rng(1)
    save(controls({arm: 0.9 if arm in ("diff", "no-norm", "init") else 0.1 for arm in CONTROLS}), records)
    axes = [
        StudyAxis(name="size", values=["0.3M", "1M", "8M"], numbers=[3e5, 1e6, 8e6]),
        StudyAxis(name="tokens", values=["5M", "20M", "80M"], numbers=[5e6, 2e7, 8e7]),
    ]

    def make(arm, point, seed):
        size, tokens = (axis.numbers[axis.values.index(value)] for axis, value in zip(axes, point, strict=True))
        n = size * (2 if arm == "diff" else 1)
        loss = 1.5 + 12 * n**-0.25 + 40 * (tokens / 1e3) ** -0.3 + rng.normal(0, 0.002)
        return record([LOSS], {LOSS.label: loss}, arm=arm, seed=seed, parameters=int(size), tokens=int(tokens))

    tried = {1e-3: [(1e-3, 1.5), (2e-3, 1.6), (3e-3, 1.7)], 2e-3: [(1e-3, 1.6), (2e-3, 1.5), (3e-3, 1.7)]}
    rates = [
        ChosenRate(arm="diff", point={"size": size, "tokens": "5M"}, learning_rate=rate, tried=tried[rate])
        for size, rate in {"0.3M": 2e-3, "8M": 1e-3}.items()
    ]
    parts = {"axes": axes, "analysis": "scaling", "name": "scaling", "rates": rates}
    save(study(["diff", "softmax"], [LOSS], 3, make, **parts), records)
    studies = read_studies(records)
    built = {one.evidence.slug: study_page(one) for one in studies}
    for slug, page in built.items():
        write_page(page, folder / slug)
    write_page(studies_page(studies), folder)
    return Built(studies, built, folder)


def test_rates_at_the_edge_of_those_tried_are_said(pages):
    text = (pages.folder / "scaling-laptop" / "index.html").read_text()
    assert "1 of 2 chosen rates are at the edge of those tried" in text


def test_pages_stand_alone_and_show_every_table(pages):
    assert pages.pages.keys() == {"controls-laptop", "scaling-laptop"}
    for slug, built in pages.pages.items():
        folder = pages.folder / slug
        text = (folder / "index.html").read_text()
        page = Page(text)
        assert not page.stack
        assert len(page.ids) == len(set(page.ids))
        assert "script" not in page.tags
        for link in page.links:
            assert link.startswith("#") or (folder / link).is_file()
        for tag, names in Ancestors(text).around:
            assert {"svg": "drawing", "table": "table"}[tag] in names
        tables, shown = all_tables(built), set(page.cells)
        assert len({table.name for table in tables}) == len(tables) >= 8
        for table in tables:
            assert {cell for row in table.folded() for cell in row} <= shown
            with open(folder / "tables" / f"{table.name}.csv", newline="") as file:
                assert list(csv.reader(file)) == [table.header(), *table.rows]
            assert (folder / "tables" / f"{table.name}.md").read_text() == table.markdown()
            assert (folder / "tables" / f"{table.name}.tex").read_text() == table.latex()


@pytest.mark.slow
@pytest.mark.parametrize("width", [375, 1280])
def test_no_page_is_wider_than_the_screen(pages, width, tmp_path):
    for path in sorted(pages.folder.rglob("index.html")):
        assert width_in_a_browser(path, width, tmp_path) == width


def test_the_index_links_every_study(pages):
    page = Page((pages.folder / "index.html").read_text())
    assert {"controls-laptop/index.html", "scaling-laptop/index.html"} <= set(page.links)
    assert not [link for link in page.links if not (link.startswith("#") or (pages.folder / link).is_file())]


def test_numbers_of_the_page_are_those_of_the_records(pages):
    evidence = pages.studies[0].evidence
    values = {arm: [run.figures[0].value for run in evidence.at(arm, ()).values()] for arm in ("diff", "twin")}
    page = Page((pages.folder / "controls-laptop" / "index.html").read_text())
    difference = np.subtract(values["diff"], values["twin"]).mean()
    assert f"{np.mean(values['diff']):.3f} against {np.mean(values['twin']):.3f}" in page.words
    assert f"difference {difference:+.3f} [" in page.words
    assert "60 of 99 planned runs" in page.words
    assert "corrected by Holm's method for the 33 comparisons" in page.words
    assert "0.85 (+0.30)" in page.cells
    assert page.cells.count("1.10") == 2  # DIFF's time over its twin's, a step and a run
    assert "5 of 5" in page.cells


def test_the_command_writes_the_same_pages_each_time_and_removes_old_tables(tmp_path, capsys):
    evidence = controls({"diff": 0.9, "twin": 0.1}, seeds=2)
    path, folder = save(evidence, tmp_path / "records"), tmp_path / "pages"
    for place in (folder, tmp_path / "again"):
        assert command.run(str(tmp_path / "records"), out=str(place)) == 0
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 20
    for file in files:
        assert (tmp_path / "again" / file.relative_to(folder)).read_bytes() == file.read_bytes()
    save(dataclasses.replace(evidence, index=dataclasses.replace(evidence.index, figures=[LOSS])), tmp_path / "records")
    assert command.run(str(path), out=str(folder)) == 0
    assert capsys.readouterr().out.count("Report: ") == 3
    names = {file.name for file in (folder / "controls-laptop" / "tables").iterdir()}
    assert not [name for name in names if re.search("retrieval|steps", name)]
    assert {"held-out-loss.csv", "held-out-loss.md", "held-out-loss.tex"} <= names


def test_a_study_without_runs_has_a_page(tmp_path):
    evidence = controls({"diff": 0.9, "twin": 0.1})
    empty = dataclasses.replace(evidence, index=dataclasses.replace(evidence.index, members=[]), runs={}, files={})
    text = write_evidence(read_studies(save(empty, tmp_path)), tmp_path / "pages").read_text()
    assert "0 of 99 planned runs" in text
    page = (tmp_path / "pages" / "controls-laptop" / "index.html").read_text()
    assert "have no pair of runs with the same seed and data yet" in page


def test_texts_under_a_licence_with_attribution_are_named_on_the_page(tmp_path):
    def make(arm, point, seed):
        run = record([LOSS], {LOSS.label: 1.5}, arm=arm, seed=seed)
        mixture = [{"source": "wiki-offline:es", "weight": 1}, {"source": "python-stdlib", "weight": 1}]
        task = {"task": "perplexity", "label": "", "options": {"text": "hf:wikitext:wikitext-2-v1:validation"}}
        return dataclasses.replace(run, recipe=run.recipe | {"data": {"mixture": mixture}, "evaluation": [task]})

    page = study_page(studied(study(["diff", "softmax"], [LOSS], 2, make)))
    text = write_page(page, tmp_path / "wiki").read_text(encoding="utf-8")
    assert "Lead sections of vital articles by the contributors of Wikipedia, es.wikipedia.org (CC BY-SA 4.0)." in text
    assert "WikiText-2 (arXiv:1609.07843), from articles by the contributors of Wikipedia (CC BY-SA 4.0)." in text
    other = study_page(studied(controls({"diff": 0.9, "twin": 0.1})))
    assert "CC BY-SA" not in write_page(other, tmp_path / "other").read_text(encoding="utf-8")


def test_every_arm_has_a_colour_of_its_own_in_all_studies():
    styles = arm_styles(CONTROLS, "twin")
    looks = [tuple(map(str, style.values())) for style in styles.values()]
    assert len(set(looks)) == len({style["color"] for style in styles.values()}) == len(CONTROLS)
    assert len({(style["marker"], str(style["linestyle"])) for style in styles.values()}) == len(CONTROLS)
    others = arm_styles(["diff_v2", "wide", "diff", "softmax"], "softmax")
    assert styles["twin"]["color"] == others["softmax"]["color"] == REFERENCE_COLOUR
    assert all(styles[arm] == others[arm] for arm in ("diff", "wide"))
    assert len({*COLOURS, *MORE_COLOURS, REFERENCE_COLOUR}) == len(COLOURS) + len(MORE_COLOURS) + 1


def test_latex_and_markdown_escape_their_own_characters():
    table = Table("t", "T", (Group("a_b", numeric=False), Group("50 %")), [["x|y & {z}", "1 \u00b1 2"]], ["Note."])
    assert table.markdown({"other": "u"}) == "| a_b | 50 % |\n| --- | ---: |\n| x\\|y & {z} | 1 \u00b1 2 |\n\nNote.\n"
    assert r"x|y \& \{z\} & 1 $\pm$ 2 \\" in table.latex()
    assert r"a\_b & 50 \% \\" in table.latex()


CLAIM = Claim(
    claim="Retrieval", paper="p", tests=[ClaimTest(study="controls", arm="diff", figure=SEEN.label)], controls=True
)


@pytest.mark.parametrize(
    ("seen", "seeds", "state"),
    [
        ({"diff": 0.9, "twin": 0.1}, 5, "reproduced here"),
        ({"diff": 0.1, "twin": 0.9}, 5, "opposite"),
        ({"diff": 0.5, "twin": 0.5}, 5, "not reproduced"),
        ({"diff": 0.9, "twin": 0.1}, 1, "not run yet"),
    ],
)
def test_the_state_of_a_claim_follows_from_the_records(seen, seeds, state):
    (judged,) = judge([CLAIM], [studied(controls(seen, seeds=seeds))])
    assert judged.state == state


def test_claims_for_and_against_are_mixed():
    studies = [studied(controls(seen)) for seen in ({"diff": 0.9, "twin": 0.1}, {"diff": 0.1, "twin": 0.9})]
    assert judge([CLAIM], studies)[0].state == "mixed"
    assert judge([Claim(claim="c", paper="p", not_testable="why")], studies)[0].state == "not testable at this scale"


def test_controls_that_remove_keep_and_reduce_an_effect():
    seen = {"diff": 0.9, "wide": 0.1, "no-norm": 0.9, "init": 0.5, "twin": 0.1}
    (judged,) = judge([CLAIM], [studied(controls(seen))])
    assert judged.controls == (
        "The advantage of DIFF over TWIN is removed in: WIDE. It is reduced in: INIT. It is kept in: NO-NORM."
    )
    (judged,) = judge([CLAIM], [studied(controls({"diff": 0.1, "wide": 0.1, "twin": 0.1}))])
    assert "no decided advantage" in judged.controls


def test_claims_name_figures_that_the_studies_have():
    claims = read_claims()
    assert len(claims) == 10
    for claim in claims:
        assert bool(claim.tests) != bool(claim.not_testable)
        for test in claim.tests:
            path = RECIPES / f"{test.study}.yaml"
            if path.is_file():
                recipe = yaml.safe_load(path.read_text("utf-8"))
                assert test.arm in recipe["arms"]
                assert test.need or test.figure in [figure["label"] for figure in recipe["figures"]], claim.claim
