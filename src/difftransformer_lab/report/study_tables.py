"""The tables of a study."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from ..results import RunRecord, StudyArm, StudyFigure, figure_of
from ..statistics import paired_difference
from .answers import ITEM_WORDS, at_words, decimals, edge_words
from .comparisons import Compared, paired_seeds, row_of, timed_seeds
from .page import MOST_ROWS
from .reading import Evidence, Point
from .scaling import Amount, Scaling
from .tables import NOT_MEASURED, Group, Table, columns, fixed, names, significant
from .words import QUIET_SHARE, busy_words, day_words, quantity, share_text, with_unit

TRAINING, HELD_OUT = "train_loss_nats", "validation_loss_nats"
NOT_REACHED, DIVERGED = "not reached", "diverged"
MARK = "*"
"""Beside an interval that excludes zero, and beside the learning rate that was chosen."""


PAPER_NEEDS = {"size": "62 %", "tokens": "64 %"}
_UNCOMPARED = ("seed", "name")
"""Keys of a recipe that differ between runs without telling arms apart."""


def figures_tables(evidence: Evidence, rows: Sequence[Compared]) -> list[Table]:
    """Return every figure of every arm: in one table where there are few, else a table for each figure."""
    figures = [figure for figure in evidence.index.figures if any(row.figure is figure for row in rows)]
    if len(figures) * len(evidence.index.arms) <= 3 * MOST_ROWS and not evidence.has_settings:
        return [figures_table(evidence, rows, figures, "figures", "Every measure")] if figures else []
    every = ((one, f"measure-{one.slug}") for one in figures)  # a name that no other table of the page has
    return [figures_table(evidence, rows, [one], name, f"Every model: {one.label}") for one, name in every]


def figures_table(
    evidence: Evidence, rows: Sequence[Compared], figures: Sequence[StudyFigure], name: str, title: str
) -> Table:
    """Return a row for each figure, setting and arm: its mean, and its paired difference to the reference."""
    points: list[Point] = [(), *(evidence.points if evidence.has_settings else [])]
    reference = evidence.reference
    reached, papers = any(one.reaches is not None for one in figures), any(one.paper for one in figures)
    several = len(figures) > 1
    groups = [Group("measure", numeric=False)] if several else []
    groups += [Group("setting", numeric=False)] if evidence.has_settings else []
    groups += [Group("model", numeric=False), Group("seeds")]
    groups += [Group("mean" if several else with_unit("mean", figures[0]), ("mean", "standard error"), "mean")]
    groups += [
        Group(f"minus {reference.label}", ("mean", "low", "high", "excludes zero"), "marked"),
        Group("seeds in that direction", ("seeds", "of"), "of"),
    ]
    groups += [Group("runs that never got there", ("runs", "of"), "of")] if reached else []
    groups += [Group("paper", ("value", "difference"), "remark")] if papers else []
    cells = []
    for figure in figures:
        places, shown = decimals(rows, figure), with_unit(figure.label, figure)
        for point in points:
            for arm in evidence.index.arms:
                row = row_of(rows, figure.label, arm.name, point)
                if row is None:
                    continue
                line = [*([shown] if several else []), *([evidence.words(point)] if evidence.has_settings else [])]
                mean, error = row.statistic.mean, row.statistic.standard_error
                shown_mean = NOT_REACHED if row.reached == 0 else fixed(mean, places)
                line += [arm.label, str(len(row.values)), shown_mean, "" if row.reached == 0 else fixed(error, places)]
                line += _difference_cells(row, places, reference)
                line += [row.never, str(row.runs) if row.never else ""] if reached else []
                line += _paper_cells(figure, arm, reference) if papers else []
                cells.append(line)
    words = "Differences are taken seed by seed, on the same data; brackets: 95 % Student t interval, each for itself."
    over_seeds = f"\u00b1: one standard error over seeds. {words}"
    notes = [ITEM_WORDS if evidence.has_one_seed else over_seeds, mark_words(evidence)]
    if reached:
        last = "A run that does not reach the level counts with its last step"
        notes.append(f"{last}; where no run does, there is no mean.")
    sources = dict.fromkeys(figure.source or "the value as published" for figure in figures if figure.paper)
    notes += [f"Paper: {source}; in brackets minus that of {reference.label}." for source in sources]
    if evidence.has_settings:
        notes.append("Means over settings are of the seeds that were run at all of them.")
    return Table(name, title, tuple(groups), cells, notes)


def is_marked(row: Compared) -> bool:
    return row.excludes_zero and not row.is_censored


def mark_words(evidence: Evidence) -> str:
    return f"{MARK}: the 95 % interval of the difference to {evidence.reference.label} excludes zero (explored, not confirmed)."


def costs_table(evidence: Evidence) -> Table:
    """Return parameters and time of every arm, the ratio of times, and the held-out loss at equal time."""
    rows = []
    reference = evidence.reference
    has_equal = False
    for arm in evidence.index.arms:
        runs = [run for one, _, _, run in evidence.every_run() if one is arm]
        if not runs:
            continue
        ended = [run for run in runs if run.diverged_after is None]
        sizes = sorted({run.parameters for run in runs})
        cells = [arm.label, quantity(sizes[0]) if len(sizes) == 1 else f"{quantity(sizes[0])} to {quantity(sizes[-1])}"]
        cells.append(_ratio_text(evidence, arm, lambda run: run.parameters, paired_seeds).partition(" ")[0])
        cells.append(significant(1e3 * fmean(run.step_seconds for run in runs), 3))
        cells.append(_ratio_text(evidence, arm, lambda run: run.step_seconds, timed_seeds))
        cells.append(significant(fmean(run.train_seconds for run in ended) / 60, 3) if ended else DIVERGED)
        cells.append(_ratio_text(evidence, arm, lambda run: run.train_seconds, timed_seeds))
        cells.append(significant(math.fsum(run.total_seconds for run in runs) / 3600, 3))
        equal = equal_time_differences(evidence, arm)
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
        f"Ratios to {reference.label}, paired by seed. Times are of the machines in the list of runs, with other runs beside "
        "them; only runs of one kind of machine are compared, and none that diverged. Hours in all include evaluation."
    ]
    if has_equal:
        notes.append(
            "Held-out loss at equal time, in nats a token: both curves at the time when the faster run would have ended at "
            "its median time of a step, which leaves out pauses. The "
            "learning rate of the slower run was not yet at its end then, so this column is against the slower."
        )
    return Table("costs", "Parameters and time", groups, rows, notes)


def equal_time_differences(evidence: Evidence, arm: StudyArm) -> list[float]:
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

    return _by_seed(evidence, arm, timed_seeds, difference)


def measured_costs_table(evidence: Evidence) -> Table:
    """Return the cost of each model, with the ratio to the reference wherever both were measured."""
    costs = evidence.index.costs
    twin = next((row for row in costs if row.model == evidence.index.reference), None)
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
        row = [f"{title}, {unit}"]
        for cost in costs:
            value, against = getattr(cost, name), getattr(twin, name) if twin else None
            row.append(NOT_MEASURED if value is None else significant(value * scale))
            row.append(f"{value / against:.2f}" if value is not None and against and cost is not twin else "")
        rows.append(row)
    groups = [Group("cost", numeric=False), *(Group(cost.label, ("value", "ratio"), "ratio") for cost in costs)]
    notes = [f"Measured in turns in one process. In brackets: times the figure of {evidence.reference.label}."]
    if any(value == NOT_MEASURED for row in rows for value in row):
        notes.append("Parameters, and weights and KV, are by formula; what is not measured was not run here.")
    if (share := evidence.index.costs_foreign_cpu_share or 0.0) > QUIET_SHARE:
        notes.insert(0, busy_words(share))
    return Table("measured_costs", "Measured cost", tuple(groups), rows, notes)


def upcycling_table(study: Evidence, compared: Sequence[Compared]) -> Table:
    """Return a row for each arm: its new parameters, the drift of its logits, and each figure before and after training."""
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


def arms_table(evidence: Evidence) -> Table:
    """Return what each arm is, where its recipe differs from the others', its size, and its cost by formula."""
    recipes = {arm.name: _flat(run.recipe) for arm, _, _, run in reversed([*evidence.every_run()])}
    keys = sorted({key for recipe in recipes.values() for key in recipe})
    compared = [key for key in keys if key.rpartition(".")[2] not in _UNCOMPARED]
    differing = [key for key in compared if len({repr(recipe.get(key)) for recipe in recipes.values()}) > 1]
    sizes = {size.arm: size for size in evidence.index.sizes}
    has_about = any(arm.about for arm in evidence.index.arms)
    rows = []
    for arm in evidence.index.arms:
        recipe, size = recipes.get(arm.name), sizes.get(arm.name)
        own = [f"{key}: {recipe[key]}" for key in differing if recipe and recipe.get(key) is not None]
        row = [arm.label, *([arm.about] if has_about else []), "; ".join(own) if recipe else NOT_MEASURED]
        counts = (size.parameters, size.train_flops_per_token, size.kv_bytes_per_token) if size else ("", "", "")
        rows.append(row + ([f"{one:,}" if one else "" for one in counts] if sizes else []))
    groups = names("model", *(["what it is"] if has_about else []), "keys that differ")
    counted = ("parameters", "training FLOPs a token", "KV bytes a token") if sizes else ()
    notes = ["Every other key of the recipe is the same for all models."]
    return Table("arms", "Models", (*groups, *map(Group, counted)), rows, notes)


def rates_table(evidence: Evidence) -> Table | None:
    """Return the mean figure of every learning rate that was tried, the best one marked; None if none was."""
    index = evidence.index
    if not index.rates:
        return None
    every = sorted({rate for one in index.rates for rate, _ in one.tried})
    rows = []
    for one in index.rates:
        tried = dict(one.tried)
        setting = at_words(evidence, one.point).removeprefix(" at ")
        cells = [evidence.arm(one.arm).label, setting, f"{one.learning_rate:g}"]
        for rate in every:
            mean = significant(tried[rate]) or DIVERGED if rate in tried else ""
            cells += [mean, MARK if rate == one.learning_rate else ""]
        rows.append([*cells, "at the edge" if one.is_at_edge else ""])
    tried_groups = (Group(f"{rate:g}", ("mean", "best"), "marked_value") for rate in every)
    groups = (*names("model", "setting"), Group("chosen rate"), *tried_groups, *names("edge"))
    figure = index.figures[0]
    notes = [
        f"Mean {figure.label} over seeds of their own, which are in no comparison; {figure.better} is better. {MARK}: the rate "
        "that was chosen. An empty cell: not tried."
    ]
    if words := edge_words(evidence):
        notes.append(words)
    return Table("rates", "Learning rates", groups, rows, notes)


def runs_table(evidence: Evidence) -> Table:
    figures = evidence.index.figures
    rows = []
    for arm, point, seed, run in evidence.every_run():
        values = [figure_of(run, figure) for figure in figures]
        cells = [arm.label, *([evidence.words(point)] if evidence.has_settings else []), str(seed)]
        missing = NOT_MEASURED if run.diverged_after is None else DIVERGED
        cells += [missing if value is None else significant(value, 5) for value in values]
        commit = run.environment.commit[:12] or "not recorded"
        rows.append([*cells, significant(run.train_seconds / 60, 3), commit, evidence.files[arm.name, point, seed]])
    measures = (with_unit(figure.label, figure) for figure in figures)
    groups = (
        *names("model", *(["setting"] if evidence.has_settings else [])),
        *map(Group, ("seed", *measures, "minutes")),
        *names("commit", "file"),
    )
    return Table("runs", "Every run", groups, rows, [f"Files are relative to {evidence.path.parent.name}/."])


def machines_table(evidence: Evidence) -> Table:
    places: dict[str, list[str]] = {}
    for _, _, _, run in evidence.every_run():
        words = f"{run.environment.where}; torch {run.environment.torch}"
        places.setdefault(words, []).append(run.created)
    rows = [[words, str(len(dates)), day_words(dates)] for words, dates in places.items()]
    return Table("machines", "Machines", (*columns("machine and code", "runs"), *names("trained on")), rows)


def _difference_cells(row: Compared, places: int, reference: StudyArm) -> list[str]:
    """Return mean, low, high, mark, and the seeds of that direction; words where there is no difference."""
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


SeedsOf = Callable[[Evidence, str, str, Point], list[int]]


def _by_seed(
    evidence: Evidence, arm: StudyArm, seeds_of: SeedsOf, compare: Callable[[RunRecord, RunRecord], float | None]
) -> list[float]:
    """Return a comparison of an arm's run with the reference's for each seed, its mean where there are several settings."""
    by_seed: dict[int, list[float]] = {}
    reference = evidence.index.reference
    for point in evidence.points:
        for seed in seeds_of(evidence, arm.name, reference, point):
            value = compare(evidence.at(arm.name, point)[seed], evidence.at(reference, point)[seed])
            if value is not None:
                by_seed.setdefault(seed, []).append(value)
    return [fmean(values) for values in by_seed.values()]


def _ratio_text(evidence: Evidence, arm: StudyArm, quantity_of: Callable[[RunRecord], float], seeds_of: SeedsOf) -> str:
    """Return the geometric mean of ratios to the reference with its interval; empty for the reference itself."""
    logs = _by_seed(evidence, arm, seeds_of, lambda own, other: math.log(quantity_of(own) / quantity_of(other)))
    if arm is evidence.reference or not logs:
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
