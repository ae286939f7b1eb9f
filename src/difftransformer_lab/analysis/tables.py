"""The tables of a study."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import fmean, median
from typing import Any

import numpy as np

from ..results import PairedDifference, RunRecord, StudyArm, StudyFigure, figure_of
from ..statistics import paired_difference
from ..table import (
    NOT_MEASURED,
    Group,
    Table,
    columns,
    date_words,
    decimals_for,
    fixed,
    names,
    p_text,
    quantity,
    significant,
    two_digits,
)
from .compare import Compared, paired_seeds, row_of, timed_seeds
from .contrasts import Finding
from .frame import Point, Records
from .scaling import Amount, Scaling
from .study import StudyAnalysis

TRAINING, HELD_OUT = "train_loss_nats", "validation_loss_nats"
NOT_REACHED, DIVERGED = "not reached", "diverged"
MARK = "*"
"""Beside an interval that excludes zero, and beside the learning rate that was chosen."""


PAPER_NEEDS = {"size": "62 %", "tokens": "64 %"}
_UNCOMPARED = ("seed", "name")
"""Keys of a recipe that differ between runs without telling arms apart."""


MOST_ROWS = 12
"""Of a table that a page shows unfolded."""
QUIET_SHARE = 0.03
"""Share of the CPU time for other processes above which times come with a warning."""

RULES = (
    "Contrasts of a question are tested in this order, each at 0.05, up to the first that is not decided. Brackets: the 95 % "
    "interval of the test. Above and below: the interval lies on that side of zero, or of the margin. Within: it lies inside "
    "of \u00b1 the smallest effect that matters. Open: none of these."
)
HOLM = (
    "p of {count} contrasts is corrected by Holm's rule, where those without all seeds count as 1; they wait for no other one. "
    "Brackets are not corrected."
)
TOKENS = (
    "In tokens: the change of the tokens with which the reference has the same loss, with Fieller's interval; at equal time "
    "with the measured times of a step."
)
OVER_SEEDS = (
    "\u00b1: one standard error over seeds. Brackets: 95 % Student t interval of the paired difference, each for itself. *: it "
    "excludes zero, as some do by chance among many. Explored, not decided."
)
OVER_ITEMS = (
    "One training run each. Brackets: 95 % interval over evaluation items, which says nothing of another training seed. *: it "
    "excludes zero."
)
LAST_STEP = "A run that does not reach the level counts with its last step."
EQUAL_TIME = (
    "At equal time: both curves where the faster run would have ended at its median time of a step. The learning rate of the "
    "slower run was not yet at its end then, so this column is against the slower."
)
BUSY = "Other processes took a share of this machine meanwhile; repeat it when it is idle."


def findings_table(study: StudyAnalysis) -> Table:
    """List the contrasts of the plan with test and state, in the plan's order."""
    rows = []
    for question, findings in study.questions:
        for place, one in enumerate(findings):
            cells = [question.question if place == 0 else "", one.contrast.name, one.contrast.figure, one.unit]
            cells += [str(one.seeds), str(one.contrast.seeds), *effect_cells(one)]
            cells.append(str(one.same_direction) if one.difference else "")
            cells += [one.difference.interval_method.partition(" over")[0] if one.difference else "", p_text(one.p)]
            beside = one.beside
            places = _places(one)
            cells += (
                [p_text(beside.p_value), *(fixed(end, places, "+") for end in (beside.low, beside.high))]
                if beside
                else [""] * 3
            )
            if study.worths:
                found = study.worths.get(one.contrast.name)
                for difference in (found.tokens, found.time) if found else (None, None):
                    cells += tokens_cells(difference)
            rows.append([*cells, one.state, one.meaning])
    in_tokens = ("in tokens", "in tokens at equal time") if study.worths else ()
    groups = (
        *names("question", "contrast"),
        Group("figure", ("label", "unit"), "remark", numeric=False),
        Group("seeds", ("there", "planned"), "of"),
        Group("effect", ("mean", "low", "high"), "interval"),
        Group("seeds on that side"),
        *names("test"),
        Group("p"),
        Group("Student's t beside", ("p", "low", "high"), "interval", numeric=False),
        *(Group(title, ("mean", "low", "high"), "interval") for title in in_tokens),
        *names("state", "meaning"),
    )
    plan = study.records.index.plan
    together = [HOLM.format(count=len(plan.plan.holm))] if plan and plan.plan.holm else []
    return Table(
        "findings", "Contrasts of the plan", groups, rows, [RULES, *together, *([TOKENS] if study.worths else [])]
    )


def brief_table(study: StudyAnalysis) -> Table:
    """Show the contrasts of a plan, or every arm by every primary figure, in a few columns."""
    if study.findings:
        rows = [[one.contrast.name, effect_text(one), one.state] for one in study.findings]
        return Table("brief", study.records.index.question, names("contrast", "effect [95 %]", "state"), rows)
    rows = []
    for row in (one for one in study.rows if not one.point and not one.figure.secondary):
        places, change = decimals(study.rows, row.figure), row.difference
        values = [fixed(row.statistic.mean, places), fixed(row.statistic.standard_error, places)]
        cells = [fixed(one, places, "+") for one in (change.mean, change.low, change.high)] if change else [""] * 3
        rows.append([with_unit(row.figure.label, row.figure), row.arm.label, *values, *cells])
    groups = (
        *names("measure", "model"),
        Group("mean", ("mean", "standard error"), "mean"),
        Group(f"minus {study.records.reference.label}", ("mean", "low", "high"), "interval"),
    )
    return Table("brief", study.records.index.question, groups, rows)


def effect_cells(finding: Finding) -> list[str]:
    """Return the effect and its interval; empty while seeds are missing."""
    if finding.effect is None:
        return ["", "", ""]
    return [fixed(one, _places(finding), "+") for one in (finding.effect, finding.low, finding.high)]


def _places(finding: Finding) -> int:
    """Return the decimals of an effect: two digits of the interval's half width."""
    low, high = finding.low, finding.high
    if low is None or high is None or high == low:
        return decimals_for([finding.effect or 0.0])
    return two_digits((high - low) / 2)


def effect_text(finding: Finding) -> str:
    """Return the effect with its unit and interval, such as "-0.027 nats/token [-0.035, -0.019]"."""
    mean, low, high = effect_cells(finding)
    return f"{mean}{f' {finding.unit}' if finding.unit else ''}{f' [{low}, {high}]' if low else ''}"


def tokens_cells(difference: PairedDifference | None) -> list[str]:
    """Return a difference in doublings as a change of the tokens in percent, with its interval; empty for None."""
    if difference is None:
        return ["", "", ""]
    bounds = (difference.mean, difference.low, difference.high)
    mean, low, high = ("" if one is None else f"{100 * math.expm1(one * math.log(2)):+.1f}" for one in bounds)
    return [f"{mean} %", low, high]


def figures_tables(records: Records, rows: Sequence[Compared]) -> list[Table]:
    """Show every figure of every arm, in one table if they are few, else in a table for each figure."""
    figures = [figure for figure in records.index.figures if any(row.figure is figure for row in rows)]
    if len(figures) * len(records.index.arms) <= 3 * MOST_ROWS and not records.has_settings:
        return [figures_table(records, rows, figures, "figures", "Every measure")] if figures else []
    every = ((one, f"measure-{one.slug}") for one in figures)  # a name that no other table of the page has
    return [figures_table(records, rows, [one], name, title_of(one)) for one, name in every]


def figures_table(
    records: Records, rows: Sequence[Compared], figures: Sequence[StudyFigure], name: str, title: str
) -> Table:
    """Show the mean of each figure, setting and arm, and its paired difference to the reference."""
    points: list[Point] = [(), *(records.points if records.has_settings else [])]
    reached, papers = any(one.reaches is not None for one in figures), any(one.paper for one in figures)
    several, axes = len(figures) > 1, records.has_settings
    groups = (
        *names(*(["measure"] if several else []), *(["setting"] if axes else []), "model"),
        Group("seeds"),
        Group("mean" if several else with_unit("mean", figures[0]), ("mean", "standard error"), "mean"),
        Group(f"minus {records.reference.label}", ("mean", "low", "high", "excludes zero"), "marked"),
        Group("seeds on that side", ("seeds", "of"), "of"),
        *([Group("runs that never got there", ("runs", "of"), "of")] if reached else []),
        *([Group("paper", ("value", "difference"), "remark")] if papers else []),
    )
    cells = []
    for figure, point, arm in product(figures, points, records.index.arms):
        row = row_of(rows, figure.label, arm.name, point)
        if row is None:
            continue
        places, mean, error = decimals(rows, figure), row.statistic.mean, row.statistic.standard_error
        line = [*([with_unit(figure.label, figure)] if several else []), *([records.words(point)] if axes else [])]
        line += [arm.label, str(len(row.values))]
        line += [NOT_REACHED, ""] if row.reached == 0 else [fixed(mean, places), fixed(error, places)]
        line += _difference_cells(row, places, records.reference)
        line += [row.never, str(row.runs) if row.never else ""] if reached else []
        line += _paper_cells(figure, arm, records.reference) if papers else []
        cells.append(line)
    notes = [OVER_ITEMS if records.has_one_seed else OVER_SEEDS, *([LAST_STEP] if reached else [])]
    sources = dict.fromkeys(figure.source for figure in figures if figure.paper and figure.source)
    return Table(name, title, groups, cells, [*notes, *(f"Paper: {source}." for source in sources)])


def is_marked(row: Compared) -> bool:
    return row.excludes_zero and not row.is_censored


def decimals(rows: Sequence[Compared], figure: StudyFigure) -> int:
    """Return the decimals of a figure: two digits of the median half width of its intervals."""
    mine = [row for row in rows if row.figure is figure]
    bounds = [(row.difference.low, row.difference.high) for row in mine if row.difference]
    halves = [(high - low) / 2 for low, high in bounds if low is not None and high is not None and high > low]
    return two_digits(median(halves)) if halves else decimals_for([row.statistic.mean for row in mine])


def title_of(figure: StudyFigure) -> str:
    return figure.label[:1].upper() + figure.label[1:]


def with_unit(title: str, figure: StudyFigure) -> str:
    """Return a title with a figure's unit; a share, from 0 to 1, has none."""
    return title if figure.unit in ("", "share") else f"{title} ({figure.unit})"


def costs_table(records: Records) -> Table:
    """Show parameters and times of every arm, their ratios, and the held-out loss at equal time."""
    rows = []
    reference = records.reference
    has_equal = False
    for arm in records.index.arms:
        runs = [run for one, _, _, run in records.every_run() if one is arm]
        if not runs:
            continue
        ended = [run for run in runs if run.diverged_after is None]
        sizes = sorted({run.parameters for run in runs})
        cells = [arm.label, quantity(sizes[0]) if len(sizes) == 1 else f"{quantity(sizes[0])} to {quantity(sizes[-1])}"]
        cells.append(_ratio_text(records, arm, lambda run: run.parameters, paired_seeds).partition(" ")[0])
        cells.append(significant(1e3 * fmean(run.step_seconds for run in runs), 3))
        cells.append(_ratio_text(records, arm, lambda run: run.step_seconds, timed_seeds))
        cells.append(significant(fmean(run.train_seconds for run in ended) / 60, 3) if ended else DIVERGED)
        cells.append(_ratio_text(records, arm, lambda run: run.train_seconds, timed_seeds))
        cells.append(significant(math.fsum(run.total_seconds for run in runs) / 3600, 3))
        equal = equal_time_differences(records, arm)
        has_equal |= bool(equal)
        difference = paired_difference(equal, [0.0] * len(equal)) if equal and arm is not reference else None
        bounds = (difference.mean, difference.low, difference.high) if difference else (None, None, None)
        rows.append([*cells, *(fixed(bound, 4, "+") for bound in bounds)])
    titles = (
        "model",
        "parameters",
        "ratio",
        "ms a step",
        "ratio [95 %]",
        "minutes a run",
        "ratio [95 %]",
        "hours in all",
    )
    equal_title = f"held-out loss at equal time, minus {reference.label}"
    groups = (*columns(*titles), Group(equal_title, ("mean", "low", "high"), "interval"))
    notes = [
        "Ratios to the reference, paired by seed; of times, where both runs began within an hour on one kind of machine. "
        "Hours in all include evaluation."
    ]
    notes += [EQUAL_TIME] if has_equal else []
    return Table("costs", "Parameters and time", groups, rows, notes)


def equal_time_differences(records: Records, arm: StudyArm) -> list[float]:
    """Return an arm's held-out loss minus the reference's at the time when the faster of both would have ended, by seed.

    Every step takes a run's median time. A seed with several settings counts with their mean.
    """

    def difference(*runs: RunRecord) -> float | None:
        pair = [(run.step_seconds, run.curves.get(HELD_OUT)) for run in runs]
        curves = [(seconds, curve) for seconds, curve in pair if curve is not None and curve.steps]
        if len(curves) < 2:
            return None
        ended = min(seconds * curve.steps[-1] for seconds, curve in curves)
        own, other = (float(np.interp(ended / seconds, curve.steps, curve.values)) for seconds, curve in curves)
        return own - other

    return _by_seed(records, arm, timed_seeds, difference)


def measured_costs_table(records: Records) -> Table:
    """Show the cost of each model, with the ratio to the reference if both were measured."""
    costs = records.index.costs
    twin = next((row for row in costs if row.model == records.index.reference), None)
    memory = ("peak_training_bytes", "weights_and_kv_bytes_4k", "weights_and_kv_bytes_64k")
    largest = max((getattr(row, name) or 0 for row in costs for name in memory), default=0)
    size = ("GiB", 2.0**-30) if largest >= 10 * 2**30 else ("MiB", 2.0**-20)  # one for all, so that columns compare
    lines = [
        ("parameters", "parameters", "M", 1e-6),
        ("training step", "train_step_seconds", "ms", 1e3),
        ("reading a prompt (prefill)", "prefill_tokens_per_second", "tokens/s", 1.0),
        ("writing (decode)", "decode_tokens_per_second", "tokens/s", 1.0),
        ("training peak memory", "peak_training_bytes", *size),
        ("weights and KV at 4k tokens", "weights_and_kv_bytes_4k", *size),
        ("weights and KV at 64k tokens", "weights_and_kv_bytes_64k", *size),
    ]
    rows = []
    for title, name, unit, scale in lines:
        if all(getattr(cost, name) is None for cost in costs):
            continue
        row = [f"{title}, {unit}"]
        for cost in costs:
            value, against = getattr(cost, name), getattr(twin, name) if twin else None
            row.append(NOT_MEASURED if value is None else significant(value * scale))
            row.append(f"{value / against:.2f}" if value is not None and against and cost is not twin else "")
        rows.append(row)
    groups = [Group("cost", numeric=False), *(Group(cost.label, ("value", "ratio"), "ratio") for cost in costs)]
    notes = ["Measured in turns in one process. In brackets: times the figure of the reference."]
    if any(value == NOT_MEASURED for row in rows for value in row):
        notes.append("Parameters, and weights and KV, are by formula; what is not measured was not run here.")
    if (records.index.costs_foreign_cpu_share or 0.0) > QUIET_SHARE:
        notes.insert(0, BUSY)
    return Table("measured_costs", "Measured cost", tuple(groups), rows, notes)


def upcycling_table(study: Records, compared: Sequence[Compared]) -> Table:
    """Show each arm's new parameters, the drift of its logits, and its figures before and after training."""
    upcycling = study.index.upcycling
    assert upcycling is not None
    parameters = {size.arm: size.parameters for size in study.index.sizes}
    before = {(one.task, one.name, repr(one.at)): one.value for one in upcycling.before}
    keys = [(figure, (figure.task, figure.name, repr(figure.at))) for figure in study.index.figures]
    told = [(figure, before[key]) for figure, key in keys if key in before and figure.unit != "bits/byte"]
    titles = ("model", "parameters", "added", "largest logit difference at the start", "same greedy tokens")
    groups = columns(*titles, *(f"{figure.label} before and after" for figure, _ in told), "seconds a step")
    rows = []
    for arm in study.index.arms:
        drift, plain = upcycling.drift[arm.name], parameters[study.index.reference]
        after = [row_of(compared, figure.label, arm.name, ()) for figure, _ in told]
        runs = [run for one, _, _, run in study.every_run() if one is arm]
        steps = [run.train_seconds / run.curves[TRAINING].steps[-1] for run in runs]
        cells = [arm.label, f"{parameters[arm.name]:,}", f"{(parameters[arm.name] - plain) / plain:.1%}"]
        cells += [f"{drift.largest_logit_difference:.1e}", f"{drift.greedy_same_tokens} of {drift.greedy_tokens}"]
        for (_, value), row in zip(told, after, strict=True):
            cells.append(f"{fixed(value, 4)}, {fixed(row.statistic.mean, 4) if row else NOT_MEASURED}")
        rows.append([*cells, f"{fmean(steps):.1f}" if steps else NOT_MEASURED])
    tokens = upcycling.drift[study.index.reference].tokens
    trained = max((run.train_tokens for _, _, _, run in study.every_run()), default=0)
    title = f"{upcycling.source} trained on for {trained:,} tokens"
    return Table("upcycling", title, groups, rows, [f"Logits on {tokens} tokens, fp32."])


def needs_table(scaling: Scaling) -> Table:
    rows = []
    for need in scaling.needs:
        paper = PAPER_NEEDS[need.axis.name] if need.arm.name == "diff" else ""
        head = [need.arm.label, need.axis.name, quantity(need.n)]
        rows.append([*head, *_amount_cells(need.fit), *_amount_cells(need.raw), paper])
    groups = (
        *names("model", "axis"),
        Group("reference has"),
        Group("arm needs, by fit", ("share", "low", "high", "range"), "ranged"),
        Group("arm needs, by interpolation", ("share", "low", "high", "range"), "ranged"),
        Group("paper"),
    )
    notes = [
        "Share of the reference's parameters (size, at the most tokens) or training tokens (tokens, at the largest size) with "
        "which the arm has the reference's loss. 95 % bootstrap intervals over seeds. Where the loss lies outside of what the "
        "arm was measured at, the fit is extrapolated and interpolation has no number: below or above range. Paper: section "
        "3.2, of fits to one run a size."
    ]
    return Table("needs", "How much less is needed", groups, rows, notes)


def laws_table(scaling: Scaling) -> Table:
    rows = []
    for trend in scaling.trends:
        law, residual = trend.law, np.abs(trend.law.at(trend.n)[0] - trend.loss).max()
        sizes = ", ".join(quantity(n) for n in trend.n)
        cells = [trend.arm.label, trend.axis.name, sizes, significant(float(law.a[0]))]
        cells += [significant(float(b), 3) for b in (law.b[0], *trend.exponents)]
        rows.append([*cells, significant(float(law.c[0])), significant(float(residual), 2)])
    groups = (
        *names("model", "axis", "measured at"),
        Group("a"),
        Group("b", ("b", "low", "high"), "interval"),
        Group("c"),
        Group("largest residual"),
    )
    notes = [
        "L = a N^-b + c by least squares, N in parameters or tokens. A law through three settings has no residual to judge by."
    ]
    return Table("laws", "Power laws", groups, rows, notes)


def arms_table(records: Records) -> Table:
    """Describe each arm: what it is, the keys of its recipe that differ, its size, and its cost by formula."""
    recipes = {arm.name: _flat(run.recipe) for arm, _, _, run in reversed([*records.every_run()])}
    keys = sorted({key for recipe in recipes.values() for key in recipe})
    compared = [key for key in keys if key.rpartition(".")[2] not in _UNCOMPARED]
    differing = [key for key in compared if len({repr(recipe.get(key)) for recipe in recipes.values()}) > 1]
    sizes = {size.arm: size for size in records.index.sizes}
    has_about = any(arm.about for arm in records.index.arms)
    rows = []
    for arm in records.index.arms:
        recipe, size = recipes.get(arm.name), sizes.get(arm.name)
        own = [f"{key}: {recipe[key]}" for key in differing if recipe and recipe.get(key) is not None]
        row = [arm.label, *([arm.about] if has_about else []), "; ".join(own) if recipe else NOT_MEASURED]
        counts = (size.parameters, size.train_flops_per_token, size.kv_bytes_per_token) if size else ("", "", "")
        rows.append(row + ([f"{one:,}" if one else "" for one in counts] if sizes else []))
    groups = names("model", *(["what it is"] if has_about else []), "keys that differ")
    counted = ("parameters", "training FLOPs a token", "KV bytes a token") if sizes else ()
    notes = ["Every other key of the recipe is the same for all models."]
    return Table("arms", "Models", (*groups, *map(Group, counted)), rows, notes)


def rates_table(records: Records) -> Table:
    """Show the mean figure at every learning rate, the best one marked."""
    index = records.index
    every = sorted({rate for one in index.rates for rate, _ in one.tried})
    rows = []
    for one in index.rates:
        tried = dict(one.tried)
        setting = _at_words(records, one.point).removeprefix(" at ")
        cells = [records.arm(one.arm).label, setting, f"{one.learning_rate:g}", "at the edge" if one.is_at_edge else ""]
        for rate in every:
            mean = significant(tried[rate]) or DIVERGED if rate in tried else ""
            cells += [mean, MARK if rate == one.learning_rate else ""]
        rows.append(cells)
    tried_groups = (Group(f"{rate:g}", ("mean", "best"), "marked_value") for rate in every)
    model = Group("model", ("", "setting"), "remark", numeric=False)
    chosen = Group("chosen rate", ("rate", "edge"), "remark")
    groups = (model, chosen, *tried_groups)
    notes = [
        "Mean of the study's first figure over seeds of their own, which are in no comparison. *: the rate that was chosen. At "
        "the edge: a better rate may lie beyond. An empty cell: not tried."
    ]
    return Table("rates", "Learning rates", groups, rows, notes)


def _at_words(records: Records, point: Mapping[str, str]) -> str:
    """Name the setting of a learning rate by the axes with several; empty if there is one setting."""
    words = [
        f"{axis.label or axis.name} {point[axis.name]}"
        for axis in records.index.axes
        if axis.name in point and len({rate.point.get(axis.name) for rate in records.index.rates}) > 1
    ]
    return f" at {', '.join(words)}" if words else ""


def runs_table(records: Records) -> Table:
    figures = records.index.figures
    rows = []
    for arm, point, seed, run in records.every_run():
        values = [figure_of(run, figure) for figure in figures]
        cells = [arm.label, *([records.words(point)] if records.has_settings else []), str(seed)]
        missing = NOT_MEASURED if run.diverged_after is None else f"{DIVERGED} after step {run.diverged_after}"
        cells += [missing if value is None else significant(value, 5) for value in values]
        commit = run.environment.commit[:12] or "not recorded"
        rows.append([*cells, significant(run.train_seconds / 60, 3), commit, records.files[arm.name, point, seed]])
    measures = (with_unit(figure.label, figure) for figure in figures)
    groups = (
        *names("model", *(["setting"] if records.has_settings else [])),
        *map(Group, ("seed", *measures, "minutes")),
        *names("commit", "file"),
    )
    return Table("runs", "Every run", groups, rows, [f"Files are relative to {records.path.parent.name}/."])


def machines_table(records: Records) -> Table:
    places: dict[str, list[str]] = {}
    for _, _, _, run in records.every_run():
        words = f"{run.environment.where}; torch {run.environment.torch}"
        places.setdefault(words, []).append(run.created)
    rows = []
    for words, dates in places.items():
        days = [date_words(pick(dates)[:10]) for pick in (min, max)]
        rows.append([words, str(len(dates)), " to ".join(dict.fromkeys(days))])
    return Table("machines", "Machines", (*columns("machine and code", "runs"), *names("trained on")), rows)


def _difference_cells(row: Compared, places: int, reference: StudyArm) -> list[str]:
    """Fill mean, low, high, mark and seeds; words if there is no difference."""
    difference = row.difference
    if difference is None:
        return ["reference" if row.arm.name == reference.name else "not paired", "", "", "", "", ""]
    if row.is_censored:
        return [NOT_REACHED, "", "", "", "", ""]
    cells = [fixed(value, places, "+") for value in (difference.mean, difference.low, difference.high)]
    return [*cells, MARK if is_marked(row) else "", str(row.same_direction), str(row.pairs)]


def _paper_cells(figure: StudyFigure, arm: StudyArm, reference: StudyArm) -> list[str]:
    value, other = figure.paper.get(arm.name), figure.paper.get(reference.name)
    if value is None:
        return ["", ""]
    places = max(len(f"{number:.6g}".partition(".")[2]) for number in figure.paper.values())
    difference = "" if other is None or arm.name == reference.name else fixed(value - other, places, "+")
    return [fixed(value, places), difference]


SeedsOf = Callable[[Records, str, str, Point], list[int]]


def _by_seed(
    records: Records, arm: StudyArm, seeds_of: SeedsOf, compare: Callable[[RunRecord, RunRecord], float | None]
) -> list[float]:
    """Compare an arm's run with the reference's for each seed, with the mean over settings."""
    by_seed: dict[int, list[float]] = {}
    reference = records.index.reference
    for point in records.points:
        for seed in seeds_of(records, arm.name, reference, point):
            value = compare(records.at(arm.name, point)[seed], records.at(reference, point)[seed])
            if value is not None:
                by_seed.setdefault(seed, []).append(value)
    return [fmean(values) for values in by_seed.values()]


def _ratio_text(records: Records, arm: StudyArm, quantity_of: Callable[[RunRecord], float], seeds_of: SeedsOf) -> str:
    """Format the geometric mean of ratios to the reference; empty for the reference itself."""
    logs = _by_seed(records, arm, seeds_of, lambda own, other: math.log(quantity_of(own) / quantity_of(other)))
    if arm is records.reference or not logs:
        return ""
    ratio = paired_difference(logs, [0.0] * len(logs))
    text = f"{math.exp(ratio.mean):.2f}"
    if ratio.low is None or ratio.high is None:
        return text
    return f"{text} [{math.exp(ratio.low):.2f}, {math.exp(ratio.high):.2f}]"


def _amount_cells(amount: Amount) -> list[str]:
    cells = [share_text(value) for value in (amount.share, amount.low, amount.high)]
    if len(set(cells)) == 1 and amount.outside:
        return [cells[0], "", "", ""]
    return [*cells, "outside the range" if amount.outside else ""]


def _flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in recipe.items():
        plain = value if isinstance(value, str) else json.dumps(value)
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": plain}
    return flat


def share_text(value: float) -> str:
    """Return a share in percent; below and above what was measured it has no number."""
    if value == 0:
        return "below range"
    if value > 99 or math.isnan(value):
        return "above range"
    return f"{fixed(100 * value, 0)} %"
