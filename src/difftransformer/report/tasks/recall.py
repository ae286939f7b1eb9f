"""Loss on AR-hits and on other tokens (the figures of arXiv:2410.05258 Table 6)."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from difftransformer.plots.bars import bars
from difftransformer.plots.curves import select
from difftransformer.results import TaskResult

_GROUPS = {"AR-hits": "nll of AR-hits", "others": "nll of others", "all tokens": "nll"}


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """A group a slice, a bar a model."""
    figure = bars(
        results,
        list(_GROUPS),
        lambda result, group: next(iter(select(result, _GROUPS[group])), None),
        form=".3f",
    )
    figure.axes[0].set_ylabel("loss (nats/token)")
    shares = dict.fromkeys(
        f"{100 * row.value:.1f} %" for result in results for row in select(result, "share of AR-hits")
    )
    ngram = results[0].options["ngram"]
    caption = (
        f"Loss on tokens that end an {ngram}-gram which occurred earlier in the window (AR-hits, {' and '.join(shares)} of "
        "tokens) and on all others; bars: one standard error over windows."
    )
    return "Associative recall", caption, figure
