"""Loss by position: of ranges of positions where these were measured, else cumulative (arXiv:2410.05258 Figure 4)."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from difftransformer.plots.curves import curves, handles, labels, select
from difftransformer.plots.seeds import (
    band,
    difference_band,
    difference_words,
    draw_differences,
    over_difference,
    seeds_of,
)
from difftransformer.plots.style import colour_of, legend_above, line_style
from difftransformer.results import Curve, TaskResult


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Draw a line for each model, positions on a log axis; for ranges also each model's minus the last one's."""
    windows, text = " and ".join(sorted({str(result.data.requests) for result in results})), results[0].data.name
    if any(select(result, "nll by position") for result in results):
        return _by_range(results, f"{windows} windows of {text}")
    figure, ax = curves(results, "cumulative nll", "position", log=True)
    ax.set_xlabel("position in the window (tokens)")
    ax.set_ylabel("mean loss up to here (nats/token)")
    caption = f"Mean loss of all positions up to each, over {windows} windows of {text}; bands: one standard error."
    return "Cumulative loss by position", caption, figure


def _by_range(results: Sequence[TaskResult], where: str) -> tuple[str, str, Figure]:
    found = [[_curve(seed) for seed in seeds_of(result)] for result in results]
    differences = [(index, difference_band(group, found[-1])) for index, group in enumerate(found[:-1])]
    figure, top, bottom = over_difference(len(differences))
    for index, group in enumerate(found):
        drawn = band(group)
        if drawn is None:
            continue
        if drawn.seeds > 1:
            top.fill_between(drawn.x, drawn.low, drawn.high, color=colour_of(index), alpha=0.2, linewidth=0)
        top.plot(drawn.x, drawn.mean, **line_style(index), markersize=5)
    top.set_xscale("log", base=2)
    top.xaxis.set_major_formatter(FuncFormatter(lambda position, _: f"{position:g}"))
    top.xaxis.set_minor_locator(NullLocator())
    top.set_ylabel("loss (nats/token)")
    legend_above(figure, handles(results))
    (bottom or top).set_xlabel("position in the context (tokens, logarithmic)")
    seeds = len(found[0])
    caption = (
        f"Loss of the tokens in each range of positions (a marker at the range's middle), in nats a token, over {where}: how "
        "far a longer context helps."
    )
    if seeds > 1:
        caption += f" Lines are means over {seeds} seeds, bands go from the smallest to the largest seed."
    if bottom:
        names = labels(results)
        shown = [(index, difference) for index, difference in differences if difference is not None]
        draw_differences(bottom, shown, f"Loss of {', '.join(names[:-1])} minus {names[-1]}")
        caption += difference_words("loss", names[-1], seeds)
    return "Loss by position in the context", caption, figure


def _curve(result: TaskResult) -> Curve:
    """Return the loss over the middle of each range, geometric and counted from 1 so that a logarithm exists."""
    rows = sorted(select(result, "nll by position"), key=lambda row: row.at["start"])
    middles = [((row.at["start"] + 1) * max(row.at["end"], row.at["start"] + 1)) ** 0.5 for row in rows]
    return Curve(steps=middles, values=[row.value for row in rows])  # type: ignore[arg-type]
