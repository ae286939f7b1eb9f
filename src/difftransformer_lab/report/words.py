"""The words that every page, table and terminal shares: of measures, verdicts, dates and times, and what terms mean."""

import math
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from ..results import StudyFigure
from .tables import State, fixed

BETTER, WORSE, ALIKE, SAME, REFERENCE = "better", "worse", "no clear difference", "the same", "reference"
OVER_ITEMS = "on these items"
VERDICTS: dict[str, State] = {
    BETTER: "good",
    f"{BETTER} {OVER_ITEMS}": "good",
    WORSE: "bad",
    f"{WORSE} {OVER_ITEMS}": "bad",
    **dict.fromkeys((ALIKE, SAME, REFERENCE, "one seed", "no interval", "not paired", "not reached"), "open"),
}
"""Verdict words of tables, and their colour."""

TERMS = Path(__file__).with_name("terms.yaml")
"""Terms that pages explain."""

QUIET_SHARE = 0.03
"""Share of the CPU time for other processes above which times come with a warning."""

_MEASURES = (
    (r"\bnll by position\b", "loss by position"),
    (r"\bnll\b", "loss per token"),
    (r"^bits per byte\b", "loss per byte"),
)
_UNITS = (("day", 86_400), ("hour", 3600), ("minute", 60), ("second", 1))


def measure_words(name: str) -> str:
    """Return a measure's name as a reader knows it."""
    for pattern, words in _MEASURES:
        name = re.sub(pattern, words, name)
    return name


def terms_in(text: str) -> list[tuple[str, str]]:
    """Return the terms that occur in a text, with what they mean."""
    terms = yaml.safe_load(TERMS.read_text(encoding="utf-8"))
    return [(term["term"], term["means"]) for term in terms if re.search(term["shown_by"], text, re.IGNORECASE)]


def date_words(when: str | datetime) -> str:
    """Return a date such as 2026-01-02T03:04:05+00:00 as people write it; a text that is no date as it is."""
    try:
        date = datetime.fromisoformat(when) if isinstance(when, str) else when
    except ValueError:
        return str(when)
    return f"{date.day} {date:%B %Y}" + (f", {date:%H:%M}" if len(str(when)) > len("2026-01-02") else "")


def day_words(texts: Iterable[str]) -> str:
    """Return the day of several dates, or the first and the last one."""
    days = [date_words(text[:10]) for text in sorted(texts)]
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""


def duration_words(seconds: float) -> str:
    """Return a time such as 40 seconds, 6 minutes or 2.5 hours."""
    name, size = next(unit for unit in _UNITS if seconds >= 1.5 * unit[1] or unit[1] == 1)
    value = seconds / size
    text = f"{value:.1f}".removesuffix(".0") if value < 10 and size >= 3600 else f"{max(1, round(value))}"
    return f"{text} {name}{'' if text == '1' else 's'}"


def busy_words(share: float) -> str:
    """Return the warning that other processes took a share of the machine while it was timed."""
    return f"Other processes took {share:.0%} of this machine meanwhile; repeat it when it is idle."


def listed(names: Iterable[str]) -> str:
    """Return names with commas, and \u201cand\u201d before the last."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def counted(number: int, name: str, names: str = "") -> str:
    return f"{number} {name if number == 1 else names or f'{name}s'}"


def title_of(figure: StudyFigure) -> str:
    """Return a figure's label as a heading."""
    return figure.label[:1].upper() + figure.label[1:]


def with_unit(title: str, figure: StudyFigure) -> str:
    """Return a title with a figure's unit; a share, from 0 to 1, has none."""
    return title if figure.unit in ("", "share") else f"{title} ({figure.unit})"


def quantity(n: float) -> str:
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= scale:
            return f"{n / scale:.3g}{unit}"
    return f"{n:g}"


def share_text(value: float) -> str:
    """Return a share in percent; below and above what was measured it has no number."""
    if value == 0:
        return "below range"
    if value > 99 or math.isnan(value):
        return "above range"
    return f"{fixed(100 * value, 0)} %"
