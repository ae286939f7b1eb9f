"""The first screen of a study's page: a plain answer, a table of verdicts, a picture, and what would decide it."""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

from ..plots.style import Drawing
from ..results import StudyFigure
from ..statistics import detectable
from . import questions, study_figures
from .answers import answer, decimals, explored_words, rates_words, scaling_answers, unpaired_words
from .comparisons import Compared, row_of
from .contrasts import FEWEST_SEEDS
from .page import Lead
from .reading import Evidence
from .studied import Studied
from .tables import NOT_MEASURED, Group, Table, fixed, names
from .words import ALIKE, BETTER, OVER_ITEMS, REFERENCE, SAME, WORSE, counted, duration_words, listed, with_unit

STUDIES = "reports/studies"
"""Folder of studies, unless a command names another."""
MOST_SEEDS = 30
"""If more would be needed, that is said instead of a number."""


def lead(study: Studied) -> Lead:
    """Return the words and the table; `draw_lead` draws the picture, which takes a second or more."""
    evidence = study.evidence
    deciding, command = what_would_decide(study)
    return Lead(
        answer=corrected_words(evidence) + plain_answer(study),
        table=questions.verdicts_table(study) if evidence.index.plan else verdicts_table(evidence, study.rows),
        deciding=deciding,
        command=command,
    )


def corrected_words(evidence: Evidence) -> str:
    """Return what stands of a study and why, before what it answered; empty where nothing was corrected."""
    correction = evidence.index.correction
    return f"Correction. {correction.stands} {correction.why} What it answered: " if correction else ""


def draw_lead(study: Studied) -> Drawing | None:
    evidence = study.evidence
    if study.scaling:
        drawing = study_figures.draw_scaling(evidence, study.scaling)
    elif evidence.index.plan:
        drawing = study_figures.draw_contrasts(study)
    else:
        drawing = study_figures.draw_transfer(evidence, study.rows)
    return drawing or study_figures.draw_arms(evidence, study.rows, leading(evidence))


def leading(evidence: Evidence) -> list[StudyFigure]:
    return [figure for figure in evidence.index.figures if not figure.secondary]


def verdict(row: Compared | None, reference: str) -> str:
    if row is None:
        return ""
    if row.reached == 0:
        return "not reached"
    if row.arm.name == reference:
        return REFERENCE
    if row.difference is None:
        return "not paired"
    if row.is_censored:
        return "not reached"
    if row.difference.low is None:
        return "one seed" if row.pairs == 1 else "no interval" if row.difference.mean else SAME
    if not row.excludes_zero:
        return ALIKE
    word = BETTER if (row.difference.mean > 0) == (row.figure.better == "higher") else WORSE
    return f"{word} {OVER_ITEMS}" if row.is_over_items else word


def verdicts_table(evidence: Evidence, rows: Sequence[Compared], figures: Sequence[StudyFigure] | None = None) -> Table:
    """Return a row for each arm: the mean of each figure over its seeds, and how it compares with the reference."""
    figures = [one for one in figures or leading(evidence) if any(row.figure is one for row in rows)]
    cells = []
    for arm in evidence.index.arms:
        line = [arm.label]
        for figure in figures:
            row, places = row_of(rows, figure.label, arm.name, ()), decimals(rows, figure)
            value = NOT_MEASURED if row is None else "" if row.reached == 0 else fixed(row.statistic.mean, places)
            error = "" if row is None or row.reached == 0 else fixed(row.statistic.standard_error, places)
            never = f"{row.never} of {row.runs}" if row is not None and row.never not in ("", "0") else ""
            line += [
                value,
                error,
                *([never] if figure.reaches is not None else []),
                verdict(row, evidence.index.reference),
            ]
        cells.append(line)
    groups = [*names("model")]
    for figure in figures:
        title = f"{with_unit(figure.label, figure)}, {figure.better} is better"
        is_censored = figure.reaches is not None
        parts = ("mean", "standard error", *(["never got there"] if is_censored else []), "verdict")
        groups.append(Group(title, parts, "censored" if is_censored else "judged", numeric=False))
    return Table("verdicts", "Every model and measure", tuple(groups), cells, [verdict_words(evidence)])


def verdict_words(evidence: Evidence) -> str:
    label = evidence.reference.label
    if evidence.has_one_seed:
        words = (
            f"One training run each. {BETTER.capitalize()} or {WORSE} {OVER_ITEMS}: the 95 % interval over evaluation items "
            f"of the difference to {label} leaves out zero. It says nothing of another training run."
        )
    else:
        words = (
            f"\u00b1: one standard error over seeds. {BETTER.capitalize()} or {WORSE}: the 95 % interval over seeds of the "
            f"difference to {label} leaves out zero. Among many comparisons some do by chance."
        )
    settings = f" Means over {len(evidence.points)} settings." if evidence.has_settings else ""
    baselines = "".join(
        f" A {one.name} model has {fixed(one.bits_per_byte, 4)} bits/byte." for one in evidence.index.baselines
    )
    return words + settings + baselines


def plain_answer(study: Studied) -> str:
    evidence = study.evidence
    if evidence.index.plan:
        return questions.plain_answer(study)
    if rates := rates_words(study):
        return f"Best learning rate. {rates}"
    main, reference = evidence.others[0], evidence.reference
    by_verdict: dict[str, list[str]] = {}
    pairs = 0
    for figure in leading(evidence):
        row, other = (row_of(study.rows, figure.label, arm.name, ()) for arm in (main, reference))
        if row is None or other is None or row.difference is None:
            continue
        pairs = max(pairs, row.pairs)
        places = decimals(study.rows, figure)
        word = verdict(row, reference.name).removesuffix(f" {OVER_ITEMS}")
        means = " against ".join(fixed(one.statistic.mean, places) for one in (row, other))
        by_verdict.setdefault(word, []).append(f"{figure.label} ({means})" if word in (BETTER, WORSE) else figure.label)
    if not by_verdict:
        figures = leading(evidence)
        return answer(evidence, study.rows, figures[0]).text if figures else unpaired_words(evidence)
    sentences = {
        BETTER: f"{main.label} is better than {reference.label} on ",
        WORSE: f"{main.label} is worse than {reference.label} on ",
        ALIKE: "no clear difference shows on ",
        SAME: "they are the same on ",
        "one seed": "nothing can be told from one run of ",
    }
    parts = [f"{words}{listed(by_verdict[word])}" for word, words in sentences.items() if word in by_verdict]
    if rest := [*by_verdict.get("no interval", []), *by_verdict.get("not reached", [])]:
        parts.append(f"{listed(rest)} cannot be judged")
    start = [scaling_answers(evidence, study.scaling)[0].text] if study.scaling and study.scaling.needs else []
    one = "With one training run of each model, by these items"
    runs = one if evidence.has_one_seed else f"With {pairs} seeds of each model"
    return " ".join([*start, f"{runs}, {'; '.join(parts)}: {explored_words(evidence, main.name)}."])


def what_would_decide(study: Studied) -> tuple[str, str]:
    """Return what would decide what a study leaves open, and the command; both as texts, the second may be empty."""
    evidence = study.evidence
    index = evidence.index
    there, planned = len(index.members), index.planned
    if there < planned:
        runs = [run.total_seconds for *_, run in evidence.every_run()]
        time = f" They take {_time(fmean(runs) * (planned - there))}." if runs else ""
        return f"{planned - there} of {planned} planned runs are missing.{time}", _command(evidence)
    if index.plan:
        return "All runs of the plan are there: nothing more of this study decides anything.", ""
    main, reference = evidence.others[0], evidence.reference
    rows = [row_of(study.rows, figure.label, main.name, ()) for figure in leading(evidence)]
    judged = [row for row in rows if row is not None and row.difference is not None and not row.is_censored]
    if not judged:
        return "", ""
    have = max(row.pairs for row in judged)
    if have == 1:
        return _more(study, max(2, FEWEST_SEEDS - 1), "would show how much training varies")
    wanted = {row.figure.label: _seeds_needed(row) for row in judged if not row.excludes_zero}
    near = {label: seeds for label, seeds in wanted.items() if seeds is not None and seeds > have}
    if near:
        label = min(near, key=lambda one: near[one])
        words = f"would tell {main.label} and {reference.label} apart on {label}, if they vary as these did"
        return _more(study, near[label] - have, words)
    if have < FEWEST_SEEDS:
        words = f"would make {FEWEST_SEEDS}; intervals of fewer rest on a rough estimate of how much training varies"
        return _more(study, FEWEST_SEEDS - have, words)
    if wanted:
        apart = f"to tell {main.label} and {reference.label} apart on {listed(wanted)}"
        small = "what difference there is, is small against that between seeds"
        return f"{MOST_SEEDS} seeds would not suffice {apart}: {small}.", ""
    return "A study with a plan, written before its runs, would confirm or refute this.", ""


def _more(study: Studied, more: int, words: str) -> tuple[str, str]:
    evidence = study.evidence
    if evidence.index.command.startswith("difftransformer demo"):  # one seed, for a part of the recipe's steps
        words = "several seeds of the whole recipe, which the stored result below has."
        return words, "difftransformer compare demo --seeds 5 --out reports/demo-full"
    there, pair = [runs for runs in evidence.runs.values() if runs], (evidence.others[0].name, evidence.reference.name)
    have = {len(runs) for runs in there}
    seeds = max(*have, more + min(len(runs) for (arm, _), runs in evidence.runs.items() if arm in pair))
    seconds = sum(fmean(run.total_seconds for run in runs.values()) * (seeds - len(runs)) for runs in there)
    command = re.sub(r" (--seeds|--set compare\.seeds)[ =]\d+", "", _command(evidence))
    option = "--set compare.seeds=" if " upcycle " in command else "--seeds "
    what = counted(more, "more seed") if len(have) == 1 else f"{seeds} seeds"
    return f"{what} of every model, {_time(seconds)}, {words}.", f"{command} {option}{seeds}"


def _command(evidence: Evidence) -> str:
    """Return the command of a study, which names the folder of its records unless that is the default."""
    path, command = evidence.path, evidence.index.command
    folder = path.parent.parent if path.is_absolute() else Path(os.path.relpath(path.resolve().parent.parent))
    is_named = command.startswith("difftransformer study ") and folder.as_posix() != STUDIES
    return f"{command} --results {shlex.quote(str(folder))}" if is_named else command


def _time(seconds: float) -> str:
    return f"about {duration_words(seconds)} where these ran, one run at a time"


def _seeds_needed(row: Compared) -> int | None:
    """Return the fewest seeds that would show a difference of this mean and spread in 4 of 5 studies; None above the most."""
    differences = [*row.differences.values()]
    mean = fmean(differences)
    if len(differences) < 2 or mean == 0:
        return None
    spread = stdev(differences)
    enough = (n for n in range(2, MOST_SEEDS + 1) if detectable(n) * spread <= abs(mean))
    return next(enough, None)
