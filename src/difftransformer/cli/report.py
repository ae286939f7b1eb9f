"""difftransformer report."""

from pathlib import Path

from ..report import print_study, write_report
from ..report.first_release import read_study
from ..results import write_result
from .console import console


def run(results: str, out: str | None = None) -> int:
    """Draw the report of a study again. Results of release 0.1.0 are converted on the way. Needs no torch.

    Args:
        results: results.json that `compare` or `upcycle --train` wrote, or its folder.
        out: Folder for index.html, and for results.json where it had to be converted; beside the results by default.
    """
    path = Path(results)
    path = path / "results.json" if path.is_dir() else path
    study, is_old = read_study(path)
    folder = Path(out) if out else path.parent
    page = write_report(study, folder)
    print_study(study, console)
    console.print(f"Report: {page}", markup=False, highlight=False, soft_wrap=True)
    target = folder / "results.json"
    if is_old and (target == path or not target.exists()):
        write_result(study, target)
        console.print(f"Results, converted: {target}", markup=False, highlight=False, soft_wrap=True)
    return 0
