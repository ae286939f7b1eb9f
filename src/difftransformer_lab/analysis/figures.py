"""The figures of a study. Each arm has one colour, marker and dash in all of them; the reference is grey."""

import math
from collections.abc import Mapping, Sequence
from itertools import cycle, product
from operator import itemgetter
from textwrap import fill
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from difftransformer.errors import ResultsError

from ..plots import COLOURS, REFERENCE_COLOUR, STYLE, Drawing, arm_styles, finish, legend_above, panels
from ..results import Curve, PairedDifference, StudyFigure
from ..statistics import paired_difference
from ..table import quantity
from .compare import Compared, paired_seeds, row_of
from .contrasts import DECIDED, Finding
from .frame import Point, Records
from .scaling import Scaling
from .tables import HELD_OUT, TRAINING, title_of, with_unit

_COLUMNS = 3
_CURVE_COLUMNS = 4
_LABEL_LETTERS = 44
_TITLE_LETTERS, _NARROW_LETTERS = 30, 22
_LINE_INCHES = 0.16
_BY_POSITION = "nll by position"

ARMS = (
    "The difference of each model to the reference, the grey line at zero. Bar: 95 % interval, each for itself, with an arrow "
    "where it leaves the panel. Marker: the mean, filled where the bar is clear of zero. Pale dots: single seeds."
)
CONTRASTS = (
    "Each contrast with its 95 % interval, by the test that decides it. Pale dots: single seeds. Marker: the effect, filled "
    "where decided. Pale band: effects smaller than the smallest one that matters. Dotted lines: the margin to clear."
)
AXES = "Mean over seeds; bars are one standard error."
TRANSFER = "Mean over seeds. Rings: the best rate of each width."
LOSSES = (
    "Held-out loss (thick, band from the smallest to the largest seed) and training loss (thin) of each model in its colour, "
    "and of the reference in grey, at the last setting. Means over seeds. The first steps may lie above the drawn range."
)
POSITIONS = (
    "Each model minus the reference by position in the context, mean over seeds, at the last setting. Below zero is better. "
    "Band: 95 % Student t interval at each position by itself."
)
LAMBDA = (
    "Lambda, the weight of the second softmax map, at the last setting. Left: a line for each layer, mean over seeds. Right: "
    "first and last point by layer, with the band from the smallest to the largest seed."
)
SCALING = "Means over seeds with one standard error, and the power laws L = a N^-b + c fitted to them."

_WARM_UP_SHARE = 0.15
"""Losses of this first part of training may lie above the drawn range, so that the rest can be told apart."""

Styles = dict[str, dict[str, Any]]


def styles_of(records: Records) -> Styles:
    return arm_styles([arm.name for arm in records.index.arms], records.index.reference)


@matplotlib.rc_context(STYLE)
def draw_arms(records: Records, rows: Sequence[Compared]) -> Drawing | None:
    """Draw the difference of every arm to the reference, a panel for each figure; means over settings."""
    told = [row.figure for row in rows if row.difference and not row.point and not row.is_censored]
    figures = [figure for figure in records.index.figures if figure in told]
    if not figures:
        return None
    arms, styles = records.others, styles_of(records)
    columns = len(figures) if len(figures) <= _COLUMNS + 1 else _COLUMNS
    lines = math.ceil(len(figures) / columns)
    is_wide = columns <= _COLUMNS
    label_letters, letters = (_LABEL_LETTERS, _TITLE_LETTERS) if is_wide else (_TITLE_LETTERS, _NARROW_LETTERS)
    labels = [fill(arm.label, label_letters) for arm in arms]
    titles = [fill(title_of(figure), letters) for figure in figures]
    below = [fill(with_unit(f"minus {records.reference.label}", figure), letters) for figure in figures]
    row = 0.14 + _LINE_INCHES * max(map(_lines, labels))
    around = max(_lines(above) + _lines(words) for above, words in zip(titles, below, strict=True))
    height = 0.43 + _LINE_INCHES * around + row * max(2, len(arms))
    canvas, grid = panels(lines * height, lines, columns, sharey=True)
    for ax, figure, above, words in zip(_used(grid, len(figures)), figures, titles, below, strict=True):
        _draw_panel(ax, records, rows, figure, styles)
        _name_rows(ax, labels)
        ax.locator_params(axis="x", nbins=5 if is_wide else 4)
        ax.set_title(f"{above}\n({figure.better} is better)", loc="left", fontsize=9.5)
        ax.set_xlabel(words)
    return finish("arms", "Every model against the reference", ARMS, canvas, False)


@matplotlib.rc_context(STYLE)
def draw_contrasts(findings: Sequence[Finding]) -> Drawing | None:
    """Draw contrasts of a plan, a panel for each figure and unit; None while none has all of its seeds."""
    panels_of: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        if finding.difference is not None:
            panels_of.setdefault((finding.contrast.figure, finding.unit), []).append(finding)
    if not panels_of:
        return None
    heights = [0.9 + 0.5 * len(findings) for findings in panels_of.values()]
    canvas, grid = panels(sum(heights) + 0.2, len(heights), height_ratios=heights)
    for ax, ((figure, unit), drawn) in zip(grid[:, 0], panels_of.items(), strict=True):
        for line, finding in enumerate(drawn):
            _draw_contrast(ax, line, finding)
        _name_rows(ax, [fill(one.contrast.name, _LABEL_LETTERS) for one in drawn])
        if unit == "doublings":
            ends = [100 * (2**end - 1) for end in ax.get_xlim()]
            changes = [
                one for one in MaxNLocator(8, steps=[1, 2, 5, 10]).tick_values(*ends) if ends[0] <= one <= ends[1]
            ]
            ax.set_xticks([math.log2(1 + one / 100) for one in changes], [f"{one:+.0f} %" for one in changes])
            ax.set_xlabel(f"change of the tokens for the same {figure}")
        else:
            ax.set_xlabel(f"{figure} ({unit})" if unit else figure)
    return finish("contrasts", "Contrasts of the plan", CONTRASTS, canvas, False)


def _name_rows(ax: Axes, words: Sequence[str]) -> None:
    """Name the rows of differences, the first on top, and draw the line at zero."""
    ax.axvline(0, color=REFERENCE_COLOUR, linewidth=1.2)
    ax.set_yticks(range(len(words)), words)
    ax.set_ylim(len(words) - 0.4, -0.6)
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)


def _draw_contrast(ax: Axes, line: int, finding: Finding) -> None:
    contrast, difference = finding.contrast, finding.difference
    assert difference is not None
    if (small := contrast.smallest) is not None:
        ends = line - 0.38, line + 0.38
        ax.fill_between([-small, small], *ends, color=REFERENCE_COLOUR, alpha=0.15, linewidth=0)
    if contrast.margin:
        for margin in (-contrast.margin, contrast.margin):
            ax.plot([margin, margin], [line - 0.38, line + 0.38], ":", color=REFERENCE_COLOUR, linewidth=1.2)
    style = {"color": COLOURS[0], "marker": "D"}
    _draw_row(ax, line, difference, list(finding.values.values()), style, is_filled=finding.state in DECIDED)


def _draw_row(
    ax: Axes,
    line: int,
    difference: PairedDifference,
    dots: Sequence[float],
    style: Mapping[str, Any],
    *,
    is_filled: bool,
    limits: tuple[float, float] = (-math.inf, math.inf),
) -> None:
    """Draw a difference with its single seeds and its interval, which ends in an arrow where it leaves the limits."""
    colour, (low, high) = style["color"], limits
    ax.plot(dots, [line] * len(dots), "o", markersize=3.5, color=colour, alpha=0.4, markeredgewidth=0)
    if difference.low is not None and difference.high is not None:
        ends = max(low, difference.low), min(high, difference.high)
        ax.plot(ends, [line, line], color=colour, linewidth=1.7, solid_capstyle="butt")
        for end, marker, leaves in ((low, "<", difference.low < low), (high, ">", difference.high > high)):
            if leaves:
                ax.plot(end, line, marker=marker, markersize=5, color=colour, clip_on=False)
    look = {"marker": style["marker"], "markersize": 6.5, "markeredgewidth": 1.4}
    ax.plot(difference.mean, line, color=colour, markerfacecolor=colour if is_filled else "white", **look)


@matplotlib.rc_context(STYLE)
def draw_axes(records: Records, rows: Sequence[Compared], figure: StudyFigure) -> Drawing | None:
    """Draw a figure over the axes: the axis with the most values along x, a panel for each setting of the other axes."""
    axes = records.index.axes
    if not any(row.figure is figure and row.point for row in rows):
        return None
    order = sorted(range(len(axes)), key=lambda i: (axes[i].numbers is not None, len(axes[i].values)), reverse=True)
    along, others = order[0], order[:0:-1]
    settings = [dict(zip(others, values, strict=True)) for values in product(*(axes[i].values for i in others))]
    columns = min(len(axes[others[-1]].values) if others else 1, _COLUMNS)
    styles = styles_of(records)
    x_axis = axes[along]
    x = x_axis.numbers or list(range(len(x_axis.values)))
    is_log = bool(x_axis.numbers) and min(x) > 0 and max(x) >= 8 * min(x)
    lines = math.ceil(len(settings) / columns)
    canvas, grid = panels(0.8 + 2.35 * lines, lines, columns, sharey="row", sharex=True)
    for ax, names in zip(_used(grid, len(settings)), settings, strict=True):
        points = [tuple(value if i == along else names[i] for i in range(len(axes))) for value in x_axis.values]
        for arm in records.index.arms:
            along_x = sorted(zip(x, points, strict=True))
            compared = [(at, row_of(rows, figure.label, arm.name, point)) for at, point in along_x]
            there = [(at, row.statistic) for at, row in compared if row]
            where, means = [at for at, _ in there], [one.mean for _, one in there]
            errors, look = [one.standard_error or 0.0 for _, one in there], styles[arm.name]
            ax.errorbar(where, means, errors, **look, markersize=4.5, elinewidth=1.0, linewidth=1.3)
        if is_log:
            ax.set_xscale("log")
            ax.minorticks_off()
        ax.set_xticks(x, x_axis.values)
        title = ", ".join(f"{axes[i].label or axes[i].name} {value}" for i, value in names.items())
        ax.set_title(title, loc="left")
        if figure.unit == "share":
            ax.set_ylim(-0.04, 1.04)
    unit = f"\n({figure.unit})" if figure.unit else ""
    _label_axes(grid, x_axis.label or x_axis.name, f"{figure.label}{unit}")
    legend_above(canvas, _handles(records, styles))
    return finish(f"axes-{figure.slug}", f"{title_of(figure)}, by setting", AXES, canvas, False)


@matplotlib.rc_context(STYLE)
def draw_transfer(records: Records, rows: Sequence[Compared]) -> Drawing | None:
    """Draw the first figure over learning rates, a line for each width and a panel for each arm; None without these axes."""
    axes, figure = {axis.name: axis for axis in records.index.axes}, records.index.figures[0]
    if list(axes) != ["width", "rate"] or not axes["rate"].numbers or not rows:
        return None
    widths, rates, numbers = axes["width"].values, axes["rate"].values, axes["rate"].numbers
    best = min if figure.better == "lower" else max
    colours = matplotlib.colormaps["viridis"](np.linspace(0.1, 0.75, len(widths)))
    looks = list(zip(widths, colours, cycle("osD^v<>"), strict=False))  # markers begin anew after the last one
    lines = math.ceil(len(records.index.arms) / 2)
    canvas, grid = panels(0.8 + 2.35 * lines, lines, 2, sharey=True, sharex=True)
    for ax, arm in zip(_used(grid, len(records.index.arms)), records.index.arms, strict=True):
        for width, colour, marker in looks:
            measured = [
                (row_of(rows, figure.label, arm.name, (width, rate)), at)
                for rate, at in zip(rates, numbers, strict=True)
            ]
            there = sorted((at, row.statistic.mean) for row, at in measured if row)
            if not there:
                continue
            ax.plot(*zip(*there, strict=True), color=colour, marker=marker, markersize=4.5)
            ax.plot(*best(there, key=itemgetter(1)), "o", markersize=11, markerfacecolor="none", color=colour)
        ax.set_xscale("log")
        ax.minorticks_off()
        ax.set_xticks(numbers, rates)
        ax.set_title(arm.label, loc="left")
    _label_axes(grid, "learning rate", with_unit(figure.label, figure))
    legend_above(canvas, [Line2D([], [], color=c, marker=m, label=f"width {width}") for width, c, m in looks])
    return finish("transfer", title_of(figure), TRANSFER, canvas, False)


@matplotlib.rc_context(STYLE)
def draw_losses(records: Records) -> Drawing | None:
    """Draw training and held-out loss over training, a small panel for each arm with the reference behind it."""
    point = records.points[-1]
    arms = [arm for arm in records.others if _band(records, arm.name, point, HELD_OUT)]
    reference = records.reference.name
    if not arms:
        return None
    styles = styles_of(records)
    columns = min(_CURVE_COLUMNS, len(arms))
    lines = math.ceil(len(arms) / columns)
    drawn = []
    height = 0.5 + 2.1 * lines if lines > 1 else 3.2
    canvas, grid = panels(height, lines, columns, sharex=True, sharey=True)
    for ax, arm in zip(_used(grid, len(arms)), arms, strict=True):
        looks = ((TRAINING, 0.8, 0.6), (HELD_OUT, 1.6, None))
        for name, (curve, width, alpha) in product((reference, arm.name), looks):
            if band := _band(records, name, point, curve):
                (x, mean, low, high), colour = band, styles[name]["color"]
                ax.plot(x, mean, color=colour, linewidth=width, alpha=alpha)
                drawn.append((x, mean))
                if curve == HELD_OUT:
                    ax.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        ax.set_title(arm.label, loc="left", fontsize=9.5)
        ax.locator_params(axis="x", nbins=4)
    last = max(float(x[-1]) for x, _ in drawn)
    for ax in grid.flat:
        _limit(ax, _settled(drawn, last))
    _label_axes(grid, "training step", "nats/token")
    return finish("losses", "Training and held-out loss", LOSSES, canvas, False)


@matplotlib.rc_context(STYLE)
def draw_positions(records: Records) -> Drawing | None:
    """Draw the loss by position in the context, every arm minus the reference; None where it was not measured."""
    point = records.points[-1]
    tasks = dict.fromkeys(
        row.task for *_, run in records.every_run() for row in run.figures if row.name == _BY_POSITION
    )
    task = next(iter(tasks), "")
    own = {arm.name: _by_position(records, arm.name, point, task) for arm in records.index.arms}
    reference = own[records.index.reference]
    if not reference or not any(own[arm.name] for arm in records.others):
        return None
    styles = styles_of(records)
    canvas, ((ax,),) = panels(3.9)
    for arm in records.others:
        pairs = paired_seeds(records, arm.name, records.index.reference, point)
        differences = []
        for place, by_seed in own[arm.name].items():
            others = reference.get(place, {})
            values = [by_seed[seed] - others[seed] for seed in pairs if seed in by_seed and seed in others]
            if values:
                differences.append(((place[0] + place[1]) / 2, paired_difference(values, [0.0] * len(values))))
        if not differences:
            continue
        x = [middle for middle, _ in differences]
        ax.plot(x, [one.mean for _, one in differences], **styles[arm.name], markersize=4.5)
        if len(records.others) <= 2:
            low = [one.mean if one.low is None else one.low for _, one in differences]
            high = [one.mean if one.high is None else one.high for _, one in differences]
            ax.fill_between(x, low, high, color=styles[arm.name]["color"], alpha=0.15, linewidth=0)
    ax.axhline(0, color=styles[records.index.reference]["color"], linewidth=1.2)
    y_label = f"held-out loss minus that of\n{records.reference.label} (nats/token)"
    ax.set(xlabel="position in the context (tokens)", ylabel=y_label)
    legend_above(canvas, _handles(records, styles))
    return finish("positions", "Held-out loss by position", POSITIONS, canvas, False)


@matplotlib.rc_context(STYLE)
def draw_lambda(records: Records) -> Drawing | None:
    """Draw lambda of each layer over training, and its start and end by layer; None where no arm has a lambda."""
    point = records.points[-1]
    every = [(arm, _lambda_table(records, arm.name, point)) for arm in records.index.arms]
    tables = [(arm, table) for arm, table in every if table is not None]
    if not tables:
        return None
    styles = styles_of(records)
    look = {"sharey": "row", "width_ratios": (3, 2), "gridspec_kw": {"wspace": 0.1}}
    figure, grid = panels(3.7 * len(tables), len(tables), 2, **look)
    for (left, right), (arm, (steps, values)) in zip(grid, tables, strict=True):
        mean = values.mean(0)
        layers = mean.shape[1]
        colours = ListedColormap(matplotlib.colormaps["viridis"](np.linspace(0.4, 0.9, layers)))
        for layer in range(layers):
            left.plot(steps, mean[:, layer], color=colours(layer), linewidth=1.4 if layers <= 12 else 1.0)
        norm = BoundaryNorm(np.arange(layers + 1) - 0.5, layers)
        bar = figure.colorbar(ScalarMappable(norm, colours), ax=left, label="layer", pad=0.01, aspect=30)
        bar.set_ticks(sorted({round(tick) for tick in np.linspace(0, layers - 1, min(layers, 8))}))
        bar.ax.minorticks_off()
        left.set_title(f"{arm.label}: over training", loc="left")
        left.set(xlabel="training step", ylabel="lambda")
        right.plot(range(layers), mean[0], color="#777777", linestyle=":", marker=".", label=f"step {steps[0]:g}")
        colour = styles[arm.name]["color"]
        if len(values) > 1:
            low, high = values[:, -1].min(0), values[:, -1].max(0)
            right.fill_between(range(layers), low, high, color=colour, alpha=0.2, linewidth=0)
        right.plot(range(layers), mean[-1], color=colour, marker="o", markersize=4, label=f"step {steps[-1]:g}")
        right.set_title("by layer", loc="left")
        right.set_xlabel("layer (from 0)")
        right.xaxis.set_major_locator(MaxNLocator(integer=True))
        right.legend(loc="best")
    return finish("lambda", "Lambda by layer", LAMBDA, figure, False)


@matplotlib.rc_context(STYLE)
def draw_scaling(records: Records, scaling: Scaling) -> Drawing | None:
    names = list(dict.fromkeys(trend.axis.name for trend in scaling.trends))
    if not names:
        return None
    styles = styles_of(records)
    canvas, (line,) = panels(4.0, 1, len(names))
    for ax, name in zip(line, names, strict=True):
        for trend in (trend for trend in scaling.trends if trend.axis.name == name):
            style = styles[trend.arm.name]
            ax.errorbar(trend.n, trend.loss, trend.error, **style | {"linestyle": "none"}, markersize=5)
            x = np.geomspace(trend.n[0], trend.n[-1], 60)
            ax.plot(x, trend.law.at(x)[0], **style | {"marker": ""}, linewidth=1.3)
        ax.set_xscale("log")
        ticks = next(trend.n for trend in scaling.trends if trend.axis.name == name)
        ax.set_xticks(ticks, [quantity(n) for n in ticks])
        ax.minorticks_off()
        other = next(axis for axis in records.index.axes if axis.name != name and axis.name in ("size", "tokens"))
        ax.set_xlabel({"size": "parameters", "tokens": "training tokens"}[name])
        ax.set_title(f"over {name}, at {other.label or other.name} {other.values[-1]}", loc="left")
    unit = scaling.figure.unit
    line[0].set_ylabel(f"{scaling.figure.label}{f' ({unit})' if unit else ''}")
    legend_above(canvas, _handles(records, styles))
    return finish("scaling", "Power laws", SCALING, canvas, False)


def _draw_panel(ax: Axes, records: Records, rows: Sequence[Compared], figure: StudyFigure, styles: Styles) -> None:
    """Draw one figure's differences; the single seeds decide the range, and longer intervals end in an arrow.

    With one seed the interval, which is over items, decides.
    """
    drawn = []
    for line, arm in enumerate(records.others):
        row = row_of(rows, figure.label, arm.name, ())
        if row is not None and row.difference is not None and not row.is_censored:
            drawn.append((line, row, row.difference, [*row.differences.values()]))
    ends = [dot for *_, dots in drawn for dot in dots]
    of_one_seed = [difference for _, _, difference, dots in drawn if len(dots) == 1]
    ends += [end for one in of_one_seed for end in (one.low, one.high) if end is not None]
    low, high = (pick(0.0, *ends) for pick in (min, max))
    room = 0.3 * (high - low) or 1.0
    low, high = low - room, high + room
    for line, row, difference, dots in drawn:
        style, is_filled = styles[row.arm.name], row.excludes_zero
        _draw_row(ax, line, difference, dots, style, is_filled=is_filled, limits=(low, high))
    ax.set_xlim(low, high)


def _lines(text: str) -> int:
    return text.count("\n") + 1


def _used(grid: np.ndarray, count: int) -> list[Axes]:
    """Return the first `count` panels and hide the rest."""
    for ax in grid.flat[count:]:
        ax.set_visible(False)
    return list(grid.flat[:count])


def _label_axes(grid: np.ndarray, x: str, y: str) -> None:
    for line in grid:
        line[0].set_ylabel(y)
    for ax in grid[-1]:
        ax.set_xlabel(x)


def _handles(records: Records, styles: Styles) -> list[Line2D]:
    return [Line2D([], [], **styles[arm.name], markersize=5, label=arm.label) for arm in records.index.arms]


def _band(records: Records, arm: str, point: Point, name: str) -> tuple[np.ndarray, ...] | None:
    """Return the steps that all seeds have, and mean, smallest and largest value there; None where there are none."""
    steps, values = _common_values(
        [run.curves[name] for run in records.ended(arm, point).values() if name in run.curves]
    )
    return (steps, values.mean(0), values.min(0), values.max(0)) if steps.size else None


def _lambda_table(records: Records, arm: str, point: Point) -> tuple[np.ndarray, np.ndarray] | None:
    """Return lambda over training: steps (S,) and values (seeds, S, layers); None for a model without lambda."""
    runs = list(records.ended(arm, point).values())
    layers = 0
    while runs and all(f"lambda {layers}" in run.curves for run in runs):
        layers += 1
    by_layer = [_common_values([run.curves[f"lambda {layer}"] for run in runs]) for layer in range(layers)]
    if not by_layer or not by_layer[0][0].size:
        return None
    return by_layer[0][0], np.stack([values for _, values in by_layer], axis=-1)


def _by_position(records: Records, arm: str, point: Point, task: str) -> dict[tuple[int, int], dict[int, float]]:
    losses: dict[tuple[int, int], dict[int, float]] = {}
    for seed, run in records.at(arm, point).items():
        for row in run.figures:
            if (row.task, row.name) == (task, _BY_POSITION) and {"start", "end"} <= row.at.keys():
                losses.setdefault((int(row.at["start"]), int(row.at["end"])), {})[seed] = row.value
    return dict(sorted(losses.items()))


def _common_values(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps that every curve has, and a row of values for each curve."""
    for curve in curves:
        if (steps_there := len(curve.steps)) != (values_there := len(curve.values)):
            raise ResultsError(f"a curve has {steps_there} steps but {values_there} values; run the command again")
    tables = [dict(zip(curve.steps, curve.values, strict=True)) for curve in curves]
    steps = sorted(set.intersection(*map(set, tables))) if tables else []
    values = np.array([[table[step] for step in steps] for table in tables], dtype=np.float64)
    return np.array(steps, dtype=np.float64), values.reshape(len(tables), len(steps))


def _settled(lines: Sequence[tuple[np.ndarray, np.ndarray]], last: float) -> list[float]:
    """Return the values after the first part of a training of `last` steps; all if there are none."""
    late = [float(v) for x, values in lines for v in values[x >= _WARM_UP_SHARE * last]]
    return late or [float(v) for _, values in lines for v in values]


def _limit(ax: Axes, values: Sequence[float]) -> None:
    low, high = min(values), max(values)
    room = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    ax.set_ylim(low - room, high + room)
