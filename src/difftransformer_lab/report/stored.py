"""A run of `difftransformer demo` beside the stored comparison of several seeds, which comes with the package."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ..analysis import StudyAnalysis, analyse, read_records
from ..analysis.compare import row_of
from ..analysis.page import Section, no_gap, study_page, write_page
from ..table import Group, Table, counted, fixed, names

FILE = "demo.json"


def stored_demo() -> StudyAnalysis:
    """Read the stored comparison: beside the package's modules in a wheel, in docs/results in a source tree."""
    package = Path(__file__).parents[1]
    folders = [folder for folder in (package / "stored", package.parents[1] / "docs" / "results") if folder.is_dir()]
    return analyse(read_records(folders[0] / FILE))


def beside_table(run: StudyAnalysis, stored: StudyAnalysis) -> Table:
    """Return loss and needle accuracy of a run and of the stored comparison, a line for each model and measure."""
    groups = (
        *names("measure", "model"),
        Group(f"this run ({_size(run)})"),
        Group(f"stored ({_size(stored)})", ("mean", "standard error"), "mean"),
    )
    rows = []
    for figure in stored.records.index.figures:
        if figure.unit != "bits/byte" and figure.name != "accuracy":
            continue
        for arm in run.records.index.arms:
            own, other = (row_of(study.rows, figure.label, arm.name, ()) for study in (run, stored))
            if own and other:
                statistic = other.statistic
                cells = [fixed(one, 3) for one in (own.statistic.mean, statistic.mean, statistic.standard_error)]
                rows.append([f"{figure.label}, {figure.unit}", arm.label, *cells])
    notes = [
        "Stored: trained earlier, on another machine and on text a third of whose held-out lines were tables; losses do not "
        "compare. Mean \u00b1 standard error over its seeds."
    ]
    return Table("beside", "This run and the stored result", groups, rows, notes)


def write_demo(
    run: StudyAnalysis, stored: StudyAnalysis, folder: Path, maps: Path, on_gap: Callable[[str], None] = no_gap
) -> Path:
    """Write the page of a run of the demo.

    Args:
        maps: The page of the shipped models' attention maps, in the same folder.
    """
    note = (
        "Layers and heads of the two models that come with the package, for one prompt: what A1 finds, what A2 takes away, "
        "and the difference for any \u03bb."
    )
    one_seed = (
        "One seed, trained for a part of the recipe's steps, shows how training goes. The stored runs of the whole recipe say "
        "what came of it."
    )
    table, title = beside_table(run, stored), "This run beside the stored result"
    beside = Section(slug="beside", title=title, notes=[one_seed], tables=[table])
    explorer = Section(slug="maps", title="Attention maps to explore", notes=[note], frame=maps.name)
    page = study_page(run)
    return write_page(replace(page, sections=[beside, explorer, *page.sections]), folder, on_gap=on_gap)


def _size(study: StudyAnalysis) -> str:
    seeds = len({seed for _, _, seed, _ in study.records.every_run()})
    steps = max(run.recipe["training"]["steps"] for *_, run in study.records.every_run())
    return f"{steps:,} steps, {counted(seeds, 'seed')}"
