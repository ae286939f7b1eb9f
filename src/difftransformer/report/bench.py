"""The tables of a benchmark: times as ratios to PyTorch's kernel, shape by shape."""

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console

from difftransformer.plots.style import INK
from difftransformer.report.tables import Group, Table
from difftransformer.report.terminal import _rich
from difftransformer.results import (
    AttentionShape,
    AttentionSkip,
    AttentionTiming,
    Bench,
    DiffLlamaTiming,
    ModelTiming,
    TrainingTiming,
)

BASE = "torch sdpa"
MEAN, SHAPE = "geometric mean", "n/h/d"
IMPLEMENTATION = "implementation"

QUIET_SHARE = 0.03  # of the CPU time to others, above which the tables end with a warning

# Okabe and Ito's colours, and a violet; an implementation keeps its own, whichever others were timed. In the order of tables
# and legends.
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
Column = tuple[str, int | None]  # of the figure: dtype, and width of a map where each has a column
Key = tuple[Place, str]  # where, and which implementation


def bench_tables(bench: Bench) -> list[Table]:
    """Tables for each mode and dtype of attention, then peak memory and the training step, where they were measured.

    On a GPU those of attention are for each width of a map too: times, token rates, which say the same the other way round,
    and FLOPs or bytes a second.
    """
    tables = []
    for mode, column in panels(bench):
        timings = in_panel(bench, mode, column)
        if column[1] is None:
            tables.append(_attention_table(bench, mode, column[0], timings))
        else:
            tables += [make(bench, mode, column, timings) for make in (_times_table, _token_rates_table, _work_table)]
    if bench.peaked:
        tables.append(_peaked_table(bench))
    if bench.memory:
        tables.append(_memory_table(bench))
    if bench.training:
        tables.append(_training_table(bench))
    if bench.diffllama:
        tables.append(_diffllama_table(bench))
    if bench.generation:
        tables.append(_generation_table(bench))
    if bench.models:
        tables.append(_models_table(bench))
    return tables


def skipped_lines(bench: Bench) -> list[str]:
    """A sentence for each implementation and reason of what was not measured."""
    found: dict[tuple[str, str], list[AttentionSkip]] = {}
    for skip in bench.skipped:
        found.setdefault((skip.implementation, skip.reason), []).append(skip)
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


def _attention_table(bench: Bench, mode: str, dtype: str, timings: Sequence[AttentionTiming]) -> Table:
    """A row for each shape, a column for each implementation."""
    names = [name for name in implementations(timings) if name != BASE]
    pair = _our_pair(names)
    cell = _cells(timings)
    means = _means(bench, mode, (dtype, None), timings)
    rows = []
    for place in places_of(timings):
        row = [_label(place), _milliseconds(cell[place, BASE].median_seconds)]
        row += [_ratio(cell[place, name].ratio_to_torch_sdpa) if (place, name) in cell else "-" for name in names]
        if pair:
            ours = cell.get((place, pair[0]))
            row.append(_ratio(ours.ratio_to_softmax_kernel) if ours and ours.ratio_to_softmax_kernel else "-")
        rows.append(row)
    keys = [(name, BASE) for name in names] + ([pair] if pair else [])
    rows.append([MEAN, "", *(_ratio(means[key][0]) + means[key][1] for key in keys)])
    titles = [SHAPE, f"{BASE}, ms", *names, *([f"{pair[0]} over {pair[1]}"] if pair else [])]
    notes = [f"Ratios of median wall times to {BASE} with 2 h heads; below 1 is faster.", *_stars(rows)]
    return Table(f"{mode}-{dtype}", f"Attention, {mode}, {dtype}", _groups(titles), rows, notes)


def _times_table(bench: Bench, mode: str, column: Column, timings: Sequence[AttentionTiming]) -> Table:
    """A row for each implementation, a column for each length: there are more of the former."""
    cell, places = _cells(timings), places_of(timings)
    rows = [[f"{BASE}, ms", *(_milliseconds(cell[place, BASE].median_seconds) for place in places), ""]]
    rows += _ratio_rows(bench, mode, column, timings, lambda ratio: ratio)
    pair = _our_pair(implementations(timings))
    if pair:
        ratios = [
            cell[place, pair[0]].ratio_to_softmax_kernel if (place, pair[0]) in cell else None for place in places
        ]
        mean, star = _means(bench, mode, column, timings)[pair]
        rows.append([f"{pair[0]} over {pair[1]}", *(_ratio(r) if r else "-" for r in ratios), _ratio(mean) + star])
    notes = [f"Ratios of median times on the GPU to {BASE} with 2 h heads; below 1 is faster.", *_stars(rows)]
    return Table(_name("times", mode, column), f"Time, {_words(mode, column, timings)}", _across(places), rows, notes)


def _token_rates_table(bench: Bench, mode: str, column: Column, timings: Sequence[AttentionTiming]) -> Table:
    rows = _ratio_rows(bench, mode, column, timings, lambda ratio: 1 / ratio)
    notes = [f"Tokens a second over those of {BASE}, the inverse of times; above 1 is faster.", *_stars(rows)]
    title = f"Token rate, {_words(mode, column, timings)}"
    return Table(_name("token-rates", mode, column), title, _across(places_of(timings)), rows, notes)


def _ratio_rows(
    bench: Bench,
    mode: str,
    column: Column,
    timings: Sequence[AttentionTiming],
    turn: Callable[[float], float],
) -> list[list[str]]:
    """A row for each implementation of what `turn` makes of its ratios, with their geometric mean."""
    cell, places, means = _cells(timings), places_of(timings), _means(bench, mode, column, timings)
    rows = []
    for name in implementations(timings):
        if name != BASE:
            found = [cell.get((place, name)) for place in places]
            mean, star = means[name, BASE]
            ratios = [_ratio(turn(timing.ratio_to_torch_sdpa)) if timing else "-" for timing in found]
            rows.append([name, *ratios, _ratio(turn(mean)) + star])
    return rows


def _work_table(bench: Bench, mode: str, column: Column, timings: Sequence[AttentionTiming]) -> Table:
    """Arithmetic a second, in decoding traffic, with the time over the floor; last the work over the floor."""
    cell, places = _cells(timings), places_of(timings)
    work = {timing.implementation: timing.work_over_floor for timing in timings}
    unit, what = ("TB/s", "bytes") if mode == "decode" else ("TFLOP/s", "FLOPs")
    rows = []
    for name in [BASE, *(name for name in implementations(timings) if name != BASE)]:
        row = [name]
        for place in places:
            timing = cell.get((place, name))
            rate = timing and (timing.terabytes_per_second if mode == "decode" else timing.teraflops_per_second)
            over = timing and timing.time_over_floor
            row += [_rate(rate) if rate else "-", f"{over:.1f}" if over else ""]
        known = work[name]
        rows.append([*row, f"{known:.2f}x" if known else "-"])
    lengths = (Group(row_of(place, column), (unit, "over the floor"), "ratio") for place in places)
    groups = (Group(IMPLEMENTATION, numeric=False), *lengths, Group(f"{what} by formula"))
    notes = [
        f"{unit} on the {what} of {BASE}, so that they compare as token rates do. In brackets: time over the least that the "
        "device's peak allows, where that is known: of plain attention, or of both maps in one kernel.",
        f"Last column: {what} of the method over that least.",
    ]
    return Table(_name("work", mode, column), f"{unit}, {_words(mode, column, timings)}", groups, rows, notes)


def _means(
    bench: Bench, mode: str, column: Column, timings: Sequence[AttentionTiming]
) -> dict[tuple[str, str], tuple[float, str]]:
    """(implementation, what the ratio is to) -> mean, and a star where a shape is missing."""
    shapes = len(places_of(timings))
    return {
        (mean.implementation, mean.against): (mean.ratio, "*" if mean.shapes < shapes else "")
        for mean in bench.means
        if (mean.mode, mean.dtype, mean.head_dim) == (mode, *column)
    }


def _our_pair(names: Sequence[str]) -> tuple[str, str] | None:
    """Differential and plain attention by our own kernels, where both were timed."""
    for name in names:
        family, _, kernel = name.partition(" ")
        if family == "softmax" and f"diff {kernel}" in names:
            return f"diff {kernel}", name
    return None


def _peaked_table(bench: Bench) -> Table:
    """A row for each implementation, dtype and mode, a column for each factor."""
    factors = sorted({timing.score_factor or 1 for timing in bench.peaked})
    cells: dict[str, dict[float, AttentionTiming]] = {}
    for timing in bench.peaked:
        if timing.implementation != BASE:
            title = f"{timing.implementation}, {timing.dtype} {timing.mode}"
            cells.setdefault(title, {})[timing.score_factor or 1] = timing
    rows = [
        [title, *(_ratio(cell[factor].ratio_to_torch_sdpa) if factor in cell else "-" for factor in factors)]
        for title, cell in cells.items()
    ]
    first = bench.peaked[0]
    notes = [
        f"n = {first.length_tokens:,}, h = {first.heads}, d = {first.head_dim}; scores of that standard deviation in nats. "
        f"Ratios of median times to {BASE} on the same numbers; below 1 is faster."
    ]
    titles = [IMPLEMENTATION, *(f"{factor:g}" for factor in factors)]
    return Table("peaked", "Attention of peaked scores", _groups(titles), rows, notes)


def _memory_table(bench: Bench) -> Table:
    names = list(dict.fromkeys(point.implementation for point in bench.memory))
    cell = {(place_of(point), point.implementation): point.peak_bytes for point in bench.memory}
    rows = []
    for place in sorted({place for place, _ in cell}):
        sizes = [f"{cell[place, name] / 2**20:,.1f}" if (place, name) in cell else "-" for name in names]
        rows.append([_label(place), *sizes])
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
    steps: dict[str, dict[str, TrainingTiming]] = {}
    for timing in bench.training:
        size = f", {timing.batch} x {timing.context_tokens}" if has_sizes else ""
        steps.setdefault(f"{timing.model}, {timing.dtype}{size}", {})[timing.implementation] = timing
    rows = []
    for title, cell in steps.items():
        row = [title, _milliseconds(cell[base].median_seconds)]
        row += [_ratio(cell[name].ratio_to_twin) if name in cell else "-" for name in others]
        if has_peaks:
            peaks = {name: timing.peak_bytes for name, timing in cell.items() if timing.peak_bytes}
            row.append(f"{peaks[base] / 2**30:.2f}" if base in peaks else "-")
            both = [base in peaks and name in peaks for name in others]
            row += [_ratio(peaks[name] / peaks[base]) if has else "-" for name, has in zip(others, both, strict=True)]
        rows.append(row)
    titles = ["model", f"{base}, ms", *others]
    notes = [f"Ratios of median {'' if is_gpu(bench) else 'wall '}times to {base}; below 1 is faster."]
    if has_peaks:
        titles += [f"{base}, GiB", *(f"{name}, memory" for name in others)]
        notes.append("Memory: the peak of a step, weights, gradients and moments included; ratios to the same.")
    return Table("training", "Training step", _groups(titles), rows, notes)


def _diffllama_table(bench: Bench) -> Table:
    cells: dict[str, list[DiffLlamaTiming]] = {}
    for timing in bench.diffllama:
        cells.setdefault(f"{timing.work}, {timing.dtype}, {timing.tokens:,}", []).append(timing)
    rows = [
        [title, *(_milliseconds(timing.median_seconds) for timing in cell), _ratio(cell[-1].ratio_to_diffllama)]
        for title, cell in cells.items()
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


def _models_table(bench: Bench) -> Table:
    cells: dict[str, dict[str, ModelTiming]] = {}
    for timing in bench.models:
        title = f"{timing.work}, {timing.model}, {timing.dtype}, {timing.batch} x {timing.context_tokens}"
        cells.setdefault(title, {})[timing.implementation] = timing
    names = list(dict.fromkeys(timing.implementation for timing in bench.models))
    rows = [
        [
            title,
            *(_milliseconds(cell[name].median_seconds) for name in names),
            f"{cell['DIFF'].ratio_to_twin:.3f}",
            _ratio(cell["twin"].ratio_to_llama),
            _ratio(cell["DIFF"].ratio_to_diffllama),
        ]
        for title, cell in cells.items()
    ]
    ratios = ["DIFF over twin", "twin over Llama", "DIFF over DiffLlama"]
    notes = [
        "Ratios of median times, to the faster DiffLlama; below 1 is faster. A call of decoding makes several tokens."
    ]
    return Table("models", "Whole models", _groups(["work", *(f"{name}, ms" for name in names), *ratios]), rows, notes)


def is_gpu(bench: Bench) -> bool:
    return bench.environment.device != "cpu"


def panels(bench: Bench) -> list[tuple[str, Column]]:
    """Mode, dtype, and width where means are of each width, as they were measured."""
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


def _across(places: Sequence[Place]) -> tuple[Group, ...]:
    """Columns: implementation, lengths, mean."""
    return _groups([IMPLEMENTATION, *(_label(place).partition("/")[0] for place in places), MEAN])


def _name(kind: str, mode: str, column: Column) -> str:
    return f"{kind}-{mode}-{column[0]}-{column[1]}"


def _words(mode: str, column: Column, timings: Sequence[AttentionTiming]) -> str:
    heads = "/".join(dict.fromkeys(str(timing.heads) for timing in timings))
    return f"{mode}, {column[0]}, h = {heads}, d = {column[1]}"


def _stars(rows: Iterable[Sequence[str]]) -> list[str]:
    """What a star means, where there is one."""
    return ["*: not timed on every shape."] if any(cell.endswith("*") for row in rows for cell in row) else []


def _cells(timings: Iterable[AttentionTiming]) -> dict[Key, AttentionTiming]:
    return {(place_of(timing), timing.implementation): timing for timing in timings}


def place_of(shape: AttentionShape) -> Place:
    return shape.length_tokens, shape.head_dim, shape.heads, shape.batch


def _label(place: Place) -> str:
    length, width, heads, batch = place
    return f"{f'{batch}x' if batch > 1 else ''}{length}/{heads}/{width}"


def row_of(place: Place, column: Column) -> str:
    """The figure's row for a place: the column says the width already, if it is of one."""
    return _label(place) if column[1] is None else _label(place).partition("/")[0]


def places_of(timings: Iterable[AttentionTiming]) -> list[Place]:
    return sorted({place_of(timing) for timing in timings})


def implementations(timings: Iterable[AttentionTiming]) -> list[str]:
    """In the order of `LOOKS`, then as they come."""
    names = dict.fromkeys(timing.implementation for timing in timings)
    return [*(name for name in LOOKS if name in names), *(name for name in names if name not in LOOKS)]


def _listed(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(words))


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"
