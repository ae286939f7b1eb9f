"""What a study answers, in sentences that are read off its comparisons alone."""

import math
from collections.abc import Sequence
from statistics import median

import numpy as np

from difftransformer.report.evidence.comparisons import Compared, comparisons_of, row_of
from difftransformer.report.evidence.reading import Evidence, Point
from difftransformer.report.evidence.scaling import Amount, Scaling
from difftransformer.report.tables import comparisons_text, decimals_for, fixed, significant
from difftransformer.report.verdict import Verdict, change_words
from difftransformer.results import StudyArm, StudyFigure

MOST_ANSWERS = 4
"""So many primary figures are answered in sentences; the tables hold all."""


def answers(evidence: Evidence, rows: Sequence[Compared], scaling: Scaling | None = None) -> list[Verdict]:
    """Return a study's answers, the most important one first."""
    found = scaling_answers(scaling) if scaling else []
    primary = [figure for figure in evidence.index.figures if not figure.secondary]
    return [*found, *(answer(evidence, rows, figure) for figure in primary[:MOST_ANSWERS])]


def answer(evidence: Evidence, rows: Sequence[Compared], figure: StudyFigure, *, brief: bool = False) -> Verdict:
    """Return what a study says about one figure.

    Args:
        evidence: The study.
        rows: Its comparisons.
        figure: The figure.
        brief: Whether to leave out the other arms that cannot be told from the reference.
    """
    whole: Point = ()
    main, reference = evidence.others[0], evidence.reference
    row, other = row_of(rows, figure.label, main.name, whole), row_of(rows, figure.label, reference.name, whole)
    if row is None or other is None or row.difference is None:
        missing = f"{main.label} and {reference.label} have no pair of runs with the same seed and data yet."
        return Verdict(title_of(figure), "unknown", missing)
    if row.is_censored:
        text = (
            f"None of {row.runs} runs of {main.label} and {other.runs} runs of {reference.label} reached "
            f"{figure.reaches:g}."
        )
        text += others_words(evidence, rows, figure, decided_alone=brief)
        return Verdict(title_of(figure), "unknown", text)
    places = decimals(rows, figure)
    a, b = (fixed(one.statistic.mean, places) for one in (row, other))
    unit = "" if figure.unit in ("", "share") else f" {figure.unit}"
    words = {
        "better": f"{main.label} is better than {reference.label}",
        "worse": f"{main.label} is worse than {reference.label}",
        "undecided": f"{main.label} and {reference.label} cannot be told apart",
        "equal": f"{main.label} and {reference.label} are equal in every seed, so there is no interval",
        "no interval": f"{main.label} and {reference.label} cannot be told apart, since there is no interval",
    }[row.state]
    change = change_words(row.difference, row.pairs, places)
    text = f"{words}: {a} against {b}{unit} ({figure.better} is better), {change}."
    low, high = row.difference.low, row.difference.high
    if row.state == "undecided" and low is not None and high is not None and not low <= 0 <= high:
        text += f" The interval excludes zero, but not after correction for {row.difference.comparisons} comparisons."
    if evidence.has_settings:
        text += f" These are means over {settings_words(evidence, rows, figure, main)}."
    if figure.reaches is not None:
        text += (
            f" {row.reached} of {row.runs} runs of {main.label} and {other.reached} of {other.runs} runs of "
            f"{reference.label} reached {figure.reaches:g}; a run that did not counts with its last step."
        )
    text += others_words(evidence, rows, figure, decided_alone=brief)
    state = {"better": "first", "worse": "second", "undecided": "undecided"}.get(row.state, "unknown")
    return Verdict(title_of(figure), state, text)  # type: ignore[arg-type]


def settings_words(evidence: Evidence, rows: Sequence[Compared], figure: StudyFigure, arm: StudyArm) -> str:
    """Return the number of settings that a figure is averaged over, and in how many of them an arm has the better mean."""
    pairs = [
        (row.statistic.mean, other.statistic.mean)
        for point in evidence.points
        if (row := row_of(rows, figure.label, arm.name, point))
        and (other := row_of(rows, figure.label, evidence.reference.name, point))
    ]
    better = sum(a > b if figure.better == "higher" else a < b for a, b in pairs)
    return f"{len(evidence.points)} settings, in {better or 'none'} of which {arm.label} has the better mean"


def title_of(figure: StudyFigure) -> str:
    """Return a figure's label as a heading."""
    return figure.label[:1].upper() + figure.label[1:]


def decimals(rows: Sequence[Compared], figure: StudyFigure) -> int:
    """Return the decimals of every number of a figure: two digits of the median half width of its intervals."""
    mine = [row for row in rows if row.figure is figure]
    bounds = [(row.difference.low, row.difference.high) for row in mine if row.difference]
    halves = [(high - low) / 2 for low, high in bounds if low is not None and high is not None and high > low]
    if not halves:
        return decimals_for([row.statistic.mean for row in mine])
    return min(6, max(0, 1 - math.floor(math.log10(median(halves)))))


def others_words(
    evidence: Evidence, rows: Sequence[Compared], figure: StudyFigure, *, decided_alone: bool = False
) -> str:
    """Return which arms after the first are better than the reference, which are worse, and which cannot be told from it."""
    states: dict[str, list[str]] = {}
    arms = evidence.others[1:]
    for arm in arms:
        row = row_of(rows, figure.label, arm.name, ())
        if row is not None:
            states.setdefault(row.state, []).append(arm.label)
    if decided_alone:
        states = {state: labels for state, labels in states.items() if state in ("better", "worse")}
    elif len(arms) > 1 and states.keys() == {"undecided"}:
        return f" Nor can any other arm be told apart from {evidence.reference.label}."
    words = {
        "better": f"Better than {evidence.reference.label}",
        "worse": f"Worse than {evidence.reference.label}",
        "undecided": f"Not told apart from {evidence.reference.label}",
        "equal": f"Equal to {evidence.reference.label} in every seed",
        "no interval": "Without an interval",
    }
    return "".join(f" {words[state]}: {'; '.join(states[state])}." for state in words if state in states)


def headline(evidence: Evidence, rows: Sequence[Compared], scaling: Scaling | None = None) -> str:
    """Return the leading answer, on the first arm and those that are better or worse, as the index of studies shows it."""
    found = scaling_answers(scaling) if scaling else []
    first = found[0] if found else answer(evidence, rows, evidence.index.figures[0], brief=True)
    return f"{first.subject}: {first.text}"


def progress_words(evidence: Evidence) -> str:
    """Return how many runs there are, and how many are planned."""
    index = evidence.index
    there = len(index.members)
    tuning = sum(member.is_tuning for member in index.members)
    words = f"{there} of {index.planned} planned runs" if there < index.planned else f"{there} runs"
    return f"{words}, {tuning} of them to choose learning rates" if tuning else words


def power_words(evidence: Evidence, rows: Sequence[Compared]) -> str:
    """Return what the table of a study is corrected for, and what its leading figure could show."""
    comparisons = comparisons_of(rows)
    if not comparisons:
        return "No arm has two seeds in common with the reference: there is no interval and no claim."
    words = (
        f"p-values are corrected by Holm's method for the {comparisons_text(comparisons)} of this study that claims rest on: "
        "every arm on every primary figure. An arm is called better only where the interval excludes zero and the corrected "
        "p-value is at most 0.05."
    )
    figure = evidence.index.figures[0]
    row = row_of(rows, figure.label, evidence.others[0].name, ())
    if row is not None and row.detectable:
        words += (
            f" In {figure.label}, {row.pairs} seeds of {row.arm.label} show a true difference with 80 % probability if it is "
            f"at least {amount(row.detectable, figure)}."
        )
    return words


def amount(value: float, figure: StudyFigure) -> str:
    """Return a difference in the unit of a figure."""
    if figure.unit == "share" and value > 1:
        return "larger than any share"
    unit = "" if figure.unit in ("", "share") else f" {figure.unit}"
    return f"{significant(value, 2)}{unit}"


def scaling_answers(scaling: Scaling) -> list[Verdict]:
    """Return how many parameters and tokens each arm needs for the reference's loss at its largest setting."""
    found = []
    for axis, arm in dict.fromkeys((need.axis.name, need.arm.name) for need in scaling.needs):
        need = [need for need in scaling.needs if (need.axis.name, need.arm.name) == (axis, arm)][-1]
        what = {"size": "parameters", "tokens": "training tokens"}[axis]
        title = f"{what.capitalize()} for equal {scaling.figure.label}"
        state = "first" if need.is_less else "second" if need.is_more else "undecided"
        text = (
            f"For the {scaling.figure.label} of {scaling.reference.label} with {quantity(need.n)} {what}, {need.arm.label} "
            f"needs {share_words(need.fit)} of them by the fitted power laws, and {share_words(need.raw)} by interpolation."
        )
        if state == "undecided":
            text += " The intervals do not agree on fewer or more."
        rising = [
            trend.arm.label
            for trend in scaling.trends
            if trend.axis.name == axis
            and trend.arm.name in (arm, scaling.reference.name)
            and (np.diff(trend.loss) > 0).any()
        ]
        if rising:
            text += f" With more {what} the mean loss of {' and of '.join(rising)} rises at some step, as no power law does."
        found.append(Verdict(title, state, text))  # type: ignore[arg-type]
    return found


def share_words(amount: Amount) -> str:
    """Return a share with its interval, and whether it lies outside of what was measured."""
    words = f"{share_text(amount.share)} [{share_text(amount.low)}, {share_text(amount.high)}]"
    return f"{words} (outside the measured range)" if amount.outside else words


def share_text(value: float) -> str:
    """Return a share in percent; below and above what was measured it has no number."""
    if value == 0:
        return "below range"
    if value > 99:
        return "above range"
    return f"{fixed(100 * value, 0)} %"


def quantity(n: float) -> str:
    """Return a number of parameters or tokens with a unit."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= scale:
            return f"{n / scale:.3g}{unit}"
    return f"{n:g}"
