"""Accuracy in every order of the same demonstrations (the form of arXiv:2410.05258 Figures 7 and 11)."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from difftransformer.plots.curves import handles, select
from difftransformer.plots.style import COLOURS, INK, MARKERS, WIDTH_INCHES, legend_above
from difftransformer.results import TaskResult


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """A strip a model: a mark for each order, its best and worst, and the margin that sampling alone would give."""
    figure = Figure(figsize=(WIDTH_INCHES, 4.2), layout="constrained")
    strips, margins = figure.subplots(1, 2, width_ratios=[3, 1.2])
    for index, result in enumerate(results):
        rows = sorted(select(result, "accuracy"), key=lambda row: row.at["order"])
        orders, values = [row.at["order"] for row in rows], [row.value for row in rows]
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        strips.plot(orders, values, color=colour, marker=marker, markersize=6, linestyle="none", alpha=0.9)
        (mean,) = select(result, "mean accuracy")
        (floor,) = select(result, "best minus worst, binomial floor")
        strips.axhline(mean.value, color=colour, linewidth=1, linestyle="--")
        strips.axhspan(
            mean.value - floor.value / 2, mean.value + floor.value / 2, color=colour, alpha=0.13, linewidth=0
        )
        (margin,) = select(result, "best minus worst")
        margins.bar(index, margin.value, 0.6, color=colour, alpha=0.75)
        margins.hlines(floor.value, index - 0.38, index + 0.38, color=INK, linewidth=1.6)
        margins.annotate(
            f"{margin.value:.2f}\nfloor {floor.value:.2f}",
            (index, max(margin.value, floor.value)),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=8.5,
        )
    strips.xaxis.get_major_locator().set_params(integer=True)
    strips.set_xlabel("order of the demonstrations")
    strips.set_ylabel("accuracy")
    margins.set_xticks([])
    margins.set_xlim(-0.8, len(results) - 0.2)
    margins.set_ylim(0, max(margins.get_ylim()[1] * 1.18, 0.05))
    margins.set_ylabel("best minus worst")
    margins.grid(axis="x", visible=False)
    legend_above(figure, handles(results))
    margin = select(results[0], "best minus worst")[0]
    at, items = margin.at, len(results[0].items)
    caption = (
        f"{items} test items of {results[0].data.name} behind the same {at['demonstrations']} demonstrations in {margin.n} "
        f"{at['format']} orders. Dashes: mean. Shaded, and black lines: the margin expected of sampling alone (binomial floor)."
    )
    return "Robustness to the order of demonstrations", caption, figure
