"""The tables and the figure of a benchmark: times as ratios to PyTorch's kernel, shape by shape."""

from collections.abc import Iterable, Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from rich.console import Console

from difftransformer.report.figures import _STYLE, INK, WIDTH_INCHES, Drawing, _finish, _legend_above
from difftransformer.report.tables import Group, Table
from difftransformer.report.terminal import _rich
from difftransformer.results import AttentionShape, AttentionSkip, AttentionTiming, Bench

BASE, OURS, OUR_SOFTMAX = "torch sdpa", "diff cpu", "softmax cpu"
MEAN, SHAPE = "geometric mean", "n/h/d"

QUIET_SHARE = 0.03  # of the CPU time to others, above which the tables end with a warning

# Okabe and Ito's colours; an implementation keeps its own, whichever others were timed.
_LOOKS = {
    OURS: ("#0072B2", "o"),
    "normed cpu": ("#0072B2", "x"),
    "diff chunked": ("#56B4E9", "s"),
    "diff sdpa": ("#009E73", "^"),
    "diff reference": ("#777777", "v"),
    OUR_SOFTMAX: ("#E69F00", "D"),
    "DiffLlama sdpa": ("#D55E00", "P"),
    "DiffLlama eager": ("#CC79A7", "X"),
}
_OTHER_LOOK = (INK, "*")

_ROW_INCHES = 0.36
_SPREAD = 0.6  # of a row, over which the implementations are laid out

Place = tuple[int, int, int]  # length, heads, width of a map


def bench_tables(bench: Bench) -> list[Table]:
    """A table for each mode and dtype of attention, then peak memory and the training step, where they were measured."""
    groups = _by_panel(bench)
    tables = [_attention_table(bench, mode, dtype, timings) for (mode, dtype), timings in groups.items()]
    if bench.memory:
        tables.append(_memory_table(bench))
    if bench.training:
        tables.append(_training_table(bench))
    return tables


def skipped_lines(bench: Bench) -> list[str]:
    """A sentence for each implementation and reason of what was not measured."""
    found: dict[tuple[str, str], list[AttentionSkip]] = {}
    for skip in bench.skipped:
        found.setdefault((skip.implementation, skip.reason), []).append(skip)
    return [
        f"Left out: {implementation} at n = {_listed(f'{skip.length_tokens:,}' for skip in skips)} "
        f"({_listed(f'{skip.dtype} {skip.mode}' for skip in skips)}): {reason}"
        for (implementation, reason), skips in found.items()
    ]


def print_bench(bench: Bench, console: Console) -> None:
    """Print the tables, and what is not in them and why."""
    for table in bench_tables(bench):
        console.print(_rich(table))
    for line in skipped_lines(bench):
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    if (bench.foreign_cpu_share or 0.0) > QUIET_SHARE:
        text = (
            f"Other processes took {bench.foreign_cpu_share:.0%} of this machine meanwhile; time again when it is idle."
        )
        console.print(text, style="bold", highlight=False, soft_wrap=True)


def draw_bench(bench: Bench, png: bool = False) -> Drawing | None:
    """Dots of every implementation's ratio to PyTorch's kernel: a panel for each mode and dtype, a row for each shape."""
    groups = _by_panel(bench)
    if not groups:
        return None
    modes, dtypes = list(dict.fromkeys(m for m, _ in groups)), list(dict.fromkeys(d for _, d in groups))
    names = [name for name in _implementations(bench.attention) if name != BASE]
    rows = {mode: 1 + max(len(_places(groups.get((mode, dtype), []))) for dtype in dtypes) for mode in modes}
    with matplotlib.rc_context(_STYLE):
        figure = Figure(
            figsize=(WIDTH_INCHES, _ROW_INCHES * sum(rows.values()) + 0.75 * len(modes) + 0.8), layout="constrained"
        )
        axes = figure.subplots(
            len(modes), len(dtypes), squeeze=False, sharex=True, sharey="row", height_ratios=list(rows.values())
        )
        for down, mode in enumerate(modes):
            for across, dtype in enumerate(dtypes):
                _draw_panel(axes[down, across], bench, mode, dtype, groups.get((mode, dtype), []), names)
            axes[down, 0].set_ylabel(SHAPE)
        for ax in axes[-1]:
            ax.set_xlabel("time over that of torch sdpa (logarithmic; left of 1 is faster)")
        _legend_above(figure, [_handle(name) for name in names])
        caption = (
            "Wall time over that of PyTorch's scaled_dot_product_attention with 2 h heads, the attention of a Transformer of "
            "the same size: medians of interleaved rounds, with quartiles. A row is a shape: n tokens, h differential "
            "heads, maps of width d. Lowest row: the geometric mean; hollow where the implementation was not timed on "
            "every shape."
        )
        return _finish("attention", "Time of attention", caption, figure, png)


def _draw_panel(
    ax: Axes, bench: Bench, mode: str, dtype: str, timings: Sequence[AttentionTiming], names: Sequence[str]
) -> None:
    places = _places(timings)
    base = {_place(timing): timing.median_seconds for timing in timings if timing.implementation == BASE}
    for index, name in enumerate(names):
        colour, marker = _LOOKS.get(name, _OTHER_LOOK)
        shift = _SPREAD * (index / max(1, len(names) - 1) - 0.5)
        for timing in timings:
            if timing.implementation == name:
                place = _place(timing)
                y = places.index(place) + shift
                quartiles = [timing.low_seconds / base[place], timing.high_seconds / base[place]]
                ax.plot(quartiles, [y, y], color=colour, linewidth=1.2)
                ax.plot(timing.ratio_to_torch_sdpa, y, marker, color=colour, markersize=5)
        for mean in bench.means:
            if (mean.mode, mean.dtype, mean.implementation, mean.against) == (mode, dtype, name, BASE):
                face = colour if mean.shapes == len(places) else "white"
                ax.plot(mean.ratio, len(places) + shift, marker, color=colour, markerfacecolor=face, markersize=6.5)
    ax.axvline(1, color=INK, linewidth=1)
    ax.axhline(len(places) - 0.5, color="#555555", linewidth=0.7)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(LogLocator(2))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_yticks(range(len(places) + 1), [*map(_label, places), MEAN])
    ax.set_ylim(len(places) + 0.5, -0.5)
    ax.grid(axis="y", visible=False)
    for y in range(0, len(places), 2):
        ax.axhspan(y - 0.5, y + 0.5, color="#f4f4f4", linewidth=0, zorder=0)
    ax.set_title(f"{mode}, {dtype}", loc="left")
    ax.tick_params(axis="x", labelbottom=True)


def _handle(name: str) -> Line2D:
    colour, marker = _LOOKS.get(name, _OTHER_LOOK)
    return Line2D([], [], color=colour, marker=marker, markersize=5, linestyle="none", label=name)


def _attention_table(bench: Bench, mode: str, dtype: str, timings: Sequence[AttentionTiming]) -> Table:
    names = [name for name in _implementations(timings) if name != BASE]
    cell = {(_place(timing), timing.implementation): timing for timing in timings}
    both = OURS in names and OUR_SOFTMAX in names
    places = _places(timings)
    rows = []
    for place in places:
        row = [_label(place), _milliseconds(cell[place, BASE].median_seconds)]
        row += [_ratio(cell[place, name].ratio_to_torch_sdpa) if (place, name) in cell else "-" for name in names]
        if both:
            ours = cell.get((place, OURS))
            row.append(_ratio(ours.ratio_to_softmax_kernel) if ours and ours.ratio_to_softmax_kernel else "-")
        rows.append(row)
    means = {
        (mean.implementation, mean.against): _ratio(mean.ratio) + ("*" if mean.shapes < len(places) else "")
        for mean in bench.means
        if (mean.mode, mean.dtype) == (mode, dtype)
    }
    rows.append([MEAN, "", *(means[name, BASE] for name in names), *([means[OURS, OUR_SOFTMAX]] if both else [])])
    titles = [SHAPE, f"{BASE}, ms", *names, *([f"{OURS} over {OUR_SOFTMAX}"] if both else [])]
    groups = tuple(Group(title, numeric=index > 0) for index, title in enumerate(titles))
    notes = [f"Ratios of median wall times to {BASE} with 2 h heads; below 1 is faster."]
    if any("*" in mean for mean in means.values()):
        notes.append("*: not timed on every shape.")
    return Table(f"{mode}-{dtype}", f"Attention, {mode}, {dtype}", groups, rows, notes)


def _memory_table(bench: Bench) -> Table:
    names = list(dict.fromkeys(point.implementation for point in bench.memory))
    cell = {(_place(point), point.implementation): point.peak_bytes for point in bench.memory}
    rows = []
    for place in sorted({place for place, _ in cell}):
        sizes = [f"{cell[place, name] / 2**20:,.1f}" if (place, name) in cell else "-" for name in names]
        rows.append([_label(place), *sizes])
    groups = tuple(Group(title, numeric=index > 0) for index, title in enumerate([SHAPE, *names]))
    first = bench.memory[0]
    notes = ["Above the inputs: outputs, gradients and workspace, in a fresh process."]
    return Table("memory", f"Peak memory, {first.mode}, {first.dtype}, MiB", groups, rows, notes)


def _training_table(bench: Bench) -> Table:
    models = dict.fromkeys((timing.model, timing.dtype) for timing in bench.training)
    names = list(dict.fromkeys(timing.implementation for timing in bench.training))
    cell = {(timing.model, timing.dtype, timing.implementation): timing for timing in bench.training}
    base = next(timing.implementation for timing in bench.training if timing.ratio_to_twin == 1)
    others = [name for name in names if name != base]
    rows = [
        [
            f"{model}, {dtype}",
            _milliseconds(cell[model, dtype, base].median_seconds),
            *(_ratio(cell[model, dtype, name].ratio_to_twin) for name in others),
        ]
        for model, dtype in models
    ]
    groups = tuple(Group(title, numeric=index > 0) for index, title in enumerate(["model", f"{base}, ms", *others]))
    notes = [f"Ratios of median wall times to {base}; below 1 is faster."]
    return Table("training", "Training step", groups, rows, notes)


def _by_panel(bench: Bench) -> dict[tuple[str, str], list[AttentionTiming]]:
    groups: dict[tuple[str, str], list[AttentionTiming]] = {}
    for timing in bench.attention:
        groups.setdefault((timing.mode, timing.dtype), []).append(timing)
    return groups


def _place(shape: AttentionShape) -> Place:
    return shape.length_tokens, shape.heads, shape.head_dim


def _label(place: Place) -> str:
    return "/".join(map(str, place))


def _places(timings: Iterable[AttentionTiming]) -> list[Place]:
    return sorted({_place(timing) for timing in timings})


def _implementations(timings: Iterable[AttentionTiming]) -> list[str]:
    """In the order of `_LOOKS`, then as they come."""
    names = dict.fromkeys(timing.implementation for timing in timings)
    return [*(name for name in _LOOKS if name in names), *(name for name in names if name not in _LOOKS)]


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"
