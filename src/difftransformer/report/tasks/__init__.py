"""A picture for each task, of one model or of several side by side, and the same figures as a table.

A picture is one file with a function `draw(results)` and one line in `PICTURES`. Results are of one task, a model each.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path

import matplotlib

from difftransformer.plots.curves import labels
from difftransformer.plots.style import STYLE, Drawing, finish
from difftransformer.report.tables import Group, Table
from difftransformer.results import Measurement, TaskResult, write_text_atomically

PICTURES = {
    "allocation": "allocation",
    "maps": "maps",
    "outliers": "outliers",
    "quantized": "quantized",
    "hallucination": "hallucination",
    "icl": "icl",
    "math": "math",
    "needle": "needle",
    "order": "order",
    "perplexity": "perplexity",
    "recall": "recall",
}


def draw_task(results: Sequence[TaskResult], png: bool = False, *, name: str | None = None) -> Drawing | None:
    """The picture of a task, or None where a table says it all. The name is the task's unless one is given."""
    if (file := PICTURES.get(results[0].task)) is None:
        return None
    module = importlib.import_module(f".{file}", __package__)
    with matplotlib.rc_context(STYLE):
        title, caption, figure = module.draw(results)
        return finish(name or results[0].task, title, caption, figure, png)


def write_picture(results: Sequence[TaskResult], path: Path) -> Path | None:
    """Write the picture as SVG, and as PNG beside it; its path, or None where there is none."""
    drawing = draw_task(results, png=True)
    if drawing is None:
        return None
    write_text_atomically(path, drawing.svg)
    assert drawing.png is not None
    temporary = path.with_name(f".{path.stem}.png.tmp")
    temporary.write_bytes(drawing.png)
    temporary.replace(path.with_suffix(".png"))
    return path


def measurement_table(results: Sequence[TaskResult], *, brief: bool = False, seeds: int = 1) -> Table:
    """A row a figure, a column a model; value and standard error.

    Args:
        results: Of one task, a model each.
        brief: Whether details are left out.
        seeds: Training seeds that the results are pooled over.
    """
    keys: list[tuple[str, tuple[tuple[str, object], ...]]] = []
    cells: dict[tuple[int, object], Measurement] = {}
    for index, result in enumerate(results):
        for row in result.measurements:
            if brief and row.detail:
                continue
            key = (row.name, tuple(row.at.items()))
            if key not in keys:
                keys.append(key)
            cells[index, key] = row
    places = list(dict.fromkeys(name for _, at in keys for name, _ in at))
    groups = (
        Group("measure", numeric=False),
        *(Group(place.replace("_", " "), numeric=False) for place in places),
        *(Group(label) for label in labels(results)),
        Group("items"),
    )
    rows = []
    for key in keys:
        found = [cells.get((index, key)) for index in range(len(results))]
        first = next(cell for cell in found if cell is not None)
        at = dict(key[1])
        rows.append(
            [
                f"{first.name}, {first.unit}",
                *(_place(at.get(place)) for place in places),
                *("" if cell is None else _value(cell) for cell in found),
                " / ".join(dict.fromkeys(f"{cell.n:,}" for cell in found if cell is not None)),
            ]
        )
    note = "± is one standard error over items, brackets Wilson's interval of 95 %; neither tells of another training seed."
    if seeds > 1:
        note = (
            f"± is one standard error over {seeds} seeds. Brackets: Wilson's interval of 95 % of the answers of all seeds, as "
            "if they were independent."
        )
    return Table(results[0].task, f"{results[0].task}: {results[0].data.name}", groups, rows, [note])


def _place(value: object) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _value(row: Measurement) -> str:
    if row.low is not None and row.high is not None:
        return f"{row.value:.3g} [{row.low:.2f}, {row.high:.2f}]"
    error = "" if row.standard_error is None else f" ± {row.standard_error:.2g}"
    return f"{row.value:.4g}{error}"
