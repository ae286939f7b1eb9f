"""The figures of a comparison."""

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from difftransformer.plots.style import (
    ACCURACY_COLOURS,
    COLOURS,
    DASHES,
    INK,
    MARKERS,
    STYLE,
    WIDTH_INCHES,
    Drawing,
    finish,
    legend_above,
)
from difftransformer.report import aggregate
from difftransformer.report.tables import error_note
from difftransformer.results import Comparison
from difftransformer.statistics import CONFIDENCE

_WARM_UP_SHARE = 0.15
"""Losses of this first part of training may lie above the drawn range, so that the rest can be told apart."""

_SMOOTHING_SHARE = 0.02
"""The training loss is averaged over this share of its points."""

_NEEDLE_CELLS_ACROSS = 18
"""More cells of needle maps than this do not fit side by side with readable labels."""

FIGURE_NAMES = ("loss", "positions", "needles", "allocation", "allocation_depths", "lambda")


def draw_all(comparison: Comparison, png: bool = False) -> list[Drawing]:
    """Every figure that the results have data for, in the order of the page."""
    draw_functions = (draw_loss, draw_positions, draw_needles, draw_allocation, draw_allocation_depths, draw_lambda)
    with matplotlib.rc_context(STYLE):
        drawn = [function(comparison) for function in draw_functions]
        return [finish(*parts, png) for parts in drawn if parts is not None]


Unfinished = tuple[str, str, str, Figure]


def draw_loss(comparison: Comparison) -> Unfinished | None:
    """Training and validation loss over steps with seed bands, and the difference of the validation losses below."""
    bands = []
    window = 1
    for index, model in enumerate(comparison.models):
        runs = aggregate.runs_of(comparison, model.model)
        points = max((len(run.train_loss_nats.values) for run in runs), default=0)
        window = 2 * round(points * _SMOOTHING_SHARE / 2) + 1
        train = aggregate.band([aggregate.smooth(run.train_loss_nats, window) for run in runs])
        bands.append((index, train, aggregate.band([run.validation_loss_nats for run in runs])))
    if not any(train or validation for _, train, validation in bands):
        return None
    difference = aggregate.difference_band(comparison, lambda run: run.validation_loss_nats)
    figure, top, bottom = _over_difference(difference is not None)
    for index, train, validation in bands:
        colour = COLOURS[index % len(COLOURS)]
        if train:
            top.plot(train.x, train.mean, color=colour, linewidth=0.9, alpha=0.55)
        if validation:
            _fill(top, validation, colour)
            top.plot(
                validation.x,
                validation.mean,
                color=colour,
                linestyle=DASHES[index % len(DASHES)],
                marker=MARKERS[index % len(MARKERS)],
                markersize=4,
                markevery=_mark_every(validation.x),
            )
    all_bands = [b for _, train, validation in bands for b in (train, validation) if b]
    last = max(float(b.x[-1]) for b in all_bands)
    settled = _settled([(b.x, row) for b in all_bands for row in (b.low, b.high)], last)
    if settled:
        _limit(top, settled)
    top.set_ylabel("loss (nats/token)")
    handles = [
        *_model_handles(comparison),
        Line2D([], [], color="#777777", linewidth=0.9, label="training (thin)"),
        Line2D([], [], color="#777777", marker="o", markersize=4, label="validation (with markers)"),
    ]
    legend_above(figure, handles)
    (bottom or top).set_xlabel("training step")
    caption = (
        f"Loss over training in nats a token. Thin lines: training loss, a moving mean over {window} logged points. "
        "Lines with markers: validation loss. "
        + _seed_band_words(comparison)
        + " The first steps may lie above the drawn range."
    )
    if bottom and difference:
        _draw_difference(bottom, comparison, difference, "validation loss", settle=last)
        caption += _difference_words(comparison, "validation loss")
    return "loss", "Loss over training", caption, figure


def draw_positions(comparison: Comparison) -> Unfinished | None:
    """Validation loss by position in the context, and the difference below."""
    edges = aggregate.position_edges(comparison)
    bands = [
        (index, aggregate.band([aggregate.position_curve(run) for run in aggregate.runs_of(comparison, model.model)]))
        for index, model in enumerate(comparison.models)
    ]
    if not edges or not any(drawn for _, drawn in bands):
        return None
    difference = aggregate.difference_band(comparison, aggregate.position_curve)
    figure, top, bottom = _over_difference(difference is not None)

    def centre(starts: np.ndarray) -> np.ndarray:
        """The geometric middle of each bucket, positions counted from 1 so that a logarithm exists."""
        return np.array([np.sqrt((start + 1) * max(edges[int(start)], start + 1)) for start in starts])

    for index, drawn in bands:
        if drawn is None:
            continue
        colour = COLOURS[index % len(COLOURS)]
        x = centre(drawn.x)
        if drawn.seeds > 1:
            top.fill_between(x, drawn.low, drawn.high, color=colour, alpha=0.2, linewidth=0)
        top.plot(
            x,
            drawn.mean,
            color=colour,
            linestyle=DASHES[index % len(DASHES)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
        )
    top.set_xscale("log", base=2)
    top.xaxis.set_major_formatter(FuncFormatter(lambda position, _: f"{position:g}"))
    top.xaxis.set_minor_locator(NullLocator())
    top.set_ylabel("loss (nats/token)")
    legend_above(figure, _model_handles(comparison))
    (bottom or top).set_xlabel("position in the context (tokens, logarithmic)")
    caption = (
        "Validation loss of the tokens in each range of positions (a marker at the range's middle), in nats a token: "
        "how far "
        "a longer context helps. " + _seed_band_words(comparison)
    )
    if bottom and difference:
        moved = aggregate.DifferenceBand(
            centre(difference.x), difference.per_seed, difference.mean, difference.low, difference.high
        )
        _draw_difference(bottom, comparison, moved, "loss")
        caption += _difference_words(comparison, "loss")
    return "positions", "Loss by position in the context", caption, figure


def draw_needles(comparison: Comparison) -> Unfinished | None:
    """A heat map of needle accuracy for each model, and for seen and unseen cities: depth by needles."""
    pooled = [aggregate.pooled_needles(aggregate.runs_of(comparison, model.model)) for model in comparison.models]
    keys = {key for cells in pooled for key in cells}
    if not keys:
        return None
    kinds = [kind for kind in aggregate.CITIES if any(key[0] == kind for key in keys)]
    settings = sorted({key[1] for key in keys})
    depths = sorted({key[2] for key in keys})
    across, panels = len(pooled), [(kind, index) for kind in kinds for index in range(len(pooled))]
    if len(settings) * across > _NEEDLE_CELLS_ACROSS:
        panels.sort(key=lambda panel: panel[1])
        across = len(kinds) if len(settings) * len(kinds) <= _NEEDLE_CELLS_ACROSS else 1
    down = -(-len(panels) // across)
    figure = Figure(figsize=(WIDTH_INCHES, down * (0.85 + 0.36 * len(depths)) + 0.5), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    several_lengths = len({setting.length_tokens for setting in settings}) > 1
    image: Any = None
    for place, ((kind, index), ax) in enumerate(zip(panels, axes.flat, strict=True)):
        grid = np.full((len(depths), len(settings)), np.nan)
        for (cell_kind, setting, depth), proportion in pooled[index].items():
            if cell_kind == kind and proportion.trials:
                grid[depths.index(depth), settings.index(setting)] = proportion.accuracy
        columns, rows = np.arange(len(settings) + 1) - 0.5, np.arange(len(depths) + 1) - 0.5
        image = ax.pcolormesh(
            columns,
            rows,
            np.ma.masked_invalid(grid),
            cmap=ACCURACY_COLOURS,
            vmin=0,
            vmax=1,
            edgecolors="white",
            linewidth=1,
        )
        ax.set_ylim(len(depths) - 0.5, -0.5)  # the start of the context on top
        for (row, column), accuracy in np.ndenumerate(grid):
            if not np.isnan(accuracy):
                ax.text(
                    column,
                    row,
                    f"{accuracy:.2f}",
                    ha="center",
                    va="center",
                    fontsize=8.5,
                    color="white" if accuracy > 0.62 else INK,
                )
        ax.set_title(
            f"{comparison.models[index].label}, {kind} cities", color=COLOURS[index % len(COLOURS)], fontweight="bold"
        )
        ax.set_xticks(
            range(len(settings)), [s.name + (f"\n{s.length_tokens}" if several_lengths else "") for s in settings]
        )
        ax.set_yticks(range(len(depths)), [f"{100 * depth:g} %" for depth in depths])
        ax.grid(False)
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0, labelbottom=True)
        ax.set_facecolor("#eeeeee")
        if place % across == 0:
            ax.set_ylabel("depth of the answer")
    figure.colorbar(image, ax=list(axes.flat), label="accuracy", fraction=0.03, pad=0.01, aspect=30)
    needle = next(run.needle for run in comparison.runs if run.needle)
    lengths = ", ".join(str(length) for length in sorted({setting.length_tokens for setting in settings}))
    caption = (
        f"Multi-needle retrieval in contexts of {lengths} tokens: share of {needle.digits}-digit numbers repeated "
        "exactly, "
        f"pooled over seeds; a guess is right with probability {needle.chance:g}. Across: needles hidden (N) and asked "
        "for "
        "(R)"
        + (" and context length. " if several_lengths else ". ")
        + "Down: where the answer stands, 0 % at the start, "
        "100 % at the end. Unseen cities never occur as needles in training. Wilson intervals are in the table below."
    )
    return "needles", "Needle retrieval", caption, figure


_FORM_WORDS = {
    "signed": "signed: weights / their sum",
    "absolute": "absolute: |weights| / their sum",
    "positive": "positive part: max(weight, 0) / their sum",
}
_SEGMENT_WORDS = {
    "first": "first token",
    "before": "context before",
    "answer": "answer",
    "after": "context after",
    "query": "query",
}


def draw_allocation(comparison: Comparison) -> Unfinished | None:
    """Bars of the share of attention on each segment, in three forms, with the answer nearest to the middle."""
    depths = aggregate.allocation_depths(comparison)
    if not depths:
        return None
    depth = min(depths, key=lambda value: (abs(value - 0.5), value))
    figure = Figure(figsize=(WIDTH_INCHES, 7.2), layout="constrained")
    axes = figure.subplots(len(aggregate.FORMS), 1, sharex=True, squeeze=False)[:, 0]
    count = len(comparison.models)
    width = 0.8 / count
    for ax, form in zip(axes, aggregate.FORMS, strict=True):
        for index, model in enumerate(comparison.models):
            runs = aggregate.runs_of(comparison, model.model)
            for place, segment in enumerate(aggregate.SEGMENTS):
                share = aggregate.allocation_share(runs, form, depth, (segment,))
                if share is None:
                    continue
                x, error = place + (index - (count - 1) / 2) * width, share.error or 0.0
                ax.bar(x, share.mean, width * 0.92, color=COLOURS[index % len(COLOURS)])
                ax.errorbar(x, share.mean, yerr=error, color=INK, linewidth=1, capsize=2.5)
                down = share.mean < 0
                ax.annotate(
                    f"{share.mean:.2f}",
                    (x, share.mean - error if down else share.mean + error),
                    xytext=(0, -3 if down else 3),
                    textcoords="offset points",
                    ha="center",
                    va="top" if down else "bottom",
                    fontsize=8.5,
                )
        ax.axhline(0, color="#555555", linewidth=0.8)
        ax.spines["bottom"].set_visible(False)
        ax.margins(y=0.18)
        ax.grid(axis="x", visible=False)
        ax.set_title(_FORM_WORDS[form], loc="left")
        ax.set_ylabel("share of attention")
        ax.set_xticks(range(len(aggregate.SEGMENTS)), [_SEGMENT_WORDS[segment] for segment in aggregate.SEGMENTS])
        ax.tick_params(axis="x", length=0)
    patches = [Patch(color=COLOURS[i % len(COLOURS)], label=m.label) for i, m in enumerate(comparison.models)]
    legend_above(figure, patches)
    allocation = next(run.allocation for run in comparison.runs if run.allocation)
    caption = (
        "Where the last prompt token looks, in the manner of Figure 1 of the paper (arXiv:2410.05258): the share of "
        "attention "
        f"on each segment, averaged over heads, layers and {allocation.documents} documents of "
        f"{allocation.length_tokens} tokens with "
        f"{allocation.needles} needles, answer at {100 * depth:g} % of the context. A differential map has negative "
        "weights, so "
        "three forms are drawn; signed weights of both signs cancel inside a segment, absolute ones do not. Whiskers: "
        "one "
        f"standard error. {error_note(comparison)}"
    )
    return "allocation", "Attention allocation", caption, figure


def draw_allocation_depths(comparison: Comparison) -> Unfinished | None:
    """Share on the answer and on the context around it, over the answer's depth."""
    depths = aggregate.allocation_depths(comparison)
    if len(depths) < 2:
        return None
    figure = Figure(figsize=(WIDTH_INCHES, 3.4), layout="constrained")
    axes = figure.subplots(1, len(aggregate.FORMS), sharey=True, squeeze=False, gridspec_kw={"wspace": 0.06})[0]
    for ax, form in zip(axes, aggregate.FORMS, strict=True):
        for index, model in enumerate(comparison.models):
            runs = aggregate.runs_of(comparison, model.model)
            for segments, dash, face in (
                (("answer",), "-", COLOURS[index % len(COLOURS)]),
                (aggregate.NOISE, ":", "white"),
            ):
                found = [(d, aggregate.allocation_share(runs, form, d, segments)) for d in depths]
                points = [(d, share.mean) for d, share in found if share]
                if points:
                    ax.plot(
                        *zip(*points, strict=True),
                        color=COLOURS[index % len(COLOURS)],
                        linestyle=dash,
                        marker=MARKERS[index % len(MARKERS)],
                        markersize=5,
                        markerfacecolor=face,
                    )
        ax.axhline(0, color="#555555", linewidth=0.8)
        ax.set_title(form, loc="left")
        ax.set_xlabel("depth of the answer")
        ax.set_xticks(depths, [f"{100 * depth:g} %" for depth in depths])
    axes[0].set_ylabel("share of attention")
    handles = [
        *_model_handles(comparison, line=False),
        Line2D([], [], color="#777777", linestyle="-", marker="o", markersize=5, label="on the answer"),
        Line2D(
            [],
            [],
            color="#777777",
            linestyle=":",
            marker="o",
            markersize=5,
            markerfacecolor="white",
            label="on the context around it",
        ),
    ]
    legend_above(figure, handles)
    caption = (
        "The share of attention on the answer (filled, solid) and on the context before and after it (hollow, dotted), "
        "over the "
        "answer's place in the context; mean over seeds. Good focus: filled high, hollow low."
    )
    return "allocation_depths", "Attention on the answer and around it, by depth", caption, figure


def draw_lambda(comparison: Comparison) -> Unfinished | None:
    """Lambda of each layer over training, and its start and end by layer."""
    found = [
        (index, table)
        for index, model in enumerate(comparison.models)
        if (table := aggregate.lambda_table(aggregate.runs_of(comparison, model.model))) is not None
    ]
    if not found:
        return None
    figure = Figure(figsize=(WIDTH_INCHES, 3.7 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), 2, squeeze=False, sharey="row", width_ratios=(3, 2), gridspec_kw={"wspace": 0.1})
    starts = sorted({int(table[0][0]) for _, table in found})
    for (left, right), (index, (steps, values)) in zip(axes, found, strict=True):
        mean = values.mean(0)
        layers = mean.shape[1]
        colours = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.0, 0.88, layers)))
        for layer in range(layers):
            left.plot(steps, mean[:, layer], color=colours(layer), linewidth=1.4 if layers <= 12 else 1.0)
            left.axhline(
                mean[0, layer], color=colours(layer), linewidth=0.9, linestyle=":", alpha=0.8 if layers <= 12 else 0.4
            )
        norm = BoundaryNorm(np.arange(layers + 1) - 0.5, layers)
        bar = figure.colorbar(ScalarMappable(norm, colours), ax=left, label="layer", pad=0.01, aspect=30)
        bar.set_ticks(sorted({round(tick) for tick in np.linspace(0, layers - 1, min(layers, 8))}))
        bar.ax.minorticks_off()
        left.set_title(f"{comparison.models[index].label}: over training", loc="left")
        left.set_xlabel("training step")
        left.set_ylabel("lambda")
        right.plot(range(layers), mean[0], color="#777777", linestyle=":", marker=".", label=f"step {steps[0]:g}")
        if len(values) > 1:
            right.fill_between(
                range(layers),
                values[:, -1].min(0),
                values[:, -1].max(0),
                color=COLOURS[index % len(COLOURS)],
                alpha=0.2,
                linewidth=0,
            )
        right.plot(
            range(layers),
            mean[-1],
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            label=f"step {steps[-1]:g}",
        )
        right.set_title("by layer", loc="left")
        right.set_xlabel("layer (from 0)")
        right.xaxis.set_major_locator(MaxNLocator(integer=True))
        right.legend(loc="best")
    caption = (
        "Lambda, the weight of the second softmax map. Left: one line a layer, mean over seeds; dotted: its value at "
        "step "
        + " and ".join(map(str, starts))
        + ". At the start of training that is lambda_init (0.8 - 0.6 exp(-0.3 layer) in the paper's V1) but for the "
        "random start of the lambda vectors. Right: start and end by layer"
        + (", with the band from the smallest to the largest seed." if len(comparison.seeds) > 1 else ".")
    )
    without = [m.label for i, m in enumerate(comparison.models) if i not in {index for index, _ in found}]
    if without:
        caption += f" {' and '.join(without)}: no lambda."
    return "lambda", "Lambda by layer", caption, figure


def _over_difference(with_difference: bool) -> tuple[Figure, Axes, Axes | None]:
    """A figure with a tall panel, and below it a low one for the difference."""
    figure = Figure(figsize=(WIDTH_INCHES, 5.6 if with_difference else 4.0), layout="constrained")
    if not with_difference:
        return figure, figure.subplots(), None
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2.6))
    return figure, top, bottom


def _draw_difference(
    ax: Axes, comparison: Comparison, difference: aggregate.DifferenceBand, what: str, settle: float = 0.0
) -> None:
    first, second = comparison.models[:2]
    if len(difference.per_seed) > 1:
        for row in difference.per_seed:
            ax.plot(difference.x, row, color="#888888", linewidth=0.7, alpha=0.9)
    if difference.low is not None and difference.high is not None:
        ax.fill_between(difference.x, difference.low, difference.high, color="#999999", alpha=0.28, linewidth=0)
    ax.plot(difference.x, difference.mean, color=INK, marker=".", markersize=5, markevery=_mark_every(difference.x))
    ax.axhline(0, color="#555555", linewidth=0.9, linestyle="--")
    settled = _settled([(difference.x, row) for row in difference.per_seed], settle)
    _limit(ax, [*settled, 0.0], margin=0.35)
    ax.set_ylabel("difference")
    ax.set_title(
        f"{first.label} minus {second.label}, {what}: below zero, {first.label} is better", loc="left", fontsize=9.5
    )


def _difference_words(comparison: Comparison, what: str) -> str:
    words = f" Below: the {what} of {comparison.models[0].label} minus that of {comparison.models[1].label}"
    if len(aggregate.paired_runs(comparison)) > 1:
        return words + (
            ", thin lines seed by seed, the thick line their mean, the band Student's t interval "
            f"({100 * CONFIDENCE:g} %) at "
            "each point by itself; with few seeds it may leave the drawn range."
        )
    return words + "; one seed, so there is no interval over training."


def _seed_band_words(comparison: Comparison) -> str:
    if len(comparison.seeds) > 1:
        return f"Lines are means over {len(comparison.seeds)} seeds, bands go from the smallest to the largest seed."
    return "One seed: there is no band."


def _settled(lines: Sequence[tuple[np.ndarray, np.ndarray]], last: float) -> list[float]:
    """The values after the first part of training, which decide the drawn range; all of them if nothing lies there."""
    late = [float(v) for x, values in lines for v in values[x >= _WARM_UP_SHARE * last]]
    return late or [float(v) for _, values in lines for v in values]


def _limit(ax: Axes, values: Sequence[float], margin: float = 0.06) -> None:
    low, high = min(values), max(values)
    room = (high - low) * margin or abs(high) * 0.05 or 1.0
    ax.set_ylim(low - room, high + room)


def _fill(ax: Axes, drawn: aggregate.Band, colour: str) -> None:
    if drawn.seeds > 1:
        ax.fill_between(drawn.x, drawn.low, drawn.high, color=colour, alpha=0.2, linewidth=0)


def _mark_every(x: np.ndarray) -> int:
    return max(1, len(x) // 20)


def _model_handles(comparison: Comparison, line: bool = True) -> list[Line2D]:
    return [
        Line2D(
            [],
            [],
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=5,
            linestyle=DASHES[i % len(DASHES)] if line else "none",
            label=model.label,
        )
        for i, model in enumerate(comparison.models)
    ]
