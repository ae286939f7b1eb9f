"""Sentences that say who won, read off the intervals and nothing else: for the loss, and for retrieval."""

from dataclasses import dataclass
from typing import Literal

from difftransformer.report.tables import fixed, is_bits_per_byte, method_text, metric_decimals, metric_title, outcome
from difftransformer.results import Comparison, MetricComparison

_UNITS_LEFT_OUT = frozenset({"share", "fraction", "accuracy"})


@dataclass(frozen=True)
class Verdict:
    """`state` is for colour; `text` says everything."""

    subject: str
    state: Literal["first", "second", "undecided", "unknown"]
    text: str


def loss_metric(comparison: Comparison) -> MetricComparison | None:
    """The metric that the first sentence is about: bits per byte, or else the first loss."""
    by_bits = [metric for metric in comparison.metrics if is_bits_per_byte(metric)]
    losses = [m for m in comparison.metrics if any(word in m.metric.lower() for word in ("loss", "nll"))]
    return next(iter(by_bits + losses), None)


def retrieval_metrics(comparison: Comparison) -> list[MetricComparison]:
    """What the next sentences are about: `needle_accuracy`, or else seen and unseen cities each, or else the first."""
    named = [m for m in comparison.metrics if any(word in m.metric.lower() for word in ("needle", "retrieval"))]
    by_cities = [m for m in named if m.metric in {"needle_accuracy_seen", "needle_accuracy_unseen"}]
    return [m for m in named if m.metric == "needle_accuracy"] or by_cities or named[:1]


def verdicts(comparison: Comparison) -> list[Verdict]:
    """A verdict on the loss, and on retrieval; where something was not measured, a verdict that says so."""
    if len(comparison.models) < 2:
        return [Verdict("comparison", "unknown", "One model was measured: there is nothing to compare it with.")]
    loss, retrieval = loss_metric(comparison), retrieval_metrics(comparison)
    found = [metric_verdict(comparison, metric, "validation loss") for metric in ([loss] if loss else [])]
    found = found or [Verdict("validation loss", "unknown", "Validation loss was not measured.")]
    found += [metric_verdict(comparison, metric, "retrieval") for metric in retrieval]
    return found if retrieval else [*found, Verdict("retrieval", "unknown", "Retrieval was not measured.")]


def metric_verdict(comparison: Comparison, metric: MetricComparison, subject: str) -> Verdict:
    """The sentence on one metric."""
    first, second = comparison.models[:2]
    if first.model not in metric.models or second.model not in metric.models:
        return Verdict(subject, "unknown", f"{metric_title(metric)} was not measured for both models.")
    decimals, title, difference = metric_decimals(metric), metric_title(metric), metric.difference
    a, b = (fixed(metric.models[model.model].mean, decimals) for model in (first, second))
    unit = f" {metric.unit}" if metric.unit and metric.unit not in _UNITS_LEFT_OUT else ""
    change = f"difference {fixed(difference.mean, decimals, '+')}"
    if difference.low is not None and difference.high is not None:
        change += f" [{fixed(difference.low, decimals, '+')}, {fixed(difference.high, decimals, '+')}]"
    if method := method_text(difference, min(metric.models[model.model].seeds for model in (first, second))):
        change += f" ({method})"
    state = outcome(metric)
    match state:
        case "first":
            text = f"{first.label} reaches a {metric.better} {title} than {second.label}: {a} vs {b}{unit}, {change}."
        case "second":
            text = (
                f"The twin wins: {second.label} reaches a {metric.better} {title} than {first.label}: {b} vs "
                f"{a}{unit}. "
                f"{first.label} minus {second.label}: {change}."
            )
        case "undecided":
            text = f"No difference in {title} can be told between {first.label} and {second.label}: "
            text += f"{a} vs {b}{unit}, {change}."
        case "unknown":
            text = f"Nobody can be said to win on {title}, which has no interval: "
            text += f"{first.label} {a}, {second.label} {b}{unit}, {change}."
    if difference.interval_method == "bootstrap over evaluation documents":
        text += " This holds for these trained models on such documents; another training seed may differ."
    return Verdict(subject, state, text)
