"""The rows of every table, built once. The page and the terminal print them folded, the CSV files cell by cell.

Metric names that the report knows by heart are in `METRIC_TITLES`; any other is printed with spaces for underscores.
"""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from difftransformer.report.aggregate import (
    CITIES,
    FORMS,
    NOISE,
    SEGMENTS,
    NeedleSetting,
    Proportion,
    allocation_depths,
    allocation_share,
    pooled_needles,
    runs_of,
)
from difftransformer.results import Cities, Comparison, MetricComparison, PairedDifference

METRIC_TITLES = {
    "validation_bits_per_byte": "validation loss",
    "validation_nll_nats_per_token": "validation loss",
    "needle_accuracy": "needle retrieval accuracy",
    "needle_accuracy_seen": "needle retrieval accuracy (seen cities)",
    "needle_accuracy_unseen": "needle retrieval accuracy (unseen cities)",
    "allocation_answer_signed": "attention on the answer",
    "allocation_noise_signed": "attention on the context around the answer",
}
"""What a metric is called in tables and sentences."""

TABLE_NAMES = (
    "metrics",
    "cost",
    "models",
    "seeds",
    "needle",
    "needle_cells",
    "allocation",
    "allocation_segments",
    "environment",
)

NOT_MEASURED = "not measured"

Fold = Literal["plain", "mean", "interval", "metric", "ratio", "remark", "share", "proportion"]

_FOLDS: dict[Fold, tuple[str, ...]] = {
    "plain": ("{}",),
    "mean": ("{}", " \u00b1 {}"),
    "interval": ("{}", " [{}", ", {}]"),
    "metric": ("{}", ", {}", " ({} is better)"),
    "ratio": ("{}", " ({}x)"),
    "remark": ("{}", " ({})"),
    "share": ("{}", " ({}", "/{})"),
    "proportion": ("{}", " [{}", ", {}]", ", {}", "/{}"),
}
"""How the cells of a group become one: the text around each cell; an empty cell is left out with its text."""


@dataclass(frozen=True)
class Group:
    """Columns that belong together: one column for a reader, one a part in the CSV."""

    title: str
    parts: tuple[str, ...] = ("",)
    fold: Fold = "plain"
    numeric: bool = True


@dataclass(frozen=True)
class Table:
    """A table as text. `rows` has one cell for each part of each group."""

    name: str
    title: str
    groups: tuple[Group, ...]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)

    def header(self) -> list[str]:
        """The CSV's first line."""
        return [f"{group.title}: {part}" if part else group.title for group in self.groups for part in group.parts]

    def folded(self) -> list[list[str]]:
        """The rows with one cell a group, as the page and the terminal print them."""
        folded = []
        for row in self.rows:
            cells, start = [], 0
            for group in self.groups:
                parts = row[start : start + len(group.parts)]
                start += len(group.parts)
                cells.append(
                    "".join(text.format(part) for text, part in zip(_FOLDS[group.fold], parts, strict=True) if part)
                )
            folded.append(cells)
        return folded

    def csv(self) -> str:
        """The table as CSV text."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.header())
        writer.writerows(self.rows)
        return buffer.getvalue()


def metric_title(metric: MetricComparison) -> str:
    """What a metric is called."""
    return METRIC_TITLES.get(metric.metric, metric.metric.replace("_", " "))


def outcome(metric: MetricComparison) -> Literal["first", "second", "undecided", "unknown"]:
    """Which model the interval of the difference favours: models[0], models[1], neither, or there is no interval."""
    low, high = metric.difference.low, metric.difference.high
    if low is None or high is None:
        return "unknown"
    if low <= 0 <= high:
        return "undecided"
    return "first" if (high < 0) == (metric.better == "lower") else "second"


def decimals_for(values: Sequence[float], half_width: float | None = None) -> int:
    """Decimals to print: five figures of the largest value, and two figures of an interval's half width; at most 6."""
    largest = max((abs(value) for value in values), default=0.0)
    decimals = 4 if largest == 0 else min(4, max(0, 4 - math.floor(math.log10(largest))))
    while half_width and decimals < 6 and half_width * 10**decimals < 10:
        decimals += 1
    return decimals


def metric_decimals(metric: MetricComparison) -> int:
    """Decimals of every number in a metric's row and sentence."""
    difference = metric.difference
    half = (
        (difference.high - difference.low) / 2 if difference.low is not None and difference.high is not None else None
    )
    return decimals_for([statistic.mean for statistic in metric.models.values()], half)


def significant(value: float | None, digits: int = 4) -> str:
    """A number with so many figures, never in exponent form; empty for None."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def fixed(value: float | None, decimals: int, sign: str = "") -> str:
    """A number with so many decimals, zero without a minus sign; empty for None."""
    if value is None or math.isnan(value):
        return ""
    return f"{0.0 if round(value, decimals) == 0 else value:{sign}.{decimals}f}"


def method_text(difference: PairedDifference, seeds: int) -> str:
    """How an interval was made, for a table cell."""
    match difference.interval_method:
        case "student-t over seeds":
            return f"{100 * difference.confidence:g} % Student t over {seeds} seeds"
        case "bootstrap over evaluation documents":
            return f"{100 * difference.confidence:g} % bootstrap over evaluation documents"
        case _:
            return ""


def metrics_table(comparison: Comparison) -> Table:
    """Every metric: mean and standard error of each model, baselines, and the paired difference with its interval."""
    models, baselines = comparison.models, comparison.baselines
    groups = [Group("metric", ("name", "unit", "better"), "metric", numeric=False)]
    groups += [Group(model.label, ("mean", "standard error"), "mean") for model in models]
    groups += [Group(f"{baseline.name} (baseline)") for baseline in baselines]
    groups += [
        Group(
            f"{models[0].label} minus {models[1].label}" if len(models) > 1 else "difference",
            ("mean", "low", "high"),
            "interval",
        ),
        Group("result", ("outcome", "interval"), "remark", numeric=False),
    ]
    rows = []
    for metric in comparison.metrics:
        decimals = metric_decimals(metric)
        row = [metric_title(metric), metric.unit, metric.better]
        for model in models:
            statistic = metric.models.get(model.model)
            row += (
                [fixed(statistic.mean, decimals), fixed(statistic.standard_error, decimals)] if statistic else ["", ""]
            )
        row += [fixed(b.bits_per_byte, decimals) if is_bits_per_byte(metric) else "" for b in baselines]
        difference = metric.difference
        row += [fixed(value, decimals, "+") for value in (difference.mean, difference.low, difference.high)]
        row += [_result_text(comparison, metric), method_text(difference, _paired_seeds(comparison, metric))]
        rows.append(row)
    return Table("metrics", "Quality", tuple(groups), rows, _metric_notes(comparison))


def is_bits_per_byte(metric: MetricComparison) -> bool:
    """Whether a metric can stand beside the n-gram baseline."""
    name = metric.metric.lower().replace(" ", "_")
    return "bits_per_byte" in name or metric.unit.lower() in {"bits/byte", "bits per byte", "bits a byte"}


def cost_table(comparison: Comparison) -> Table:
    """What each model costs, with the ratio to the twin (models[1]) wherever both were measured."""
    costs = comparison.costs
    twin = next((row for row in costs if len(comparison.models) > 1 and row.model == comparison.models[1].model), None)
    memory_unit, memory_scale = _byte_unit(
        [
            value
            for row in costs
            for value in (row.peak_training_bytes, row.weights_and_kv_bytes_4k, row.weights_and_kv_bytes_64k)
            if value
        ]
    )
    columns = [
        ("parameters", "M", "parameters", 1e-6),
        ("training step", "ms", "train_step_seconds", 1e3),
        ("prefill", "tokens/s", "prefill_tokens_per_second", 1.0),
        ("decode", "tokens/s", "decode_tokens_per_second", 1.0),
        ("training peak memory", memory_unit, "peak_training_bytes", memory_scale),
        ("weights + KV at 4k", memory_unit, "weights_and_kv_bytes_4k", memory_scale),
        ("weights + KV at 64k", memory_unit, "weights_and_kv_bytes_64k", memory_scale),
    ]
    ratio = "times the twin's"
    groups = [Group("model", numeric=False)]
    groups += [Group(f"{title} ({unit})", ("value", ratio), "ratio") for title, unit, _, _ in columns]
    rows = []
    for cost in costs:
        row = [cost.label]
        for _, _, name, scale in columns:
            value, against = getattr(cost, name), getattr(twin, name) if twin else None
            row.append(NOT_MEASURED if value is None else significant(value * scale))
            row.append(f"{value / against:.2f}" if value is not None and against and cost is not twin else "")
        rows.append(row)
    notes = ["In brackets: times the twin's figure." if twin else ""]
    if any(value == NOT_MEASURED for row in rows for value in row):
        notes.append("Parameters, and weights + KV, are by formula; what is not measured was not run here.")
    return Table("cost", "Cost", tuple(groups), rows, [note for note in notes if note])


def models_table(comparison: Comparison) -> Table:
    """What was compared."""
    rows = [
        [
            model.label,
            model.attention_type,
            str(model.parameters),
            str(model.train_flops_per_token),
            str(model.kv_bytes_per_token),
        ]
        for model in comparison.models
    ]
    groups = (
        Group("model", numeric=False),
        Group("attention type", numeric=False),
        Group("parameters"),
        Group("training FLOPs a token"),
        Group("KV cache bytes a token"),
    )
    return Table("models", "Models", groups, rows)


def seeds_table(comparison: Comparison) -> Table:
    """Every run on its own."""
    rows = []
    for model in comparison.models:
        for run in runs_of(comparison, model.model):
            needles = _sum(pooled_needles([run]).values())
            rows.append(
                [
                    model.label,
                    str(run.seed),
                    fixed(run.nll.nll_nats_per_token, 4),
                    fixed(run.nll.bits_per_byte, 4),
                    *(
                        [fixed(needles.accuracy, 4), str(needles.correct), str(needles.trials)]
                        if needles.trials
                        else [NOT_MEASURED, "", ""]
                    ),
                    str(run.train_tokens),
                    significant(run.train_seconds),
                    run.run,
                ]
            )
    groups = (
        Group("model", numeric=False),
        Group("seed"),
        Group("validation loss (nats/token)"),
        Group("validation loss (bits/byte)"),
        Group("needles found", ("share", "correct", "asked"), "share"),
        Group("training tokens"),
        Group("training time (s)"),
        Group("run", numeric=False),
    )
    return Table("seeds", "Every run", groups, rows)


def needle_table(comparison: Comparison, by_depth: bool) -> Table | None:
    """Needle accuracy with Wilson intervals, for each cell or summed over depths; None where nothing was asked."""
    pooled = {model.model: pooled_needles(runs_of(comparison, model.model)) for model in comparison.models}
    keys = sorted({key for cells in pooled.values() for key in cells}, key=lambda key: (CITIES.index(key[0]), *key[1:]))
    if not keys:
        return None
    places: list[tuple[Cities, NeedleSetting, float | None]] = (
        [*keys] if by_depth else [(*pair, None) for pair in dict.fromkeys((key[0], key[1]) for key in keys)]
    )
    rows = []
    for cities, setting, depth in places:
        row = [cities, str(setting.length_tokens), setting.name, *([f"{depth:g}"] if depth is not None else [])]
        for model in comparison.models:
            total = _sum(
                [
                    value
                    for key, value in pooled[model.model].items()
                    if key[:2] == (cities, setting) and depth in (None, key[2])
                ]
            )
            row += _proportion_cells(total)
        rows.append(row)
    groups = [Group("cities", numeric=False), Group("context (tokens)"), Group("needles", numeric=False)]
    groups += [Group("depth")] if by_depth else []
    groups += [
        Group(model.label, ("accuracy", "low", "high", "correct", "asked"), "proportion") for model in comparison.models
    ]
    notes = [
        "Accuracy [95 % Wilson interval], right answers/questions, pooled over seeds"
        + ("." if by_depth else " and depths.")
        + " N: needles hidden, R: needles asked for. The interval treats questions as independent; the models'"
        " difference over seeds is in the table of metrics."
    ]
    if by_depth:
        return Table("needle_cells", "Needle retrieval, every cell", tuple(groups), rows, notes)
    return Table("needle", "Needle retrieval", tuple(groups), rows, notes)


def allocation_table(comparison: Comparison) -> Table | None:
    """Share of attention on the answer and on the context around it, by depth; None where it was not measured."""
    rows = []
    for form in FORMS:
        for depth in allocation_depths(comparison):
            row = [form, f"{depth:g}"]
            for model in comparison.models:
                runs = runs_of(comparison, model.model)
                for segments in (("answer",), NOISE):
                    share = allocation_share(runs, form, depth, segments)
                    row.append(fixed(share.mean, 3) if share else NOT_MEASURED)
            rows.append(row)
    if not rows:
        return None
    groups = [Group("form", numeric=False), Group("answer depth")]
    groups += [Group(f"{model.label}, {part}") for model in comparison.models for part in ("answer", "noise")]
    note = "Noise: the context before and after the answer together. " + (
        "Mean over seeds." if len(comparison.seeds) > 1 else "One seed."
    )
    return Table("allocation", "Attention allocation by depth", tuple(groups), rows, [note])


def allocation_segments_table(comparison: Comparison) -> Table | None:
    """Share of attention on every segment; None where it was not measured."""
    rows = []
    for form in FORMS:
        for depth in allocation_depths(comparison):
            for segment in SEGMENTS:
                row = [form, f"{depth:g}", segment]
                for model in comparison.models:
                    share = allocation_share(runs_of(comparison, model.model), form, depth, (segment,))
                    row += [fixed(share.mean, 4), fixed(share.error, 4)] if share else ["", ""]
                rows.append(row)
    if not rows:
        return None
    groups = [Group("form", numeric=False), Group("answer depth"), Group("segment", numeric=False)]
    groups += [Group(model.label, ("share", "standard error"), "mean") for model in comparison.models]
    return Table(
        "allocation_segments", "Attention allocation, every segment", tuple(groups), rows, [error_note(comparison)]
    )


def error_note(comparison: Comparison) -> str:
    """What the standard error of an allocation share is over."""
    return (
        "Standard errors are over seeds."
        if len(comparison.seeds) > 1
        else "One seed: standard errors are over evaluation documents."
    )


def environment_table(comparison: Comparison) -> Table:
    """Where it was measured."""
    environment = comparison.environment
    rows = [
        ["difftransformer", environment.difftransformer],
        ["Python", environment.python],
        ["torch", environment.torch],
        ["transformers", environment.transformers],
        ["platform", environment.platform],
        ["processor", environment.processor],
        ["device", environment.device],
        ["threads", str(environment.threads)],
        ["seeds", ", ".join(map(str, comparison.seeds))],
        ["created", comparison.created],
    ]
    return Table("environment", "Environment", (Group("what", numeric=False), Group("value", numeric=False)), rows)


def _proportion_cells(proportion: Proportion) -> list[str]:
    if not proportion.trials:
        return ["", "", "", "", ""]
    low, high = proportion.interval
    return [
        fixed(proportion.accuracy, 3),
        fixed(low, 3),
        fixed(high, 3),
        str(proportion.correct),
        str(proportion.trials),
    ]


def _sum(proportions: Iterable[Proportion]) -> Proportion:
    proportions = list(proportions)
    return Proportion(sum(p.correct for p in proportions), sum(p.trials for p in proportions))


def _paired_seeds(comparison: Comparison, metric: MetricComparison) -> int:
    return min(
        (metric.models[model.model].seeds for model in comparison.models[:2] if model.model in metric.models),
        default=len(comparison.seeds),
    )


def _result_text(comparison: Comparison, metric: MetricComparison) -> str:
    labels = [model.label for model in comparison.models]
    match outcome(metric):
        case "first":
            return f"{labels[0]} better"
        case "second":
            return f"{labels[1]} better" if len(labels) > 1 else "worse"
        case "undecided":
            return "undecided"
        case _:
            return "no interval"


def _metric_notes(comparison: Comparison) -> list[str]:
    if len(comparison.seeds) == 1:
        notes = [
            "One seed: there is no standard error and no interval over training. A bootstrap interval says how far "
            "other "
            "evaluation documents might move the difference; it says nothing about another training seed."
        ]
    else:
        notes = [
            f"Mean \u00b1 standard error over {len(comparison.seeds)} seeds. The difference is taken seed by seed: "
            "both "
            "models of a seed saw the same batches in the same order. Its interval is Student's t over seeds."
        ]
    notes.append("Undecided: the interval holds zero.")
    return notes


def _byte_unit(values: Sequence[int]) -> tuple[str, float]:
    """One unit for a whole table, so that its columns can be added and compared."""
    return ("GiB", 2.0**-30) if max(values, default=0) >= 10 * 2**30 else ("MiB", 2.0**-20)
