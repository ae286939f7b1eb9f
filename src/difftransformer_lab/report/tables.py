"""The rows of every table of a study, built once. The page and the terminal print them folded, the CSV files cell by cell."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from difftransformer_lab.printable import printable
from difftransformer_lab.report.figures import runs_of
from difftransformer_lab.results import (
    Comparison,
    MetricComparison,
    PairedDifference,
    Study,
    TaskResult,
    Upcycling,
    headlines,
    title_of,
)

NOT_MEASURED = "not measured"
NOT_RECORDED = "not recorded"

Fold = Literal[
    "plain", "mean", "interval", "metric", "ratio", "remark", "of", "ranged", "judged", "marked", "marked_value"
]

_FOLDS: dict[Fold, tuple[str, ...]] = {
    "plain": ("{}",),
    "mean": ("{}", " \u00b1 {}"),
    "interval": ("{}", " [{}", ", {}]"),
    "metric": ("{}", ", {}", " ({} is better)"),
    "ratio": ("{}", " ({}x)"),
    "remark": ("{}", " ({})"),
    "of": ("{}", " of {}"),
    "judged": ("{}", " \u00b1 {}", " {}"),
    "marked": ("{}", " [{}", ", {}]", " {}"),
    "marked_value": ("{}", " {}"),
    "ranged": ("{}", " [{}", ", {}]", " ({})"),
}
"""Texts around the cells of a group that become one; an empty cell is left out with its text."""


@dataclass(frozen=True)
class Group:
    """Columns that belong together: one column for a reader, one for each part in the CSV."""

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
        """Return the first line of the CSV."""
        return [f"{group.title}: {part}" if part else group.title for group in self.groups for part in group.parts]

    def folded(self) -> list[list[str]]:
        """Return the rows with one cell for each group, as the page and the terminal print them."""
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
        """Return the table as CSV text."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(self.header())
        writer.writerows(self.rows)
        return printable(buffer.getvalue())

    def markdown(self, links: Mapping[str, str] | None = None) -> str:
        """Return the table as Markdown, with its cells folded, and its notes.

        Args:
            links: Addresses by the text of a cell.
        """
        links = links or {}
        titles = [group.title for group in self.groups]
        marks = ["---:" if group.numeric else "---" for group in self.groups]
        rows = [
            [f"[{cell}]({links[cell]})" if cell in links else cell.replace("|", "\\|") for cell in row]
            for row in self.folded()
        ]
        lines = [f"| {' | '.join(row)} |" for row in (titles, marks, *rows)]
        return printable("\n".join([*lines, *([""] if self.notes else []), " ".join(self.notes)]).rstrip() + "\n")

    def latex(self) -> str:
        """Return the table as LaTeX for the package booktabs, with its cells folded and its notes as comments."""
        columns = "".join("r" if group.numeric else "l" for group in self.groups)
        header, *rows = [
            " & ".join(map(latex_text, row)) + r" \\"
            for row in ([group.title for group in self.groups], *self.folded())
        ]
        lines = [
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            header,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
        ]
        return printable("\n".join([*(f"% {note}" for note in self.notes), *lines]) + "\n")


_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "_": r"\_",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "\u00b1": r"$\pm$",
}


def latex_text(text: str) -> str:
    """Return a text with LaTeX's own characters escaped."""
    return "".join(_LATEX.get(letter, letter) for letter in text)


Outcome = Literal["first", "second", "undecided", "unknown"]


def favoured(difference: PairedDifference) -> Outcome:
    """Return which side of a difference is higher, if its interval and its p-value after Holm's correction tell them apart."""
    low, high, p = difference.low, difference.high, difference.p_holm
    if low is None or high is None:
        return "unknown"
    if low <= 0 <= high or (p is not None and p > 1 - difference.confidence):
        return "undecided"
    return "first" if low > 0 else "second"


def outcome(difference: PairedDifference, better: Literal["lower", "higher"]) -> Outcome:
    """Return which model a difference favours: the first, the second, neither, or there is no interval."""
    found = favoured(difference)
    if better == "higher" or found not in ("first", "second"):
        return found
    return "second" if found == "first" else "first"


def p_text(p: float | None) -> str:
    """Format a p-value; empty for None."""
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def comparisons_text(number: int) -> str:
    """Return a number of comparisons in words."""
    return "1 comparison" if number == 1 else f"{number} comparisons"


def holm_note(differences: Iterable[PairedDifference]) -> str:
    """Return the note of a table whose p-values are corrected for the number of comparisons on the page."""
    comparisons = max((one.comparisons or 0 for one in differences), default=0)
    if not comparisons:
        return "Undecided: the interval holds zero."
    return (
        f"p (Holm): p-value corrected for the {comparisons_text(comparisons)} of this page; a loss in two units is one. "
        "Undecided: it is above 0.05, or the interval holds zero."
    )


def decimals_for(values: Sequence[float], half_width: float | None = None) -> int:
    """Return the decimals to print: five digits of the largest value, two of an interval's half width, at most 6."""
    largest = max((abs(value) for value in values), default=0.0)
    decimals = 4 if largest == 0 else min(4, max(0, 4 - math.floor(math.log10(largest))))
    while half_width and decimals < 6 and half_width * 10**decimals < 10:
        decimals += 1
    return decimals


def metric_decimals(metric: MetricComparison) -> int:
    """Return the decimals of every number in a metric's row and sentence."""
    halves = [
        (one.high - one.low) / 2 for one in metric.differences.values() if one.low is not None and one.high is not None
    ]
    return decimals_for([statistic.mean for statistic in metric.models.values()], min(halves, default=None))


def significant(value: float | None, digits: int = 4) -> str:
    """Format a number with that many significant digits, never in exponent form; empty for None."""
    if value is None:
        return ""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def fixed(value: float | None, decimals: int, sign: str = "") -> str:
    """Format a number with that many decimals, zero without a minus sign; empty for None."""
    if value is None or math.isnan(value):
        return ""
    return f"{0.0 if round(value, decimals) == 0 else value:{sign}.{decimals}f}"


def method_text(difference: PairedDifference, seeds: int) -> str:
    """Return how an interval was made, for a table cell."""
    match difference.interval_method:
        case "student-t over seeds":
            return f"{100 * difference.confidence:g} % Student t over {seeds} seeds"
        case "none":
            return ""
        case method:
            return f"{100 * difference.confidence:g} % {method}"


def metrics_table(study: Study) -> Table:
    """Return every metric: mean and standard error of each model, baselines, and the paired differences with intervals."""
    *others, reference = study.models
    baselines = study.baselines if isinstance(study, Comparison) else []
    groups = [Group("metric", ("name", "unit", "better"), "metric", numeric=False)]
    groups += [Group(model.label, ("mean", "standard error"), "mean") for model in study.models]
    groups += [Group(f"{baseline.name} (baseline)") for baseline in baselines]
    for model in others:
        groups.append(Group(f"{model.label} minus {reference.label}", ("mean", "low", "high"), "interval"))
        groups += [Group("p (Holm)"), Group("result", ("outcome", "interval"), "remark", numeric=False)]
    rows = []
    for metric in study.metrics:
        decimals = metric_decimals(metric)
        row = [metric.metric, metric.unit, metric.better]
        for model in study.models:
            statistic = metric.models[model.model]
            row += [fixed(statistic.mean, decimals), fixed(statistic.standard_error, decimals)]
        row += [fixed(b.bits_per_byte, decimals) if is_baselined(metric) else "" for b in baselines]
        for model in others:
            difference = metric.differences[model.model]
            row += [fixed(value, decimals, "+") for value in (difference.mean, difference.low, difference.high)]
            row += [
                p_text(difference.p_holm),
                _result_text(metric, model.model, model.label, reference.label),
                method_text(difference, len(study.seeds)),
            ]
        rows.append(row)
    return Table("metrics", "Quality", tuple(groups), rows, _metric_notes(study))


def is_baselined(metric: MetricComparison) -> bool:
    """Whether a metric can stand beside the baseline, a byte model scored on the held-out text."""
    return metric.unit == "bits/byte" and metric.metric.startswith("validation ")


def cost_table(comparison: Comparison) -> Table:
    """Return each model's cost, with the ratio to the reference wherever both were measured."""
    costs = comparison.costs
    twin = next((row for row in costs if len(comparison.models) > 1 and row.model == comparison.models[-1].model), None)
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


def models_table(study: Study) -> Table:
    """Return what was compared."""
    rows = [
        [
            model.label,
            model.attention_type,
            str(model.parameters),
            str(model.train_flops_per_token),
            str(model.kv_bytes_per_token),
        ]
        for model in study.models
    ]
    groups = (
        Group("model", numeric=False),
        Group("attention type", numeric=False),
        Group("parameters"),
        Group("training FLOPs a token"),
        Group("KV cache bytes a token"),
    )
    return Table("models", "Models", groups, rows)


def runs_table(study: Study) -> Table:
    """Return every run by itself, with the headline figures of its evaluations."""
    names = list(dict.fromkeys(name for run in study.runs for name, _ in _figures(run.evaluations)))
    rows = []
    for model in study.models:
        for run in runs_of(study, model.model):
            found = dict(_figures(run.evaluations))
            values = [found.get(name, NOT_MEASURED) for name in names]
            rows.append(
                [model.label, str(run.seed), *values, str(run.train_tokens), significant(run.train_seconds), run.run]
            )
    groups = (
        Group("model", numeric=False),
        Group("seed"),
        *(Group(name) for name in names),
        Group("training tokens"),
        Group("training time (s)"),
        Group("run", numeric=False),
    )
    return Table("runs", "Every run", groups, rows)


def _figures(evaluations: dict[str, TaskResult]) -> list[tuple[str, str]]:
    return [
        (f"{title_of(row, result)} ({row.unit})", fixed(row.value, 4))
        for result in evaluations.values()
        for row in headlines(result)
    ]


def upcycling_table(study: Upcycling) -> Table:
    """Return a row for each model: its new parameters, the drift of its logits, and each metric before and after."""
    before = [(result, row) for result in study.before.values() for row in headlines(result)]
    before = [(result, row) for result, row in before if not row.name.startswith("bits")]
    groups = (
        Group("model", numeric=False),
        Group("parameters"),
        Group("added"),
        Group("largest logit difference at the start"),
        Group("same greedy tokens"),
        *(Group(f"{title_of(row, result)} before and after") for result, row in before),
        Group("seconds a step"),
    )
    rows = []
    for model, run in zip(study.models, study.runs, strict=True):
        drift, added = study.drift[model.model], study.added_parameters[model.model]
        after = dict(_figures(run.evaluations))
        rows.append(
            [
                model.label,
                f"{model.parameters:,}",
                f"{added / (model.parameters - added):.1%}",
                f"{drift.largest_logit_difference:.1e}",
                f"{drift.greedy_same_tokens} of {drift.greedy_tokens}",
                *(
                    f"{fixed(row.value, 4)}, {after.get(f'{title_of(row, result)} ({row.unit})', NOT_MEASURED)}"
                    for result, row in before
                ),
                f"{run.train_seconds / run.train_loss_nats.steps[-1]:.1f}",
            ]
        )
    tokens = study.drift[study.models[0].model].tokens
    title = f"{study.source} trained on for {study.runs[0].train_tokens:,} tokens"
    return Table("upcycling", title, groups, rows, [f"Logits on {tokens} tokens, fp32."])


def environment_table(study: Study) -> Table:
    """Return where it was measured."""
    environment = study.environment
    rows = [
        ["difftransformer", environment.difftransformer],
        ["commit", environment.commit or NOT_RECORDED],
        ["Python", environment.python],
        ["torch", environment.torch],
        ["transformers", environment.transformers],
        ["platform", environment.platform],
        ["processor", environment.processor],
        ["device", environment.device],
        ["threads", str(environment.threads)],
        ["instruction set", environment.instruction_set or NOT_RECORDED],
        ["compiler of the kernels", environment.compiler or NOT_RECORDED],
        ["seeds", ", ".join(map(str, study.seeds))],
        ["created", study.created],
    ]
    return Table("environment", "Environment", (Group("what", numeric=False), Group("value", numeric=False)), rows)


def _result_text(metric: MetricComparison, model: str, first: str, second: str) -> str:
    words = {
        "first": f"{first} better",
        "second": f"{second} better",
        "undecided": "undecided",
        "unknown": "no interval",
    }
    return words[outcome(metric.differences[model], metric.better)]


def _metric_notes(study: Study) -> list[str]:
    if len(study.seeds) == 1:
        notes = [
            "One seed: there is no standard error and no interval over training. An interval over items says how far other "
            "evaluation items might move the difference; it says nothing about another training seed."
        ]
    else:
        notes = [
            f"Mean \u00b1 standard error over {len(study.seeds)} seeds. The difference is taken seed by seed: the models of a "
            "seed saw the same batches in the same order. Its interval is Student's t over seeds."
        ]
    notes.append(holm_note(one for metric in study.metrics for one in metric.differences.values()))
    return notes


def _byte_unit(values: Sequence[int]) -> tuple[str, float]:
    """One unit for a whole table, so that its columns can be added and compared."""
    return ("GiB", 2.0**-30) if max(values, default=0) >= 10 * 2**30 else ("MiB", 2.0**-20)
