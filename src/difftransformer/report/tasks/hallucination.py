"""The share of faithful answers in each set (the figures of arXiv:2410.05258 Table 4), with intervals."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from difftransformer.plots.bars import bars, sets_of
from difftransformer.plots.curves import labels, select
from difftransformer.results import TaskResult


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """A group a set, a bar a model."""
    figure = bars(
        results,
        sets_of(results, "accuracy"),
        lambda result, name: next(iter(select(result, "accuracy", set=name)), None),
        form=".2f",
    )
    ax = figure.axes[0]
    ax.set_ylim(0, 1.08)
    ax.set_ylabel("answers without hallucination (share)")
    judges = list(dict.fromkeys(str(result.options["judge"]) for result in results))
    words = (
        f"Judge: {judges[0]}" if len(judges) == 1 else f"Different judges, which do not compare: {', '.join(judges)}"
    )
    caption = f"Share of answers that keep to their document, with 95 % Wilson intervals over answers. {words}."
    for result, label in zip(results, labels(results), strict=True):
        if left := sum(row.value for row in select(result, "unjudged")):
            caption += f" {label}: {left:.0f} answers have no verdict and are left out."
    return "Contextual hallucination", caption, figure
