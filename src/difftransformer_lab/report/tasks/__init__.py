"""The picture of a task, for one model or several side by side, and the same figures as a table.

The results that a function takes are of one task, one for each model. The task's own file draws its picture.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib

from difftransformer.files import write_atomically, write_text_atomically

from ...evals.tasks import registered_tasks
from ...plots.curves import labels
from ...plots.style import STYLE, Drawing, finish
from ...results import Measurement, TaskResult
from ...statistics import FEW_ITEMS
from ..tables import Group, Table, names
from ..words import measure_words

Key = tuple[str, tuple[tuple[str, object], ...]]
"""A measurement's name and places."""


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
    """Return a value and its uncertainty with the same decimals: those of one digit of the uncertainty."""
    if row.low is not None and row.high is not None:
        decimals = max(2, _decimals((row.high - row.low) / 2))
        return f"{row.value:.{decimals}f} [{row.low:.{decimals}f}, {row.high:.{decimals}f}]"
    if not row.standard_error:
        return f"{row.value:.4g}" + ("" if row.standard_error is None else " ± 0")
    decimals = _decimals(row.standard_error)
    return f"{row.value:.{decimals}f} ± {row.standard_error:.{decimals}f}"


def _decimals(uncertainty: float) -> int:
    """Return the decimals of the first significant digit of a number, once it is rounded; at least 0."""
    return max(0, -int(f"{uncertainty:.0e}".partition("e")[2]))
