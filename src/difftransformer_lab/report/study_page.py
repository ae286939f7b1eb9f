"""The page of a study, and the page of all studies with the index of claims."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from ..plots.seeds import Pooled, pooled
from ..plots.style import Drawing, models_drawn_as
from . import questions, study_figures, study_tables
from .answers import answers, brief_explored, changes_words, interval_words, progress_words, shared_words
from .claims import Judged, judge, read_claims
from .lead import draw_lead, lead, leading
from .page import Lead, Page, Said, Section, no_gap, recipe_text, task_section, write_page
from .reading import Evidence
from .studied import Studied
from .tables import Table, names
from .words import counted, listed, quantity

CLAIMS_NOTE = (
    "Open: something else than the claim explains all that was decided. Only contrasts of registered plans say anything for "
    "or against a claim; what was explored is left out where one is decided. Reproduced here: one is decided for it and "
    "none against it. In part: another effect is smaller than the smallest that the plan looks for. Opposite: the other way "
    "round. No difference as large as the paper's: the interval lies within that smallest effect. Planned: seeds are "
    "missing, an earlier contrast is open, or the plan is not registered. Token-equivalents: the change of the tokens for "
    "the same loss, as the study's page says. In the last column, for: decided on the claim's side. Small: decided to be "
    "within that smallest effect. Confounded: decided, and explained by something else. Beside: what an effect is due to. "
    "Nothing here says what holds at the paper's scale."
)


def write_study(study: Studied, folder: Path, *, on_gap: Callable[[str], None] = no_gap) -> Path:
    """Write the page of one study, `folder/index.html`; `on_gap` is called with each figure that it lacks."""
    return write_page(study_page(study), folder, on_gap=on_gap)


def write_evidence(studies: Sequence[Studied], folder: Path, *, on_gap: Callable[[str], None] = no_gap) -> Path:
    """Write a page for each study, and one for all of them.

    Args:
        folder: Folder of the pages; `NAME-PRESET/index.html` is a study's.
        on_gap: Called with each figure that a page lacks.

    Returns:
        The path of `index.html`.
    """
    for study in studies:

        def named(gap: str, slug: str = study.evidence.slug) -> None:
            on_gap(f"{slug}: {gap}")

        write_study(study, folder / study.evidence.slug, on_gap=named)
    return write_page(studies_page(studies), folder)


def study_page(study: Studied) -> Page:
    evidence, rows = study.evidence, study.rows
    index = evidence.index
    rates = study_tables.rates_table(evidence)
    tuning = [Section(slug="tuning", title="Learning rates", tables=[rates])] if rates else []
    first = replace(lead(study), drawing=draw_lead(study))
    sections = [_plan_section(study), *tuning] if index.plan else []
    sections += _result_sections(study)
    if index.upcycling:
        table = study_tables.upcycling_table(evidence, rows)
        sections.append(Section(slug="upcycling", title="Before and after", tables=[table]))
    if study.scaling:
        scaling = study.scaling
        shown = [study_tables.needs_table(scaling), study_tables.laws_table(scaling)] if scaling.needs else []
        sections.append(Section(slug="scaling", title="Power laws", tables=shown, gaps=scaling.gaps))
    if evidence.has_settings:
        drawings = _drawn(*(study_figures.draw_axes(evidence, rows, figure) for figure in index.figures))
        sections += [replace(drawing, title=f"{drawing.title}, by setting") for drawing in drawings]
    sections += _drawn(study_figures.draw_losses(evidence), study_figures.draw_lambda(evidence))
    sections += _task_sections(evidence)
    sections += _drawn(study_figures.draw_positions(evidence))
    if evidence.runs:
        costs = [study_tables.measured_costs_table(evidence)] if index.costs else []
        costs.append(study_tables.costs_table(evidence))
        sections.append(Section(slug="cost", title="Parameters and time", tables=costs))
    sections += [] if index.plan else tuning
    tables = [study_tables.arms_table(evidence), study_tables.machines_table(evidence)]
    every_run = [study_tables.runs_table(evidence)]
    sections.append(Section(slug="runs", title="Models and runs", tables=tables, details=every_run))
    shared = shared_words(study)
    sections.append(_made_section(study, [*(f"Disclosed: {one}" for one in changes_words(study)), shared]))
    stage = "confirms a plan" if index.plan else "explores: nothing in it is confirmed"
    about = f"Study {index.name}, preset {index.preset}, which {stage}. {index.about} {progress_words(evidence)}."
    return Page(title=index.question, about=about.replace("  ", " "), lead=first, sections=sections)


def _drawn(*drawings: Drawing | None) -> list[Section]:
    """Return a section for each drawing that there is."""
    return [Section(slug=one.name, title=one.title, drawing=one) for one in drawings if one is not None]


def found_words(study: Studied) -> list[Said]:
    """Return what a study found: the answers to its plan's questions, or what it explored."""
    return questions.question_verdicts(study) if study.evidence.index.plan else answers(study)


def _plan_section(study: Studied) -> Section:
    plan = study.evidence.index.plan
    assert plan is not None
    about = [plan.plan.about] if plan.plan.about else []
    return Section(
        slug="plan",
        title="The plan and its tests",
        notes=[*questions.plan_words(study), *about],
        tables=[questions.contrasts_table(study)],
        texts=[("The plan", "As it is in the study's index.", questions.plan_text(plan.plan))],
    )


def _result_sections(study: Studied) -> list[Section]:
    evidence = study.evidence
    tables = study_tables.figures_tables(evidence, study.rows)
    if not tables:
        return []
    is_new = len(leading(evidence)) < len(evidence.index.figures) or evidence.index.plan or study.scaling
    drawing = study_figures.draw_arms(evidence, study.rows) if is_new else None
    title = f"Every measure against {evidence.reference.label}"
    return [Section(slug="arms", title=title, drawing=drawing, notes=[interval_words(evidence)], tables=tables)]


def _task_sections(evidence: Evidence) -> list[Section]:
    """Return a section for each task whose whole results are kept, pooled over the seeds of the last setting."""
    point = evidence.points[-1]
    by_task: dict[str, list[Pooled]] = {}
    for arm in evidence.index.arms:
        runs = evidence.at(arm.name, point).values()
        for name in dict.fromkeys(name for run in runs for name in run.evaluations):
            results = [run.evaluations[name] for run in runs if name in run.evaluations]
            by_task.setdefault(name, []).append(pooled(results, arm.label))
    styles = [*study_figures.styles_of(evidence).values()]
    with models_drawn_as(styles):
        return [
            task_section(name, results, seeds=max(len(one.seeds) for one in results))
            for name, results in by_task.items()
        ]


def _made_section(study: Studied, notes: Sequence[str]) -> Section:
    evidence = study.evidence
    command = f"{evidence.index.command} trains the runs that are missing and keeps the others."
    texts = []
    reference = [run for arm, _, _, run in evidence.every_run() if arm is evidence.reference]
    if reference:
        words = f"That of {evidence.reference.label} in the first setting; the table of models says what differs."
        texts.append(("Recipe", words, recipe_text(reference[0].recipe)))
    return Section(slug="made", title="How this was made", notes=[command, *filter(None, notes)], texts=texts)


def studies_page(studies: Sequence[Studied]) -> Page:
    """Build the page of several studies; with the claims of the paper if the studies test or explore any."""
    judged = [one for one in judge(read_claims(), studies) if one.evident or one.claim.not_testable]
    links = {one.evidence.slug: f"{one.evidence.slug}/index.html" for one in studies}
    table = studies_table(studies)
    sections = [Section(slug="studies", title="Studies", tables=[table], links=links)]
    if any(one.evident for one in judged):
        sections.append(Section(slug="claims", title="Claims of the paper", tables=[claims_table(judged)], links=links))
        title = "Evidence for the Differential Transformer"
        states = listed(f"{n} {state}" for state, n in Counter(one.state for one in judged).items())
        answer = f"The paper's claims, tested on small models: {states}."
    else:
        title, answer = counted(len(studies), "study", "studies"), "What each study asked and found."
    about = "Every number follows from the records of runs."
    return Page(title=title, about=about, lead=Lead(answer=answer), sections=sections)


def claims_table(judged: Sequence[Judged]) -> Table:
    rows = []
    for one in judged:
        head = [one.claim.claim, one.claim.paper, one.state]
        evident = [
            [said.study.evidence.slug, scale_words(said.study), said.words, said.tokens, said.vote]
            for said in one.evident
        ]
        evident = evident or [["", "", one.claim.not_testable or one.claim.not_run, "", ""]]
        rows += [[*(head if place == 0 else [""] * 3), *cells] for place, cells in enumerate(evident)]
    groups = names(
        "claim",
        "in the paper",
        "here",
        "decided by",
        "scale",
        "what it found, or why there is none",
        "token-equivalents",
        "says",
    )
    return Table("claims", "Claims of the paper", groups, rows, [CLAIMS_NOTE])


def scale_words(study: Studied) -> str:
    """Return the sizes of a study's compared runs and their tokens a parameter, to two digits."""
    runs = [run for *_, run in study.evidence.every_run()]

    def span(values: Sequence[float]) -> str:
        ends = [min(values), max(values)] if max(values) > 1.1 * min(values) else [max(values)]
        return " to ".join(quantity(float(f"{end:.1e}")) for end in ends)

    parameters = f"{span([run.parameters for run in runs])} parameters"
    if study.evidence.index.upcycling:
        return f"{parameters}, pretrained"
    return f"{parameters}, {span([run.train_tokens / run.parameters for run in runs])} tokens a parameter"


def studies_table(studies: Sequence[Studied]) -> Table:
    rows = [
        [one.evidence.slug, one.evidence.index.question, brief_answer(one), progress_words(one.evidence)]
        for one in studies
    ]
    return Table("studies", "Studies", names("study", "question", "answer", "runs"), rows)


def brief_answer(study: Studied) -> str:
    """Return what stands of a study, or its leading answer, in at most `answers.MOST_WORDS` words."""
    if study.evidence.index.correction:
        return study.evidence.index.correction.stands
    return questions.brief_answer(study) if study.evidence.index.plan else brief_explored(study)
