"""Results of tasks: the picture and the table of one task for some models, and paired differences over the same items.

Functions take the results of one task, one for each model. The task's own file draws its picture.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import combinations
from pathlib import Path
from typing import Literal

import matplotlib
import numpy as np

from difftransformer.files import write_atomically, write_text_atomically

from ..evals.tasks import registered_tasks
from ..plots import STYLE, Drawing, Pooled, finish, labels
from ..results import Grid, ItemScore, Measurement, PairedDifference, TaskResult
from ..statistics import FEW_ITEMS, holm_differences, item_difference, mean_and_standard_error, paired_difference
from ..table import Group, Table, columns, names, p_text

Key = tuple[str, tuple[tuple[str, object], ...]]
"""A measurement's name and places."""

_SEED = 0


_MEASURES = (
    (r"\bnll by position\b", "loss by position"),
    (r"\bnll of the answer\b", "loss of the whole answer"),
    (r"\bnll\b", "loss per token"),
    (r"^bits per byte\b", "loss per byte"),
)


@dataclass(frozen=True)
class Pair:
    """One figure of two models, or of one model under two settings, on the same items."""

    name: str
    compared: str
    items: int
    first: float
    second: float
    difference: PairedDifference


def draw_task(results: Sequence[TaskResult], png: bool = False, *, name: str | None = None) -> Drawing | None:
    """Draw the picture of a task; None where a table says it all. The drawing is named like the task unless `name` is given."""
    kind = registered_tasks().get(results[0].task)
    if kind is None or kind.draw is None:
        return None
    with matplotlib.rc_context(STYLE):
        return finish(name or results[0].task, *kind.draw(results), png)


def write_picture(results: Sequence[TaskResult], path: Path) -> Path | None:
    """Write a task's picture as SVG and as PNG beside it, and return its path; None where the task has no picture."""
    drawing = draw_task(results, png=True)
    if drawing is None:
        return None
    write_text_atomically(path, drawing.svg)
    assert drawing.png is not None
    write_atomically(path.with_suffix(".png"), drawing.png)
    return path


def measurement_table(results: Sequence[TaskResult], *, brief: bool = False, seeds: int = 1) -> Table:
    """Build a table with a row for each measurement and a column for each model: value and standard error.

    Args:
        brief: Whether to leave out measurements that are details.
        seeds: Training seeds that each result is pooled over.
    """
    keys: list[Key] = []
    cells: dict[tuple[int, object], Measurement] = {}
    for index, result in enumerate(results):
        for row in result.measurements:
            if brief and row.detail:
                continue
            key = (row.name, tuple(row.at.items()))
            if key not in keys:
                keys.append(key)
            cells[index, key] = row
    if brief:
        keys = [key for place, key in enumerate(keys) if not _is_told(key, keys[:place], cells, len(results))]
    places = list(dict.fromkeys(name for _, at in keys for name, _ in at))
    groups = (
        *names("measure", *(place.replace("_", " ") for place in places)),
        *map(Group, (*labels(results), "items")),
    )
    rows = []
    for key in keys:
        measured = [cells.get((index, key)) for index in range(len(results))]
        there = [cell for cell in measured if cell is not None]
        at = dict(key[1])
        rows.append(
            [
                f"{measure_words(there[0].name)}, {there[0].unit}",
                *(_place(at.get(place)) for place in places),
                *("" if cell is None else _value(cell) for cell in measured),
                " / ".join(dict.fromkeys(map(_count, there))),
            ]
        )
    return Table(results[0].task, f"Measured on {results[0].data.name}", groups, rows, _notes(cells.values(), seeds))


def measure_words(name: str) -> str:
    for pattern, words in _MEASURES:
        name = re.sub(pattern, words, name)
    return name


def pairs(first: TaskResult, second: TaskResult, compared: str = "") -> list[Pair]:
    """Every figure that both models have items for; none where they were not asked the same (another tokenizer, say)."""
    names = dict.fromkeys(item.name for item in first.items)
    return [pair for name in names if (pair := pair_of(first, second, name, compared)) is not None]


def pair_of(first: TaskResult, second: TaskResult, name: str, compared: str = "") -> Pair | None:
    """Return a figure that both models have the same items for; None if there are none."""
    if first.data.sha256 != second.data.sha256:
        return None
    return _pair(name, compared, _by_item(first, name), _by_item(second, name))


def task_pairs(results: Sequence[TaskResult]) -> list[Pair]:
    """Every two models, and within each model the figures that its task contrasts. Results are of one task."""
    named = list(zip(labels(results), results, strict=True))
    paired = [pair for (a, x), (b, y) in combinations(named, 2) for pair in pairs(x, y, f"{a} minus {b}")]
    kind = registered_tasks().get(results[0].task)
    if kind is None or kind.contrasts is None:
        return paired
    for label, result in named:
        for contrast in kind.contrasts(result):
            a, b = (_by_item(result, name) for name in (contrast.first, contrast.second))
            paired += filter(None, [_pair(contrast.figure, f"{label}: {contrast.settings}", a, b)])
    return paired


def corrected_pairs(by_task: Mapping[str, Sequence[Pair]]) -> dict[str, list[Pair]]:
    """Return the pairs of every task of a page, with p-values corrected for all comparisons of the page."""
    every = [(label, pair) for label, rows in by_task.items() for pair in rows]
    # A loss in two units is one comparison.
    about = [(label, pair.name.replace("bits per byte", "nll"), pair.compared) for label, pair in every]
    corrected = iter(holm_differences([pair.difference for _, pair in every], about))
    return {name: [replace(pair, difference=next(corrected)) for pair in rows] for name, rows in by_task.items()}


def pairs_table(label: str, rows: Sequence[Pair]) -> Table | None:
    """Build the table of a task's pairs with corrected p-values; None without pairs."""
    if not rows:
        return None
    words = {"first": "first higher", "second": "second higher", "undecided": "undecided", "unknown": "no interval"}
    cells = []
    for pair in rows:
        difference = pair.difference
        bounds = ["" if bound is None else f"{bound:+.4f}" for bound in (difference.low, difference.high)]
        values = [f"{pair.first:.4f}", f"{pair.second:.4f}", f"{difference.mean:+.4f}", *bounds]
        result = [p_text(difference.p_holm), words[favoured(difference)], str(pair.items)]
        cells.append([measure_words(pair.name), pair.compared, *values, *result])
    groups = (
        *names("figure", "compared"),
        *map(Group, ("first", "second")),
        Group("difference", ("mean", "low", "high"), "interval"),
        Group("p (Holm)"),
        *columns("result", "items"),
    )
    notes = [
        "Intervals of 95 % over the same items, each by itself: mid-p for right and wrong answers, else Student's t and the "
        "studentised bootstrap, whichever is wider. They say how far other items might move the difference, and nothing of "
        "another training seed.",
        holm_note(pair.difference for pair in rows),
    ]
    if any(pair.items < FEW_ITEMS for pair in rows):
        notes.append(f"Fewer than {FEW_ITEMS} items: the interval of strongly skewed scores is too short.")
    return Table(f"{label}_pairs", "The same items, paired", groups, cells, notes)


Outcome = Literal["first", "second", "undecided", "unknown"]


def favoured(difference: PairedDifference) -> Outcome:
    """Say which side is higher, if the interval and the p-value after Holm's correction tell them apart."""
    low, high, p = difference.low, difference.high, difference.p_holm
    if low is None or high is None:
        return "unknown"
    if low <= 0 <= high or (p is not None and p > 1 - difference.confidence):
        return "undecided"
    return "first" if low > 0 else "second"


def holm_note(differences: Iterable[PairedDifference]) -> str:
    """Explain, below a table, how its p-values are corrected for the comparisons of the page."""
    comparisons = max((one.comparisons or 0 for one in differences), default=0)
    if not comparisons:
        return "Undecided: the interval holds zero."
    number = "1 comparison" if comparisons == 1 else f"{comparisons} comparisons"
    return (
        f"p (Holm): p-value corrected for the {number} of this page; a loss in two units is one. "
        "Undecided: it is above 0.05, or the interval holds zero."
    )


def _is_told(key: Key, earlier: Sequence[Key], cells: Mapping[tuple[int, object], Measurement], models: int) -> bool:
    def measured(one: Key) -> list[tuple[float, int] | None]:
        rows = [cells.get((index, one)) for index in range(models)]
        return [None if row is None else (row.value, row.n) for row in rows]

    own = measured(key)
    wider = [other for other in earlier if other[0] == key[0] and set(other[1]) < set(key[1])]
    return None not in own and any(measured(other) == own for other in wider)


def _notes(rows: Iterable[Measurement], seeds: int) -> list[str]:
    if seeds > 1:
        return [
            f"± is one standard error over {seeds} seeds, brackets are Student's t intervals of 95 % over these seeds; where "
            "all seeds agree there are none."
        ]
    notes = [
        "± is one standard error over items, brackets are 95 % Wilson intervals; neither covers another training seed."
    ]
    uncertain = [row for row in rows if row.standard_error is not None]
    if any(row.units for row in uncertain):
        notes.append("'In N units': answers that share a document or an item are one unit, and errors are over units.")
    if any((row.units or row.n) < FEW_ITEMS for row in uncertain):
        notes.append(f"Errors and intervals over fewer than {FEW_ITEMS} items or units are rough.")
    return notes


def _place(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _count(row: Measurement) -> str:
    return f"{row.n:,}" + (f" in {row.units:,} units" if row.units else "")


def _value(row: Measurement) -> str:
    """Format a value with its uncertainty, rounded to one digit of the uncertainty."""
    if row.low is not None and row.high is not None:
        decimals = max(2, _decimals((row.high - row.low) / 2))
        return f"{row.value:.{decimals}f} [{row.low:.{decimals}f}, {row.high:.{decimals}f}]"
    if not row.standard_error:
        return f"{row.value:.4g}" + ("" if row.standard_error is None else " ± 0")
    decimals = _decimals(row.standard_error)
    return f"{row.value:.{decimals}f} ± {row.standard_error:.{decimals}f}"


def _decimals(uncertainty: float) -> int:
    """Return the number of decimals that shows the first significant digit, at least 0."""
    return max(0, -int(f"{uncertainty:.0e}".partition("e")[2]))


def _pair(name: str, compared: str, a: dict[str, ItemScore], b: dict[str, ItemScore]) -> Pair | None:
    if not a or a.keys() != b.keys():
        return None
    x, y = [a[item] for item in a], [b[item] for item in a]
    x_scores, y_scores = [one.score for one in x], [one.score for one in y]
    x_weights, y_weights = [one.weight for one in x], [one.weight for one in y]
    difference = item_difference(x_scores, y_scores, x_weights, y_weights, seed=_SEED)
    first, second = sum(x_scores) / sum(x_weights), sum(y_scores) / sum(y_weights)
    return Pair(name, compared, len(a), first, second, difference)


def _by_item(result: TaskResult, name: str) -> dict[str, ItemScore]:
    return {item.item: item for item in result.items if item.name == name}


def pooled(results: Sequence[TaskResult], label: str) -> Pooled:
    """Pool a model's results over seeds.

    Figures are means over seeds with their standard error over seeds, and shares of right answers have Student's t interval
    over seeds, as far as it lies inside [0, 1]; seeds that all agree give none. With one seed, errors and intervals are
    over items.
    """
    first, *others = results
    tables = [{(row.name, *row.at.items()): row for row in result.measurements} for result in results]
    keys = [key for key in tables[0] if all(key in table for table in tables)]
    grids = first.grids
    if others:
        every = [(grid, _same_grids(grid, others)) for grid in first.grids]
        means = [(grid, np.mean([grid.values, *same], axis=0)) for grid, same in every if same]
        grids = [replace(grid, values=mean.tolist()) for grid, mean in means]
    parts = {field.name: getattr(first, field.name) for field in fields(TaskResult)} | {
        "model": replace(first.model, name=label),
        "measurements": [_pooled([table[key] for table in tables]) for key in keys],
        "items": [],
        "grids": grids,
        "gaps": list(dict.fromkeys(gap for result in results for gap in result.gaps)),
    }
    return Pooled(**parts, seeds=list(results))


def _pooled(rows: Sequence[Measurement]) -> Measurement:
    if len(rows) == 1:
        return rows[0]
    values = [row.value for row in rows]
    statistic = mean_and_standard_error(values)
    whole = replace(rows[0], value=statistic.mean, standard_error=statistic.standard_error, units=None)
    if rows[0].low is None:
        return whole
    interval = paired_difference(values, [0.0] * len(values))
    whole = replace(whole, n=sum(row.n for row in rows), low=None, high=None)
    if not statistic.standard_error or interval.low is None or interval.high is None:
        return whole
    if whole.unit != "share":
        return replace(whole, low=interval.low, high=interval.high)
    return replace(whole, low=max(0.0, interval.low), high=min(1.0, interval.high))


def _same_grids(grid: Grid, others: Sequence[TaskResult]) -> list[list[list[float]]]:
    """Return the values of the same grid in other results; none where one lacks it or has another shape."""
    shape = list(map(len, grid.values))
    same = (other for result in others for other in result.grids if (other.name, other.at) == (grid.name, grid.at))
    values = [other.values for other in same if list(map(len, other.values)) == shape]
    return values if len(values) == len(others) and len(set(shape)) == 1 else []
