"""Sentences that say which model is better, read off the intervals alone."""

from dataclasses import dataclass
from typing import Literal

from difftransformer_lab.report.tables import fixed, method_text, metric_decimals, outcome, p_text
from difftransformer_lab.results import MetricComparison, ModelSummary, PairedDifference, Study


@dataclass(frozen=True)
class Verdict:
    """`state` is for colour; `text` says everything."""

    subject: str
    state: Literal["first", "second", "undecided", "unknown"]
    text: str


def verdicts(study: Study) -> list[Verdict]:
    """Return a verdict on every evaluation's leading metric, for each model against the reference."""
    if len(study.models) < 2:
        return [Verdict("comparison", "unknown", "One model was measured: there is nothing to compare it with.")]
    *others, reference = study.models
    return [
        _verdict(study, metric, model, reference)
        for task in dict.fromkeys(metric.task for metric in study.metrics)
        for metric in leading_metrics([metric for metric in study.metrics if metric.task == task])
        for model in others
    ]


def leading_metrics(metrics: list[MetricComparison]) -> list[MetricComparison]:
    """Return what sentences are about: bits a byte of a loss, else the first figure wherever it was taken."""
    bits = [metric for metric in metrics if metric.unit == "bits/byte"]
    first = metrics[0].metric.partition(" (")[0]
    return bits[:1] or [metric for metric in metrics if metric.metric.partition(" (")[0] == first]


def _verdict(study: Study, metric: MetricComparison, model: ModelSummary, reference: ModelSummary) -> Verdict:
    decimals, difference = metric_decimals(metric), metric.differences[model.model]
    a, b = (fixed(metric.models[one.model].mean, decimals) for one in (model, reference))
    unit = "" if metric.unit == "share" else f" {metric.unit}"
    change = change_words(difference, len(study.seeds), decimals)
    state = outcome(difference, metric.better)
    first, second, title = model.label, reference.label, metric.metric
    match state:
        case "first":
            text = f"{first} reaches a {metric.better} {title} than {second}: {a} vs {b}{unit}, {change}."
        case "second":
            text = (
                f"{second} reaches a {metric.better} {title} than {first}: {b} vs {a}{unit}. {first} minus {second}: "
                f"{change}."
            )
        case "undecided":
            text = f"The {title} of {first} and {second} cannot be told apart: {a} vs {b}{unit}, {change}."
        case "unknown":
            text = (
                f"The {title} has no interval, so neither model can be called better: {first} {a}, {second} {b}{unit}, "
            )
            text += f"{change}."
    if difference.interval_method not in ("student-t over seeds", "none"):
        text += " This holds for these trained models on such items; another training seed may differ."
    return Verdict(title, state, text)


def change_words(difference: PairedDifference, seeds: int, decimals: int) -> str:
    """Return a difference over seeds with its interval, the interval's method and the corrected p-value."""
    change = f"difference {fixed(difference.mean, decimals, '+')}"
    if difference.low is not None and difference.high is not None:
        change += f" [{fixed(difference.low, decimals, '+')}, {fixed(difference.high, decimals, '+')}]"
    remarks = [method_text(difference, seeds)]
    if difference.p_holm is not None:
        remarks.append(f"p (Holm) {p_text(difference.p_holm)}")
    return f"{change} ({'; '.join(filter(None, remarks))})" if any(remarks) else change
