"""What the pages for newcomers promise: short sentences, terms that lead to the glossary, tables and figures as measured."""

import ast
import json
import math
import re
from pathlib import Path

import pytest
import yaml
from PIL import Image

import difftransformer
from difftransformer.families.llama import targets
from difftransformer.model.nll import WHOLE_LOGITS
from difftransformer_lab.cli import upcycle
from difftransformer_lab.results import TaskResult, read_result
from tests.support.pages import load

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PLAIN = [DOCS / "index.md", DOCS / "start.md", DOCS / "how-it-works.md", *sorted((DOCS / "guides").glob("*.md"))]
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))
MOST_WORDS = 30


def name(path):
    return str(path.relative_to(DOCS))


def without_code(text):
    """Text without code blocks; a code span, a formula or a link's target is one word."""
    text = re.sub(r"^ *```.*?^ *```|^    [^\n]*$|^!\[[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]+`", "code", re.sub(r"\]\([^)]*\)", "]", text))


def prose(text):
    """Paragraphs and list items, without headings and tables."""
    for paragraph in re.split(r"\n\s*\n|\n(?=[-*\d] |\d\. |#|\|)", without_code(text)):
        if not paragraph.strip().startswith(("#", "|")):
            yield " ".join(paragraph.split())


def sentences(text):
    return [part for paragraph in prose(text) for part in re.split(r"(?<=[.!?:;])\s+", paragraph) if part]


def text_of(path):
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


@pytest.mark.parametrize("path", [*PLAIN, *NOTEBOOKS], ids=name)
def test_sentences_are_short(path):
    found = {part: len(part.split()) for part in sentences(text_of(path))}
    assert found
    assert {part: words for part, words in found.items() if words > MOST_WORDS} == {}


def test_a_long_sentence_is_found():
    text = "# Title\n\nOne. " + "word " * 31 + "end.\n\n| " + "a " * 50
    assert max(len(part.split()) for part in sentences(text)) == 32


@pytest.mark.parametrize("path", PLAIN[1:], ids=name)
def test_links_to_the_glossary_name_its_terms(path):
    text = " ".join((DOCS / "glossary.md").read_text(encoding="utf-8").lower().split())
    for term in re.findall(r"\[([^\]]+)\]\([./]*glossary\.md#[\w-]+\)", path.read_text(encoding="utf-8")):
        assert re.sub(r"('s|s)$", "", " ".join(term.lower().split())) in text, term


@pytest.fixture(scope="module")
def script():
    return load(DOCS / "figures" / "mechanism.py")


@pytest.mark.parametrize("name", ["maps", "maps-dark"])
def test_the_picture_of_the_maps_is_drawn_from_the_shipped_model(script, name):
    assert Image.open(DOCS / "figures" / f"{name}.png").text["Source"] == script.source()


def test_what_is_said_of_the_maps_is_in_the_model(script):
    words, layers = script.shipped_maps()
    first, second, difference = (cells[-1] for cells in script.maps_of(layers[script.LAYER], script.FINDS).values())
    named = {words[at]: float(first[at]) for at in first.argsort()[::-1][:2]}
    text = " ".join((DOCS / "how-it-works.md").read_text(encoding="utf-8").split())
    said = re.search(r"([\d.]+) to the 4, and ([\d.]+) to the 6 of the other city", text)
    assert [f"{named[digit]:.2f}" for digit in ("4", "6")] == [*said.groups()]
    assert second[-1] > 0.99  # "all its weight"
    assert difference[-1] < -0.5  # "subtracts the last token"
    assert difference[first.argmax()] == pytest.approx(max(named.values()), abs=1e-3)  # "keeps both numbers"


def test_the_figure_of_lambda_shows_its_result(script):
    result = read_result(DOCS / "results" / "lambda.json", TaskResult)
    (ax,) = script.draw_lambda(result).axes
    schedule, trained = ax.lines[:2]
    start = [0.8 - 0.6 * math.exp(-0.3 * layer) for layer in range(8)]
    assert list(schedule.get_ydata()) == pytest.approx(start)
    (grid,) = [grid for grid in result.grids if grid.name == "lambda"]
    assert [row[0] for row in grid.values] == list(trained.get_ydata())
    assert "in its first layer it is negative" in (DOCS / "how-it-works.md").read_text(encoding="utf-8")
    assert grid.values[0][0] < 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=name)
def test_notebooks_are_stored_without_outputs_and_parse(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 3
    for cell in code:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
        ast.parse("".join(cell["source"]))


def test_notebooks_open_in_colab_where_the_repository_is_public(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    build, name = load(DOCS / "build.py"), "maps.ipynb"
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://github.com/a/b/"')
    path = rf"github/a/b/blob/(main|v{re.escape(difftransformer.__version__)})/docs/notebooks/{name}"
    link = rf"\s*\[Open in Colab\]\(https://colab\.research\.google\.com/{path}\)"
    assert re.fullmatch(link, build.colab_link(name, tmp_path))
    (tmp_path / "pyproject.toml").write_text("[project]")
    assert build.colab_link(name, tmp_path) == ""
    assert [path.stem for path in NOTEBOOKS] == ["maps", "twin", "upcycle"]
    for path in NOTEBOOKS:  # they install the package by its name
        assert '"difftransformer[lab]"' in "".join(json.loads(path.read_text("utf-8"))["cells"][1]["source"])


def test_the_citation_has_the_version_and_the_licence():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == difftransformer.__version__
    assert citation["license"] == "MIT"
    assert "MIT License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(DOCS.rglob("*.md")), ids=name)
def test_pictures_have_a_text_instead(path):
    for words, file in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", path.read_text(encoding="utf-8")):
        assert len(words.split()) >= 3, f"{name(path)}: {file}"


def test_the_list_of_pages_is_complete():
    """index.md is the navigation of the site, so it names every page; findings.md names those of the studies."""
    texts = ((DOCS / page).read_text(encoding="utf-8") for page in ("index.md", "findings.md"))
    listed = {page for text in texts for page in re.findall(r"\]\(([^)#]+)", text)}
    pages = {name(path) for path in (*DOCS.rglob("*.md"), *NOTEBOOKS)} - {"index.md"}
    assert pages <= listed, pages - listed


@pytest.mark.parametrize("page", ["recipes.md", "performance.md"])
def test_the_logits_above_which_the_loss_is_chunked(page):
    text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
    (cpu, gpu), *others = re.findall(r"2\^(\d+) logits on a CPU, or 2\^(\d+) on a GPU", text)
    assert {"cpu": 2 ** int(cpu), "cuda": 2 ** int(gpu)} == WHOLE_LOGITS
    assert not others


def test_the_help_of_upcycle_names_every_target():
    parameter = re.search(r"\n        to: (.*?)\n        train: ", upcycle.run.__doc__, re.DOTALL)[1]
    assert [one for one in targets() if not re.search(rf"\b{one}\b", parameter)] == []
