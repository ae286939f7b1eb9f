"""Tables of results in docs/results as pages show them; docs/inserted.py inserts them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean

from difftransformer_lab.bench.tables import Cell, cells, grouped, label, ratio, time_tables
from difftransformer_lab.results import Bench, BenchRow, read_result
from difftransformer_lab.table import Table, columns, names

DOCS = Path(__file__).parents[1] / "docs"
DIFFLLAMAS = ("DiffLlama sdpa", "DiffLlama eager")
# Ratios beside those to a table's base: a title, an implementation, and others, the fastest of which it is divided by.
OVER_KERNEL = ("diff cpu over softmax cpu", "diff cpu", ("softmax cpu",))
NORMED = ("normed cpu over the faster DiffLlama", "normed cpu", DIFFLLAMAS)
PAIRS = (
    OVER_KERNEL,
    ("diff triton over softmax triton", "diff triton", ("softmax triton",)),
    NORMED,
    ("normed triton over the faster DiffLlama", "normed triton", DIFFLLAMAS),
    ("DIFF over the faster DiffLlama", "DIFF", DIFFLLAMAS),
)
# Title, factor and format of figures; others are shown as they are.
FIGURES = {
    "peak_bytes": ("peak memory, MiB", 2**-20, ",.1f"),
    "cpu_seconds": ("CPU time of all threads, ms", 1e3, ",.2f"),
}
# Results are named after the processor.
PROCESSORS = {
    "epyc-zen5": "AMD EPYC (Zen 5), AVX512_BF16",
    "xeon-amx": "Intel Xeon, AMX",
}


def page_table(name: str) -> str:
    """Make a table that a page inserts, by its name: one of those below, or a result in docs/results."""
    kernels = {title: read(f"bench-{file}") for file, title in PROCESSORS.items()}
    if name == "kernels":
        return (
            together(kernels, attention_ratios)
            + "\nGeometric means over 9 shapes, in brackets the best and the worst shape.\n"
        )
    if name == "decoding":
        return together(kernels, decode_ratios) + "\nRatios of median times to torch sdpa; below 1 is faster.\n"
    if name == "memory":
        (memory,) = figure_tables(row for row in read("bench-epyc-zen5").rows if row.part == "memory")
        return memory.markdown()
    if name == "models":
        models = {title: read(f"models-{file}") for file, title in PROCESSORS.items()}
        return "\n".join(f"**{title}**\n\n{models_ratios(one)}" for title, one in models.items())
    if name == "machines":
        return "\n".join(f"- {circumstances(one)}" for one in kernels.values())
    return printed(name)


def read(name: str) -> Bench:
    """Read the result of a benchmark."""
    return read_result(DOCS / "results" / f"{name}.json", Bench)


def bench_tables(bench: Bench) -> list[Table]:
    """Make the tables of times and of other figures."""
    return [*time_tables(bench, PAIRS), *figure_tables(bench.rows)]


def figure_tables(rows: Iterable[BenchRow]) -> Iterator[Table]:
    """Make a table of each kind of work: a column for each implementation where there is one figure, else for each figure."""
    for (part, work), group in grouped(rows, lambda row: (row.part, row.work)).items():
        found = [row for row in group if row.figures.keys() - {"parameters"}]
        figures = list(dict.fromkeys(name for row in found for name in row.figures if name != "parameters"))
        title = f"{part.capitalize()}, {work}"
        if len(figures) == 1:
            people = list(dict.fromkeys(row.implementation for row in found))
            values = {(label(row), row.implementation): shown(row, figures[0]) for row in found}
            lines = [
                [key, *(values.get((key, one), "-") for one in people)] for key in dict.fromkeys(map(label, found))
            ]
            yield Table("figures", f"{title}: {title_of(figures[0])}", columns("", *people), lines)
        elif figures:
            lines = [[f"{label(row)}, {row.implementation}", *(shown(row, name) for name in figures)] for row in found]
            yield Table("figures", title, columns("", *map(title_of, figures)), lines)


def title_of(figure: str) -> str:
    """Name a figure."""
    return FIGURES[figure][0] if figure in FIGURES else figure.replace("_", " ")


def shown(row: BenchRow, figure: str) -> str:
    """Format a figure."""
    _, factor, form = FIGURES.get(figure, ("", 1, ".3g"))
    return f"{factor * row.figures[figure]:{form}}"


def printed(name: str) -> str:
    """Write the tables of a result, and where it was measured."""
    result = read(name)
    tables = bench_tables(result)
    texts = [f"{table.title}:\n\n{table.markdown()}" if len(tables) > 1 else table.markdown() for table in tables]
    return "\n".join([*texts, f"{circumstances(result)}\n"])


def circumstances(result: Bench) -> str:
    """Say where a result was measured, and how busy the machine was; and by which script, whose options stay."""
    where = result.environment
    how = f"`{result.command}`, " if result.command.startswith("python ") else ""
    if where.device != "cpu":
        return f"{how}{where.device}, torch {where.torch}."
    threads = "one thread" if where.threads == 1 else f"{where.threads} threads"
    share = f"other processes took {100 * (result.foreign_cpu_share or 0):.1f} % of the machine"
    return f"{how}{where.processor}, torch {where.torch}, {threads}; {share}."


def together(results: Mapping[str, Bench], table: Callable[[Bench], Table]) -> str:
    """Write the same table of each processor as one, with the processor's name in the first of its rows."""
    tables = {title.partition(",")[0]: table(result) for title, result in results.items()}
    rows = [[title if place == 0 else "", *row] for title, one in tables.items() for place, row in enumerate(one.rows)]
    first = next(iter(tables.values()))
    return replace(first, groups=(*names("processor"), *first.groups), rows=rows, notes=[]).markdown()


def by_work(result: Bench, part: str) -> dict[str, list[Cell]]:
    """Arrange the rows of a part by dtype and work."""
    timed = grouped((row for row in result.rows if row.part == part), lambda row: f"{row.dtype} {row.work}")
    return {key: list(cells(rows).values()) for key, rows in timed.items() if not key.endswith("decode")}


def attention_ratios(result: Bench) -> Table:
    """Average the times of attention over PyTorch's over all shapes."""
    rows = []
    for key, found in by_work(result, "attention").items():
        own, kernel, normed = (
            [ratio(cell, *pair) for cell in found]
            for pair in (("diff cpu", ("torch sdpa",)), OVER_KERNEL[1:], NORMED[1:])
        )
        rows.append([key, ranged(own), f"{geometric_mean(kernel):.2f}", ranged(normed)])
    titles = ("`diff cpu` over `torch sdpa`", "over `softmax cpu`", "`normed cpu` over the faster DiffLlama")
    return Table("", "", columns("", *titles), rows)


def ranged(ratios: list[float]) -> str:
    """Write a geometric mean, and the range in brackets."""
    return f"{geometric_mean(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"


def decode_ratios(result: Bench) -> Table:
    """Compare attention of a decoding step with PyTorch's, without the means over shapes."""
    table = next(table for table in time_tables(result, PAIRS) if table.title == "Attention, decode")
    return replace(table, rows=[row for row in table.rows if "mean" not in row[0]])


def models_ratios(result: Bench) -> str:
    """Compare whole models, with both dtypes in a cell."""
    rows = []
    pairs = (("DIFF", ("twin",)), ("twin", ("Llama sdpa",)), ("DIFF", DIFFLLAMAS))
    for (work, size), found in grouped(result.rows, lambda row: (row.work, row.shape["model"])).items():
        measured = cells(found).values()
        rows.append([
            f"{work}, {size}", *(" / ".join(f"{ratio(cell, *pair):.2f}" for cell in measured) for pair in pairs)
        ])  # fmt: skip
    titles = ["fp32 / bf16", "DIFF over its twin", "the twin over Llama", "DIFF over the faster DiffLlama"]
    return Table("", "", columns(*titles), rows, [f"Ratios of medians. {circumstances(result)}"]).markdown()
