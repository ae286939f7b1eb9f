"""The site that `make docs` built: complete, at home on a phone and in the dark, and in need of nothing from the network."""

import importlib
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.chromium import CONTRAST, chromium
from tests.support.needed import lacking

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ.get("DIFFTRANSFORMER_SITE", ROOT / "build" / "site"))
DOCS = ROOT / "docs"
FIRST_PAGE_BYTES = 300_000
LEAST_CONTRAST = 4.5
LONGEST_PAGE = 8.5 * 800  # pixels: about eight screens of 1280 x 800, on other machines' fonts too
MOST_ENTRIES = 25

pytestmark = [pytest.mark.slow, pytest.mark.tools]


@pytest.fixture(scope="module")
def pages():
    """Every page but copies of the source code."""
    if not (SITE / "index.html").is_file():
        lacking(f"no site in {SITE}: make docs")
    return sorted(path for path in SITE.rglob("*.html") if "_modules" not in path.parts)


class Parts(HTMLParser):
    """What a page loads, its text, and its headings."""

    def __init__(self, path):
        super().__init__()
        self.loads, self.text, self.inside, self.unnamed = [], [], 0, []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag in ("script", "img", "iframe") and "src" in found:
            self.loads.append(found["src"])
        if tag == "link" and {"stylesheet", "preload", "icon"} & set((found.get("rel") or "").split()):
            self.loads.append(found["href"])
        if tag == "img" and not found.get("alt"):
            self.unnamed.append(found.get("src"))
        if tag == "article":
            self.inside += 1

    def handle_endtag(self, tag):
        if tag == "article":
            self.inside -= 1

    def handle_data(self, data):
        if self.inside:
            self.text.append(data)


def local(page, target):
    return (page.parent / target.partition("?")[0]).resolve()


def test_nothing_is_loaded_from_elsewhere(pages):
    for page in pages:
        for target in Parts(page).loads:
            if target.startswith("data:"):  # in the page itself
                continue
            assert not re.match(r"(?:[a-z]+:)?//", target), f"{page.name}: {target}"
            assert local(page, target).is_file(), f"{page.name}: {target}"
    for sheet in SITE.rglob("*.css"):
        for target in re.findall(r"url\(\s*[\"']?([^\"')]+)", sheet.read_text(encoding="utf-8")):
            assert not re.match(r"(?:https?:)?//", target), f"{sheet.name}: {target}"


def test_the_first_page_is_small_and_says_something_without_scripts(pages):
    index = SITE / "index.html"
    parts = Parts(index)
    files = {local(index, target) for target in parts.loads} | {index}
    assert sum(path.stat().st_size for path in files) < FIRST_PAGE_BYTES
    assert "pip install" in "".join(parts.text)


def test_the_navigation_is_short(pages):
    text = (SITE / "index.html").read_text(encoding="utf-8")
    sidebar = text.partition('class="sidebar-tree"')[2].partition("</aside>")[0]
    assert 10 < sidebar.count('<li class="toctree-l1') <= MOST_ENTRIES


def test_every_page_has_its_text_in_the_html_and_every_picture_has_words(pages):
    written = {path.relative_to(DOCS).with_suffix(".html") for path in (*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb"))}
    assert written <= {path.relative_to(SITE) for path in pages}
    for path in written:
        parts = Parts(SITE / path)
        assert len("".join(parts.text)) > 300, path
        if path.parts[0] != "notebooks":
            assert parts.unnamed == [], path


def test_notebooks_have_been_run(pages):
    for path in DOCS.glob("notebooks/*.ipynb"):
        shown = (SITE / path.relative_to(DOCS).with_suffix(".html")).read_text(encoding="utf-8")
        assert "cell_output" in shown, path.name
        assert "<img" in shown, path.name
        assert "Traceback" not in shown, path.name


def public_names(package):
    """Public names as Python itself gives them: `__all__`, or else what the package's own modules or the module define."""
    module = importlib.import_module(package)
    if hasattr(module, "__all__"):
        return set(module.__all__)
    own = f"{package}."
    return {
        name
        for name, thing in vars(module).items()
        if not name.startswith("_") and f"{getattr(thing, '__module__', '')}.".startswith(own)
    }


def test_every_public_name_is_documented_with_its_source(pages):
    packages = [path.stem for path in (SITE / "api").glob("*.html")]
    assert len(packages) >= 12
    for package in packages:
        text = (SITE / "api" / f"{package}.html").read_text(encoding="utf-8")
        anchors = set(re.findall(r'id="([\w.]+)"', text))
        names = public_names(package)
        assert names
        assert {name for name in names if f"{package}.{name}" not in anchors} == set(), package
        assert "viewcode-link" in text, package


def test_names_at_the_top_are_documented_somewhere(pages):
    import difftransformer

    anchors = {
        anchor.rpartition(".")[2]
        for path in (SITE / "api").glob("*.html")
        for anchor in re.findall(r'id="(difftransformer[\w.]+)"', path.read_text(encoding="utf-8"))
    }
    assert {name for name in difftransformer.__all__ if name != "__version__"} <= anchors


def test_the_search_finds_a_page_from_disk(pages):
    """The index is a script, which a page opened from disk may load; a request for data would be refused."""
    index = (SITE / "searchindex.js").read_text(encoding="utf-8")
    assert index.startswith("Search.setIndex(")
    assert "how-it-works" in index


@pytest.mark.parametrize(
    ("words", "page"),
    [("drop", "guides/layer"), ("fine tune", "guides/llama"), ("gqa", "guides/layer"), ("kv cache", "guides/layer")],
)
def test_the_search_finds_what_people_look_for(pages, words, page):
    text = (SITE / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    place = index["docnames"].index(page)
    for word in words.split():
        found = [
            index[part].get(stem, []) for part in ("terms", "titleterms") for stem in {word, word.removesuffix("e")}
        ]
        assert place in {one for some in found for one in (some if isinstance(some, list) else [some])}, word


STILL = "<style>* { transition: none !important; animation: none !important; }</style>"


@pytest.mark.parametrize("width", [375, 1280])
def test_a_browser_finds_nothing_too_wide_too_long_too_faint_or_broken(pages, width):
    if not (shutil.which("chromium") or shutil.which("google-chrome")):
        lacking("no Chromium")
    ours, wrong = {(SITE / path.relative_to(DOCS)).with_suffix(".html") for path in DOCS.rglob("*.md")}, {}
    with chromium() as browser:
        for page in pages:
            browser.open(page, width=width)
            browser.run("document.querySelectorAll('details').forEach(part => part.open = true)")
            browser.run(f"document.head.insertAdjacentHTML('beforeend', {STILL!r})")
            for theme in ("light", "dark"):
                browser.run(f"document.body.dataset.theme = {theme!r}")
                sizes = browser.run(
                    "(({ scrollWidth, scrollHeight }) => [scrollWidth, scrollHeight])(document.documentElement)"
                )
                _, contrast, words = browser.run(CONTRAST)
                too_long = page in ours and width == 1280 and sizes[1] > LONGEST_PAGE
                if sizes[0] > width or too_long or contrast < LEAST_CONTRAST:
                    wrong[page.name, theme] = *sizes, contrast, words
        assert wrong == {}
        assert browser.complaints == []
        assert not [url for url in browser.requests if re.match("https?:|wss?:", url)]
        browser.run("console.error('control'), fetch('http://control.invalid/').catch(() => 0)")
        assert browser.complaints  # so that errors and requests are known to be seen
        assert "http://control.invalid/" in browser.requests
