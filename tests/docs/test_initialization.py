"""docs/initialization.md: by fan-in DIFF's first layer starts near the size of the embeddings at every width."""

import json
import re
from pathlib import Path

import pytest

from tests.support.pages import load, pages

DOCS = Path(__file__).parents[2] / "docs"
ROWS = json.loads((DOCS / "results" / "start-rms.json").read_text("utf-8"))["result"]["rows"]
WIDTHS = [64, 128, 256, 320, 512, 768, 1024, 1536, 2048, 3072]


@pytest.fixture(scope="module")
def script():
    return load(DOCS / "figures" / "initialization.py")


def ratios(start, arm):
    """By width, attention over the embeddings in each seed."""
    return {
        row["width"]: [a / b for a, b in zip(row["attention_rms"], row["attention_joins"], strict=True)]
        for row in ROWS
        if (row["start"], row["arm"]) == (start, arm)
    }


def test_by_fan_in_attention_is_near_the_size_of_the_embeddings_at_every_width():
    found = ratios("fan_in", "DIFF")
    assert list(found) == WIDTHS
    assert all(0.2 <= ratio <= 2 for seeds in found.values() for ratio in seeds)


def test_from_a_normal_start_it_is_larger_than_five_times_at_every_width():
    assert all(min(seeds) > 5 for seeds in ratios("normal", "DIFF").values())


@pytest.mark.parametrize("width", [64, 128, 256])
def test_measured_again_the_sizes_are_those_of_the_file(script, width):
    for start in ("fan_in", "normal"):
        attention = script.start_sizes(script.config_of(width, "DIFF", start), seed=0)[0]
        assert attention.ratio == pytest.approx(ratios(start, "DIFF")[width][0], rel=0.01)
        assert start == "normal" or 0.2 <= attention.ratio <= 2


def test_every_width_is_in_the_table():
    assert "{{ start_sizes() }}" in (DOCS / "initialization.md").read_text("utf-8")
    assert [int(width) for width in re.findall(r"^\| (\d+) \|", pages().start_sizes(), re.MULTILINE)] == WIDTHS


def test_the_figure_shows_the_file(script):
    for ax, start in zip(script.draw().axes, ("fan_in", "normal"), strict=True):
        curves = [line for line in ax.lines if len(line.get_xdata()) == len(WIDTHS)]
        for line, arm in zip(curves, ("DIFF", "DIFF without norm", "V2", "Transformer"), strict=True):
            means = {width: sum(seeds) / len(seeds) for width, seeds in ratios(start, arm).items()}
            assert dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) == pytest.approx(means)
