"""Two models on the same items: the difference of each figure with an interval over items."""

from dataclasses import dataclass

from difftransformer.plots.curves import labels
from difftransformer.report.tables import Group, Table
from difftransformer.results import ItemScore, PairedDifference, TaskResult
from difftransformer.statistics import bootstrap_difference

_SEED = 0


@dataclass(frozen=True)
class Pair:
    """One figure of two models on the same items."""

    name: str
    items: int
    first: float
    second: float
    difference: PairedDifference


def pairs(first: TaskResult, second: TaskResult) -> list[Pair]:
    """Every figure that both models have items for; none where they were not asked the same (another tokenizer, say)."""
    if first.data.sha256 != second.data.sha256:
        return []
    found = []
    for name in dict.fromkeys(item.name for item in first.items):
        a, b = (_by_item(result, name) for result in (first, second))
        if a.keys() != b.keys():
            continue
        rows = [(a[item], b[item]) for item in a]
        found.append(
            Pair(
                name,
                len(rows),
                sum(x.score for x, _ in rows) / sum(x.weight for x, _ in rows),
                sum(y.score for _, y in rows) / sum(y.weight for _, y in rows),
                bootstrap_difference(
                    [x.score for x, _ in rows],
                    [y.score for _, y in rows],
                    [x.weight for x, _ in rows],
                    [y.weight for _, y in rows],
                    seed=_SEED,
                ),
            )
        )
    return found


def pairs_table(results: list[TaskResult]) -> Table | None:
    """The first model against each other one."""
    names = labels(results)
    rows = []
    for index, other in enumerate(results[1:], start=1):
        for pair in pairs(results[0], other):
            low, high = pair.difference.low, pair.difference.high
            interval = "" if low is None or high is None else f" [{low:+.4f}, {high:+.4f}]"
            rows.append(
                [
                    pair.name,
                    f"{names[0]} minus {names[index]}",
                    f"{pair.first:.4f}",
                    f"{pair.second:.4f}",
                    f"{pair.difference.mean:+.4f}{interval}",
                    str(pair.items),
                ]
            )
    if not rows:
        return None
    groups = (Group("figure", numeric=False), Group("models", numeric=False), Group("first"), Group("second"))
    notes = [
        "Intervals: paired bootstrap over items, 95 %. They say how far other items might move the difference, and nothing of "
        "another training seed."
    ]
    title = "The same items, paired"
    return Table(f"{results[0].task}_pairs", title, (*groups, Group("difference"), Group("items")), rows, notes)


def _by_item(result: TaskResult, name: str) -> dict[str, ItemScore]:
    return {item.item: item for item in result.items if item.name == name}
