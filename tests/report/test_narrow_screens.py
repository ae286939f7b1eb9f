"""Pages on a telephone: nothing but tables and figures is wider than the screen, and these scroll by themselves."""

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from difftransformer_lab.evals.scores import proportion
from difftransformer_lab.report import studied, write_study, write_suite
from tests.support.task_results import task_result

LONG = "/a/folder/" + "with-a-name-that-cannot-be-broken-" * 4
SCROLLING = {"svg": "drawing", "table": "table"}

MEASURE = """<body style="margin: 0"><iframe id="page" src="PAGE" style="border: 0; width: WIDTHpx; height: 900px"></iframe>
<script>
document.getElementById("page").onload = event => {
  const page = event.target.contentDocument;
  page.querySelectorAll("details").forEach(part => part.open = true);
  document.body.insertAdjacentHTML("beforeend", "<p id='found'>" + JSON.stringify(page.documentElement.scrollWidth) + "</p>");
};
</script></body>"""


class Ancestors(HTMLParser):
    """The classes of what is around every SVG and table."""

    def __init__(self, text):
        super().__init__()
        self.stack, self.around = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag in SCROLLING:
            self.around.append((tag, {name for _, names in self.stack for name in names}))
        if tag not in ("meta", "br"):
            self.stack.append((tag, (dict(attrs).get("class") or "").split()))

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        while self.stack.pop()[0] != tag:
            pass


@pytest.fixture(scope="module")
def pages(comparison, tmp_path_factory):
    """The page of a comparison and of a suite, with names and reasons that hold no space."""
    folder = tmp_path_factory.mktemp("pages")
    rows = [
        proportion("accuracy", [True, False], {"needles": 2, "asked": 1, "length_tokens": 9, "depth": depth})
        for depth in (0.0, 1.0)
    ]
    found = {"needle": [task_result("needle", LONG + name, rows, digits=7, data=LONG) for name in "ab"]}
    missing = [("perplexity", LONG + "a", f"{LONG}.txt: no such file")]
    return [write_study(studied(comparison), folder / "study"), write_suite("s" * 60, found, missing, folder / "suite")]


def test_words_break_and_what_is_wide_scrolls(pages):
    for path in pages:
        text = path.read_text()
        style = text[: text.index("</style>")]
        rules = dict(re.findall(r"^([^@{}]+?) \{ ([^}]*) \}$", style, re.MULTILINE))
        assert "overflow-wrap: anywhere" in rules["body"]
        around = Ancestors(text).around
        assert {tag for tag, _ in around} == set(SCROLLING)
        for tag, names in around:
            assert SCROLLING[tag] in names
            assert "overflow-x: auto" in rules[f".{SCROLLING[tag]}"]


def width_in_a_browser(path, width, folder):
    """Return how wide a page is on a screen of that width; a message on the console fails."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium")
    outer = folder / "outer.html"
    outer.write_text(MEASURE.replace("PAGE", path.as_uri()).replace("WIDTH", str(width)))
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
    words += ["--allow-file-access-from-files", f"--user-data-dir={folder}", "--virtual-time-budget=5000"]
    words += ["--enable-logging=stderr"]
    done = subprocess.run([browser, *words, "--dump-dom", outer.as_uri()], capture_output=True, text=True, check=True)
    assert "CONSOLE" not in done.stderr
    found = re.search('<p id="found">(.*?)</p>', done.stdout)
    assert found is not None
    return json.loads(html.unescape(found[1]))


@pytest.mark.slow
@pytest.mark.parametrize("width", [375, 1280])
def test_a_browser_finds_no_page_wider_than_the_screen(pages, width, tmp_path):
    for path in pages:
        assert width_in_a_browser(path, width, tmp_path) == width
