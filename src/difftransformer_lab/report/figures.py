"""The figures of a study's training: losses and lambda over steps. Each task draws its own picture."""

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from difftransformer.errors import ResultsError
from difftransformer_lab.plots import seeds
from difftransformer_lab.plots.style import (
    STYLE,
    WIDTH_INCHES,
    Drawing,
    colour_of,
    finish,
    legend_above,
    line_style,
)
from difftransformer_lab.results import Curve, RunResult, Study

_SMOOTHING_SHARE = 0.02
"""The training loss is averaged over this share of its points."""

_MOST_TRAINING_LINES = 2
"""Of more models than this, which lie close together, noisy training losses would hide the validation losses."""

Unfinished = tuple[str, str, str, Figure]


def draw_training(study: Study, png: bool = False) -> list[Drawing]:
    """Draw every figure of the training that the results have data for."""
    with matplotlib.rc_context(STYLE):
        drawn = [draw_loss(study), draw_lambda(study)]
        return [finish(*parts, png) for parts in drawn if parts is not None]


def runs_of(study: Study, model: str) -> list[RunResult]:
    """Return the runs of a model, by seed."""
    return sorted((run for run in study.runs if run.model == model), key=lambda run: run.seed)


def draw_loss(study: Study) -> Unfinished | None:
    """Draw training and validation loss over steps with seed bands, and below each model's minus the reference's."""
    runs = [runs_of(study, model.model) for model in study.models]
    points = max((len(run.train_loss_nats.values) for group in runs for run in group), default=0)
    window = 2 * round(points * _SMOOTHING_SHARE / 2) + 1
    train = [seeds.band([seeds.smooth(run.train_loss_nats, window) for run in group]) for group in runs]
    curves = [[run.validation_loss_nats for run in group] for group in runs]
    validation = [seeds.band(group) for group in curves]
    if len(runs) > _MOST_TRAINING_LINES and any(validation):
        train = [None] * len(runs)
    bands = [band for band in (*train, *validation) if band]
    if not bands:
        return None
    found = [(index, seeds.difference_band(group, curves[-1])) for index, group in enumerate(curves[:-1])]
    differences = [(index, difference) for index, difference in found if difference]
    figure, top, bottom = seeds.over_difference(len(differences))
    for index, (thin, drawn) in enumerate(zip(train, validation, strict=True)):
        if thin:
            top.plot(thin.x, thin.mean, color=colour_of(index), linewidth=0.9, alpha=0.55)
        if drawn:
            if drawn.seeds > 1:
                top.fill_between(drawn.x, drawn.low, drawn.high, color=colour_of(index), alpha=0.2, linewidth=0)
            top.plot(drawn.x, drawn.mean, **line_style(index), markersize=4, markevery=max(1, len(drawn.x) // 20))
    last = max(float(band.x[-1]) for band in bands)
    seeds.limit(top, seeds.settled([(band.x, row) for band in bands for row in (band.low, band.high)], last))
    top.set_ylabel("loss (nats/token)" if any(train) else "validation loss\n(nats/token)")
    handles = [
        *(Line2D([], [], **line_style(i), markersize=5, label=model.label) for i, model in enumerate(study.models)),
    ]
    if any(train):
        handles.append(Line2D([], [], color="#777777", linewidth=0.9, label="training (thin)"))
        handles.append(Line2D([], [], color="#777777", marker="o", markersize=4, label="validation (with markers)"))
    legend_above(figure, handles)
    (bottom or top).set_xlabel("training step")
    caption = f"Loss over training in nats a token. {_seed_words(study)} The first steps may lie above the drawn range."
    if any(train):
        caption += (
            f" Thin lines: training loss, a moving mean over {window} points. Lines with markers: validation loss."
        )
    if bottom:
        others = ", ".join(study.models[index].label for index, _ in differences)
        title = f"Validation loss of {others} minus {study.models[-1].label}"
        seeds.draw_differences(bottom, differences, title, last)
        caption += seeds.difference_words("validation loss", study.models[-1].label, len(study.seeds))
    return "loss", "Loss over training", caption, figure


def draw_lambda(study: Study) -> Unfinished | None:
    """Draw lambda of each layer over training, and its start and end by layer."""
    found = [
        (index, table)
        for index, model in enumerate(study.models)
        if (table := lambda_table(runs_of(study, model.model))) is not None
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
        left.set_title(f"{study.models[index].label}: over training", loc="left")
        left.set_xlabel("training step")
        left.set_ylabel("lambda")
        right.plot(range(layers), mean[0], color="#777777", linestyle=":", marker=".", label=f"step {steps[0]:g}")
        if len(values) > 1:
            low, high = values[:, -1].min(0), values[:, -1].max(0)
            right.fill_between(range(layers), low, high, color=colour_of(index), alpha=0.2, linewidth=0)
        style = line_style(index) | {"linestyle": "-"}
        right.plot(range(layers), mean[-1], **style, markersize=4, label=f"step {steps[-1]:g}")
        right.set_title("by layer", loc="left")
        right.set_xlabel("layer (from 0)")
        right.xaxis.set_major_locator(MaxNLocator(integer=True))
        right.legend(loc="best")
    caption = (
        "Lambda, the weight of the second softmax map. Left: one line for each layer, mean over seeds; dotted: its value at "
        f"step {' and '.join(map(str, starts))}. At the start of training that is lambda_init (0.8 - 0.6 exp(-0.3 layer) in "
        "the paper's V1) but for the random start of the lambda vectors. Right: start and end by layer"
        + (", with the band from the smallest to the largest seed." if len(study.seeds) > 1 else ".")
    )
    without = [m.label for i, m in enumerate(study.models) if i not in {index for index, _ in found}]
    if without:
        caption += f" {' and '.join(without)}: no lambda."
    return "lambda", "Lambda by layer", caption, figure


def lambda_table(runs: Sequence[RunResult]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return lambda over training: steps (S,) and values (seeds, S, layers); None for a model without lambda.

    Raises:
        ResultsError: a run whose `lambda_values` is not one row of layers for each of its `lambda_steps`.
    """
    runs = [run for run in runs if run.lambda_values]
    if not runs:
        return None
    layers = len(runs[0].lambda_values[0])
    for run in runs:
        if len(run.lambda_values) != len(run.lambda_steps) or any(len(row) != layers for row in run.lambda_values):
            raise ResultsError(
                f"{run.run}: lambda_values must hold one row of {layers} layers for each of {len(run.lambda_steps)} "
                "lambda_steps; run the command again"
            )
    if layers == 0:
        return None
    by_layer = [
        seeds.common_values(
            [Curve(steps=run.lambda_steps, values=[row[layer] for row in run.lambda_values]) for run in runs]
        )
        for layer in range(layers)
    ]
    steps = by_layer[0][0]
    return (steps, np.stack([values for _, values in by_layer], axis=-1)) if steps.size else None


def _seed_words(study: Study) -> str:
    if len(study.seeds) > 1:
        return f"Lines are means over {len(study.seeds)} seeds, bands go from the smallest to the largest seed."
    return "One seed: there is no band."
