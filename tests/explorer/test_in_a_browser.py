"""The explorer in a headless Chromium: nothing is fetched, everything is reached by keyboard, and numbers follow lambda."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from difftransformer.data import byte_tokenizer
from difftransformer_lab.explorer import maps
from tests.explorer.conftest import MAKE, TEXT
from tests.support.chromium import CONTRAST, chromium

pytestmark = pytest.mark.slow
READY = "document.documentElement?.dataset.ready"
TOKENS = len(TEXT.encode()) + 1


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture
def opened(browser, pages):
    """Open a page; at the end nothing but its file was asked for, and the console is empty."""
    browser.requests.clear()
    browser.complaints.clear()

    def open_page(kind, **options):
        browser.open(pages[kind], ready=READY, **options)
        return browser

    yield open_page
    assert {url for url in browser.requests if not url.startswith("data:")} <= {
        path.as_uri() for path in pages.values()
    }
    assert browser.complaints == []


def text(browser, selector, index=0):
    return browser.run(f"document.querySelectorAll({selector!r})[{index}].textContent")


def numbers(words):
    return [float(found.replace("\u2212", "-")) for found in re.findall(r"[\u2212]?\d+\.\d+", words)]


def settle(browser):
    browser.run("new Promise(done => setTimeout(done, 300))")


@pytest.mark.parametrize("kind", ["diff", "diff_v2", "llama", "beside"])
@pytest.mark.parametrize("width", [375, 1280])
def test_no_page_is_wider_than_the_screen(kind, width, opened):
    browser = opened(kind, width=width)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert browser.run("performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["diff", "beside"])
def test_contrast(kind, scheme, opened):
    browser = opened(kind, scheme=scheme)
    count, least, words = browser.run(CONTRAST)
    assert count > 40
    assert least >= 4.5, words
    page, canvas = "getComputedStyle(document.body).backgroundColor", "getComputedStyle(document.body).color"
    before = browser.run(page), browser.run(canvas)
    browser.move("#theme", click=True)
    assert (browser.run(page), browser.run(canvas)) != before
    assert browser.run(CONTRAST)[1] >= 4.5
    assert (sum(map(int, re.findall(r"\d+", before[0])[:3])) > 380) == (scheme == "light")


def test_colours_are_those_of_the_weights(opened):
    """The canvas of the difference has the colour of its sign: blue above zero, orange below."""
    browser = opened("diff")
    told = browser.run(
        """(() => { const view = views[0], size = view.model.size;
        const pixels = view.root.querySelector("[data-kind=left] canvas").getContext("2d").getImageData(0, 0, size, size).data;
        const wrong = []; let future = 0;
        for (let row = 0; row < size; row++) for (let key = 0; key < size; key++) {
          const [r, , b, a] = pixels.slice(4 * (row * size + key)), weight = key <= row ? left(view.head, row, key) : 0;
          if (key > row) future += a;
          else if (Math.abs(weight) > 0.01 && (b > r) !== (weight > 0)) wrong.push([row, key]);
        } return [wrong.length, future] })()"""
    )
    assert told == [0, 0]


@pytest.mark.parametrize("steps", ["fine", "coarse"])
@pytest.mark.parametrize("kind", ["diff", "diff_v2", "softmax"])
def test_weights_are_those_of_the_model(kind, steps, browser, tmp_path, monkeypatch):
    if steps == "coarse":
        monkeypatch.setattr("difftransformer_lab.explorer.page.MOST_CHARACTERS", 0)
    model = MAKE[kind]()
    browser.open(maps(model, byte_tokenizer(), TEXT).save(tmp_path / "page.html"), ready=READY)
    drawn = browser.run(
        """views[0].model.heads.map(head => Array.from({length: views[0].model.size}, (_, row) =>
        Array.from({length: views[0].model.size}, (_, key) => key > row ? 0 : left(head, row, key))))"""
    )
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(torch.tensor([[256, *TEXT.encode()]]), output_attentions=True).attentions
    np.testing.assert_allclose(drawn, torch.cat(own, 1)[0], rtol=0, atol=1e-3)


def test_keys_choose_a_row_and_mark_tokens(opened):
    browser = opened("diff")
    browser.run("document.querySelector('.text').focus()")
    assert f"(token {TOKENS})" in text(browser, ".row h3")
    for key, at in (("Home", 1), ("ArrowRight", 2), ("PageDown", 12), ("ArrowLeft", 11), ("End", TOKENS)):
        browser.press(key)
        assert f"(token {at})" in text(browser, ".row h3")
    active = browser.run("document.querySelector('.text').getAttribute('aria-activedescendant')")
    assert browser.run(f"document.getElementById({active!r}).getAttribute('aria-selected')") == "true"
    browser.press("Home")
    browser.press("ArrowRight", shift=True)
    browser.press("ArrowRight", shift=True)
    assert browser.run("document.querySelectorAll('.token.marked').length") == 3
    settle(browser)
    assert re.match(r"Token 3 of \d+, .* reads ", text(browser, "#said"))
    browser.press("Escape")
    assert browser.run("document.querySelectorAll('.token.marked').length") == 0


def test_keys_choose_a_head_and_the_slider_turns_lambda(opened):
    browser = opened("diff")
    browser.run("document.querySelector('.grid').focus()")
    browser.press("Home")
    browser.press("ArrowDown")
    assert text(browser, ".place h3") == "Layer 1, head 0"
    browser.press("ArrowRight")
    assert text(browser, ".place h3") == "Layer 1, head 1"
    own = numbers(text(browser, ".cell"))
    browser.run("document.querySelector('[type=range]').focus()")
    browser.press("Home")
    assert "not the model\u2019s own" in text(browser, ".note")
    browser.run("views[0].setLambda(0)")
    first, _, rest = numbers(text(browser, ".cell"))
    assert first == rest
    settle(browser)
    assert text(browser, "#said").startswith("Lambda 0.00")
    browser.run("views[0].setLambda(0.5)")
    first, second, rest = numbers(text(browser, ".cell"))
    assert rest == pytest.approx(first - 0.5 * second, abs=2e-3)
    browser.press("0")
    assert numbers(text(browser, ".cell")) == own
    assert browser.run("document.querySelector('.reset').disabled") is True


def test_v2_says_what_the_slider_does(opened):
    browser = opened("diff_v2")
    assert "The slider gives every token the same \u03bb" in text(browser, ".note")
    lam = numbers(text(browser, ".operator output"))
    browser.run("document.querySelector('.text').focus()")
    browser.press("ArrowLeft")
    assert numbers(text(browser, ".operator output")) != lam
    browser.run("views[0].setLambda(0.25)")
    assert "for every token" in text(browser, ".note")
    assert numbers(text(browser, ".operator output")) == [0.25]


def test_heads_are_sorted(opened):
    browser = opened("diff")
    browser.run("document.querySelector('.text').focus()")
    for key, shift in (("Home", False), ("ArrowRight", True), ("End", False)):
        browser.press(key, shift=shift)
    for how, falling in (("cancelled", True), ("entropy", False), ("first", True), ("marked", True)):
        browser.run(f"sorting.value = {how!r}; sorting.dispatchEvent(new Event('change'))")
        shown = [
            numbers(text(browser, ".grid .head span:last-child", i))[0]
            for i in range(browser.run("document.querySelectorAll('.grid .head').length"))
        ]
        assert len(shown) == 6
        assert shown == sorted(shown, reverse=falling)


def test_the_mouse_shows_a_row_and_a_weight(opened):
    browser = opened("beside")
    browser.move("[data-kind=first] .square", 0.1, 0.7)
    row = int(0.7 * TOKENS) + 1
    for index in (0, 1):
        assert f"(token {row})" in text(browser, ".row h3", index)
    browser.move("h1")
    assert f"(token {TOKENS})" in text(browser, ".row h3")


def test_the_page_opens_with_heads_that_read_the_answer(browser, tmp_path):
    """One layer on both sides, in each the head that gives the marked token most of the last row; the sentence says so."""
    page = maps(MAKE["diff"](), byte_tokenizer(), TEXT, MAKE["softmax"](), answer="three", names=("ours", "twin"))
    browser.open(page.save(tmp_path / "page.html"), ready=READY)
    assert browser.run("document.querySelectorAll('.token.marked').length") == 2 * len("three")
    assert text(browser, "#prompt").startswith(TEXT.partition(" \u00e9")[0])
    weights = browser.run(
        "views.map(view => view.model.heads.map(head => "
        "[head.layer, head.head, left(head, view.model.size - 1, 1 + 'one two\\n'.length)]))"
    )
    layer = max(weights[0], key=lambda one: one[2])[0]
    said = text(browser, "#notice")
    for index, (heads, name) in enumerate(zip(weights, ("ours", "twin"), strict=True)):
        _, head, weight = max((one for one in heads if one[0] == layer), key=lambda one: one[2])
        assert text(browser, ".place h3", index) == f"Layer {layer}, head {head}"
        assert f"{weight:.2f} in {name} (head {head})" in said


def test_both_sides_move_together_and_the_address_holds_them(opened):
    browser = opened("beside")
    browser.run("document.querySelector('#together').click()")
    browser.run("views[0].choose(views[0].model.heads[3])")
    chosen = text(browser, ".place h3")
    assert text(browser, ".place h3", 1) == chosen
    browser.run("views[0].setLambda(0.25); views[0].chooseRow(4)")
    address = browser.run("location.hash")
    assert re.fullmatch(r"#4,1\.\d:0\.25,1\.\d", address)
    browser.run("views[0].choose(views[0].model.heads[0]); views[0].chooseRow(9)")
    browser.run(f"location.hash = {address!r}")
    settle(browser)
    assert text(browser, ".place h3") == chosen
    assert "(token 5)" in text(browser, ".row h3")
    assert "not the model\u2019s own" in text(browser, ".note")


def test_a_token_is_found_and_its_predictions_are_shown(opened):
    browser = opened("diff")
    browser.run("find('w')")
    assert f"(token {TEXT.index('w') + 2})" in text(browser, ".row h3")
    browser.run("find('w')")
    assert f"(token {TEXT.encode().rindex(b'w') + 2})" in text(browser, ".row h3")
    assert len(re.findall(r"\d+ %", text(browser, ".following"))) == 5
    browser.run("find('\u00df')")
    assert text(browser, "#sorted") == "No token has \u201c\u00df\u201d."


def test_the_table_has_the_weights(opened):
    browser = opened("diff")
    lines = browser.run("views[0].table()").splitlines()
    assert len(lines) == TOKENS + 1 + TEXT.count("\n") * 2  # the line end is a token of a row and of a column
    last = [float(value) for value in lines[-1].split(",")[-TOKENS:]]
    drawn = browser.run("Array.from({length: views[0].model.size}, (_, key) => left(views[0].head, views[0].row, key))")
    assert last == pytest.approx(drawn, abs=1e-4)


def test_print_is_light_and_without_controls(opened):
    browser = opened("diff", scheme="dark")
    browser.run("dispatchEvent(new Event('beforeprint'))")
    browser.media("dark", "print")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    shown = [
        f"document.querySelector({name!r}).checkVisibility()" for name in ("#theme", ".heads", "[type=range]", "canvas")
    ]
    assert [browser.run(script) for script in shown] == [False, False, False, True]
    browser.media("dark")
    browser.run("dispatchEvent(new Event('afterprint'))")
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 27)"


def test_a_notebooks_frame_draws(browser, tmp_path):
    """The frame may run its script, in a process of its own: its picture has the blue and the orange of the maps."""
    page = maps(MAKE["diff"](), byte_tokenizer(), TEXT)
    (tmp_path / "notebook.html").write_text(f"<!doctype html><body>{page._repr_html_()}</body>")
    browser.open(tmp_path / "notebook.html")
    colours = []
    for _ in range(50):
        browser.picture(tmp_path / "frame.png")
        red, _, blue = np.moveaxis(np.asarray(Image.open(tmp_path / "frame.png").convert("RGB")).astype(int), -1, 0)
        colours = [(blue > red + 50).sum(), (red > blue + 50).sum()]
        if min(colours) > 1000:
            return
        settle(browser)
    raise AssertionError(colours)
