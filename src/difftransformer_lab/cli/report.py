"""difftransformer report."""

from pathlib import Path

from difftransformer.errors import ResultsError

from ..analysis import StudyAnalysis, read_studies
from ..analysis.page import study_page, write_page, write_studies
from ..analysis.tables import brief_table
from .console import show, show_table, told_gaps

STUDIES = "reports/studies"
"""Folder of studies, unless a command names another."""


def run(results: str, out: str | None = None) -> int:
    """Draw the page of a comparison again, or the pages of studies. Needs no torch.

    Args:
        results: results.json that `compare` or `upcycle --train` wrote, or its folder; or the index of a study, its folder, or
            a folder of studies such as docs/results/studies.
        out: Folder for index.html; by default the folder of results.json, or a folder in reports/studies.
    """
    path = Path(results)
    studies = read_studies(path)
    if not studies:
        raise ResultsError(f"{path}: no results.json and no study here; name the folder of a comparison or of studies")
    first = studies[0].records
    if first.path.name == "results.json":
        return show_study(studies[0], Path(out) if out else first.path.parent, "report")
    if path.is_file() or len(studies) == 1:
        return show_study(studies[0], Path(out) if out else Path(STUDIES) / first.slug, "report")
    path, missing = write_studies(studies, Path(out or STUDIES))
    show(f"Report: {path}")
    return told_gaps("report", missing)


def show_study(study: StudyAnalysis, folder: Path, verb: str) -> int:
    """Write a study's page and print its findings, as the end of the command `verb`."""
    page = study_page(study)
    path = write_page(page, folder)
    show_table(brief_table(study))
    show(f"Report: {path}\nResults: {study.records.path}")
    return told_gaps(verb, page.gaps)
