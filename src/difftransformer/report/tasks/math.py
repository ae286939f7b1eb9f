"""Problems solved: by set, or over training where all models are checkpoints (arXiv:2410.05258 Figures 9 and 10)."""

import re
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from difftransformer.plots.bars import bars, sets_of
from difftransformer.plots.curves import curves, select
from difftransformer.results import TaskResult

_CHECKPOINT = re.compile(r"(?P<run>.+)[/\\]checkpoints[/\\]step-(?P<step>\d+)[/\\]?")


def draw(results: Sequence[TaskResult]) -> tuple[str, str, Figure]:
    """Bars by set; a curve a run over steps where several checkpoints are given and nothing else."""
    found = [_CHECKPOINT.fullmatch(result.model.name) for result in results]
    places = [(match["run"], int(match["step"])) for match in found if match is not None]
    cap = results[0].options["max_new_tokens"]
    if len(results) > 1 and len(places) == len(results):
        figure, ax = curves(_runs(results, places), "mean accuracy", "step")
        ax.set_xlabel("training step")
        ax.set_ylabel("mean accuracy over sets")
        ax.set_ylim(bottom=0)
        caption = (
            f"Mean accuracy over {', '.join(sets_of(results, 'accuracy'))} by checkpoint; bands: one standard error."
        )
    else:
        figure = bars(
            results,
            sets_of(results, "accuracy"),
            lambda result, name: next(iter(select(result, "accuracy", set=name)), None),
            form=".2f",
        )
        figure.axes[0].set_ylim(0, 1.08)
        figure.axes[0].set_ylabel("accuracy")
        caption = "Share of problems solved, with 95 % Wilson intervals over problems."
    return "Mathematical problems", f"{caption} At most {cap} tokens a solution.", figure


def _runs(results: Sequence[TaskResult], places: Sequence[tuple[str, int]]) -> list[TaskResult]:
    """One result for each run, its mean accuracies told apart by the step."""
    by_run: dict[str, TaskResult] = {}
    for result, (run, step) in zip(results, places, strict=True):
        rows = [replace(row, at={"step": step}) for row in select(result, "mean accuracy")]
        whole = by_run.setdefault(run, replace(result, model=replace(result.model, name=run), measurements=[]))
        whole.measurements.extend(rows)
    return list(by_run.values())
