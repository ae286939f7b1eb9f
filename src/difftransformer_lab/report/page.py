"""The HTML report: one self-contained page, with its figures and tables beside it as SVG, PNG and CSV files.

Studies and `eval SUITE` write the same page: a suite has a section for each of its tasks, a study has more around them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml  # type: ignore[import-untyped]
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from difftransformer.errors import DiffTransformerError
from difftransformer.files import write_text_atomically

from ..plots.curves import labels
from ..plots.seeds import Pooled
from ..plots.style import Drawing, inline_svg
from ..printable import printable
from ..results import TaskResult
from .tables import Table
from .tasks import draw_task, measurement_table
from .tasks.pairs import corrected_pairs, pairs_table, task_pairs

TEMPLATE = "page.html.j2"
MISSING = "missing"
"""Slug of the section of tasks that were not run."""

T = TypeVar("T")


@dataclass(frozen=True)
class Verdict:
    """What was found, at the top of a page. `state` is for colour; `text` says everything."""

    subject: str
    state: Literal["first", "second", "undecided", "unknown"]
    text: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
        slug: Name in addresses and of files.
        title: Heading.
        drawing: Figure.
        notes: Paragraphs.
        tables: Tables that are shown.
        details: A long table that the reader opens.
        texts: Heading, paragraph and preformatted text.
        gaps: What could not be measured or drawn, and why.
        links: Addresses of other pages beside this one, by the text of a cell of the section's tables.
    """

    slug: str
    title: str
    drawing: Drawing | None = None
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    details: Table | None = None
    texts: Sequence[tuple[str, str, str]] = ()
    gaps: Sequence[str] = ()
    links: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole page."""

    title: str
    about: str
    sections: Sequence[Section]
    verdicts: Sequence[Verdict] = field(default_factory=list)

    @property
    def gaps(self) -> list[str]:
        """What could not be measured or drawn, and why."""
        return [
            gap if section.slug == MISSING else f"{section.slug}: {gap}"
            for section in self.sections
            for gap in section.gaps
        ]


def no_gap(text: str) -> None:
    """Take note of no gap."""


def write_suite(
    name: str,
    found: Mapping[str, Sequence[TaskResult]],
    missing: Sequence[tuple[str, str, str]],
    folder: Path,
    *,
    on_gap: Callable[[str], None] = no_gap,
) -> Path:
    """Write the page of a suite.

    Args:
        name: Name of the suite.
        found: Results by experiment, one for each model.
        missing: Experiment, model and reason of what was not run.
        folder: Folder of the report.
        on_gap: Called with each figure that the page lacks.

    Returns:
        The path of `index.html`.
    """
    return write_page(suite_page(name, found, missing), folder, on_gap=on_gap)


def write_page(page: Page, folder: Path, *, on_gap: Callable[[str], None] = no_gap) -> Path:
    """Write `index.html`, `figures/*.svg`, and each table as CSV, Markdown and LaTeX in `tables/`.

    The page needs nothing beside itself: style and figures are inside it, and it has no scripts and no addresses. The
    same results give the same bytes. `index.html` is written last, and each file complete or not at all.
    """
    drawings = {section.slug: section.drawing for section in page.sections if section.drawing}
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    svg = {slug: inline_svg(replace(drawing, name=slug)) for slug, drawing in drawings.items()}
    text = environment.get_template(TEMPLATE).render(page=page, svg=svg)
    _remove_earlier(folder)
    for slug, drawing in drawings.items():
        write_text_atomically(folder / "figures" / f"{slug}.svg", drawing.svg)
    for table in all_tables(page):
        for suffix, made in (("csv", table.csv()), ("md", table.markdown()), ("tex", table.latex())):
            write_text_atomically(folder / "tables" / f"{table.name}.{suffix}", made)
    write_text_atomically(folder / "index.html", text)
    for gap in page.gaps:
        on_gap(gap)
    return folder / "index.html"


def _remove_earlier(folder: Path) -> None:
    """Remove the figures and tables of the page that is there, so that none outlives it."""
    page = folder / "index.html"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    for name in re.findall(r'<h2 id="figure-([\w.-]+)"', text):
        (folder / "figures" / f"{name}.svg").unlink(missing_ok=True)
    for name in re.findall(r'href="tables/([\w.-]+)\.csv"', text):
        for suffix in ("csv", "md", "tex"):
            (folder / "tables" / f"{name}.{suffix}").unlink(missing_ok=True)


def all_tables(page: Page) -> list[Table]:
    """Return every table of a page."""
    return [table for section in page.sections for table in (*section.tables, section.details) if table is not None]


def suite_page(name: str, found: Mapping[str, Sequence[TaskResult]], missing: Sequence[tuple[str, str, str]]) -> Page:
    """Build the page of a suite."""
    gaps: dict[str, list[str]] = {label: [] for label, results in found.items() if results}
    paired = {
        label: _or_gap(broken, "the paired differences", partial(task_pairs, found[label])) or []
        for label, broken in gaps.items()
    }
    sections = [
        task_section(label, found[label], paired=pairs_table(label, pairs), broken=gaps[label])
        for label, pairs in corrected_pairs(paired).items()
    ]
    first = next((results for results in found.values() if results), [])
    about = ""
    if missing:
        reasons = [f"{experiment} on {model}: {reason}" for experiment, model, reason in missing]
        sections.append(Section(slug=MISSING, title="Not run", gaps=reasons))
    if first:
        names = " against ".join(result.model.name for result in first)
        about = f"{names}. Measured on {first[0].environment.where}, {first[0].created}."
        notes = [
            f"{model.name}: {model.architecture} ({model.attention}), {model.parameters:,} parameters, {model.dtype}; sha256 "
            f"{model.sha256[:16]}."
            for model in (result.model for result in first)
        ]
        sections.append(Section(slug="models", title="Models", notes=notes))
    return Page(title=f"Suite {name}", about=about, sections=sections)


def task_section(
    label: str,
    results: Sequence[TaskResult],
    *,
    seeds: int = 1,
    paired: Table | None = None,
    broken: Sequence[str] = (),
) -> Section:
    """Build the section of a task.

    Args:
        label: Name of the evaluation.
        results: Its results, one for each model.
        seeds: Training seeds that each result is pooled over.
        paired: Table of the models' differences on the same items.
        broken: What could not be measured.
    """
    slug, first = label.replace(" ", "-"), results[0]
    names = labels(results)
    gaps = [f"{name}: {gap}" for name, result in zip(names, results, strict=True) for gap in result.gaps]
    gaps += broken
    drawing = _or_gap(gaps, "the figure", lambda: draw_task(results, name=slug))
    brief, table = (measurement_table(results, brief=brief, seeds=seeds) for brief in (True, False))
    is_long = len(table.rows) > len(brief.rows)
    shown, notes = [replace(brief, name=f"{slug}_brief" if is_long else slug)], []
    if not isinstance(first, Pooled):
        if paired is not None:
            shown.append(replace(paired, name=f"{slug}_pairs"))
        elif len(results) > 1:
            notes = ["The models were not asked the same tokens or score no items, so nothing is paired."]
    options = "\n".join(f"{key}: {value}" for key, value in first.options.items())
    return Section(
        slug=slug,
        title=f"{label}: {drawing.title}" if drawing else label,
        drawing=drawing,
        notes=notes,
        tables=shown,
        details=replace(table, name=slug) if is_long else None,
        texts=[
            (
                "What the paper leaves open, and how it was asked",
                " ".join(_choices(results)),
                f"{first.command}\n{options}",
            )
        ],
        gaps=gaps,
    )


def _choices(results: Sequence[TaskResult]) -> list[str]:
    """Return the choices of all models, and then those that differ, such as the token that separates documents."""
    shared = [choice for choice in results[0].choices if all(choice in result.choices for result in results)]
    return shared + [
        f"{name}: {choice}"
        for name, result in zip(labels(results), results, strict=True)
        for choice in result.choices
        if choice not in shared
    ]


def _or_gap(gaps: list[str], what: str, make: Callable[[], T]) -> T | None:
    """Return what `make` returns; if it fails, add a gap, so that one broken figure does not cost the page."""
    try:
        return make()
    except Exception as error:
        gaps.append(f"{what}: {error if isinstance(error, DiffTransformerError) else repr(error)}")
        return None


def recipe_text(recipe: dict[str, Any]) -> str:
    """Return a recipe as YAML, in its own order."""
    plain = json.loads(json.dumps(recipe, default=str))
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)).rstrip()
