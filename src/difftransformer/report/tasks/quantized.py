"""A task's main figure against the bits of the attention logits (the form of arXiv:2410.05258 Figure 8)."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from difftransformer.report.figures import COLOURS, DASHES, MARKERS, WIDTH_INCHES, _legend_above
from difftransformer.report.tasks.plots import handles
from difftransformer.results import Measurement, TaskResult

_SETTING = ("bits", "granularity")
_ASIDE = 0.05


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """A panel for each granularity, a line a model, from many bits to few."""
    main = _main(results[0])
    panels = list(dict.fromkeys(row.at["granularity"] for row in results[0].measurements))
    bits = sorted({row.at["bits"] for result in results for row in result.measurements}, reverse=True)
    figure = Figure(figsize=(WIDTH_INCHES, 3.9), layout="constrained")
    for ax, granularity in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        for index, result in enumerate(results):
            found = {
                row.at["bits"]: row
                for row in result.measurements
                if _place(row) == _place(main) and row.at["granularity"] == granularity
            }
            aside = _ASIDE * (index - (len(results) - 1) / 2)  # so that no whisker hides another
            x = [bits.index(value) + aside for value in bits if value in found]
            rows = [found[value] for value in bits if value in found]
            ax.errorbar(
                x,
                [row.value for row in rows],
                yerr=[row.standard_error or 0.0 for row in rows],
                color=COLOURS[index % len(COLOURS)],
                linestyle=DASHES[index % len(DASHES)],
                marker=MARKERS[index % len(MARKERS)],
                capsize=3,
            )
        ax.set_xticks(range(len(bits)), [str(value) for value in bits])
        ax.set_xlabel("bits of the attention logits")
        ax.set_title(f"a step for each {granularity}", loc="left")
    at = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in main.at.items() if name not in _SETTING)
    figure.axes[0].set_ylabel(f"{main.name} ({main.unit})")
    _legend_above(figure, handles(results))
    options = results[0].options
    figure_name = f"{main.name[0].upper()}{main.name[1:]}" + (f" at {at}" if at else "")
    caption = (
        f"{figure_name} of {results[0].data.name} under rounded attention logits; 16 bits leaves them alone. Linear "
        f"layers: weights {options['weights']}, activations {options['activations']}. Whiskers: one standard error."
    )
    return "Coarser attention logits", caption, figure


def _main(result: TaskResult) -> Measurement:
    """The first figure among those that were taken at the fewest places."""
    return min(result.measurements, key=lambda row: len(row.at))


def _place(row: Measurement) -> tuple[object, ...]:
    return row.name, *((name, str(value)) for name, value in row.at.items() if name not in _SETTING)
