"""The table of metrics: every evaluation's headline figures, over seeds, against the reference model."""

from collections.abc import Sequence
from dataclasses import replace

from difftransformer_lab.report.tasks.pairs import pairs as paired_items
from difftransformer_lab.results import Measurement, MetricComparison, RunResult, headlines, title_of
from difftransformer_lab.statistics import holm_differences, mean_and_standard_error, paired_difference


def compare_metrics(runs: Sequence[RunResult], models: Sequence[str]) -> list[MetricComparison]:
    """Return mean and standard error of each model, and the difference of each to the last, corrected for their number.

    With two or more seeds the interval is Student's t over the per-seed differences. With one seed, seeds say nothing:
    figures that are sums over items, such as losses, get an interval over these items, others get no interval. A figure
    that a run lacks has no row.
    """
    *others, reference = models
    chosen = {model: [run for run in runs if run.model == model] for model in models}
    table = []
    for name, result in chosen[models[0]][0].evaluations.items():
        for headline in headlines(result):
            found = {model: [_figure(run, name, headline) for run in chosen[model]] for model in models}
            values = {model: [row.value for row in rows if row is not None] for model, rows in found.items()}
            if any(len(values[model]) < len(chosen[model]) for model in models):
                continue
            differences = {model: paired_difference(values[model], values[reference]) for model in others}
            if len(values[reference]) == 1 and not headline.at:
                end = chosen[reference][0].evaluations[name]
                for model in others:
                    pairs = paired_items(chosen[model][0].evaluations[name], end)
                    differences[model] = next(
                        (pair.difference for pair in pairs if pair.name == headline.name), differences[model]
                    )
            table.append(
                MetricComparison(
                    task=name,
                    metric=title_of(headline, result),
                    unit=headline.unit,
                    better=headline.better or "higher",
                    models={model: mean_and_standard_error(values[model]) for model in models},
                    differences=differences,
                )
            )
    every = [(one, (row.task, row.metric, model)) for row in table for model, one in row.differences.items()]
    corrected = iter(holm_differences([one for one, _ in every], [about for _, about in every]))
    return [replace(row, differences={model: next(corrected) for model in row.differences}) for row in table]


def _figure(run: RunResult, name: str, headline: Measurement) -> Measurement | None:
    rows = run.evaluations[name].measurements if name in run.evaluations else []
    return next((row for row in rows if (row.name, row.at) == (headline.name, headline.at)), None)
