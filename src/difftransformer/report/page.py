"""The HTML report: one self-contained page, with its figures and tables beside it as SVG, PNG and CSV files."""

import json
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from difftransformer.plots.style import Drawing, inline_svg
from difftransformer.report import tables
from difftransformer.report.figures import FIGURE_NAMES, draw_all
from difftransformer.report.verdict import verdicts
from difftransformer.results import Comparison, write_text_atomically

TEMPLATE = "template.html.j2"


def write_report(comparison: Comparison, folder: Path | str, png: bool = False) -> Path:
    """Write `folder/index.html`, `folder/figures/*.svg` and `folder/tables/*.csv`.

    The page needs nothing beside itself: style and figures are inside it, and it has no scripts and no addresses. The
    same results give the same bytes. `index.html` is written last, each file whole or not at all.

    Args:
        comparison: what `compare` measured.
        folder: where the report goes; made if it is missing.
        png: whether to write `figures/*.png` as well.

    Returns:
        The path of `index.html`.

    Raises:
        ResultsError: curves that contradict themselves.
    """
    folder = Path(folder)
    drawings = draw_all(comparison, png)
    found = build_tables(comparison)
    page = render_page(comparison, drawings, found)
    _remove_earlier(folder)
    for drawing in drawings:
        write_text_atomically(folder / "figures" / f"{drawing.name}.svg", drawing.svg)
        if drawing.png is not None:
            temporary = folder / "figures" / f".{drawing.name}.png.tmp"
            temporary.write_bytes(drawing.png)
            temporary.replace(folder / "figures" / f"{drawing.name}.png")
    for table in found.values():
        write_text_atomically(folder / "tables" / f"{table.name}.csv", table.csv())
    write_text_atomically(folder / "index.html", page)
    return folder / "index.html"


def _remove_earlier(folder: Path) -> None:
    """Remove the figures and tables of an earlier report here, so that none outlives the page that it belonged to."""
    for name in FIGURE_NAMES:
        for suffix in ("svg", "png"):
            (folder / "figures" / f"{name}.{suffix}").unlink(missing_ok=True)
    for name in tables.TABLE_NAMES:
        (folder / "tables" / f"{name}.csv").unlink(missing_ok=True)


def build_tables(comparison: Comparison) -> dict[str, tables.Table]:
    """Every table that the results have data for, by name."""
    built = (
        tables.metrics_table(comparison),
        tables.cost_table(comparison),
        tables.models_table(comparison),
        tables.seeds_table(comparison),
        tables.needle_table(comparison, by_depth=False),
        tables.needle_table(comparison, by_depth=True),
        tables.allocation_table(comparison),
        tables.allocation_segments_table(comparison),
        tables.environment_table(comparison),
    )
    return {table.name: table for table in built if table is not None}


def render_page(comparison: Comparison, drawings: list[Drawing], found: dict[str, tables.Table]) -> str:
    """The page as text."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(TEMPLATE).render(
        comparison=comparison,
        verdicts=verdicts(comparison),
        tables=found,
        figures=drawings,
        svg={drawing.name: inline_svg(drawing) for drawing in drawings},
        recipe=recipe_text(comparison.recipe),
    )


def recipe_text(recipe: dict[str, Any]) -> str:
    """A recipe as YAML, in its own order."""
    plain = json.loads(json.dumps(recipe, default=str))
    return str(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=100)).rstrip()
