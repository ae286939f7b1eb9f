"""The page of a study, of a comparison and of a suite: question, table, figure, runs, recipe.

All pages have one template. Its words are written by people: a study's question, a plan's sentences.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from difftransformer.errors import DiffTransformerError
from difftransformer.files import write_text_atomically

from ..plots import Drawing, Pooled, colours_of_pages, inline_svg, labels, models_drawn_as, short_names
from ..printable import printable, write_page_text
from ..results import TaskResult
from ..table import NOT_MEASURED, Group, Table, date_words, fixed, names, significant
from . import figures, tables
from .frame import Records
from .study import StudyAnalysis
from .tasks import corrected_pairs, draw_task, measure_words, measurement_table, pairs_table, pooled, task_pairs

TEMPLATE = "page.html.j2"
TABLE_SUFFIXES = ("csv", "md")
MISSING = "missing"
"""Slug of the section of tasks that were not run."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page.

    Attributes:
        tables: Tables that are shown, or folded where they have more than `tables.MOST_ROWS` rows.
        details: Long tables that the reader opens.
        texts: Heading and preformatted text, which the reader opens.
        links: Addresses of other pages beside this one, by the text of a cell of the section's tables.
    """

    slug: str
    title: str
    drawing: Drawing | None = None
    notes: Sequence[str] = ()
    tables: Sequence[Table] = ()
    details: Sequence[Table] = ()
    texts: Sequence[tuple[str, str]] = ()
    gaps: Sequence[str] = ()
    links: Mapping[str, str] = field(default_factory=dict)

    @property
    def every_table(self) -> list[tuple[Table, bool]]:
        """The tables, and whether the reader has to open them."""
        return [
            *((table, len(table.rows) > tables.MOST_ROWS) for table in self.tables),
            *((one, True) for one in self.details),
        ]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page: its question, what a reader must know first, and its sections."""

    title: str
    about: Sequence[str] = ()
    sections: Sequence[Section]

    @property
    def gaps(self) -> list[str]:
        """What could not be measured or drawn, and why."""
        every = [(section.slug, gap) for section in self.sections for gap in section.gaps]
        return [gap if slug == MISSING else f"{slug}: {gap}" for slug, gap in every]


def write_page(page: Page, folder: Path) -> Path:
    """Write `index.html`, `figures/*.svg`, and each table as CSV and Markdown in `tables/`.

    The page needs nothing beside itself: style and figures are inside it, and it has no scripts and no addresses. The
    same results give the same bytes. `index.html` is written last, and each file complete or not at all.
    """
    environment = Environment(
        loader=FileSystemLoader([Path(__file__).parent, Path(__file__).parents[1]]),
        autoescape=True,
        finalize=lambda value: printable(value) if isinstance(value, str) else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    drawings = {section.slug: section.drawing for section in page.sections if section.drawing}
    svg = {slug: inline_svg(replace(drawing, name=slug)) for slug, drawing in drawings.items()}
    text = environment.get_template(TEMPLATE).render(page=page, svg=svg, colours=colours_of_pages())
    _remove_earlier(folder)
    for slug, drawing in drawings.items():
        write_text_atomically(folder / "figures" / f"{slug}.svg", drawing.svg)
    for table, _ in (one for section in page.sections for one in section.every_table):
        for suffix, made in zip(TABLE_SUFFIXES, (table.csv(), table.markdown()), strict=True):
            write_text_atomically(folder / "tables" / f"{table.name}.{suffix}", made)
    write_page_text(folder / "index.html", text)
    return folder / "index.html"


def write_studies(studies: Sequence[StudyAnalysis], folder: Path) -> tuple[Path, list[str]]:
    """Write the page of each study, `NAME-PRESET/index.html`, and a list of them.

    Returns:
        The path of the list, and what the pages lack.
    """
    gaps = []
    for study in studies:
        page, slug = study_page(study), study.records.slug
        write_page(page, folder / slug)
        gaps += [f"{slug}: {gap}" for gap in page.gaps]
    rows = [[one.records.slug, one.records.index.question, *_progress(one.records)] for one in studies]
    table = Table("studies", "Studies", (*names("study", "question"), *names("runs", "of")), rows)
    links = {one.records.slug: f"{one.records.slug}/index.html" for one in studies}
    section = Section(slug="studies", title="All studies", tables=[table], links=links)
    return write_page(Page(title="Studies", sections=[section]), folder), gaps


def study_page(study: StudyAnalysis) -> Page:
    records, rows = study.records, study.rows
    index = records.index
    sections = []
    if index.plan:
        found = tables.findings_table(study)
        sections.append(
            Section(slug="findings", title="Findings", drawing=figures.draw_contrasts(study.findings), tables=[found])
        )
    measured = tables.figures_tables(records, rows)
    if measured:
        drawing = figures.draw_transfer(records, rows) or figures.draw_arms(records, rows)
        sections.append(Section(slug="arms", title="Every model and measure", drawing=drawing, tables=measured))
    if index.baselines:
        cells = [[one.name, fixed(one.bits_per_byte, 4)] for one in index.baselines]
        table = Table("baselines", "Models of the same text", (*names("model"), Group("bits/byte")), cells)
        sections.append(Section(slug="baselines", title="Baselines", tables=[table]))
    if index.upcycling:
        sections.append(
            Section(slug="upcycling", title="Before and after", tables=[tables.upcycling_table(records, rows)])
        )
    if study.scaling:
        drawing = figures.draw_scaling(records, study.scaling)
        needs = [tables.needs_table(study.scaling), tables.laws_table(study.scaling)] if study.scaling.needs else []
        gaps = study.scaling.gaps
        sections.append(Section(slug="scaling", title="Power laws", drawing=drawing, tables=needs, gaps=gaps))
    if records.has_settings:
        sections += _drawn(*(figures.draw_axes(records, rows, figure) for figure in index.figures))
    sections += _drawn(figures.draw_losses(records), figures.draw_lambda(records))
    sections += _task_sections(records)
    sections += _drawn(figures.draw_positions(records))
    if records.runs:
        costs = [tables.measured_costs_table(records)] if index.costs else []
        costs.append(tables.costs_table(records))
        sections.append(Section(slug="cost", title="Parameters and time", tables=costs))
    if index.rates:
        sections.append(Section(slug="rates", title="Learning rates", tables=[tables.rates_table(records)]))
    there, planned = _progress(records)
    made = [tables.arms_table(records), tables.machines_table(records)]
    if study.shared:
        shared = [[slug, str(count)] for slug, count in study.shared.items()]
        made.append(Table("shared", "Runs that another study has too", (*names("study"), Group("runs")), shared))
    sections.append(
        Section(
            slug="runs",
            title="Runs",
            notes=[f"Runs: {there} of {planned}.", *(f"{date_words(one.when)}: {one.what}" for one in index.changes)],
            tables=made,
            details=[tables.runs_table(records)],
        )
    )
    sections.append(_recipe_section(study))
    correction = [f"{index.correction.stands} {index.correction.why}"] if index.correction else []
    return Page(title=index.question, about=[*correction, index.about], sections=sections)


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
        models: Names of the models, in the order of the columns; by default in the order in which results name them.
    """
    gaps: dict[str, list[str]] = {label: [] for label, results in by_task.items() if results}
    paired = {
        label: _or_gap(broken, "the paired differences", partial(task_pairs, by_task[label])) or []
        for label, broken in gaps.items()
    }
    sections = [Section(slug="all", title="Every task", tables=[_suite_table(by_task, models)])] if gaps else []
    sections += [
        task_section(label, by_task[label], paired=pairs_table(label, pairs), broken=gaps[label])
        for label, pairs in corrected_pairs(paired).items()
    ]
    if missing:
        reasons = [f"{experiment} on {model}: {reason}" for experiment, model, reason in missing]
        sections.append(Section(slug=MISSING, title="Not run", gaps=reasons))
    about = []
    if first := next((results for results in by_task.values() if results), []):
        about = [f"{first[0].environment.where}, {date_words(first[0].created)}"]
        rows = [
            [one.name, one.architecture, one.attention, f"{one.parameters:,}", one.dtype, one.sha256[:16]]
            for one in (result.model for result in first)
        ]
        groups = names("model", "architecture", "attention", "parameters", "dtype", "sha256")
        sections.append(Section(slug="models", title="Models", tables=[Table("models", "Models", groups, rows)]))
    title = f"Suite {name}: {', '.join(models)}" if models else f"Suite {name}"
    return Page(title=title, about=about, sections=sections)


def _suite_table(by_task: Mapping[str, Sequence[TaskResult]], models: Sequence[str]) -> Table:
    """Show the first measure of each task for each model."""
    measured = {result.model.name: None for results in by_task.values() for result in results}
    models = [model for model in dict.fromkeys([*models, *measured]) if model in measured]
    rows = []
    for label, results in by_task.items():
        first = next((row for result in results for row in result.measurements if not row.detail), None)
        if first is not None:
            by_model = {result.model.name: result.measurements for result in results}
            values = (
                next(
                    (significant(one.value) for one in by_model.get(model, ()) if one.name == first.name), NOT_MEASURED
                )
                for model in models
            )
            rows.append([measure_words(label), f"{measure_words(first.name)}, {first.unit}", *values])
    return Table("all", "Every task", names("task", "measure", *short_names(models)), rows)


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
    named = list(zip(labels(results), results, strict=True))
    gaps = [*(f"{name}: {gap}" for name, result in named for gap in result.gaps), *broken]
    drawing = _or_gap(gaps, "the figure", lambda: draw_task(results, name=slug))
    brief, table = (measurement_table(results, brief=brief, seeds=seeds) for brief in (True, False))
    is_long = len(table.rows) > len(brief.rows)
    shown = [replace(brief, name=f"{slug}_brief" if is_long else slug)]
    shown += [replace(paired, name=f"{slug}_pairs")] if paired else []
    own = [f"{name}: {choice}" for name, result in named for choice in result.choices]
    shared = [choice for choice in first.choices if all(choice in result.choices for result in results)]
    choices = shared + [text for text in own if text.partition(": ")[2] not in shared]
    options = [f"{key}: {value}" for key, value in first.options.items()]
    return Section(
        slug=slug,
        title=label if drawing is None else drawing.title if label == first.task else f"{drawing.title} ({label})",
        drawing=drawing,
        tables=shown,
        details=[replace(table, name=slug, title="Every measurement")] if is_long else [],
        texts=[("How it was asked", "\n".join([*choices, first.command, *options]))],
        gaps=gaps,
    )


def recipe_text(recipe: dict[str, Any]) -> str:
    plain = json.loads(json.dumps(recipe, default=str))
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)).rstrip()


def _task_sections(records: Records) -> list[Section]:
    """Make a section for each task with whole results, pooled over the seeds of the last setting."""
    by_task: dict[str, list[Pooled]] = {}
    for arm in records.index.arms:
        runs = records.at(arm.name, records.points[-1]).values()
        for name in dict.fromkeys(name for run in runs for name in run.evaluations):
            results = [run.evaluations[name] for run in runs if name in run.evaluations]
            by_task.setdefault(name, []).append(pooled(results, arm.label))
    with models_drawn_as([*figures.styles_of(records).values()]):
        return [
            task_section(name, results, seeds=max(len(one.seeds) for one in results))
            for name, results in by_task.items()
        ]


def _recipe_section(study: StudyAnalysis) -> Section:
    records, index, texts = study.records, study.records.index, []
    for arm, _, _, run in records.every_run():
        if arm is records.reference:
            texts.append((f"Recipe of {arm.label}", recipe_text(run.recipe)))
            break
    notes = [index.command]
    if index.plan:
        plan, why_not = index.plan, study.why_not_registered
        notes.append(f"{plan.file}, SHA-256 {plan.sha256}, commit {plan.commit[:12]}, {date_words(plan.committed)}")
        notes += [f"Planned, not registered: {why_not}" if why_not else "Registered: committed before every run."]
        texts.append(("Plan", recipe_text(_set_fields(plan.plan))))
    return Section(slug="recipe", title="Recipe", notes=notes, texts=texts)


def _set_fields(value: Any) -> Any:
    """Turn a dataclass into plain data, without defaults."""
    if isinstance(value, list):
        return [_set_fields(one) for one in value]
    if not is_dataclass(value):
        return value
    stated = {one.name: getattr(value, one.name) for one in fields(value) if getattr(value, one.name) != one.default}
    return {name: _set_fields(one) for name, one in stated.items() if one != {}}


def _progress(records: Records) -> list[str]:
    return [str(len(records.index.members)), str(records.index.planned)]


def _drawn(*drawings: Drawing | None) -> list[Section]:
    return [Section(slug=one.name, title=one.title, drawing=one) for one in drawings if one is not None]


def _or_gap(gaps: list[str], what: str, make: Callable[[], T]) -> T | None:
    """Call `make`. If it fails, note a gap: one broken figure must not cost the page."""
    try:
        return make()
    except Exception as error:
        gaps.append(f"{what}: {error if isinstance(error, DiffTransformerError) else repr(error)}")
        return None


def _remove_earlier(folder: Path) -> None:
    """Remove the figures and tables of the page that this one replaces."""
    page = folder / "index.html"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    for name in re.findall(r'<h2 id="figure-([\w.-]+)"', text):
        (folder / "figures" / f"{name}.svg").unlink(missing_ok=True)
    for name in re.findall(r'href="tables/([\w.-]+)\.csv"', text):
        for suffix in TABLE_SUFFIXES:
            (folder / "tables" / f"{name}.{suffix}").unlink(missing_ok=True)
