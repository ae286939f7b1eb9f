"""What a study that explores found, in sentences that are read off its comparisons alone. They hold no verdict."""

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import median

import numpy as np

from ..results import StudyArm, StudyFigure
from .comparisons import Compared, row_of
from .contrasts import FEWEST_SEEDS
from .page import Said
from .reading import Evidence, Point
from .scaling import Amount, Need, Scaling
from .studied import Studied
from .tables import decimals_for, fixed
from .words import date_words, quantity, share_text, title_of

NEEDS = {"size": "parameters", "tokens": "training tokens"}

MOST_WORDS = 25
"""Of an answer in the index of studies."""

MOST_ANSWERS = 4
"""So many primary figures are answered in sentences; the tables hold all."""


def answers(study: Studied) -> list[Said]:
    evidence = study.evidence
    if rates := rates_words(study):
        return [Said("Best learning rate", rates)]
    about_scaling = scaling_answers(evidence, study.scaling) if study.scaling else []
    primary = [figure for figure in evidence.index.figures if not figure.secondary]
    return [*about_scaling, *(answer(evidence, study.rows, figure) for figure in primary[:MOST_ANSWERS])]


def answer(evidence: Evidence, rows: Sequence[Compared], figure: StudyFigure) -> Said:
    """Return what a study that explores found about one figure of its first arm: the effect and its seeds, no verdict."""
    main, reference = evidence.others[0], evidence.reference
    row, other = row_of(rows, figure.label, main.name, ()), row_of(rows, figure.label, reference.name, ())
    if row is None or other is None or row.difference is None:
        nowhere = is_nowhere(evidence, rows, figure)
        return Said(title_of(figure), f"No run has {figure.label}." if nowhere else unpaired_words(evidence))
    if row.is_censored:
        runs = f"{row.runs} runs of {main.label} and {other.runs} runs of {reference.label}"
        return Said(title_of(figure), f"All of {runs} never got to {figure.reaches:g}.")
    places = decimals(rows, figure)
    a, b = (fixed(one.statistic.mean, places) for one in (row, other))
    text = f"{effect_words(row, figure, places)} ({a} against {b}; {figure.better} is better)"
    if row.difference.low is None:
        text += ", without an interval"
    elif not row.excludes_zero:
        text += ", cannot be told apart"
    text += f"; {explored_words(evidence, main.name)}."
    if evidence.has_settings:
        text += f" Mean over {settings_words(evidence, rows, figure, main)}."
    if figure.reaches is not None:
        runs = f"{row.never} of {row.runs} runs of {main.label} and {other.never} of {other.runs} runs of {reference.label}"
        text += f" {runs} never got to {figure.reaches:g}; they count with their last step."
    return Said(title_of(figure), f"{main.label} minus {reference.label} {text}")


def unpaired_words(evidence: Evidence) -> str:
    return f"{evidence.others[0].label} and {evidence.reference.label} have no pair of runs with the same seed and data yet."


def is_nowhere(evidence: Evidence, rows: Sequence[Compared], figure: StudyFigure) -> bool:
    """Whether there are runs, and none has the figure."""
    return bool(evidence.runs) and not any(row.figure is figure for row in rows)


def best_rates(study: Studied) -> dict[str, dict[str, str]]:
    """Return the learning rate with the best mean by arm and width, for a study over widths and rates; empty for another."""
    index = study.evidence.index
    if [axis.name for axis in index.axes] != ["width", "rate"]:
        return {}
    figure, sign = index.figures[0], 1 if index.figures[0].better == "lower" else -1
    means: dict[tuple[str, str], dict[str, float]] = {}
    for row in study.rows:
        if row.figure is figure and row.point:
            width, rate = row.point
            means.setdefault((row.arm.label, width), {})[rate] = sign * row.statistic.mean
    best: dict[str, dict[str, str]] = {}
    for (arm, width), of_rates in means.items():
        best.setdefault(arm, {})[width] = min(of_rates, key=of_rates.__getitem__)
    return best


def rates_words(study: Studied) -> str:
    """Return the best rate of each arm at each width in a sentence, and those tried; "" for a study over other axes."""
    if not (best := best_rates(study)):
        return ""
    rates = study.evidence.index.axes[1].values
    said = []
    edge = dict.fromkeys((rates[0], rates[-1]), " (at the edge)")
    for arm, of_widths in best.items():
        places = [f"{rate} at width {width}{edge.get(rate, '')}" for width, rate in of_widths.items()]
        same = set(of_widths.values())
        said.append(f"{arm}: {f'{same.pop()} at every width' if len(same) == 1 < len(places) else ', '.join(places)}")
    tried = ", ".join(rates)
    explored = explored_words(study.evidence, *(arm.name for arm in study.evidence.others))
    seeds = ", one seed" if study.evidence.has_one_seed else ""
    return f"{'; '.join(said)}. Tried: {tried}; {explored}{seeds}."


def effect_words(row: Compared, figure: StudyFigure, places: int) -> str:
    """Return a difference with its interval, and in how many seeds it has that direction."""
    assert row.difference is not None
    mean, low, high = (
        fixed(one, places, "+") for one in (row.difference.mean, row.difference.low, row.difference.high)
    )
    unit = "" if figure.unit in ("", "share") else f" {figure.unit}"
    interval = f" [{low}, {high}]{' over items' if row.is_over_items else ''}" if low else ""
    return f"{mean}{unit}{interval}, {direction_words(row.difference.mean, row.same_direction, row.pairs)}"


def direction_words(mean: float, same: int, seeds: int) -> str:
    side = "above zero" if mean > 0 else "below zero" if mean < 0 else "equal"
    return f"{side} in {same} of {seeds} seeds"


def explored_words(evidence: Evidence, *arms: str) -> str:
    """Return that a result is one of exploration, and how the weights of the arms and the reference started."""
    starts = evidence.starts(*arms, evidence.index.reference)
    return f"explored{f' with the {starts[0]} start' if len(starts) == 1 else ''}, not confirmed"


def brief_explored(study: Studied) -> str:
    """Return the effect that a study which explores found on its first figure, in a few words, as its index shows it."""
    evidence, figure = study.evidence, study.evidence.index.figures[0]
    if study.scaling and study.scaling.needs:
        first = study.scaling.needs[0]  # of the first arm; its last need is at the largest setting
        need = [one for one in study.scaling.needs if (one.axis, one.arm) == (first.axis, first.arm)][-1]
        fits = len(next(trend.n for trend in study.scaling.trends if trend.axis is need.axis))
        return (
            f"{need.arm.label} needs {share_words(need.fit)} of {quantity(need.n)} {NEEDS[need.axis.name]} for "
            f"{evidence.reference.label}'s loss, by fits to {fits} settings; "
            f"{explored_words(evidence, need.arm.name).removesuffix(', not confirmed')}."
        )
    if best := best_rates(study):
        return brief_rates(best)
    main, reference = evidence.others[0], evidence.reference
    row = row_of(study.rows, figure.label, main.name, ())
    if row is None or row.difference is None or row.is_censored:
        missing = "no run has it" if is_nowhere(evidence, study.rows, figure) else "no pair of runs yet"
        return f"{title_of(figure)}: {missing}."
    if row.pairs < 2:
        return f"{title_of(figure)}: one seed, which tells nothing apart; see the page."
    effect = effect_words(row, figure, decimals(study.rows, figure))
    words = explored_words(evidence, main.name).removesuffix(", not confirmed")
    names = f"{title_of(figure)}: {main.label} minus {reference.label}"
    return shortest(
        [f"{names} {effect}; {words}.", f"{names} {effect}; explored.", f"{title_of(figure)}: {effect}; explored."]
    )


def brief_rates(best: Mapping[str, Mapping[str, str]]) -> str:
    """Return the best rates of arms at the first and the last width, arms with the same ones together."""
    arms: dict[str, list[str]] = {}
    for arm, rates in best.items():
        chosen = list(rates.values())
        words = chosen[0] if len(set(chosen)) == 1 else f"{chosen[0]} to {chosen[-1]}"
        arms.setdefault(words, []).append(arm)
    widths = list(next(iter(best.values())))
    said = "; ".join(f"{rates} ({'; '.join(names)})" for rates, names in arms.items())
    return f"Best rate, width {widths[0]} to {widths[-1]}: {said}; explored."


def shortest(texts: Sequence[str]) -> str:
    """Return the first text of at most `MOST_WORDS` words, or the last one."""
    return next((text for text in texts if len(text.split()) <= MOST_WORDS), texts[-1])


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


def decimals(rows: Sequence[Compared], figure: StudyFigure) -> int:
    mine = [row for row in rows if row.figure is figure]
    bounds = [(row.difference.low, row.difference.high) for row in mine if row.difference]
    halves = [(high - low) / 2 for low, high in bounds if low is not None and high is not None and high > low]
    return two_digits(median(halves)) if halves else decimals_for([row.statistic.mean for row in mine])


def two_digits(half_width: float) -> int:
    """Return the decimals at which an interval's half width has two digits, from 0 to 6."""
    return min(6, max(0, 1 - math.floor(math.log10(half_width))))


def progress_words(evidence: Evidence) -> str:
    index = evidence.index
    there = len(index.members)
    tuning = sum(member.is_tuning for member in index.members)
    words = f"{there} of {index.planned} planned runs" if there < index.planned else f"{there} runs"
    words += f", {tuning} of them to choose learning rates" if tuning else ""
    diverged = diverged_runs(evidence, evidence.points)
    return f"{words}, {len(diverged)} diverged ({'; '.join(diverged)})" if diverged else words


def diverged_runs(evidence: Evidence, points: Collection[Point]) -> list[str]:
    """Return in words which runs at some points diverged."""
    return [
        f"{arm.label}, seed {seed}, after step {run.diverged_after}"
        for arm, point, seed, run in evidence.every_run()
        if run.diverged_after is not None and point in points
    ]


ITEM_WORDS = (
    "One seed: no interval is over training. Brackets are 95 % intervals over evaluation items, which say how far other items "
    "might move a difference, and nothing of another training seed."
)


def interval_words(evidence: Evidence) -> str:
    if not evidence.index.plan and evidence.has_one_seed:
        return ITEM_WORDS
    words = "Brackets: 95 % Student t intervals over seeds, not corrected for the number of comparisons. "
    words += "Among many, some exclude zero (*) by chance; "
    confirm = "a study with a plan must confirm what they suggest."
    words += "only the contrasts of the plan are decided." if evidence.index.plan else confirm
    seeds = {len(runs) for runs in evidence.runs.values()}
    if seeds and min(seeds) < FEWEST_SEEDS:
        words += f" Intervals of fewer than {FEWEST_SEEDS} seeds are wide, and rest on an estimate of their own noise."
    return words


def edge_words(evidence: Evidence) -> str:
    """Return for which arms and settings the best learning rate is at the edge of those tried; empty if for none."""
    rates = evidence.index.rates
    places = [
        f"{evidence.arm(rate.arm).label}{at_words(evidence, rate.point)} ({rate.learning_rate:g})"
        for rate in rates
        if rate.is_at_edge
    ]
    if not places:
        return ""
    edges = f"{len(places)} of {len(rates)} chosen learning rates are at the edge of those tried"
    return f"{edges}, so that a better one may lie beyond: {'; '.join(places)}."


def at_words(evidence: Evidence, point: Mapping[str, str]) -> str:
    """Return the setting of a learning rate, by the axes along which there are several; empty if there is one setting."""
    words = [
        f"{axis.label or axis.name} {point[axis.name]}"
        for axis in evidence.index.axes
        if axis.name in point and len({rate.point.get(axis.name) for rate in evidence.index.rates}) > 1
    ]
    return f" at {', '.join(words)}" if words else ""


def changes_words(study: Studied) -> list[str]:
    changes = study.evidence.index.changes
    return [f"{date_words(change.when)}: {change.what}" for change in changes] or ["None known."]


def shared_words(study: Studied) -> str:
    if not study.shared:
        return ""
    words = [f"{count} {'run' if count == 1 else 'runs'} with {slug}" for slug, count in study.shared.items()]
    return f"Shares {' and '.join(words)}: on these the studies are not independent of each other."


def scaling_answers(evidence: Evidence, scaling: Scaling) -> list[Said]:
    """Return how many parameters and tokens each arm needs for the reference's loss at its largest setting."""
    said = []
    for axis, arm in dict.fromkeys((need.axis.name, need.arm.name) for need in scaling.needs):
        need = [need for need in scaling.needs if (need.axis.name, need.arm.name) == (axis, arm)][-1]
        what = NEEDS[axis]
        text = f"{need_words(need, scaling)}; {explored_words(evidence, arm)}."
        both = [
            one for one in scaling.trends if one.axis.name == axis and one.arm.name in (arm, scaling.reference.name)
        ]
        rising = [trend.arm.label for trend in both if (np.diff(trend.loss) > 0).any()]
        if rising:
            text += f" With more {what} the mean loss of {' and of '.join(rising)} rises at some step, as no power law does."
        said.append(Said(f"{what.capitalize()} for equal {scaling.figure.label}", text))
    return said


def need_words(need: Need, scaling: Scaling) -> str:
    return (
        f"{need.arm.label} needs {share_words(need.fit)} of the {quantity(need.n)} {NEEDS[need.axis.name]} of "
        f"{scaling.reference.label} for its {scaling.figure.label} by the fitted power laws, and {share_words(need.raw)} by "
        "interpolation"
    )


def share_words(amount: Amount) -> str:
    """Return a share with its interval, and whether it lies outside of what was measured."""
    words = f"{share_text(amount.share)} [{share_text(amount.low)}, {share_text(amount.high)}]"
    return f"{words} (outside the measured range)" if amount.outside else words
