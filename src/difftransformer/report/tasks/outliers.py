"""The largest attention logits and hidden states in order, and the median of all (arXiv:2410.05258 Table 5)."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from difftransformer.plots.curves import handles, select
from difftransformer.plots.style import COLOURS, DASHES, MARKERS, WIDTH_INCHES, legend_above
from difftransformer.results import TaskResult

_KINDS = ("attention logits", "hidden states")


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """A panel for logits and one for hidden states, a curve a model over rank; its median a thin line."""
    figure = Figure(figsize=(WIDTH_INCHES, 4.0), layout="constrained")
    for ax, kind in zip(figure.subplots(1, 2), _KINDS, strict=True):
        medians = [select(result, kind, rank="median")[0].value for result in results]
        for index, result in enumerate(results):
            colour = COLOURS[index % len(COLOURS)]
            rows = select(result, kind)
            top = sorted((row.at["rank"], row.value) for row in rows if row.at["rank"] != "median")
            ax.plot(
                *zip(*top, strict=True),
                color=colour,
                linestyle=DASHES[index % len(DASHES)],
                marker=MARKERS[index % len(MARKERS)],
                markersize=4,
            )
            median, above = medians[index], medians[index] == max(medians)
            ax.axhline(median, color=colour, linewidth=0.9, linestyle=DASHES[index % len(DASHES)])
            ax.annotate(
                f"median {median:.3g}",
                (1.0, median),
                xycoords=("axes fraction", "data"),
                xytext=(-3, 3 if above else -3),
                textcoords="offset points",
                ha="right",
                va="bottom" if above else "top",
                fontsize=8,
                color=colour,
            )
        ax.set_xscale("log")
        ax.set_yscale("log")
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(NullFormatter())
        ax.set_title(kind, loc="left")
        ax.set_xlabel("rank, from the largest")
    figure.axes[0].set_ylabel("absolute value")
    legend_above(figure, handles(results))
    counts = ", ".join(f"{select(result, _KINDS[0], rank='median')[0].n:.3g}" for result in results)
    caption = (
        f"The largest absolute values in order, and the median of all as a line, over {results[0].options['tokens']:,} "
        f"tokens of {results[0].data.name} ({counts} logits)."
    )
    return "Activation outliers", caption, figure
