"""The table, the sentences and the figure of an upcycling study."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console
from rich.markup import escape

from difftransformer.plots.style import COLOURS, DASHES, MARKERS, STYLE, WIDTH_INCHES, finish, legend_above
from difftransformer.report.tables import Group, Table
from difftransformer.report.terminal import _rich
from difftransformer.report.verdict import metric_verdict
from difftransformer.results import Comparison, NeedleResult, NllResult, Upcycling, write_text_atomically

FIGURE_FILE = "loss.svg"


def upcycling_table(study: Upcycling) -> Table:
    """A row a model: what it adds, how far its logits were from the source's, loss and retrieval before and after."""
    groups = (
        Group("model", numeric=False),
        Group("parameters"),
        Group("added"),
        Group("largest logit difference at the start"),
        Group("same greedy tokens"),
        Group("loss before, nats/token"),
        Group("after"),
        Group("retrieval before"),
        Group("after"),
        Group("seconds a step"),
    )
    before = study.before
    rows = []
    for model, run in zip(study.models, study.runs, strict=True):
        drift, added = study.drift[model.model], study.added_parameters[model.model]
        rows.append(
            [
                model.label,
                f"{model.parameters:,}",
                f"{added / (model.parameters - added):.1%}",
                f"{drift.largest_logit_difference:.1e}",
                f"{drift.greedy_same_tokens} of {drift.greedy_tokens}",
                _loss(before.nll),
                _loss(run.nll),
                _retrieval(before.needle),
                _retrieval(run.needle),
                f"{run.train_seconds / run.train_loss_nats.steps[-1]:.1f}",
            ]
        )
    tokens = study.drift[study.models[0].model].tokens
    notes = [
        f"Logits on {tokens} tokens, fp32. Retrieval is the share of numbers read back, over all cells. One seed: intervals "
        "are over evaluation windows and say nothing of another training seed."
    ]
    return Table(
        "upcycling", f"{study.source} trained on for {study.runs[0].train_tokens:,} tokens", groups, rows, notes
    )


def upcycling_sentences(study: Upcycling) -> list[str]:
    """Which ends lower than the unconverted model, by how much, for each form."""
    sentences = []
    for name, metrics in study.differences.items():
        pair = _as_comparison(study, [name, study.models[-1].model])
        loss = next(metric for metric in metrics if metric.metric == "validation_nll_nats_per_token")
        sentences.append(metric_verdict(pair, loss, "validation loss").text.replace("The twin wins: ", ""))
    return sentences


def print_upcycling(study: Upcycling, console: Console) -> None:
    """Print the sentences and the table."""
    for sentence in upcycling_sentences(study):
        console.print(escape(sentence), highlight=False)
    console.print(_rich(upcycling_table(study)))


def write_upcycling(study: Upcycling, folder: Path) -> Path:
    """Draw the validation losses into the folder; the figure's path."""
    with matplotlib.rc_context(STYLE):
        drawing = finish("loss", "Validation loss", "", _losses(study), False)
    write_text_atomically(folder / FIGURE_FILE, drawing.svg)
    return folder / FIGURE_FILE


def _losses(study: Upcycling) -> Figure:
    """Validation loss over steps, and below it each form's minus the unconverted model's: the forms lie close together."""
    figure = Figure(figsize=(WIDTH_INCHES, 5.4), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    plain = study.runs[-1].validation_loss_nats
    handles = []
    for index, (model, run) in enumerate(zip(study.models, study.runs, strict=True)):
        curve = run.validation_loss_nats
        style: dict[str, Any] = {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
            "linestyle": DASHES[index % len(DASHES)],
            "markersize": 5,
        }
        top.plot(curve.steps, curve.values, **style)
        differences = [value - other for value, other in zip(curve.values, plain.values, strict=True)]
        bottom.plot(curve.steps, differences, **style)
        handles.append(Line2D([], [], label=model.label, **style))
    top.set_ylabel("validation loss\n(nats/token)")
    bottom.set_ylabel(f"minus that of\n{study.models[-1].label}")
    bottom.set_xlabel("training step")
    legend_above(figure, handles)
    return figure


def _as_comparison(study: Upcycling, models: list[str]) -> Comparison:
    return Comparison(
        name=study.name,
        command=study.command,
        created=study.created,
        environment=study.environment,
        recipe=study.recipe,
        seeds=[study.runs[0].seed],
        models=[next(row for row in study.models if row.model == model) for model in models],
        baselines=[],
        runs=[run for run in study.runs if run.model in models],
        costs=[],
        metrics=[],
    )


def _loss(nll: NllResult | None) -> str:
    return "-" if nll is None else f"{nll.nll_nats_per_token:.4f}"


def _retrieval(needle: NeedleResult | None) -> str:
    if needle is None:
        return "-"
    return f"{sum(cell.correct for cell in needle.cells)} of {sum(cell.trials for cell in needle.cells)}"
