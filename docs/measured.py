"""Tables of benchmarks, single comparisons and simulations as the documentation shows them, read from docs/results/*.json."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from difftransformer_lab.report import Studied, read_evidence, studied
from difftransformer_lab.report.answers import decimals, interval_words, progress_words
from difftransformer_lab.report.bench import DIFFLLAMAS, MEAN, bench_tables, cells, ratio
from difftransformer_lab.report.comparisons import row_of
from difftransformer_lab.report.study_tables import MARK, NOT_REACHED, is_marked, mark_words, upcycling_table
from difftransformer_lab.report.tables import Group, Table, fixed, names
from difftransformer_lab.results import Bench, BenchRow, read_document, read_result

DOCS = Path(__file__).parent
RESULTS = DOCS / "results"
TYPES = ("softmax", "diff", "diff_v2", "grouped_diff", "grouped_diff_v2", "dex")
MISSING = "not measured yet"
NORMAL_START = (
    " Weights start from N(0, 0.05\u00b2), as no model does by default: with the fan-in start variants may differ otherwise."
)
LOSS = "validation loss per token"
# Files of benchmarks are named after the processor.
PROCESSORS = {
    "epyc-zen5": "AMD EPYC (Zen 5), AVX512_BF16",
    "xeon-amx": "Intel Xeon, AMX",
    "epyc-zen4": "AMD EPYC (Zen 4), AVX512_BF16, earlier kernels",
}


def blocks(studies: Sequence[Studied]) -> dict[Path, dict[str, str]]:
    """Return the generated text of each page, by the name of its markers."""
    kernels = {title: bench(f"bench-{name}") for name, title in PROCESSORS.items()}
    models = {title: bench(f"models-{name}") for name, title in PROCESSORS.items()}
    demo, upcycled = compared("demo"), compared("upcycle")
    pages = {
        "README.md": {"demo": demo_table(demo)},
        "retrieval.md": {"retrieval": retrieval_table(), "demo": attention_table(demo)},
        "choose.md": {"measured": choice_tables(bench("variants"), upcycled, studies)},
        "performance.md": {
            "attention": together(kernels, attention_ratios),
            "peaked": together(kernels, peaked_ratios),
            "decode": together(kernels, decode_ratios),
            "memory": printed(next(iter(kernels.values())), "memory-forward+backward-figures"),
        },
        "performance-models.md": {
            "models": by_processor(models, models_ratios),
            "generation": "\n".join(printed(bench(name)) for name in ("generation", "generation-two-threads")),
            "loss": printed(bench("loss")),
            "overhead": printed(bench("overhead")),
        },
        "performance-gpu.md": {"attention": printed(bench("bench-h200")), "h100": printed(bench("bench-h100"))},
        "accelerate.md": {"diffllama": printed(bench("diffllama"))},
        "upcycling.md": {"upcycle": upcycling_tables(upcycled)},
        "evaluation-intervals.md": {"intervals": coverage_table()},
        "initialization.md": {"start-rms": start_table()},
    }
    return {(DOCS.parent if page == "README.md" else DOCS) / page: parts for page, parts in pages.items()}


def by_processor(results: Mapping[str, Bench], text: Callable[[Bench], str]) -> str:
    """Return the same tables for each processor, under its name."""
    return "\n".join(f"**{title}**\n\n{text(result)}" for title, result in results.items())


def together(results: Mapping[str, Bench], table: Callable[[Bench], Table]) -> str:
    """Return the same table of each processor as one table, the processor's name in the first row of its own."""
    tables = {title.partition(",")[0]: table(result) for title, result in results.items()}
    rows = [[title if place == 0 else "", *row] for title, one in tables.items() for place, row in enumerate(one.rows)]
    notes = list(dict.fromkeys(note for one in tables.values() for note in one.notes))
    first = next(iter(tables.values()))
    return replace(first, groups=(*names("processor"), *first.groups), rows=rows, notes=notes).markdown()


def bench(name: str) -> Bench:
    """Read the result of a benchmark."""
    return read_result(RESULTS / f"{name}.json", Bench)


def printed(result: Bench, *names: str) -> str:
    """Return tables of a benchmark as the command prints them: those of these names, or all of them and its circumstances."""
    tables = [table for table in bench_tables(result) if table.name in names or not names]
    texts = [f"{table.title}:\n\n{table.markdown()}" if len(tables) > 1 else table.markdown() for table in tables]
    return "\n".join(texts) + ("" if names else f"\n{circumstances(result)}\n")


def circumstances(result: Bench) -> str:
    """Return the command of a benchmark, and how busy the machine was."""
    where = result.environment
    if where.device != "cpu":
        return f"`{result.command}`, {where.device}, torch {where.torch}."
    threads = "one thread" if where.threads == 1 else f"{where.threads} threads"
    return (
        f"`{result.command}`, {where.processor}, torch {where.torch}, {threads}; other processes took "
        f"{100 * (result.foreign_cpu_share or 0):.1f} % of the machine."
    )


def attention_ratios(result: Bench) -> Table:
    """Return the times of attention over PyTorch's, as geometric means over all shapes."""
    rows = []
    timed = [row for row in result.rows if row.part == "attention" and row.work != "decode"]
    for dtype, work in dict.fromkeys((row.dtype, row.work) for row in timed):
        found = cells(row for row in timed if (row.dtype, row.work) == (dtype, work)).values()
        own = [ratio(cell, "diff cpu", ("torch sdpa",)) for cell in found]
        kernel = geometric_mean(ratio(cell, "diff cpu", ("softmax cpu",)) for cell in found)
        normed = [ratio(cell, "normed cpu", DIFFLLAMAS) for cell in found]
        rows.append([
            f"{dtype} {work}", f"{geometric_mean(own):.2f}", f"{min(own):.2f}", f"{max(own):.2f}", f"{kernel:.2f}",
            f"{geometric_mean(normed):.2f}", f"{min(normed):.2f}", f"{max(normed):.2f}",
        ])  # fmt: skip
    groups = (
        Group("", numeric=False),
        Group("`diff cpu` over `torch sdpa`", ("mean", "low", "high"), "interval"),
        Group("over `softmax cpu`"),
        Group("`normed cpu` over the faster DiffLlama", ("mean", "low", "high"), "interval"),
    )
    notes = [
        f"Geometric means over {len(own)} shapes, in brackets the best and the worst shape.",
        circumstances(result),
    ]
    return Table("attention", "Attention", groups, rows, notes)


def peaked_ratios(result: Bench) -> Table:
    """Return the times of differential attention over PyTorch's by the size of the scores, a row for each kind of work."""
    timed = [row for row in result.rows if row.part == "peaked"]
    rows = []
    for dtype, work in dict.fromkeys((row.dtype, row.work) for row in timed):
        found = cells(row for row in timed if (row.dtype, row.work) == (dtype, work)).values()
        rows.append([f"{dtype} {work}", *(f"{ratio(cell, 'diff cpu', ('torch sdpa',)):.2f}" for cell in found)])
    factors = dict.fromkeys(f"{row.shape.get('score_factor', 1):g}" for row in timed)
    groups = (*names(""), *(Group(factor) for factor in factors))
    return Table("peaked", "Peaked scores", groups, rows)


def decode_ratios(result: Bench) -> Table:
    """Return the times of decoding by attention over PyTorch's, without the means over shapes."""
    table = next(table for table in bench_tables(result) if table.name == "attention-decode")
    return replace(table, rows=[row for row in table.rows if MEAN not in row[0]])


def models_ratios(result: Bench) -> str:
    """Return the times of whole models over those of others."""
    rows = []
    for work, size in dict.fromkeys((row.work, row.shape["model"]) for row in result.rows):
        found = cells(row for row in result.rows if (row.work, row.shape["model"]) == (work, size))
        pairs = (("DIFF", ("twin",)), ("twin", ("Llama sdpa",)), ("DIFF", DIFFLLAMAS))
        ratios = [" / ".join(f"{ratio(cell, who, bases):.2f}" for cell in found.values()) for who, bases in pairs]
        rows.append([f"{work}, {size}", *ratios])
    titles = ("fp32 / bf16", "DIFF over its twin", "the twin over Llama", "DIFF over the faster DiffLlama")
    groups = tuple(Group(title, numeric=place > 0) for place, title in enumerate(titles))
    return Table("models", "Whole models", groups, rows, [f"Ratios of medians. {circumstances(result)}"]).markdown()


def compared(name: str) -> Studied:
    """Return a committed comparison."""
    return studied(read_evidence(RESULTS / f"{name}.json"))


def demo_table(study: Studied) -> str:
    """Return loss and retrieval of `make demo`."""
    evidence = study.evidence
    _, _, _, run = next(evidence.every_run())
    notes = [
        f"{run.parameters / 1e6:.1f}M parameters, {run.train_tokens / 1e6:.1f}M tokens, {len(evidence.at('diff', ()))} seeds "
        f"([results](docs/results/demo.json)). Mean \u00b1 standard error over seeds. {interval_words(evidence)}",
    ]
    figures = [one for one in evidence.index.figures if one.unit == "bits/byte" or one.name == "accuracy"]
    return by_model(study, [one.label for one in figures], notes)


def upcycling_tables(study: Studied) -> str:
    """Return what upcycling adds, and the loss after training on."""
    notes = [interval_words(study.evidence), mark_words(study.evidence)]
    return f"{upcycling_table(study.evidence, study.rows).markdown()}\n{by_model(study, [LOSS], notes)}"


def by_model(study: Studied, labels: Sequence[str], notes: list[str]) -> str:
    """Return figures with a model a row, and each model's difference to the reference."""
    rows = []
    for arm in study.evidence.index.arms:
        cells = [arm.label]
        for label in labels:
            row = row_of(study.rows, label, arm.name, ())
            places = max(4, decimals(study.rows, row.figure))
            cells += [fixed(row.statistic.mean, places), fixed(row.statistic.standard_error, places)]
            change = row.difference
            cells += [fixed(one, places, "+") for one in (change.mean, change.low, change.high)] if change else [""] * 3
            cells.append(MARK if is_marked(row) else "")
        rows.append(cells)
    groups = [Group("model", numeric=False)]
    units = {one.label: one.unit for one in study.evidence.index.figures}
    for label in labels:
        groups.append(Group(f"{label}, {units[label]}", ("mean", "standard error"), "mean"))
        groups.append(
            Group(f"minus {study.evidence.reference.label}", ("mean", "low", "high", "excludes zero"), "marked")
        )
    return Table("models", "Models", tuple(groups), rows, notes).markdown()


def attention_table(study: Studied) -> str:
    """Return where the last token of a needle prompt attends in `make demo`, and the learned lambda."""
    rows = []
    for arm in study.evidence.index.arms:
        runs = list(study.evidence.at(arm.name, ()).values())
        shares = []
        for segments in (("answer",), ("before", "after")):
            found = [
                row.value
                for run in runs
                for row in run.evaluations["allocation"].measurements
                if row.at.get("form") == "signed" and row.at.get("depth") == 0.5 and row.at["segment"] in segments
            ]
            shares.append(f"{100 * sum(found) / len(runs):.0f} %")
        learned = [
            [curve.values[-1] for name, curve in run.curves.items() if name.startswith("lambda ")] for run in runs
        ]
        lambdas = "; ".join(", ".join(f"{value:+.2f}" for value in layers) for layers in learned if layers)
        rows.append([arm.label, *shares, lambdas])
    titles = ("", "attention on the answer", "on the text around it", "lambda at the end, by layer; a seed each")
    groups = tuple(Group(title, numeric=place in (1, 2)) for place, title in enumerate(titles))
    return Table(
        "attention", "Attention", groups, rows, ["Signed weight of the last prompt token, answer at mid depth."]
    ).markdown()


def retrieval_table() -> str:
    """Return the share of right answers about seen and unseen cities, by number of needles."""
    study = compared("retrieval")
    runs = {arm.label: run for arm, _, _, run in study.evidence.every_run()}
    rows = []
    for cities in ("seen", "unseen"):
        for label, run in runs.items():
            cells = {}
            for row in run.evaluations["needle"].measurements:
                if row.name == "accuracy" and row.at.get("cities") == cities and "depth" in row.at:
                    cells.setdefault(row.at["needles"], []).append((round(row.value * row.n), row.n))
            shares = [
                f"{100 * sum(right for right, _ in found) / sum(n for _, n in found):.1f} %" for found in cells.values()
            ]
            rows.append([f"{label}, {cities} cities", *shares])
    groups = (Group("needles in the context", numeric=False), *(Group(str(count)) for count in cells))
    loss = study.evidence.index.figures[0]
    means = {
        arm.label: row_of(study.rows, loss.label, arm.name, ()).statistic.mean for arm in study.evidence.index.arms
    }
    losses = " and ".join(f"{fixed(mean, 3)} ({label})" for label, mean in means.items())
    notes = [
        f"`{study.evidence.index.command}`, one seed, {run.train_tokens / 1e6:.1f}M tokens. "
        f"{loss.label.capitalize()}, {loss.unit}: {losses}."
    ]
    return Table("retrieval", "Retrieval", groups, rows, notes).markdown()


def coverage_table() -> str:
    """Return how often intervals held the true value in simulations."""
    _, _, plain = read_document(RESULTS / "intervals.json")
    sizes = sorted({row["n"] for row in plain["rows"]})
    found = {(row["data"], row["n"]): row["coverage"] for row in plain["rows"]}
    cells = [
        [data, *(
            f"{value:.3f}" if (value := found.get((data, n), {}).get(method)) is not None else ""
            for method in ("chosen", "percentile") for n in sizes
        )]
        for data in dict.fromkeys(row["data"] for row in plain["rows"])
    ]  # fmt: skip
    titles = [*(f"{n} items" for n in sizes), *(f"percentile bootstrap, {n} items" for n in sizes)]
    groups = (Group("data", numeric=False), *(Group(title) for title in titles))
    notes = [f"`{plain['command']}`, {plain['replicates']:,} simulations."]
    return Table("intervals", "Coverage of intervals", groups, cells, notes).markdown()


def start_table() -> str:
    """Return attention over the embeddings that it joins at step 0, by width, start and attention type."""
    _, _, result = read_document(RESULTS / "start-rms.json")
    rows = result["rows"]
    columns = list(dict.fromkeys((row["start"], row["arm"]) for row in rows))
    ratios = {(row["width"], row["start"], row["arm"]): over_stream(row, "attention") for row in rows}
    cells = [
        [str(width), *(f"{ratios[width, *column]:.3g}" for column in columns)]
        for width in dict.fromkeys(row["width"] for row in rows)
    ]
    groups = (Group("width"), *(Group(f"`{start}`: {arm}") for start, arm in columns))
    mlps = {start: [over_stream(row, "mlp") for row in rows if row["start"] == start] for start, _ in columns}
    spans = " and ".join(f"{min(found):.2g} to {max(found):.2g} with `{start}`" for start, found in mlps.items())
    notes = [
        f"`{result['command']}`: RMS of the first layer's attention over that of the embeddings, {result['tokens']} random "
        f"tokens, mean of {len(result['seeds'])} seeds. The MLP's output over the stream that it joins: {spans}."
    ]
    return Table("start", "Sizes at step 0", groups, cells, notes).markdown()


def over_stream(row: Mapping[str, Any], branch: str) -> float:
    """Return the size of a branch over that of the stream that it joins, as the mean over seeds."""
    return fmean(output / stream for output, stream in zip(row[f"{branch}_rms"], row[f"{branch}_joins"], strict=True))


def choice_tables(timed: Bench, upcycled: Studied, studies: Sequence[Studied]) -> str:
    """Return what was measured of each attention type: time, quality in two studies and after upcycling."""
    explored = [one for one in studies if one.evidence.index.plan is None]
    explored.sort(key=lambda one: one.evidence.index.preset != "normal-start")  # which counts where nothing else does
    found = {one.evidence.index.name: one for one in explored}
    trained, recalled = found.get("variants") or found.get("controls"), found.get("synthetic")
    works = ("training step", "prefill", "decoding")
    quality = ("retrieval, seen cities", "retrieval, unseen cities")
    recall = ("right answers", "steps to 90 % of answers")
    times, qualities, recalls = [], [], []
    for kind in TYPES:
        times.append([f"`{kind}`", *(span(timed.rows, kind, work) for work in works)])
        qualities.append([f"`{kind}`", *studied_cells(trained, kind, quality), upcycled_cell(upcycled, kind)])
        recalls.append([f"`{kind}`", *studied_cells(recalled, kind, recall)])
    sizes = ", ".join(dict.fromkeys(row.shape["model"] for row in timed.rows))
    time_notes = [
        f"Times relative to softmax attention at equal parameters: the range over {sizes} parameters, "
        f"in fp32 and bf16. {circumstances(timed)}"
    ]
    notes = [
        *studied_notes(trained),
        "Upcycled: one seed, 95 % interval over evaluation windows ([more](upcycling.md#continue-training)).",
    ]
    change = "upcycled: loss minus the unconverted model's, nats/token"
    tables = [
        Table("times", "Times", names("`attention_type`", *works), times, time_notes),
        Table("quality", "Quality", names("`attention_type`", *quality, change), qualities, notes),
    ]
    if recalled:
        titles = ("`attention_type`", *(f"associative recall: {label}" for label in recall))
        tables.append(Table("recall", "Recall", names(*titles), recalls, studied_notes(recalled)))
    return "\n".join(table.markdown() for table in tables)


def studied_notes(study: Studied | None) -> list[str]:
    """Return the command of a study, and how to read its cells."""
    if study is None:
        return []
    index = study.evidence.index
    means = f" of means over {len(study.evidence.points)} settings" if study.evidence.has_settings else ""
    return [
        f"Study: `{index.command}` ([its page](results/studies/{index.name}/README.md#{index.preset}), "
        f"{progress_words(study.evidence)}), mean \u00b1 standard error over seeds{means}."
        + NORMAL_START * (index.preset == "normal-start"),
        mark_words(study.evidence),
    ]


def span(timings: Sequence[BenchRow], kind: str, work: str) -> str:
    """Return the smallest and the largest time of a type over the twin's."""
    found = cells(row for row in timings if row.work == work).values()
    ratios = [ratio(cell, kind, ("softmax",)) for cell in found if kind in cell]
    if not ratios:
        return MISSING
    return "1" if kind == "softmax" else f"{min(ratios):.2f} to {max(ratios):.2f}"


def studied_cells(study: Studied | None, kind: str, figures: Sequence[str]) -> Iterator[str]:
    """Yield each figure of a type's first arm in a study."""
    runs = study.evidence.every_run() if study else ()
    arm = next((arm for arm, _, _, run in runs if run.recipe["model"]["attention_type"] == kind), None)
    for label in figures:
        row = row_of(study.rows, label, arm.name, ()) if study and arm else None
        if study is None or arm is None or row is None:
            yield MISSING
            continue
        if row.reached == 0:
            yield NOT_REACHED
            continue
        places = decimals(study.rows, row.figure)
        mark = f" {MARK}" if is_marked(row) else ""
        yield f"{fixed(row.statistic.mean, places)} \u00b1 {fixed(row.statistic.standard_error, places)}{mark}"


def upcycled_cell(study: Studied, kind: str) -> str:
    """Return the loss after training on, minus the unconverted model's."""
    (name,) = [size.arm for size in study.evidence.index.sizes if size.attention_type == kind] or [""]
    row = row_of(study.rows, LOSS, name, ())
    if row is None or row.difference is None:
        return "the measure" if kind == "softmax" else MISSING
    return f"{row.difference.mean:+.4f} [{row.difference.low:+.4f}, {row.difference.high:+.4f}]"
