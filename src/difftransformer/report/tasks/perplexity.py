"""Loss against position, cumulative (the form of arXiv:2410.05258 Figure 4)."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from difftransformer.report.tasks.plots import curves
from difftransformer.results import TaskResult


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """A line a model, position on a log axis."""
    figure, ax = curves(results, "cumulative nll", "position", log=True)
    ax.set_xlabel("position in the window (tokens)")
    ax.set_ylabel("mean loss up to here (nats/token)")
    windows, text = " and ".join(sorted({str(result.data.requests) for result in results})), results[0].data.name
    caption = f"Mean loss of all positions up to each, over {windows} windows of {text}; bands: one standard error."
    return "Cumulative loss by position", caption, figure
