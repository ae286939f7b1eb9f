"""One page for a suite: every experiment with its picture, its figures side by side, and paired differences."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from difftransformer.plots.style import inline_svg
from difftransformer.report.tasks import draw_task, measurement_table
from difftransformer.report.tasks.pairs import pairs_table
from difftransformer.results import TaskResult, write_text_atomically

TEMPLATE = "suite.html.j2"


def write_suite(
    name: str, found: Mapping[str, Sequence[TaskResult]], missing: Sequence[tuple[str, str, str]], folder: Path
) -> Path:
    """Write FOLDER/index.html, figures/*.svg and tables/*.csv; the page holds its style and figures itself.

    Args:
        name: Of the suite.
        found: Results by experiment, a model each.
        missing: Experiment, model and reason of what was not run.
        folder: Where the report goes.

    Returns:
        The path of the page.
    """
    sections = []
    for label, results in found.items():
        if not results:
            continue
        slug = label.replace(" ", "-")
        drawing = draw_task(results, name=slug)
        table, paired = measurement_table(results), pairs_table(list(results))
        tables = {"": table} | ({"_pairs": paired} if paired else {})
        if drawing is not None:
            write_text_atomically(folder / "figures" / f"{slug}.svg", drawing.svg)
        for suffix, one in tables.items():
            write_text_atomically(folder / "tables" / f"{slug}{suffix}.csv", one.csv())
        sections.append(
            {
                "label": label,
                "slug": slug,
                "title": drawing.title if drawing else label,
                "caption": drawing.caption if drawing else "",
                "svg": None if drawing is None else inline_svg(drawing),
                "brief": measurement_table(results, brief=True),
                "table": table,
                "paired": paired,
                "results": results,
            }
        )
    write_text_atomically(folder / "index.html", _render(name=name, sections=sections, missing=missing))
    return folder / "index.html"


def _render(**values: Any) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parents[1]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(TEMPLATE).render(**values)
