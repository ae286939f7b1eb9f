"""A task's main figure against the bits of the attention logits (the form of arXiv:2410.05258 Figure 8)."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from difftransformer.plots.curves import handles
from difftransformer.plots.style import COLOURS, DASHES, MARKERS, WIDTH_INCHES, legend_above
from difftransformer.results import Measurement, TaskResult

Place = tuple[tuple[str, str], ...]

_SETTING = ("bits", "granularity")
_ASIDE = 0.05
_MOST_ROWS = 8


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """A row of panels for each place of the task's first figure, a panel for each granularity, a line a model."""
    name, unit = results[0].measurements[0].name, results[0].measurements[0].unit
    shown = [row for row in results[0].measurements if row.name == name and not row.detail]
    places = list(dict.fromkeys(_place(row) for row in shown))
    granularities = list(dict.fromkeys(row.at["granularity"] for row in shown))
    drawn = places[:_MOST_ROWS]
    figure = Figure(figsize=(WIDTH_INCHES, 0.9 + 3.0 * len(drawn)), layout="constrained")
    axes = figure.subplots(len(drawn), len(granularities), sharey="row", squeeze=False)
    for row_of_axes, place in zip(axes, drawn, strict=True):
        for ax, granularity in zip(row_of_axes, granularities, strict=True):
            _lines(ax, results, name, place, granularity)
            ax.set_title(", ".join([*_words(place), f"a step for each {granularity}"]), loc="left")
        row_of_axes[0].set_ylabel(f"{name} ({unit})")
    for ax in axes[-1]:
        ax.set_xlabel("bits of the attention logits")
    legend_above(figure, handles(results))
    options = results[0].options
    left_out = f" The first {len(drawn)} of {len(places)} places." if len(drawn) < len(places) else ""
    caption = (
        f"{name[0].upper()}{name[1:]} of {results[0].data.name} under rounded attention logits; 16 bits leaves them alone. "
        f"Linear layers: weights {options['weights']}, activations {options['activations']}. "
        f"Whiskers: one standard error.{left_out}"
    )
    return "Coarser attention logits", caption, figure


def _lines(ax: Axes, results: Sequence[TaskResult], name: str, place: Place, granularity: str) -> None:
    bits = sorted({row.at["bits"] for result in results for row in result.measurements}, reverse=True)
    for index, result in enumerate(results):
        found = {
            row.at["bits"]: row
            for row in result.measurements
            if row.name == name and _place(row) == place and row.at["granularity"] == granularity
        }
        aside = _ASIDE * (index - (len(results) - 1) / 2)  # so that no whisker hides another
        rows = [found[value] for value in bits if value in found]
        ax.errorbar(
            [bits.index(value) + aside for value in bits if value in found],
            [row.value for row in rows],
            yerr=[row.standard_error or 0.0 for row in rows],
            color=COLOURS[index % len(COLOURS)],
            linestyle=DASHES[index % len(DASHES)],
            marker=MARKERS[index % len(MARKERS)],
            capsize=3,
        )
    ax.set_xticks(range(len(bits)), [str(value) for value in bits])


def _place(row: Measurement) -> Place:
    return tuple((name, str(value)) for name, value in row.at.items() if name not in _SETTING)


def _words(place: Place) -> list[str]:
    """A name of lm-eval stands for itself, without its version."""
    at = dict(place)
    if "task" in at:
        shots = [f"{at['shots']} shots"] if "shots" in at else []
        return [at["task"], *shots]
    return [f"{name.replace('_', ' ')} {value}" for name, value in place]
