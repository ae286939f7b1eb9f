"""Figures over the same items: every two models, and the settings of one model that its task contrasts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from ...evals.tasks import registered_tasks
from ...plots.curves import labels
from ...results import ItemScore, PairedDifference, TaskResult
from ...statistics import FEW_ITEMS, holm_differences, item_difference
from ..tables import Group, Table, columns, favoured, holm_note, names, p_text
from ..words import measure_words

_SEED = 0


@dataclass(frozen=True)
class Pair:
    """One figure of two models, or of one model under two settings, on the same items."""

    name: str
    compared: str
    items: int
    first: float
    second: float
    difference: PairedDifference


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
    """Build the table of a task's pairs, whose p-values are corrected; None without any."""
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
