"""Accuracy against the number of demonstrations (the form of arXiv:2410.05258 Figure 6)."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from difftransformer.plots.curves import curves, select
from difftransformer.plots.style import INK
from difftransformer.results import TaskResult


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """A line a model, the number of demonstrations on a log axis."""
    figure, ax = curves(results, "accuracy", "demonstrations", log=True)
    counts = sorted({row.at["demonstrations"] for result in results for row in select(result, "accuracy")})
    if counts[0] == 0:  # linear up to the first demonstrations, so that none has a place
        ax.set_xscale("symlog", base=2, linthresh=counts[1] if len(counts) > 1 else 1)
        ax.set_xlim(left=0)
    ax.set_xticks(_spread(counts), [f"{count:,}" for count in _spread(counts)])
    ax.minorticks_off()
    chance = select(results[0], "chance")[0]
    ax.axhline(chance.value, color=INK, linewidth=1, linestyle=":")
    ax.annotate(
        f"chance, 1 of {chance.n}",
        (1, chance.value),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8.5,
    )
    ax.set_ylim(0, 1.02)
    ax.set_xlabel("demonstrations in the prompt")
    ax.set_ylabel("accuracy")
    items, draws = (results[0].options[name] for name in ("items", "draws"))
    again = f", each behind {draws} draws of demonstrations" if draws > 1 else ""
    bands = "one standard error over items" if draws > 1 else "Wilson's interval of 95 %"
    caption = (
        f"Labels of {items} test items of {results[0].data.name}{again}, decoded among all labels; bands: {bands}."
    )
    return "Many-shot in-context classification", caption, figure


def _spread(counts: Sequence[int]) -> list[int]:
    """Marks of the axis: the sizes that stand far enough from the one before."""
    kept: list[int] = []
    for count in counts:
        if len(kept) < 1 or kept[-1] == 0 or count >= 1.4 * kept[-1]:
            kept.append(count)
    return kept
