"""Heat maps of retrieval: depth by length, a panel for each model and number of needles, with the count of each cell."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from difftransformer.report.figures import _ACCURACY_COLOURS, INK, WIDTH_INCHES
from difftransformer.report.tasks import labels
from difftransformer.report.tasks.plots import select
from difftransformer.results import TaskResult


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """A row a setting, a column a model."""
    cells = [row for result in results for row in select(result, "accuracy") if "depth" in row.at]
    settings = sorted({(row.at["needles"], row.at["asked"]) for row in cells})
    lengths, depths = (sorted({row.at[key] for row in cells}) for key in ("length_tokens", "depth"))
    figure = Figure(figsize=(WIDTH_INCHES, len(settings) * (1.0 + 0.42 * len(depths)) + 0.4), layout="constrained")
    axes = figure.subplots(len(settings), len(results), squeeze=False, sharex=True, sharey=True)
    image: Any = None
    for row, (needles, asked) in enumerate(settings):
        for column, (result, label) in enumerate(zip(results, labels(results), strict=True)):
            ax = axes[row, column]
            grid = np.full((len(depths), len(lengths)), np.nan)
            for cell in select(result, "accuracy", needles=needles, asked=asked):
                if "depth" not in cell.at:
                    continue
                y, x = depths.index(cell.at["depth"]), lengths.index(cell.at["length_tokens"])
                grid[y, x] = cell.value
                ax.text(
                    x,
                    y,
                    f"{round(cell.value * cell.n)}/{cell.n}",
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color="white" if cell.value > 0.62 else INK,
                )
            edges = [np.arange(count + 1) - 0.5 for count in (len(lengths), len(depths))]
            image = ax.pcolormesh(
                *edges,
                np.ma.masked_invalid(grid),
                cmap=_ACCURACY_COLOURS,
                vmin=0,
                vmax=1,
                edgecolors="white",
                linewidth=1,
            )
            ax.set_ylim(len(depths) - 0.5, -0.5)
            ax.set_title(f"{label}: {needles} needles, {asked} asked" if needles > 1 else f"{label}: one needle")
            ax.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
            ax.set_yticks(range(len(depths)), [f"{100 * depth:g} %" for depth in depths])
            ax.grid(False)
            ax.spines[:].set_visible(False)
            ax.tick_params(length=0)
        axes[row, 0].set_ylabel("depth of the answer")
    for ax in axes[-1]:
        ax.set_xlabel("length (tokens)")
    figure.colorbar(image, ax=list(axes.flat), label="accuracy", fraction=0.03, pad=0.01, aspect=30)
    digits = results[0].options["digits"]
    chance = 10.0**-digits
    caption = (
        f"Share of {digits}-digit numbers given back exactly; in each cell right answers of all. A guess: {chance:g}."
    )
    return "Needle retrieval", caption, figure
