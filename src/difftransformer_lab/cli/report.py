"""difftransformer report."""

from pathlib import Path

from ..report import brief_answer, print_study, read_studies, write_evidence, write_report
from ..report.first_release import read_study
from ..results import write_result
from .console import Gaps, console, show

STUDIES = "reports/studies"
"""Folder of the pages of studies."""


def run(results: str, out: str | None = None) -> int:
    """Draw the report of a comparison again, or the pages of studies. Needs no torch.

    Results of release 0.1.0 are converted.

    Args:
        results: results.json that `compare` or `upcycle --train` wrote, or its folder; or the index of a study, its folder, or
            a folder of studies such as docs/results/studies.
        out: Folder for index.html, and for results.json if it had to be converted; beside the results by default, and
            reports/studies for studies.
    """
    path = Path(results)
    studies = read_studies(path)
    if studies:
        for one in studies:
            show(f"{one.evidence.slug}: {brief_answer(one)}")
        show(f"Report: {write_evidence(studies, Path(out or STUDIES))}")
        return 0
    path = path / "results.json" if path.is_dir() else path
    study, is_old = read_study(path)
    folder = Path(out) if out else path.parent
    gaps = Gaps("report")
    page = write_report(study, folder, on_gap=gaps)
    print_study(study, console)
    show(f"Report: {page}")
    target = folder / "results.json"
    if is_old and (target == path or not target.exists()):
        show(f"Results, converted: {write_result(study, target)}")
    return gaps.status
