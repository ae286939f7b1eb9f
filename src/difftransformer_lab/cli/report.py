"""difftransformer report."""

from pathlib import Path

from difftransformer.errors import ResultsError

from ..report import Studied, brief_answer, print_study, read_studies, write_evidence, write_study
from ..report.lead import STUDIES
from .console import Gaps, console, show


def run(results: str, out: str | None = None) -> int:
    """Draw the page of a comparison again, or the pages of studies. Needs no torch.

    Args:
        results: results.json that `compare` or `upcycle --train` wrote, or its folder; or the index of a study, its folder, or
            a folder of studies such as docs/results/studies.
        out: Folder for index.html; that of results.json by default, and one in reports/studies for other studies.
    """
    path = Path(results)
    studies = read_studies(path)
    if not studies:
        raise ResultsError(f"{path}: no results.json and no study here; name the folder of a comparison or of studies")
    first = studies[0]
    if first.evidence.path.name == "results.json":
        return show_study(first, Path(out) if out else first.evidence.path.parent, "report")
    if path.is_file() or len(studies) == 1:
        return show_study(first, Path(out) if out else Path(STUDIES) / first.evidence.slug, "report")
    for one in studies:
        show(f"{one.evidence.slug}: {brief_answer(one)}")
    gaps = Gaps("report")
    show(f"Report: {write_evidence(studies, Path(out or STUDIES), on_gap=gaps)}")
    return gaps.status


def show_study(study: Studied, folder: Path, verb: str) -> int:
    """Write a study's page, print the study, and return the exit status of the command `verb`."""
    gaps = Gaps(verb)
    page = write_study(study, folder, on_gap=gaps)
    print_study(study, console)
    show(f"Report: {page}\nResults: {study.evidence.path}")
    return gaps.status
