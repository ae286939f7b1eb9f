"""The page of a study, and the page of all studies with the index of claims."""

from collections.abc import Sequence
from pathlib import Path

from difftransformer.report.evidence import drawings, tables
from difftransformer.report.evidence.answers import answers, headline, power_words, progress_words
from difftransformer.report.evidence.claims import Judged, Studied, judge, read_claims, studied
from difftransformer.report.evidence.reading import Evidence, find_studies, read_evidence
from difftransformer.report.page import Page, Section, recipe_text, write_page
from difftransformer.report.tables import Group, Table
from difftransformer.report.verdict import Verdict

CLAIMS_NOTE = (
    "States are computed from the studies. Reproduced here: a comparison of a study is for the claim by the study's own rule "
    "(the interval excludes zero, and the p-value is at most 0.05 after Holm's correction), and none is against it. Opposite: "
    "the other way round. Not reproduced: no comparison decides. Nothing here says what holds at the paper's scale."
)


def read_studies(path: Path) -> list[Studied]:
    """Read and compare the studies of a folder, or one of them.

    Raises:
        ResultsError: An index or a run cannot be read.
    """
    return [studied(read_evidence(one)) for one in find_studies(path)]


def write_evidence(studies: Sequence[Studied], folder: Path) -> Path:
    """Write a page for each study, and one for all of them.

    Args:
        studies: The studies.
        folder: Folder of the pages; `NAME-PRESET/index.html` is a study's.

    Returns:
        The path of `index.html`.
    """
    for study in studies:
        write_page(study_page(study), folder / study.evidence.slug)
    return write_page(studies_page(studies), folder)


def study_page(study: Studied) -> Page:
    """Build the page of a study."""
    evidence, rows = study.evidence, study.rows
    index = evidence.index
    sections = [_result_section(evidence, study)]
    if study.scaling:
        scaling = study.scaling
        shown = [tables.needs_table(scaling), tables.laws_table(scaling)] if scaling.needs else []
        drawing = drawings.draw_scaling(evidence, scaling)
        sections.append(Section(slug="scaling", title="Power laws", drawing=drawing, tables=shown, gaps=scaling.gaps))
    if evidence.has_settings:
        for figure in index.figures:
            drawing = drawings.draw_axes(evidence, rows, figure)
            if drawing:
                every = tables.figure_table(evidence, rows, figure, whole=False)
                sections.append(
                    Section(slug=drawing.name, title=f"{drawing.title}, by setting", drawing=drawing, details=every)
                )
    losses = tables.losses_table(evidence)
    if losses:
        is_long = len(losses.rows) > 2 * len(index.arms)
        drawing = drawings.draw_losses(evidence)
        shown = [] if is_long else [losses]
        sections.append(
            Section(
                slug="losses",
                title="Training and held-out loss",
                drawing=drawing,
                tables=shown,
                details=losses if is_long else None,
            )
        )
    positions = drawings.draw_positions(evidence)
    if positions:
        sections.append(Section(slug=positions.name, title=positions.title, drawing=positions))
    if evidence.runs:
        sections.append(Section(slug="cost", title="Parameters and time", tables=[tables.costs_table(evidence)]))
    rates = tables.rates_table(evidence)
    if rates:
        sections.append(Section(slug="tuning", title="Learning rates", details=rates))
    sections.append(Section(slug="arms-compared", title="Arms", tables=[tables.arms_table(evidence)]))
    sections.append(
        Section(
            slug="runs",
            title="Every run",
            tables=[tables.machines_table(evidence)],
            details=tables.runs_table(evidence),
        )
    )
    sections.append(_made_section(evidence))
    return Page(
        title=index.question,
        about=f"Study {index.name}, preset {index.preset}. {index.about} {progress_words(evidence)}.".replace(
            "  ", " "
        ),
        verdicts=answers(evidence, rows, study.scaling),
        sections=sections,
    )


def _result_section(evidence: Evidence, study: Studied) -> Section:
    shown = [tables.figure_table(evidence, study.rows, figure) for figure in evidence.index.figures]
    return Section(
        slug="arms",
        title=f"Every arm against {evidence.reference.label}",
        drawing=drawings.draw_arms(evidence, study.rows),
        notes=[power_words(evidence, study.rows)],
        tables=[tables.overview_table(evidence, study.rows), *(table for table in shown if table.rows)],
    )


def _made_section(evidence: Evidence) -> Section:
    texts = [("Command", "It trains the runs that are missing and keeps the others.", evidence.index.command)]
    reference = [run for arm, _, _, run in evidence.every_run() if arm is evidence.reference]
    if reference:
        words = f"That of {evidence.reference.label} in the first setting; the table of arms says what differs."
        texts.append(("Recipe", words, recipe_text(reference[0].recipe)))
    notes = [f"Text: {words} (CC BY-SA 4.0)." for words in evidence.attributions()]
    return Section(slug="made", title="How this was made", notes=notes, texts=texts)


def studies_page(studies: Sequence[Studied]) -> Page:
    """Build the page of all studies."""
    judged = judge(read_claims(), studies)
    links = {one.evidence.slug: f"{one.evidence.slug}/index.html" for one in studies}
    sections = [
        Section(slug="claims", title="Claims of the paper", tables=[claims_table(judged)], links=links),
        Section(slug="studies", title="Studies", tables=[studies_table(studies)], links=links),
    ]
    verdicts = [Verdict(one.claim.claim, "unknown", one.controls) for one in judged if one.controls]
    about = (
        "The paper's claims, tested on small models with controls, several seeds and paired statistics. Every number follows "
        "from the committed records of runs."
    )
    return Page(title="Evidence for the Differential Transformer", about=about, verdicts=verdicts, sections=sections)


def claims_table(judged: Sequence[Judged]) -> Table:
    """Return the claims with their states, and a row for each comparison that tests one."""
    rows = []
    for one in judged:
        head = [one.claim.claim, one.claim.paper, one.state]
        tests = [[study.evidence.slug, what, vote] for study, what, vote in one.votes]
        tests = tests or [["", one.claim.not_testable, ""]]
        rows += [[*(head if place == 0 else ["", "", ""]), *test] for place, test in enumerate(tests)]
    notes = [f"{one.claim.claim}: {one.controls}" for one in judged if one.controls]
    titles = ("claim", "in the paper", "here", "study", "comparison, or why there is none", "says")
    return Table(
        "claims",
        "Claims of the paper",
        tuple(Group(title, numeric=False) for title in titles),
        rows,
        [*notes, CLAIMS_NOTE],
    )


def studies_table(studies: Sequence[Studied]) -> Table:
    """Return the studies with their answers."""
    rows = [
        [
            one.evidence.slug,
            one.evidence.index.question,
            headline(one.evidence, one.rows, one.scaling),
            progress_words(one.evidence),
        ]
        for one in studies
    ]
    groups = tuple(Group(title, numeric=False) for title in ("study", "question", "answer", "runs"))
    return Table("studies", "Studies", groups, rows)
