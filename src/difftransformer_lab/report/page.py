"""The HTML report: one self-contained page, with its figures and tables beside it as SVG, PNG and CSV files.

Studies and `eval SUITE` write the same page: a suite has a section for each of its tasks, a study has more around them.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from difftransformer.errors import DiffTransformerError
from difftransformer.files import write_text_atomically

from .. import plots
from ..plots.curves import labels, short_names
from ..plots.seeds import Pooled
from ..plots.style import Drawing, colours_of_pages, inline_svg
from ..printable import printable
from ..results import TaskResult
from .tables import NOT_MEASURED, Group, Table, favoured, significant
from .tables import names as names_of
from .tasks import draw_task, measurement_table
from .tasks.pairs import Pair, corrected_pairs, pairs_table, task_pairs
from .words import ALIKE, BETTER, REFERENCE, VERDICTS, WORSE, date_words, listed, measure_words, terms_in

TEMPLATE = "page.html.j2"
LEAD = "lead"
MOST_LETTERS = 120
"""A table whose words need more room in a row has its cells below each other."""
MOST_ROWS = 12
"""Of a table that is not folded."""
TABLE_SUFFIXES = ("csv", "md", "tex")
MISSING = "missing"
"""Slug of the section of tasks that were not run."""

ASKED = "What the paper leaves open, and how it was asked"

T = TypeVar("T")


@dataclass(frozen=True)
class Said:
    """A sentence about something, such as a figure or a question."""

    subject: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Lead:
    """What a reader sees first.

    Attributes:
        answer: The answer to the page's title, in a sentence or two.
        table: Every model and every leading measure, with a verdict in words.
        drawing: The picture that carries it.
        deciding: What would decide what is open.
        command: The command that does so; empty if none does.
    """

    answer: str
    table: Table | None = None
    drawing: Drawing | None = None
    deciding: str = ""
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
        tables: Tables that are shown, or folded where they have more than `MOST_ROWS` rows.
        details: Long tables that the reader opens.
        texts: Heading, paragraph and preformatted text.
        links: Addresses of other pages beside this one, by the text of a cell of the section's tables.
        frame: Address of a page beside this one that is shown in a frame.
    """

    slug: str
    title: str
    drawing: Drawing | None = None
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    details: Sequence[Table] = ()
    texts: Sequence[tuple[str, str, str]] = ()
    gaps: Sequence[str] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    frame: str = ""

    def folded(self, most_rows: int) -> list[Table]:
        """Return the tables that the reader opens: the details, and those with more rows."""
        return [*(table for table in self.tables if len(table.rows) > most_rows), *self.details]


@dataclass(frozen=True, kw_only=True)
class Page:
    title: str
    about: str
    lead: Lead
    sections: Sequence[Section]

    @property
    def gaps(self) -> list[str]:
        """What could not be measured or drawn, and why."""
        every = [(section.slug, gap) for section in self.sections for gap in section.gaps]
        return [gap if slug == MISSING else f"{slug}: {gap}" for slug, gap in every]


def no_gap(text: str) -> None:
    """Take note of no gap."""


def write_page(
    page: Page, folder: Path, *, on_gap: Callable[[str], None] = no_gap, refresh_seconds: int | None = None
) -> Path:
    """Write `index.html`, `figures/*.svg`, and each table as CSV, Markdown and LaTeX in `tables/`.

    The page needs nothing beside itself: style and figures are inside it, and it has no scripts and no addresses. The
    same results give the same bytes. `index.html` is written last, and each file complete or not at all. With
    `refresh_seconds` a browser loads the page anew that often.
    """
    drawings = {section.slug: section.drawing for section in page.sections if section.drawing}
    if page.lead.drawing:
        drawings[LEAD] = page.lead.drawing
    environment = Environment(
        loader=FileSystemLoader([Path(__file__).parent, Path(plots.__file__).parent]),
        autoescape=True,
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    svg = {slug: inline_svg(replace(drawing, name=slug)) for slug, drawing in drawings.items()}
    names = {
        "refresh_seconds": refresh_seconds,
        "verdicts": VERDICTS,
        "most_letters": MOST_LETTERS,
        "most_rows": MOST_ROWS,
        "colours": colours_of_pages(),
    }
    template = environment.get_template(TEMPLATE)
    without_terms = template.render(page=page, svg=svg, terms=[], **names)
    words = re.sub(r"<svg.*?</svg>|<style.*?</style>|<[^>]*>", " ", without_terms, flags=re.DOTALL)
    text = template.render(page=page, svg=svg, terms=terms_in(words), **names)
    _remove_earlier(folder)
    for slug, drawing in drawings.items():
        write_text_atomically(folder / "figures" / f"{slug}.svg", drawing.svg)
    for table in all_tables(page):
        for suffix, made in zip(TABLE_SUFFIXES, (table.csv(), table.markdown(), table.latex()), strict=True):
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
        for suffix in TABLE_SUFFIXES:
            (folder / "tables" / f"{name}.{suffix}").unlink(missing_ok=True)


def all_tables(page: Page) -> list[Table]:
    sections = [table for section in page.sections for table in (*section.tables, *section.details)]
    return [*([page.lead.table] if page.lead.table else []), *sections]


def suite_page(
    name: str,
    by_task: Mapping[str, Sequence[TaskResult]],
    missing: Sequence[tuple[str, str, str]],
    models: Sequence[str] = (),
) -> Page:
    """Build the page of a suite.

    Args:
        by_task: Results by experiment, one for each model.
        missing: Experiment, model and reason of what was not run.
        models: Names of the models, the last one the reference; by default in the order in which results name them.
    """
    gaps: dict[str, list[str]] = {label: [] for label, results in by_task.items() if results}
    paired = {
        label: _or_gap(broken, "the paired differences", partial(task_pairs, by_task[label])) or []
        for label, broken in gaps.items()
    }
    sections = [
        task_section(label, by_task[label], paired=pairs_table(label, pairs), broken=gaps[label])
        for label, pairs in corrected_pairs(paired).items()
    ]
    if missing:
        reasons = [f"{experiment} on {model}: {reason}" for experiment, model, reason in missing]
        sections.append(Section(slug=MISSING, title="Not run", gaps=reasons))
    about = ""
    if first := next((results for results in by_task.values() if results), []):
        about = f"Measured on {first[0].environment.where}, {date_words(first[0].created)}."
        notes = [
            f"{model.name}: {model.architecture} ({model.attention}), {model.parameters:,} parameters, {model.dtype}; sha256 "
            f"{model.sha256[:16]}."
            for model in (result.model for result in first)
        ]
        sections.append(Section(slug="models", title="Models", notes=notes))
    lead = _suite_lead(by_task, corrected_pairs(paired), models)
    return Page(title=f"Suite {name}", about=about, lead=lead, sections=sections)


def _suite_lead(
    by_task: Mapping[str, Sequence[TaskResult]], pairs: Mapping[str, Sequence[Pair]], models: Sequence[str]
) -> Lead:
    """Return the first measure of each task for each model that has one, and how it compares with the last model's."""
    measured_models = {result.model.name: None for results in by_task.values() for result in results}
    models = [model for model in dict.fromkeys([*models, *measured_models]) if model in measured_models]
    names = short_names(models) if models else []
    rows, told = [], dict[str, list[str]]()
    for label, results in by_task.items():
        first = next((row for result in results for row in result.measurements if not row.detail), None)
        if first is None:
            continue
        by_model = {result.model.name: result for result in results}
        own = dict(zip(by_model, labels(results), strict=True))  # the names of the pairs, which may be shorter
        line = [measure_words(label), f"{measure_words(first.name)}, {first.unit}"]
        differences = {pair.compared: pair.difference for pair in pairs[label] if pair.name == first.name}
        for name, model in zip(names, models, strict=True):
            measured = by_model[model].measurements if model in by_model else []
            value = next((significant(one.value) for one in measured if one.name == first.name), NOT_MEASURED)
            word = REFERENCE if measured and name == names[-1] and len(names) > 1 else ""
            if (difference := differences.get(f"{own.get(model)} minus {own.get(models[-1])}")) is not None:
                outcome = favoured(difference)
                word = BETTER if (outcome == "first") == (first.better == "higher") else WORSE
                word = word if outcome in ("first", "second") else ALIKE
                if name == names[0]:
                    told.setdefault(word, []).append(measure_words(label))
            line += [value, word]
        rows.append(line)
    of_models = (Group(name, ("value", "verdict"), "valued", numeric=False) for name in names)
    groups = (*names_of("task", "measure"), *of_models)
    words = [f"{word} on {listed(tasks)}" for word, tasks in told.items()]
    answer = f"{names[0]}, compared with {names[-1]}: {'; '.join(words)}." if told else ""
    note = "Verdicts compare with {} on the same items: 95 % intervals that leave out zero, after Holm's correction for every "
    note += "comparison of this page. They say nothing of another training run."
    notes = [note.format(names[-1])] if told else []
    table = Table("verdicts", "Every task", groups, rows, notes) if rows else None
    nothing = f"What {listed(names) if names else 'no model'} can do; nothing is compared."
    return Lead(answer=answer or nothing, table=table)


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
        seeds: Training seeds that each result is pooled over.
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
        title=label if drawing is None else drawing.title if label == first.task else f"{drawing.title} ({label})",
        drawing=drawing,
        notes=notes,
        tables=shown,
        details=[replace(table, name=slug, title="Every measurement")] if is_long else [],
        texts=[(ASKED, " ".join(_choices(results)), f"{first.command}\n{options}")],
        gaps=gaps,
    )


def _choices(results: Sequence[TaskResult]) -> list[str]:
    """Return the choices of all models, and then those that differ, such as the token that separates documents."""
    shared = [choice for choice in results[0].choices if all(choice in result.choices for result in results)]
    named = zip(labels(results), results, strict=True)
    every = [(name, choice) for name, result in named for choice in result.choices]
    return shared + [f"{name}: {choice}" for name, choice in every if choice not in shared]


def _or_gap(gaps: list[str], what: str, make: Callable[[], T]) -> T | None:
    """Return what `make` returns; if it fails, add a gap, so that one broken figure does not cost the page."""
    try:
        return make()
    except Exception as error:
        gaps.append(f"{what}: {error if isinstance(error, DiffTransformerError) else repr(error)}")
        return None


def recipe_text(recipe: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(recipe, default=str))
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)).rstrip()
