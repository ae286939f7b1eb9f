"""difftransformer report."""

from pathlib import Path

from ..report import print_comparison, write_report
from ..results import Comparison, read_result
from .console import console, show


def run(results: str, out: str | None = None) -> int:
    """Draw the report of a comparison again. Needs no torch.

    Args:
        results: results.json that `compare` wrote, or its folder.
        out: Folder for index.html; beside the results by default.
    """
    path = Path(results)
    path = path / "results.json" if path.is_dir() else path
    comparison = read_result(path, Comparison)
    page = write_report(comparison, Path(out) if out else path.parent)
    print_comparison(comparison, console)
    show(f"Report: {page}")
    return 0
