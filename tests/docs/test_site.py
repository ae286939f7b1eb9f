"""The site that `make docs` built: complete, at home on a phone and in the dark, and in need of nothing from the network."""

import html
import importlib
import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE = Path(os.environ.get("DIFFTRANSFORMER_SITE", ROOT / "build" / "site"))
DOCS = ROOT / "docs"
FIRST_PAGE_BYTES = 300_000
LEAST_CONTRAST = 4.5
LONGEST_PAGE = 8.5 * 800  # pixels: about eight screens of 1280 x 800, on other machines' fonts too
MOST_ENTRIES = 25

pytestmark = [pytest.mark.slow, pytest.mark.tools]


def lacking(what):
    if os.environ.get("DIFFTRANSFORMER_CI") == "1":
        pytest.fail(what)
    pytest.skip(what)


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


MEASURE = """<!DOCTYPE html><body style="margin: 0"><iframe id="page" style="border: 0; width: WIDTHpx; height: 900px"></iframe>
<script>
const pages = PAGES, found = {};
console.error("control");
fetch("http://control.invalid/").catch(() => {});
function rgba(text) { const parts = text.match(/[\\d.]+/g).map(Number); return parts.length < 4 ? [...parts, 1] : parts; }
function over(top, below) { return [0, 1, 2].map(i => top[i] * top[3] + below[i] * (1 - top[3])).concat(1); }
function light(colour) {
  const [r, g, b] = colour.slice(0, 3).map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function ground(view, node) {
  const layers = [];
  for (; node; node = node.parentElement) layers.push(rgba(view.getComputedStyle(node).backgroundColor));
  return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
}
function faint(page, view) {
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT), bad = new Set();
  for (let node; node = walker.nextNode();) {
    const element = node.parentElement, style = view.getComputedStyle(element);
    if (!node.textContent.trim() || element.closest("script, style, noscript, title, svg")) continue;
    if (!element.getClientRects().length || style.visibility !== "visible" || +style.opacity === 0) continue;
    const behind = ground(view, element), ink = over(rgba(style.color), behind);
    const [a, b] = [light(ink), light(behind)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    if (ratio < LEAST) bad.add(`${element.tagName} ${node.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return [...bad].slice(0, 5);
}
const frame = document.getElementById("page");
(async () => {
  for (const url of pages) {
    await new Promise(done => { frame.onload = done; frame.src = url; });
    const page = frame.contentDocument, view = frame.contentWindow;
    page.querySelectorAll("details").forEach(part => part.open = true);
    const style = page.createElement("style");
    style.textContent = "* { transition: none !important; animation: none !important; }";
    page.head.append(style);
    found[url] = {};
    for (const theme of ["light", "dark"]) {
      page.body.dataset.theme = theme;
      const { scrollWidth, scrollHeight } = page.documentElement;
      found[url][theme] = { width: scrollWidth, height: scrollHeight, faint: faint(page, view) };
    }
  }
  document.body.insertAdjacentHTML("beforeend", "<p id='found'></p>");
  document.getElementById("found").textContent = JSON.stringify(found);
})();
</script></body>"""


@pytest.mark.parametrize("width", [375, 1280])
def test_a_browser_finds_nothing_too_wide_too_long_too_faint_or_broken(pages, width, tmp_path):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        lacking("no Chromium")
    text = MEASURE.replace("WIDTH", str(width)).replace("LEAST", str(LEAST_CONTRAST))
    outer, log = tmp_path / "outer.html", tmp_path / "net.json"
    outer.write_text(text.replace("PAGES", json.dumps([path.as_uri() for path in pages])), encoding="utf-8")
    words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
    words += ["--disable-component-update", "--no-first-run", f"--log-net-log={log}", "--enable-logging=stderr"]
    words += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path}", "--window-size=1300,950"]
    words += ["--virtual-time-budget=600000", "--timeout=300000"]
    done = subprocess.run([browser, *words, "--dump-dom", outer.as_uri()], capture_output=True, text=True, check=True)
    answer = re.search('<p id="found">(.*?)</p>', done.stdout, re.DOTALL)
    assert answer is not None, done.stderr[-2000:]
    found = json.loads(html.unescape(answer[1]))
    assert len(found) == len(pages)
    wrong = {}
    ours = {(SITE / path.relative_to(DOCS)).with_suffix(".html").as_uri() for path in DOCS.rglob("*.md")}
    for url, themes in found.items():
        for theme, seen in themes.items():
            too_long = url in ours and width == 1280 and seen["height"] > LONGEST_PAGE
            if seen["width"] > width or seen["faint"] or too_long:
                wrong[Path(url).name, theme] = seen
    assert wrong == {}
    # The measuring page itself writes an error and asks for an address, so that both are known to be seen.
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line and '"control"' not in line] == []
    assert '"control"' in done.stderr
    requested = re.findall(
        r'"initiator":"file://".{0,400}?"url":"((?:https?|wss?)://[^"/]+)', log.read_text(encoding="utf-8")
    )
    assert set(requested) == {"http://control.invalid"}
