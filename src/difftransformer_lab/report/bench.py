"""The tables of a benchmark: times as ratios to PyTorch's kernel, shape by shape."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from rich.console import Console

from difftransformer_lab.plots.style import INK
from difftransformer_lab.report.tables import Group, Table
from difftransformer_lab.report.terminal import rich_table
from difftransformer_lab.results import AttentionShape, AttentionTiming, Bench, VariantTiming

BASE = "torch sdpa"
MEAN, SHAPE = "geometric mean", "n/h/d"
IMPLEMENTATION = "implementation"

QUIET_SHARE = 0.03  # share of the CPU time for other processes above which a warning is printed

# Colour and marker of each implementation, in the order of tables and legends. They stay the same whichever others were
# timed. The colours are Okabe and Ito's, and a violet.
LOOKS = {
    "diff cpu": ("#0072B2", "o"),
    "diff triton": ("#0072B2", "o"),
    "diff triton deterministic": ("#0072B2", "d"),
    "normed cpu": ("#0072B2", "x"),
    "normed triton": ("#0072B2", "x"),
    "diff flash": ("#7B4EA3", "<"),
    "diff flex": ("#000000", ">"),
    "diff chunked": ("#56B4E9", "s"),
    "diff sdpa": ("#009E73", "^"),
    "diff reference": ("#777777", "v"),
    "softmax cpu": ("#E69F00", "D"),
    "softmax triton": ("#E69F00", "D"),
    "torch cudnn": ("#777777", "h"),
    "DiffLlama sdpa": ("#D55E00", "P"),
    "DiffLlama eager": ("#CC79A7", "X"),
}
OTHER_LOOK = (INK, "*")

Place = tuple[int, int, int, int]  # length, width of a map, heads, batch
Column = tuple[str, int | None]  # column of the figure: dtype, and the width of a map if each width has its own column
RowT = TypeVar("RowT")
VariantT = TypeVar("VariantT", bound=VariantTiming)


def bench_tables(bench: Bench) -> list[Table]:
    """Make tables for each mode and dtype of attention, then for every other part that was measured.

    On a GPU those of attention are made for each width of a map too: times with token rates, and FLOPs or bytes a second.
    """
    tables = []
    for mode, column in panels(bench):
        timings = in_panel(bench, mode, column)
        tables.append(_times_table(bench, mode, column, timings))
        if column[1] is not None:
            tables.append(_work_table(mode, column, timings))
    others: list[tuple[Sequence[object], Callable[[Bench], Table]]] = [
        (bench.peaked, _peaked_table),
        (bench.memory, _memory_table),
        (bench.training, _training_table),
        (bench.diffllama, _diffllama_table),
        (bench.generation, _generation_table),
        (bench.models, _models_table),
        (bench.variants, _variants_table),
        (bench.loss, _loss_table),
        (bench.overhead, _overhead_table),
    ]
    return tables + [make(bench) for rows, make in others if rows]


def skipped_lines(bench: Bench) -> list[str]:
    """Write a sentence for each implementation that was left out and each reason."""
    found = _grouped(bench.skipped, lambda skip: (skip.implementation, skip.reason))
    lines = [
        f"Left out: {implementation} at n = {_listed(f'{skip.length_tokens:,}' for skip in skips)} "
        f"({_listed(f'{skip.dtype} {skip.mode}' for skip in skips)}): {reason}"
        for (implementation, reason), skips in found.items()
    ]
    return lines + [
        f"Left out: {skip.implementation} in the training step of {skip.model}, {skip.dtype}, "
        f"{skip.batch} x {skip.context_tokens:,} tokens: {skip.reason}"
        for skip in bench.training_skipped
    ]


def print_bench(bench: Bench, console: Console) -> None:
    """Print the tables, then what was left out and why."""
    for table in bench_tables(bench):
        console.print(rich_table(table))
    for line in skipped_lines(bench):
        console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
    if (bench.foreign_cpu_share or 0.0) > QUIET_SHARE:
        text = (
            f"Other processes took {bench.foreign_cpu_share:.0%} of this machine meanwhile; repeat it when it is idle."
        )
        console.print(text, style="bold", highlight=False, soft_wrap=True)


def _times_table(bench: Bench, mode: str, column: Column, timings: Sequence[AttentionTiming]) -> Table:
    """Make the table of ratios: for one width a row for each implementation, else a row for each shape."""
    dtype, width = column
    cell, places, names = _cells(timings), places_of(timings), implementations(timings)
    pairs = [(name, BASE) for name in names if name != BASE]
    pairs += [(diff, name) for name in names if (diff := name.replace("softmax", "diff")) != name and diff in names]
    means = {
        (mean.implementation, mean.against): mean
        for mean in bench.means
        if (mean.mode, (mean.dtype, mean.head_dim)) == (mode, column)
    }
    rows = [[f"{BASE}, ms", *(_milliseconds(cell[place, BASE].median_seconds) for place in places), ""]]
    rates = [["", *("" for _ in rows[0][1:])]]
    for name, against in pairs:
        mean, found = means[name, against], [cell.get((place, name)) for place in places]
        field = "ratio_to_torch_sdpa" if against == BASE else "ratio_to_softmax_kernel"
        ratios = [*(getattr(timing, field) if timing else None for timing in found), mean.ratio]
        rows.append([name if against == BASE else f"{name} over {against}", *map(_ratio, ratios)])
        rows[-1][-1] += "*" if mean.shapes < len(places) else ""
        rates.append(["", *(_ratio(1 / ratio) if ratio else "" for ratio in ratios)])
    clock = "wall times" if width is None else "times on the GPU"
    notes = [f"Ratios of median {clock} to {BASE} with 2 h heads; below 1 is faster."]
    if any(row[-1].endswith("*") for row in rows):
        notes.append("*: not timed on every shape.")
    if width is None:
        titles, *cells = zip([SHAPE, *map(_label, places), MEAN], *rows, strict=True)
        return Table(f"{mode}-{dtype}", f"Attention, {mode}, {dtype}", _groups(titles), [*map(list, cells)], notes)
    notes.append(f"In brackets: tokens a second over those of {BASE}, the inverse of the ratio; above 1 is faster.")
    columns = [*(row_of(place, column) for place in places), MEAN]
    groups = [
        Group(IMPLEMENTATION, numeric=False),
        *(Group(name, ("time", "token rate"), "remark") for name in columns),
    ]
    rows = [
        [row[0], *(part for pair in zip(row[1:], rate[1:], strict=True) for part in pair)]
        for row, rate in zip(rows, rates, strict=True)
    ]
    return Table(_name("times", mode, column), f"Time, {_title(mode, column, timings)}", tuple(groups), rows, notes)


def _work_table(mode: str, column: Column, timings: Sequence[AttentionTiming]) -> Table:
    """Make the table of FLOPs (in decoding, bytes) a second with the time over the roofline, and the work over the least."""
    cell, places = _cells(timings), places_of(timings)
    work = {timing.implementation: timing.work_over_least for timing in timings}
    unit, what = ("TB/s", "bytes") if mode == "decode" else ("TFLOP/s", "FLOPs")
    rows = []
    for name in [BASE, *(name for name in implementations(timings) if name != BASE)]:
        row = [name]
        for place in places:
            timing = cell.get((place, name))
            rate = timing and (timing.terabytes_per_second if mode == "decode" else timing.teraflops_per_second)
            over = timing and timing.time_over_roofline
            row += [_rate(rate) if rate else "-", f"{over:.1f}" if over else ""]
        known = work[name]
        rows.append([*row, f"{known:.2f}x" if known else "-"])
    lengths = (Group(row_of(place, column), (unit, "over the roofline"), "ratio") for place in places)
    groups = (Group(IMPLEMENTATION, numeric=False), *lengths, Group(f"{what} by formula"))
    notes = [
        f"{unit} count the {what} of {BASE} for every row, so they compare as token rates do. In brackets: time over the "
        "least that the device's peak allows, where the peak is known: of plain attention, or of both maps in one kernel.",
        f"Last column: {what} of the method over the least.",
    ]
    return Table(_name("work", mode, column), f"{unit}, {_title(mode, column, timings)}", groups, rows, notes)


def _peaked_table(bench: Bench) -> Table:
    """Make a row for each implementation, dtype and mode, and a column for each factor."""
    factors = sorted({timing.score_factor or 1 for timing in bench.peaked})
    timed = [timing for timing in bench.peaked if timing.implementation != BASE]
    cells = _grouped(timed, lambda t: f"{t.implementation}, {t.dtype} {t.mode}")
    rows = []
    for title, timings in cells.items():
        ratios = {timing.score_factor or 1: timing.ratio_to_torch_sdpa for timing in timings}
        rows.append([title, *(_ratio(ratios.get(factor)) for factor in factors)])
    first = bench.peaked[0]
    notes = [
        f"n = {first.length_tokens:,}, h = {first.heads}, d = {first.head_dim}. Columns: standard deviation of the scores in "
        f"nats. Ratios of median times to {BASE} on the same numbers; below 1 is faster."
    ]
    titles = [IMPLEMENTATION, *(f"{factor:g}" for factor in factors)]
    return Table("peaked", "Attention of peaked scores", _groups(titles), rows, notes)


def _memory_table(bench: Bench) -> Table:
    names = list(dict.fromkeys(point.implementation for point in bench.memory))
    cell = {(place_of(point), point.implementation): f"{point.peak_bytes / 2**20:,.1f}" for point in bench.memory}
    places = sorted({place for place, _ in cell})
    rows = [[_label(place), *(cell.get((place, name), "-") for name in names)] for place in places]
    first = bench.memory[0]
    how = "by PyTorch's count" if is_gpu(bench) else "in a fresh process"
    notes = [f"Above the inputs: outputs, gradients and workspace, {how}."]
    return Table("memory", f"Peak memory, {first.mode}, {first.dtype}, MiB", _groups([SHAPE, *names]), rows, notes)


def _training_table(bench: Bench) -> Table:
    names = list(dict.fromkeys(timing.implementation for timing in bench.training))
    base = next(timing.implementation for timing in bench.training if timing.ratio_to_twin == 1)
    others = [name for name in names if name != base]
    has_sizes = len({timing.context_tokens for timing in bench.training}) > 1
    has_peaks = any(timing.peak_bytes for timing in bench.training)
    steps = _grouped(
        bench.training,
        lambda t: f"{t.model}, {t.dtype}" + (f", {t.batch} x {t.context_tokens}" if has_sizes else ""),
    )
    rows = []
    for title, timings in steps.items():
        cell = {timing.implementation: timing for timing in timings}
        row = [title, _milliseconds(cell[base].median_seconds)]
        row += [_ratio(cell[name].ratio_to_twin if name in cell else None) for name in others]
        if has_peaks:
            peaks = {name: timing.peak_bytes for name, timing in cell.items() if timing.peak_bytes}
            whole = peaks.get(base)
            row.append(f"{whole / 2**30:.2f}" if whole else "-")
            row += [_ratio(peaks[name] / whole if whole and name in peaks else None) for name in others]
        rows.append(row)
    titles = ["model", f"{base}, ms", *others]
    notes = [f"Ratios of median {'' if is_gpu(bench) else 'wall '}times to {base}; below 1 is faster."]
    if has_peaks:
        titles += [f"{base}, GiB", *(f"{name}, memory" for name in others)]
        notes.append(f"Memory: the peak of a step, weights, gradients and moments included; ratios to {base}.")
    return Table("training", "Training step", _groups(titles), rows, notes)


def _diffllama_table(bench: Bench) -> Table:
    rows = [
        [title, *(_milliseconds(timing.median_seconds) for timing in cell), _ratio(cell[-1].ratio_to_diffllama)]
        for title, cell in _grouped(bench.diffllama, lambda t: f"{t.work}, {t.dtype}, {t.tokens:,}").items()
    ]
    names = list(dict.fromkeys(timing.implementation for timing in bench.diffllama))
    titles = ["work, dtype, tokens", *(f"{name}, ms" for name in names), "ratio"]
    parameters = bench.diffllama[0].parameters
    notes = [f"transformers' DiffLlama with {parameters / 1e6:.0f}M parameters; ratios below 1 are faster."]
    return Table("diffllama", "DiffLlama accelerated", _groups(titles), rows, notes)


def _generation_table(bench: Bench) -> Table:
    rows = [
        [
            f"{timing.implementation}, {timing.cache} cache, {timing.dtype}",
            f"{timing.tokens_per_second:.1f}",
            _milliseconds(timing.median_seconds),
            f"{_milliseconds(timing.low_seconds)} to {_milliseconds(timing.high_seconds)}",
            "-" if timing.median_cpu_seconds is None else _milliseconds(timing.median_cpu_seconds),
            _ratio(timing.rate_over_diffllama),
            _ratio(timing.rate_over_twin),
        ]
        for timing in bench.generation
    ]
    titles = ["model", "tokens/s", "ms", "quartiles, ms", "CPU ms", "rate over DiffLlama", "rate over the Transformer"]
    first = bench.generation[0]
    notes = [
        f"A step of one token behind {first.cached_tokens:,}, {first.parameters / 1e6:.0f}M parameters. Rates over the faster "
        "DiffLlama and over the Transformer, both with a static cache; above 1 is faster."
    ]
    return Table("generation", "Decoding by whole models", _groups(titles), rows, notes)


def _model_cells(timings: Sequence[VariantT]) -> tuple[list[str], dict[str, dict[str, VariantT]]]:
    """Return the implementations, and the timings of each piece of work by implementation."""
    names = list(dict.fromkeys(timing.implementation for timing in timings))
    cells = _grouped(timings, lambda t: f"{t.work}, {t.model}, {t.dtype}, {t.batch} x {t.context_tokens}")
    return names, {title: {timing.implementation: timing for timing in cell} for title, cell in cells.items()}


def _models_table(bench: Bench) -> Table:
    names, cells = _model_cells(bench.models)
    rows = []
    for title, cell in cells.items():
        ratios = [f"{cell['DIFF'].ratio_to_twin:.3f}", _ratio(cell["twin"].ratio_to_llama)]
        ratios.append(_ratio(cell["DIFF"].ratio_to_diffllama))
        rows.append([title, *(_milliseconds(cell[name].median_seconds) for name in names), *ratios])
    titles = [*(f"{name}, ms" for name in names), "DIFF over twin", "twin over Llama", "DIFF over DiffLlama"]
    notes = [
        "Ratios of median times; DiffLlama means the faster of the two. Below 1 is faster. A decoding call makes several "
        "tokens."
    ]
    return Table("models", "Whole models", _groups(["work", *titles]), rows, notes)


def _variants_table(bench: Bench) -> Table:
    names, cells = _model_cells(bench.variants)
    rows = []
    for title, cell in cells.items():
        rows.append([title, _milliseconds(cell["softmax"].median_seconds)])
        rows[-1] += [_ratio(cell[name].ratio_to_twin) for name in names if name != "softmax"]
    titles = ["softmax, ms", *(name for name in names if name != "softmax")]
    notes = [
        "Ratios of median times to softmax attention, the models having equally many parameters. Below 1 is faster. A decoding "
        "call makes several tokens."
    ]
    return Table("variants", "Attention types", _groups(["work", *titles]), rows, notes)


def _loss_table(bench: Bench) -> Table:
    cells = _grouped(bench.loss, lambda t: f"{t.dtype}, {t.tokens:,} x {t.hidden_size}, {t.vocab_size:,} logits")
    rows = [
        [
            f"{title}: {timing.implementation}",
            _milliseconds(timing.median_seconds),
            _ratio(timing.ratio_to_whole),
            f"{timing.peak_bytes / 2**20:,.0f}",
            _ratio(timing.peak_bytes / timings[0].peak_bytes),
        ]
        for title, timings in cells.items()
        for timing in timings
    ]
    notes = [f"Forward and backward; ratios to {bench.loss[0].implementation}. Memory above the inputs."]
    return Table("loss", "Loss", _groups(["loss", "ms", "ratio", "MiB", "memory, ratio"]), rows, notes)


def _overhead_table(bench: Bench) -> Table:
    rows = [
        [
            f"{row.model}, {row.dtype}, {row.batch} x {row.context_tokens}",
            _milliseconds(row.step_seconds),
            _ratio(row.ratio_to_bare),
            *(f"{100 * share:.2f}" for share in (row.loader_share, row.log_share, row.inside_share, row.save_share)),
            f"{100 * row.share:.2f}",
        ]
        for row in bench.overhead
    ]
    titles = ["step, ms", "over bare loop", "loader, %", "logs, %", "inside, %", "checkpoints, %", "together, %"]
    first = bench.overhead[0]
    notes = [
        f"Shares of a step; looks inside the model every {first.inside_every} steps, a checkpoint every {first.save_every}."
    ]
    return Table("overhead", "Training loop", _groups(["model", *titles]), rows, notes)


def is_gpu(bench: Bench) -> bool:
    return bench.environment.device != "cpu"


def panels(bench: Bench) -> list[tuple[str, Column]]:
    """List mode and column of each panel in the order in which they were measured."""
    return list(dict.fromkeys((mean.mode, (mean.dtype, mean.head_dim)) for mean in bench.means))


def in_panel(bench: Bench, mode: str, column: Column) -> list[AttentionTiming]:
    dtype, width = column
    return [
        timing
        for timing in bench.attention
        if (timing.mode, timing.dtype) == (mode, dtype) and width in (None, timing.head_dim)
    ]


def _groups(titles: Sequence[str]) -> tuple[Group, ...]:
    return tuple(Group(title, numeric=index > 0) for index, title in enumerate(titles))


def _name(kind: str, mode: str, column: Column) -> str:
    return f"{kind}-{mode}-{column[0]}-{column[1]}"


def _title(mode: str, column: Column, timings: Sequence[AttentionTiming]) -> str:
    heads = "/".join(dict.fromkeys(str(timing.heads) for timing in timings))
    return f"{mode}, {column[0]}, h = {heads}, d = {column[1]}"


def _cells(timings: Iterable[AttentionTiming]) -> Mapping[tuple[Place, str], AttentionTiming]:
    return {(place_of(timing), timing.implementation): timing for timing in timings}


KeyT = TypeVar("KeyT")


def _grouped(rows: Iterable[RowT], key: Callable[[RowT], KeyT]) -> dict[KeyT, list[RowT]]:
    groups: dict[KeyT, list[RowT]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def place_of(shape: AttentionShape) -> Place:
    return shape.length_tokens, shape.head_dim, shape.heads, shape.batch


def _label(place: Place) -> str:
    length, width, heads, batch = place
    return f"{f'{batch}x' if batch > 1 else ''}{length}/{heads}/{width}"


def row_of(place: Place, column: Column) -> str:
    """Return the label of a place's row in the figure, without the width if the column states it."""
    return _label(place) if column[1] is None else _label(place).partition("/")[0]


def places_of(timings: Iterable[AttentionTiming]) -> list[Place]:
    return sorted({place_of(timing) for timing in timings})


def implementations(timings: Iterable[AttentionTiming]) -> list[str]:
    """List the names in the order of `LOOKS`, then the others as they come."""
    names = dict.fromkeys(timing.implementation for timing in timings)
    return [*(name for name in LOOKS if name in names), *(name for name in names if name not in LOOKS)]


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _ratio(ratio: float | None) -> str:
    return f"{ratio:.2f}" if ratio else "-"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"
