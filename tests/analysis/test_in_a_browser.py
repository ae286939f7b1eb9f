"""Pages in a headless Chromium: nothing is asked of the network, no console message, no scrolling aside, words can be read."""

import pytest

from difftransformer_lab.analysis import analyse
from difftransformer_lab.analysis.page import study_page, suite_page, write_page
from difftransformer_lab.evals.scores import proportion
from tests.support.chromium import CONTRAST, chromium
from tests.support.task_results import task_result

pytestmark = pytest.mark.slow
LONG = "/a/folder/" + "with-a-name-that-cannot-be-broken-" * 4
CUT = """[...document.querySelectorAll("main *")].filter(e => e.checkVisibility() && !e.closest("svg")
  && e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display != "inline").map(e => e.outerHTML.slice(0, 80))"""
SMALL = """[...document.querySelectorAll("svg text")].filter(e => e.checkVisibility())
  .map(e => parseFloat(getComputedStyle(e).fontSize) * Math.hypot(e.getScreenCTM().a, e.getScreenCTM().b))"""


@pytest.fixture(scope="module")
def pages(comparison, make, tmp_path_factory):
    """The page of comparisons and of a suite, with names and reasons that hold no space."""
    folder = tmp_path_factory.mktemp("pages")
    rows = [
        proportion("accuracy", [True, False], {"needles": 2, "asked": 1, "length_tokens": 9, "depth": depth})
        for depth in (0.0, 1.0)
    ]
    found = {"needle": [task_result("needle", LONG + name, rows, digits=7, data=LONG) for name in "ab"]}
    missing = [("perplexity", LONG + "a", f"{LONG}.txt: no such file")]
    many = make(seeds=2, models=("diff", "diff_v2", "softmax"), layers=40, lengths=(512, 4096))
    return {
        "comparison": write_page(study_page(analyse(comparison)), folder / "study"),
        "many": write_page(study_page(analyse(many)), folder / "many"),
        "suite": write_page(suite_page("s" * 60, found, missing), folder / "suite"),
    }


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("kind", ["comparison", "many", "suite"])
def test_a_page_on_a_screen(kind, width, scheme, browser, pages):
    browser.requests.clear()
    browser.complaints.clear()
    browser.open(pages[kind], width=width, scheme=scheme)
    browser.run("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run(CUT) == []
    count, least, words = browser.run(CONTRAST)
    assert count > 40
    assert least >= 4.5, words
    assert min(browser.run(SMALL), default=9) >= (7 if kind == "suite" or width == 375 else 8)
    assert browser.complaints == []
    assert browser.requests == [pages[kind].as_uri()]
